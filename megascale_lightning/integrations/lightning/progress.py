"""Makes Lightning's saved counters agree with the stream's position.

Lightning counts microbatches, the stream counts steps. A run that goes on from a checkpoint starts at the first
microbatch of the first step that was not taken; if the counters said anything else, optimizer steps would fall on the
wrong microbatches.
"""

from __future__ import annotations

from typing import Any

__all__ = ["is_at_end_of_epoch", "settle_progress"]

_BATCHES = "epoch_loop.batch_progress"
_EPOCHS = "epoch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"


def settle_progress(
    fit_loop: dict[str, Any],
    *,
    saved: int,
    now: int,
    step_limited: bool,
    passes: bool = False,
    rows: tuple[int, int] = (1, 1),
) -> bool:
    """Rewrite the counters of `checkpoint["loops"]["fit_loop"]` in place where they do not fit.

    That is: where the number of microbatches of a step changed, where the save was in mid-accumulation, where a
    failure left batches counted as ready that were never processed, and where a step-limited run was saved at the end
    of an epoch (Lightning would run one more microbatch in the finished epoch, and step on it), or any run at the start
    of one (its batches would be counted from where the epoch before ended).

    In passes it is also where the save came with the last batch of an epoch, before all that an epoch's end brings:
    Lightning would go on with the next epoch, and the validation and `on_train_epoch_end` of this one never took place.
    Counted as if its validation was broken off, the end is made up for.

    Args:
        fit_loop: As `trainer.fit_loop.state_dict()` gave it.
        saved: Microbatches of a step in the run that saved.
        now: Microbatches of a step in this run.
        step_limited: `trainer.max_steps` is set.
        passes: An epoch of the trainer is one pass over the data.
        rows: Rows of a step in the run that saved, and in this one.

    Returns:
        Whether something was changed.
    """
    batches, epochs = fit_loop.get(_BATCHES), fit_loop.get(_EPOCHS)
    if not batches or not epochs:
        return False
    current, total = batches["current"], batches["total"]
    # Set before the batch ran, the flag may be about a batch that is going to be repeated.
    last = bool(batches["is_last_batch"]) and current["ready"] == current["processed"]
    # The last step of an epoch may have fewer microbatches than the others.
    on_boundary = current["processed"] % saved == 0 or last
    drifted = not total["ready"] == total["started"] == total["processed"]
    over = step_limited and last and _end_not_counted(epochs["current"])
    announced = last and _start_not_counted(epochs["current"])
    closing = passes and last and _end_not_begun(epochs["current"]) and total["completed"] < total["processed"]
    resized = rows[0] != rows[1]
    if saved == now and on_boundary and not (drifted or over or announced or closing or resized):
        return False
    steps = -(-current["processed"] // saved) if on_boundary else current["processed"] // saved
    if passes:
        # Of a pass, what counts is how far it is through the data.
        steps = steps * rows[0] // rows[1]
    earlier = total["processed"]
    if over:
        for tracker in (epochs["current"], epochs["total"]):
            tracker["completed"] = tracker["processed"]
    if over or announced:
        steps, last = 0, False
    else:
        earlier -= current["processed"]
    # A batch short of completed is what a save from `on_train_batch_end` looks like; Lightning completes it when it
    # restarts. That is right only for the last batch of a step of this epoch; whatever else lies before the step is
    # long complete.
    pending = steps > 0 and on_boundary and total["completed"] < total["processed"] and not closing
    done = current["processed"] if last and saved == now and not resized else steps * now
    _settle(current, done, pending=pending)
    _settle(total, done + (earlier if saved == now else -(-earlier // saved) * now), pending=pending)
    batches["is_last_batch"] = last
    validation = fit_loop.get(_VALIDATION)
    if closing and validation:
        for tracker in (validation["current"], validation["total"]):
            tracker.update(ready=1, started=1, processed=0, completed=0)
        validation["is_last_batch"] = False
    return True


def is_at_end_of_epoch(fit_loop: dict[str, Any]) -> bool:
    """Whether all batches of an epoch were processed, and its end (`on_train_epoch_end`) has not come.

    Args:
        fit_loop: As `trainer.fit_loop.state_dict()` gave it.
    """
    batches, epochs = fit_loop.get(_BATCHES), fit_loop.get(_EPOCHS)
    return bool(batches and epochs and batches["is_last_batch"] and _end_not_begun(epochs["current"]))


def _end_not_begun(epoch: dict[str, int]) -> bool:
    """Whether the epoch is running."""
    return epoch["ready"] == epoch["started"] == epoch["processed"] + 1


def _end_not_counted(epoch: dict[str, int]) -> bool:
    """Whether the save came from `on_train_epoch_end`: all was processed, only the end itself was not counted."""
    return epoch["ready"] == epoch["started"] == epoch["processed"] == epoch["completed"] + 1


def _start_not_counted(epoch: dict[str, int]) -> bool:
    """Whether the save came from `on_train_epoch_start`: an epoch is announced, the batches are the last one's."""
    return epoch["ready"] - 1 == epoch["started"] == epoch["processed"] == epoch["completed"]


def _settle(tracker: dict[str, int], batches: int, *, pending: bool) -> None:
    tracker["ready"] = tracker["started"] = tracker["processed"] = batches
    tracker["completed"] = batches - 1 if pending else batches
