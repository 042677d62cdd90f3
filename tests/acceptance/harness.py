"""Drives one `MegaScaleLoader` per data-parallel rank in one process, and checks what batches say of themselves."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megascale_lightning import ClientPlaceTree, LoaderConfig, MegaScaleLoader, PackedRows, model_inputs

from .data import PAD, Corpus, labels_of, loss_mask_of, score_of

Piece = tuple[str, int, int, int, int, int]
"""(source, epoch, unit, row, start, stop)"""


@dataclass
class Microbatch:
    """What one rank got in one `next`."""

    tensors: dict[str, Any]
    info: Any
    rows: list[list[Piece]]
    """Per row of the tensors; empty for filler."""


@dataclass
class Step:
    """One optimizer step over all ranks."""

    number: int
    ranks: list[list[Microbatch]]
    certificate: str
    state: dict[str, Any] | None = None
    """State after the step, through JSON."""
    rows: frozenset[frozenset[Piece]] = field(init=False)

    def __post_init__(self) -> None:
        found = [frozenset(map(tuple, row)) for mb in self.microbatches() for row in mb.rows if row]
        self.rows = frozenset(found)
        assert len(self.rows) == len(found), f"step {self.number} has a row twice"

    def microbatches(self) -> Iterator[Microbatch]:
        for rank in self.ranks:
            yield from rank

    def pieces(self) -> list[Piece]:
        return [piece for row in self.rows for piece in row]


class World:
    """All data-parallel ranks of a job in this process: every rank has step t before one asks for step t + 1."""

    def __init__(
        self,
        config: LoaderConfig,
        dp: int = 1,
        accumulate: int | None = None,
        *,
        state: dict[str, Any] | None = None,
        stream: str = "train",
        keep_states: bool = False,
        passes: bool = False,
    ) -> None:
        tree = ClientPlaceTree.from_sizes(dp=dp)
        self.keep_states = keep_states
        self.loaders = [
            MegaScaleLoader(config, tree=tree, rank=rank, stream=stream, accumulate=accumulate, passes=passes)
            for rank in range(dp)
        ]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(json.loads(json.dumps(state)))
        self._iterators = [iter(loader) for loader in self.loaders]

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for loader in reversed(self.loaders):
            loader.close()

    def reiterate(self) -> None:
        """Begin anew at the consumed state, on every rank."""
        self._iterators = [iter(loader) for loader in self.loaders]

    def state(self) -> dict[str, Any]:
        """The state, which is the same on every rank, through JSON."""
        states = [without_run(json.loads(json.dumps(loader.state_dict()))) for loader in self.loaders]
        for other in states[1:]:
            assert other == states[0], "ranks differ in their state"
        return dict(json.loads(json.dumps(self.loaders[0].state_dict())))

    def pull(self, rank: int) -> Microbatch | None:
        """One microbatch of a rank, or None at the end of the stream."""
        try:
            return microbatch(next(self._iterators[rank]))
        except StopIteration:
            return None

    def step(self) -> Step | None:
        """The next step on all ranks, or None when the stream has ended on all of them."""
        ranks: list[list[Microbatch]] = []
        for rank in range(len(self.loaders)):
            got: list[Microbatch] = []
            while True:
                mb = self.pull(rank)
                if mb is None:
                    assert not got, f"the stream ended inside a step on rank {rank}"
                    break
                assert mb.info.microbatch == len(got)
                got.append(mb)
                if mb.info.is_last_in_step:
                    break
            ranks.append(got)
        counts = [len(got) for got in ranks]
        assert len(set(counts)) == 1, f"ranks got {counts} microbatches"
        if not counts[0]:
            return None
        infos = [mb.info for got in ranks for mb in got]
        assert len({info.step for info in infos}) == 1, f"ranks are at steps {[info.step for info in infos]}"
        assert len({info.step_loss_tokens for info in infos}) == 1
        assert sum(info.num_loss_tokens for info in infos) == infos[0].step_loss_tokens
        certificates = {loader.certificate for loader in self.loaders}
        assert len(certificates) == 1, f"ranks differ in the certificate after step {infos[0].step}"
        return Step(infos[0].step, ranks, certificates.pop(), self.state() if self.keep_states else None)

    def steps(self, count: int | None = None) -> list[Step]:
        """The next `count` steps, or all that there are."""
        found: list[Step] = []
        while count is None or len(found) < count:
            step = self.step()
            if step is None:
                break
            found.append(step)
        return found


def run_world(
    config: LoaderConfig, dp: int = 1, accumulate: int | None = None, steps: int | None = None, **more: Any
) -> list[Step]:
    """The first `steps` steps (None: all) of a job of `dp` ranks."""
    with World(config, dp, accumulate, **more) as world:
        return world.steps(steps)


def run_threads(config: LoaderConfig, dp: int, steps: int) -> list[Step]:
    """The same with one free-running thread per rank, as processes would do it."""
    tree = ClientPlaceTree.from_sizes(dp=dp)
    loaders = [MegaScaleLoader(config, tree=tree, rank=rank) for rank in range(dp)]
    found: list[list[tuple[list[Microbatch], str]]] = [[] for _ in loaders]
    errors: list[BaseException] = []

    def drive(rank: int) -> None:
        try:
            got: list[Microbatch] = []
            for batch in loaders[rank]:
                got.append(microbatch(batch))
                if got[-1].info.is_last_in_step:
                    found[rank].append((got, loaders[rank].certificate))
                    got = []
                    if len(found[rank]) == steps:
                        return
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=drive, args=(rank,), daemon=True) for rank in range(dp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    alive = [thread.is_alive() for thread in threads]
    if errors:
        raise errors[0]
    assert not any(alive), f"still running: {alive}; steps so far: {[len(one) for one in found]}"
    for loader in loaders:
        loader.close()
    merged = []
    for one in zip(*found, strict=True):
        assert len({certificate for _, certificate in one}) == 1
        merged.append(Step(one[0][0][0].info.step, [got for got, _ in one], one[0][1]))
    return merged


def microbatch(batch: dict[str, Any]) -> Microbatch:
    """A batch taken apart, its ids aligned with the rows of its tensors."""
    info = batch["megascale"]
    ids = [[tuple(piece) for piece in row] for row in info.sample_ids()]
    weights = np.asarray(info.row_weights)
    if len(ids) != len(weights):
        real = iter(ids)
        ids = [next(real) if weight else [] for weight in weights]
    return Microbatch(model_inputs(batch), info, ids)


def without_run(state: dict[str, Any]) -> dict[str, Any]:
    """A state without what names the run that wrote it."""
    return {key: value for key, value in state.items() if key != "run"}


def same_tensors(one: Step, other: Step) -> bool:
    """Whether every rank got the same microbatches, bit for bit."""
    for mine, its in zip(one.microbatches(), other.microbatches(), strict=True):
        if mine.tensors.keys() != its.tensors.keys() or mine.rows != its.rows:
            return False
        for name, value in mine.tensors.items():
            other_value = its.tensors[name]
            if isinstance(value, torch.Tensor):
                if value.dtype != other_value.dtype or not torch.equal(value, other_value):
                    return False
            elif value != other_value:
                return False
    return True


def real_tokens(mb: Microbatch, row: int) -> np.ndarray:
    """The tokens of a row without its padding."""
    ids = mb.tensors["input_ids"][row].numpy()
    count = int(np.count_nonzero(ids != PAD))
    assert not np.any(ids[count:] != PAD), "padding inside a row"
    return ids[:count]


def documents(mb: Microbatch, row: int) -> list[np.ndarray]:
    """The tokens of each piece of a row, cut where the positions begin anew."""
    tokens = real_tokens(mb, row)
    if not len(tokens):
        return []
    positions = mb.tensors["position_ids"][row].numpy()[: len(tokens)]
    starts = np.flatnonzero(positions == 0)
    found = np.split(tokens, starts[1:])
    for document, start in zip(found, starts, strict=True):
        assert np.array_equal(positions[start : start + len(document)], np.arange(len(document)))
    return found


def check_microbatch(corpus: Corpus, mb: Microbatch, config: LoaderConfig) -> None:
    """Everything that a batch says of itself holds: ids against tokens, labels, masks, lengths, counts."""
    rows = config.rows
    ids = mb.tensors["input_ids"]
    assert ids.dtype == torch.int64
    assert ids.shape == mb.tensors["labels"].shape == mb.tensors["position_ids"].shape
    assert ids.shape[0] == rows.micro_batch_size == len(mb.info.row_weights) == len(mb.rows)
    expected = torch.full_like(ids, -100)
    bounds, scores = [0], []
    for row, pieces in enumerate(mb.rows):
        found = documents(mb, row)
        assert len(found) == len(pieces), "as many documents as ids"
        assert float(mb.info.row_weights[row]) == (1.0 if pieces else 0.0)
        at = 0
        for piece, tokens in zip(pieces, found, strict=True):
            check_piece(corpus, piece, tokens, rows.capacity)
            scores.append(score_of(int(tokens[0]) - max(piece[4], 0)))
            expected[row, at : at + len(tokens)] = _targets(tokens, config)
            at += len(tokens)
            bounds.append(row * ids.shape[1] + at)
        if at < ids.shape[1]:
            bounds.append((row + 1) * ids.shape[1])
        _check_fields(mb, row, np.concatenate(found) if found else np.zeros(0, np.int64), config)
    if rows.shift_labels:
        expected = torch.cat([expected[:, 1:], torch.full_like(expected[:, :1], -100)], dim=1)
    assert torch.equal(mb.tensors["labels"], expected)
    assert mb.info.num_loss_tokens == int((expected != -100).sum())
    if isinstance(rows, PackedRows):
        assert ids.shape[1] == rows.width
        _check_bounds(mb, bounds)
    if "score" in rows.sample_fields and all(mb.rows):
        assert torch.as_tensor(mb.tensors["score"]).flatten().tolist() == scores


def check_piece(corpus: Corpus, piece: Piece, tokens: np.ndarray, capacity: int) -> None:
    """An id names the very tokens that stand in the row."""
    name, _, unit, row, start, stop = piece
    source, sample, offset = corpus.locate(int(tokens[0]))
    files = corpus.files[source]
    length = int(files.lengths[sample])
    assert source == name, f"{piece} holds tokens of {source}"
    assert np.array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens)))
    assert offset == start
    if length <= capacity:
        assert (start, stop) == (0, -1)
        assert len(tokens) == length
    elif stop != -1:
        assert start % capacity == 0
        assert stop == min(start + capacity, length)
        assert len(tokens) == stop - start
    if files.ids is not None:
        assert files.ids[sample] == (unit, row), f"{piece} is {files.ids[sample]}"


def _targets(tokens: np.ndarray, config: LoaderConfig) -> torch.Tensor:
    """Unshifted labels of one document."""
    fields = config.rows.token_fields
    targets = labels_of(tokens) if "labels" in fields else tokens.copy()
    if "loss_mask" in fields:
        targets[loss_mask_of(tokens) == 0] = -100
    targets[0] = -100
    return torch.as_tensor(targets)


def _check_fields(mb: Microbatch, row: int, tokens: np.ndarray, config: LoaderConfig) -> None:
    count = len(tokens)
    if "loss_mask" in config.rows.token_fields:
        mask = mb.tensors["loss_mask"][row]
        assert mask[:count].tolist() == loss_mask_of(tokens).tolist()
        assert not mask[count:].any()
    if "attention_mask" in mb.tensors:
        # A filler row keeps its first position: attention over nothing is not a number.
        expected = (torch.arange(mb.tensors["input_ids"].shape[1]) < max(count, 1)).long()
        assert torch.equal(mb.tensors["attention_mask"][row], expected)


def _check_bounds(mb: Microbatch, bounds: list[int]) -> None:
    for name in ("q", "k"):
        found = mb.tensors[f"cu_seq_lens_{name}"]
        assert found.dtype == torch.int32
        assert found.tolist() == bounds
        assert mb.tensors[f"max_length_{name}"] == max(np.diff(bounds))
    positions = mb.tensors["position_ids"].flatten()
    for start, stop in itertools.pairwise(bounds):
        assert torch.equal(positions[start:stop], torch.arange(stop - start)), "positions begin anew in each segment"


def check_steps(corpus: Corpus, steps: list[Step], config: LoaderConfig) -> None:
    """`check_microbatch` for all of them, and steps that follow each other."""
    for before, after in itertools.pairwise(steps):
        assert after.number == before.number + 1
    for step in steps:
        for mb in step.microbatches():
            check_microbatch(corpus, mb, config)


def count_tokens(steps: list[Step]) -> Counter[int]:
    """How often each token was delivered."""
    found: Counter[int] = Counter()
    for step in steps:
        for mb in step.microbatches():
            for row in range(len(mb.rows)):
                found.update(real_tokens(mb, row).tolist())
    return found


def watched(body: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Run `body` in a thread; fail this test alone, and say where it stands, when it does not come back."""
    import sys
    import traceback

    result: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(body())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        raise AssertionError(f"no progress within {timeout_s} s; it stands at\n{stack}")
    return result[0]
