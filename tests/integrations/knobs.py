"""Settings of a trainer, each run over real data, and what must have come of it.

A run is a function of a `Bench`; its check gets what each rank wrote down. One process runs them one after the other, a
test as well as a script that DDP starts on two ranks.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.tuner import Tuner

from megascale_lightning import ConfigError, MegaScaleDataModule
from tests.integrations.bench import (
    RECORDS,
    Bench,
    Model,
    Ranks,
    Wanted,
    check_passes,
    check_steps,
    count,
    num_steps,
    samples,
)


class Knob:
    """A run and its check; `only` names the rows it is for."""

    def __init__(self, run: Callable[[Bench], Any], check: Callable[[Ranks], None], only: str = "") -> None:
        self.run, self.check, self.only = run, check, only


def refusal(run: Callable[[Bench], Any]) -> Callable[[Bench], Any]:
    """The message of the error that the run ends with."""

    def running(bench: Bench) -> Any:
        try:
            run(bench)
        except (ConfigError, ValueError) as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        return {"refused": "nothing"}

    return running


def says(*words: str) -> Callable[[Ranks], None]:
    def check(ranks: Ranks) -> None:
        for rank in ranks:
            for word in words:
                assert word in rank["refused"], rank["refused"]

    return check


def fit(**settings: Any) -> Callable[[Bench], Any]:
    return lambda bench: bench.fit(**settings)


def passes(number: int, **more: Any) -> Callable[[Ranks], None]:
    return lambda ranks: check_passes(ranks, number, **more)


def stream(steps: int, *, ends: int | None = None, validated: int | None = None) -> Callable[[Ranks], None]:
    """An endless stream of which so many steps were trained."""

    def check(ranks: Ranks) -> None:
        check_steps(ranks)
        assert num_steps(ranks) == steps
        if ends is not None:
            assert count(ranks, "ends") == ends
        if validated is not None:
            assert count(ranks, "validated") == validated

    return check


def often(every: Callable[[int], int]) -> Callable[[Ranks], None]:
    """One pass, with as many validations as the number of batches says."""

    def check(ranks: Ranks) -> None:
        check_passes(ranks, 1, validated=every(len(ranks[0]["trained"])))

    return check


def early_stopping(bench: Bench) -> Any:
    class Count(Model):
        def on_validation_epoch_end(self) -> None:
            self.log("epochs", float(self.trainer.current_epoch), sync_dist=True)
            super().on_validation_epoch_end()

    model, data = Count(), bench.data()
    stopper = EarlyStopping("epochs", patience=0, mode="min")
    bench.trainer(max_epochs=9, callbacks=[stopper]).fit(model, datamodule=data)
    return model.log_of


def second_fit(bench: Bench) -> Any:
    """`max_epochs` raised between two fits; validation and test alone in between, from a checkpoint of before."""
    model, data = Model(), bench.data(test_sources=[bench.source("other")])
    folder = bench.folder()
    trainer = bench.trainer(
        max_epochs=1, enable_checkpointing=True, callbacks=[ModelCheckpoint(folder, filename="end", save_top_k=-1)]
    )
    trainer.fit(model, datamodule=data)
    before = data.state_dict()
    evaluated = Model()
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    bench.trainer().test(evaluated, datamodule=data, ckpt_path=path, verbose=False)
    bench.trainer().validate(evaluated, datamodule=data, verbose=False)
    moved = data.state_dict() != before
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, datamodule=data)
    return {**model.log_of, "moved": moved, "tested": evaluated.log_of["evaluated"]}


def check_second_fit(ranks: Ranks) -> None:
    check_passes(ranks, 3)
    for rank in ranks:
        assert rank["moved"] is False
    seen = samples(ranks, "tested")
    assert set(seen.values()) == {1}
    assert len(seen) == RECORDS["other"] + RECORDS["held"]


def learning_rate(find: Callable[[L.Trainer, Model, MegaScaleDataModule], float]) -> Callable[[Bench], Any]:
    def run(bench: Bench) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            trainer = bench.trainer(max_epochs=2, default_root_dir=folder, enable_checkpointing=True)
            trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, ModelCheckpoint)]  # type: ignore[attr-defined]
            torch.manual_seed(0)  # whether its loss diverges, which ends the search, must not depend on other tests
            model, data = Model(), bench.data()
            found = find(trainer, model, data)
            tried = [step for step, *_ in model.log_of["trained"]]
            start = data.next_step
            for log in model.log_of.values():
                log.clear()
            trainer.fit(model, datamodule=data)
            return {**model.log_of, "found": found, "tried": len(tried), "start": start}

    return run


def tune(trainer: L.Trainer, model: Model, data: MegaScaleDataModule) -> float:
    Tuner(trainer).lr_find(model, datamodule=data, num_training=20)
    return model.lr


def check_learning_rate(ranks: Ranks) -> None:
    check_passes(ranks, 2)
    for rank in ranks:
        assert rank["tried"] == min(20, len(rank["trained"]))
        assert rank["start"] == 0
        assert rank["found"] != 0.01 or rank["tried"] < 20, "too few points suggest nothing"


def finder_callback(bench: Bench) -> Any:
    """The search within the fit: its batches come first, then the pass from its start."""
    with tempfile.TemporaryDirectory() as folder:
        finder = LearningRateFinder(num_training_steps=15)
        trainer = bench.trainer(max_epochs=1, default_root_dir=folder, callbacks=[finder])
        torch.manual_seed(0)
        model, data = Model(), bench.data()
        trainer.fit(model, datamodule=data)
    tried = min(15, len(model.log_of["trained"]) // 2)
    log = {key: values[tried:] for key, values in model.log_of.items()}
    return {**log, "events": model.log_of["events"][-2:]}


def failing(callback: Callable[[Path], Any], name: str) -> Callable[[Bench], Any]:
    """A failure in the second pass; what it saved goes on with the very step that failed."""

    def run(bench: Bench) -> Any:
        folder = bench.folder()
        model, data = Model(fail_at=5), bench.data()
        with suppress(Wanted):
            bench.trainer(max_epochs=3, enable_checkpointing=True, callbacks=[callback(folder)]).fit(
                model, datamodule=data
            )
        model.log_of["stepped"] = model.log_of["stepped"][: len(model.log_of["trained"])]
        again = Model()
        path = next(folder.glob(name))
        bench.trainer(max_epochs=3).fit(again, datamodule=bench.data(), ckpt_path=path)
        return {key: [*model.log_of[key], *again.log_of[key]] for key in model.log_of}

    return run


def resumed(names: Sequence[str]) -> Callable[[Bench], Any]:
    """Three passes; resumed from each of their steps, all within the second pass and at its end among them."""

    def run(bench: Bench) -> Any:
        folder = bench.folder()
        savers = [
            ModelCheckpoint(folder, filename="step={step}", auto_insert_metric_name=False, every_n_train_steps=1),
            ModelCheckpoint(folder, filename="epoch={epoch}", auto_insert_metric_name=False),
            ModelCheckpoint(
                folder,
                filename="end={epoch}",
                auto_insert_metric_name=False,
                save_on_train_epoch_end=True,
                every_n_epochs=2,
            ),
        ]
        for saver in savers:
            saver.save_top_k = -1
        whole = Model()
        trainer = bench.trainer(max_epochs=3, enable_checkpointing=True, callbacks=savers)
        trainer.fit(whole, datamodule=bench.data(*names))
        per_pass = trainer.global_step // 3
        paths = [folder / f"step={step}.ckpt" for step in range(per_pass + 1, 2 * per_pass + 1)]
        runs = {}
        for path in [*paths, folder / "epoch=1.ckpt", folder / "end=1.ckpt"]:
            model = Model()
            bench.trainer(max_epochs=3).fit(model, datamodule=bench.data(*names), ckpt_path=path)
            runs[path.stem] = model.log_of
        return {**whole.log_of, "runs": runs, "per_pass": per_pass, "weight": whole.head.weight.sum().item()}

    return run


def check_resumed(names: Sequence[str]) -> Callable[[Ranks], None]:
    def check(ranks: Ranks) -> None:
        check_passes(ranks, 3, names=names)
        for rank in ranks:
            for name, log in rank["runs"].items():
                first = int(name.split("=")[1]) if name.startswith("step") else 2 * rank["per_pass"]
                assert log["trained"] == [line for line in rank["trained"] if line[0] >= first], name
                assert log["rates"] == rank["rates"][len(rank["rates"]) - len(log["rates"]) :], name
                left = [event for event in rank["events"] if event[1] > first or (event[1] == first and "step" in name)]
                if name.startswith("epoch="):
                    left = [event for event in rank["events"] if event == ("ends", first)] + left
                assert log["events"] == left, name

    return check


def uneven(bench: Bench) -> Any:
    """Seven and five held-out records on ranks that take two rows each, in two loaders by name."""
    held = {"val_sources": {"held": [bench.source("held")], "other": [bench.source("other")]}}
    model, data = Model(), bench.data(**held)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.3)
    found = bench.trainer().validate(model, datamodule=data, verbose=False)
    return {**model.log_of, "metrics": found}


def check_uneven(ranks: Ranks) -> None:
    seen = samples(ranks, "evaluated")
    assert set(seen.values()) == {1}
    assert len(seen) == RECORDS["held"] + RECORDS["other"]
    assert len({len(rank["evaluated"]) for rank in ranks}) == 1, "equal counts"


def alone(bench: Bench) -> Any:
    """Test and prediction alone, twice each, with a limit in between."""
    sources = {"test_sources": {"a": [bench.source("held")], "b": [bench.source("other")]}}
    data = bench.data(**sources, predict_sources=[bench.source("other")])
    logs = []
    for limit in (1.0, 1, 1.0):
        model = Model()
        trainer = bench.trainer(limit_test_batches=limit, limit_predict_batches=limit)
        trainer.test(model, datamodule=data, verbose=False)
        trainer.predict(model, datamodule=data, return_predictions=False)
        logs.append(model.log_of["evaluated"])
    return {"logs": logs, "state": data.state_dict()}


def check_alone(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["logs"][0] == rank["logs"][2], "each starts at the beginning"
        assert len(rank["logs"][1]) == 3, "one batch of each loader"
        assert rank["state"] == {}
    seen = samples([{"all": rank["logs"][0]} for rank in ranks], "all")
    by_name = Counter(key[0] for key in seen.elements())
    assert by_name == {"held": RECORDS["held"], "other": 2 * RECORDS["other"]}


def check_early(ranks: Ranks) -> None:
    check_passes(ranks, 2)


def accumulated(bench: Bench) -> Any:
    return bench.fit(max_epochs=2, accumulate_grad_batches=3)


def sanity(number: int) -> Callable[[Bench], Any]:
    return lambda bench: bench.fit(max_epochs=2, num_sanity_val_steps=number)


class Finetuning(BackboneFinetuning):
    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0, verbose=False)


THREE = ("large", "middle", "small")
UNKNOWN = ("steps_per_epoch=", "whole number")

KNOBS: dict[str, Knob] = {
    "max_epochs alone": Knob(fit(max_epochs=3), passes(3)),
    "three unequal sources": Knob(fit(max_epochs=3, names=THREE), passes(3, names=THREE)),
    "resumed in the second pass": Knob(resumed(("one",)), check_resumed(("one",))),
    "three sources, resumed": Knob(resumed(THREE), check_resumed(THREE)),
    "accumulate_grad_batches": Knob(accumulated, passes(2)),
    "last_step=drop": Knob(
        fit(max_epochs=2, accumulate_grad_batches=2, data={"last_step": "drop"}),
        lambda ranks: check_steps(ranks),
    ),
    "max_steps alone": Knob(fit(max_steps=13), stream(13)),
    "max_epochs and max_steps": Knob(fit(max_epochs=3, max_steps=3), stream(3)),
    "max_epochs and max_time": Knob(fit(max_epochs=2, max_time=timedelta(minutes=9)), passes(2)),
    "max_time=0": Knob(fit(max_epochs=2, max_time=timedelta(0)), stream(0)),
    "limit_train_batches=4": Knob(fit(max_epochs=3, limit_train_batches=4), stream(12, ends=3, validated=3)),
    "limit_train_batches=0": Knob(fit(max_epochs=3, limit_train_batches=0), stream(0, ends=0)),
    "limit_train_batches=0.5": Knob(
        fit(max_epochs=2, limit_train_batches=0.5),
        lambda ranks: stream({1: 10, 2: 6}[len(ranks)], ends=2, validated=2)(ranks),
        "collated",
    ),
    "limit_train_batches=0.5 of unknown": Knob(
        refusal(fit(max_epochs=2, limit_train_batches=0.5)), says(*UNKNOWN), "packed"
    ),
    "steps_per_epoch": Knob(
        fit(max_epochs=3, data={"steps_per_epoch": 4}, limit_train_batches=0.5), stream(6, ends=3, validated=3)
    ),
    "val_check_interval=2": Knob(fit(max_epochs=1, val_check_interval=2), often(lambda batches: batches // 2)),
    "val_check_interval=0.5": Knob(
        fit(max_epochs=1, val_check_interval=0.5), often(lambda batches: batches // (batches // 2)), "collated"
    ),
    "val_check_interval=0.5 of unknown": Knob(
        refusal(fit(max_epochs=1, val_check_interval=0.5)), says(*UNKNOWN), "packed"
    ),
    "val_check_interval by the clock": Knob(
        fit(max_epochs=1, val_check_interval=timedelta(microseconds=1)),
        lambda ranks: check_passes(ranks, 1, validated=count(ranks, "validated")),
    ),
    "check_val_every_n_epoch=2": Knob(fit(max_epochs=4, check_val_every_n_epoch=2), passes(4, validated=2)),
    "check_val_every_n_epoch=None": Knob(
        fit(max_epochs=3, check_val_every_n_epoch=None, val_check_interval=5),
        lambda ranks: check_passes(ranks, 3, validated=len(ranks[0]["trained"]) // 5),
    ),
    "reload_dataloaders_every_n_epochs": Knob(fit(max_epochs=3, reload_dataloaders_every_n_epochs=1), passes(3)),
    "reload with a limit": Knob(
        fit(max_epochs=3, limit_train_batches=2, reload_dataloaders_every_n_epochs=1), stream(6, ends=3, validated=3)
    ),
    "num_sanity_val_steps=2": Knob(sanity(2), passes(2)),
    "num_sanity_val_steps=-1": Knob(sanity(-1), passes(2)),
    "limit_val_batches=1": Knob(fit(max_epochs=2, limit_val_batches=1), passes(2)),
    "limit_val_batches=0": Knob(fit(max_epochs=2, limit_val_batches=0), passes(2, validated=0)),
    "limit_val_batches=0.5": Knob(fit(max_epochs=2, limit_val_batches=0.5), passes(2), "collated"),
    "limit_val_batches=0.5 of unknown": Knob(
        refusal(fit(max_epochs=2, limit_val_batches=0.5)), says("limit_val_batches=0.5", "whole number"), "packed"
    ),
    "fast_dev_run=True": Knob(fit(fast_dev_run=True), stream(1, ends=1, validated=1)),
    "fast_dev_run=3": Knob(fit(fast_dev_run=3), stream(3, ends=1, validated=1)),
    "overfit_batches": Knob(refusal(fit(max_epochs=2, overfit_batches=2)), says("overfit_batches=2", "new data")),
    "EarlyStopping": Knob(early_stopping, check_early),
    "second fit": Knob(second_fit, check_second_fit),
    "Tuner.lr_find": Knob(learning_rate(tune), check_learning_rate),
    "LearningRateFinder": Knob(finder_callback, passes(1)),
    "OnExceptionCheckpoint": Knob(
        failing(lambda folder: OnExceptionCheckpoint(folder), "on_exception.ckpt"), passes(3)
    ),
    "save_on_exception": Knob(
        failing(lambda folder: ModelCheckpoint(folder, every_n_epochs=100, save_on_exception=True), "epoch=*.ckpt"),
        passes(3),
    ),
    "BackboneFinetuning": Knob(lambda bench: bench.fit(max_epochs=3, callbacks=[Finetuning()]), passes(3)),
    "uneven validation": Knob(uneven, check_uneven),
    "test and predict alone": Knob(alone, check_alone),
}


def knobs_for(rows: str) -> list[str]:
    return [name for name, knob in KNOBS.items() if knob.only in ("", rows)]
