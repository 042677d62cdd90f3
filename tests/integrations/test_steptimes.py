"""`StepTimes` in a real trainer: what is timed, what is left out, and the file at the end."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from megascale_lightning import (
    Balanced,
    CollatedRows,
    ConfigError,
    CostOf,
    Curriculum,
    HybridVLM,
    MegaScaleDataModule,
    MegaScaleWarning,
    PackedRows,
    Source,
    TokenCount,
)
from megascale_lightning.integrations.lightning.steptimes import StepTimes
from megascale_lightning.planning.calibration import CalibratedCost, CostCalibrator, microbatch_features
from tests.integrations.corpora import real_data
from tests.integrations.fakes import make_trainer
from tests.integrations.models import Recorder


class Keeps(CostCalibrator):
    """Writes down what it is given."""

    def __init__(self) -> None:
        super().__init__(skip_steps=0)
        self.given: list[tuple[Any, float, int]] = []

    def add(self, features: Any, seconds: float, *, step: int) -> None:
        self.given.append((features, seconds, step))
        super().add(features, seconds, step=step)


class Model(Recorder):
    """Takes known time in its parts, and sees the documents by the boundaries that attention gets."""

    def __init__(self, *, forward: float = 0.0, elsewhere: float = 0.0) -> None:
        super().__init__()
        self.forward_time, self.elsewhere = forward, elsewhere
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(self.forward_time)
        if isinstance(batch, dict):
            self.seen.append(torch.diff(batch["cu_seq_lens_q"]).tolist())
            return self.layer(batch["input_ids"][:, :2].float()).sum()
        return self.layer(batch).sum()

    validation_step = L.LightningModule.validation_step  # type: ignore[assignment]  # none: no warning about its data

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(self.elsewhere)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        time.sleep(self.elsewhere)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def optimizer_step(self, *args: Any, **more: Any) -> None:
        super().optimizer_step(*args, **more)
        time.sleep(self.elsewhere)


class Frozen(Model):
    """Gives no loss in the second microbatch of a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch["megascale"].microbatch == 0 else None


def run(corpus: Path, times: StepTimes, model: Any = None, *, steps: int = 6, **more: Any) -> Model:
    model = model or Model()
    trainer = make_trainer(max_steps=steps, accumulate_grad_batches=2, callbacks=[times], **more)
    trainer.fit(model, datamodule=real_data(corpus))
    found: Model = model
    return found


def test_every_microbatch_is_timed_with_what_is_in_it(corpus: Path) -> None:
    keeps = Keeps()
    model = run(corpus, StepTimes(calibrator=keeps), steps=30)
    assert [step for *_, step in keeps.given] == [step for step in range(30) for _ in range(2)]
    full = 0
    for (features, seconds, _), lengths in zip(keeps.given, model.seen, strict=True):
        assert seconds > 0
        if sum(lengths) == features[2]:  # else the last segments are padding
            full += 1
            assert features.tolist() == [1, len(lengths), sum(lengths), sum(n * n for n in lengths), 0, 0, 0]
    assert full >= 3
    assert max(features[1] for features, *_ in keeps.given) > 2


def test_only_forward_and_backward_are_timed(corpus: Path) -> None:
    """20 ms in forward; 40 ms each in the transfer, the optimizer and at the end of a batch."""
    keeps = Keeps()
    run(corpus, StepTimes(calibrator=keeps), Model(forward=0.02, elsewhere=0.04))
    seconds = np.array([seconds for _, seconds, _ in keeps.given])
    assert seconds.min() >= 0.02
    assert np.median(seconds) < 0.04


def test_backward_is_timed_up_to_the_last_gradient(corpus: Path) -> None:
    """20 ms in the backward pass count; 40 ms after its last gradient, where DDP waits for others, do not."""

    class Slow(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            loss.register_hook(lambda gradient: time.sleep(0.02))
            return loss

        def backward(self, loss: Any, *args: Any, **more: Any) -> None:
            super().backward(loss, *args, **more)
            time.sleep(0.04)

    keeps = Keeps()
    run(corpus, StepTimes(calibrator=keeps), Slow())
    seconds = np.array([seconds for _, seconds, _ in keeps.given])
    assert seconds.min() >= 0.02
    assert np.median(seconds) < 0.04


def test_a_strategy_that_sets_gradients_itself_is_timed_to_the_end_of_backward(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepTimes, "_on_gradient", lambda self, parameter: None)
    keeps = Keeps()
    run(corpus, StepTimes(calibrator=keeps), Model(forward=0.02))
    assert len(keeps.given) == 12
    assert min(seconds for _, seconds, _ in keeps.given) >= 0.02


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
def test_without_a_backward_pass_there_is_no_time(corpus: Path) -> None:
    keeps = Keeps()
    run(corpus, StepTimes(calibrator=keeps), Frozen())
    assert [step for *_, step in keeps.given] == list(range(6))


def test_images_are_what_the_user_says(corpus: Path) -> None:
    keeps = Keeps()
    run(corpus, StepTimes(calibrator=keeps, images=lambda batch: {"patches": batch["input_ids"].numel()}), steps=1)
    assert [features[4:].tolist() for features, *_ in keeps.given] == [[64, 0, 0]] * 2


def test_batches_of_ones_own_take_the_datamodules_word() -> None:
    data = MegaScaleDataModule(
        sources=[Source("all", [torch.full((2,), float(n)) for n in range(40)])],
        rows=CollatedRows(4),
        runtime="local",
    )
    keeps = Keeps()
    trainer = make_trainer(max_steps=5, callbacks=[StepTimes(calibrator=keeps)])
    trainer.fit(Model(), datamodule=data)
    assert [step for *_, step in keeps.given] == list(range(5))
    assert [features[1] for features, *_ in keeps.given] == [4] * 5


def test_microbatches_with_filler_are_left_out(corpus: Path) -> None:
    keeps = Keeps()
    times = StepTimes(calibrator=keeps)
    clocked = SimpleNamespace(device=torch.device("cpu"), parameters=lambda: iter(()))
    times.on_train_epoch_start(None, clocked)  # type: ignore[arg-type]
    for step, weights in enumerate(([1.0, 1.0], [1.0, 0.0])):
        info = SimpleNamespace(step=step, row_weights=np.array(weights), lengths=np.array([5, 6]))
        batch = {"megascale": info}
        times.on_train_batch_start(None, None, batch, step)  # type: ignore[arg-type]
        times.on_after_backward(None, None)  # type: ignore[arg-type]
        times.on_train_batch_end(None, None, None, batch, step)  # type: ignore[arg-type]
    assert [step for *_, step in keeps.given] == [0]


def test_the_file_is_written_at_the_end(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    times = StepTimes(path, calibrator=CostCalibrator(skip_steps=1))
    run(corpus, times, steps=30)
    cost = CalibratedCost.from_yaml(path)
    assert cost.num_samples + cost.num_outliers == len(times.calibrator) == 58


def test_rank_0_alone_writes(tmp_path: Path) -> None:
    keeps = Keeps()
    rng = np.random.default_rng(0)
    for step in range(60):
        lengths = rng.integers(1, 500, rng.integers(1, 9))
        keeps.add(microbatch_features(lengths), 0.1 + 1e-5 * lengths.sum(), step=step)
    for first in (False, True):
        trainer = SimpleNamespace(is_global_zero=first)
        StepTimes(tmp_path / "costs.yaml", calibrator=keeps).on_train_end(trainer, None)  # type: ignore[arg-type]
        assert (tmp_path / "costs.yaml").exists() == first


def test_too_little_to_fit_is_a_warning_and_no_file(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    with pytest.warns(MegaScaleWarning, match="costs.yaml is not written.*record more steps"):
        run(corpus, StepTimes(path), steps=4)
    assert not path.exists()


@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_stays(corpus: Path, fails: bool) -> None:
    class Fails(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if fails and batch["megascale"].step == 2:
                raise RuntimeError("wanted")
            return super().training_step(batch, batch_idx)

    model = Fails()
    with pytest.raises(RuntimeError, match="wanted") if fails else nullcontext():
        run(corpus, StepTimes(), model)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_manual_optimization_is_refused(corpus: Path) -> None:
    model = Model()
    model.automatic_optimization = False
    with pytest.raises(ConfigError, match="automatic_optimization = False"):
        make_trainer(max_steps=1, callbacks=[StepTimes()]).fit(model, datamodule=real_data(corpus))


def test_other_data_are_refused() -> None:
    data: Any = torch.utils.data.DataLoader([torch.ones(2)] * 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pass datamodule= to trainer"):
        make_trainer(max_steps=1, callbacks=[StepTimes()]).fit(Model(), data)


class Fitted(Keeps):
    """Knows a cost from its thirtieth microbatch on."""

    def fit(self, *, half_life: float | None = None) -> CalibratedCost:
        if len(self) < 30:
            return super().fit()
        return CalibratedCost(constant=9.0, per_token=float(len(self)))


def test_rows_are_placed_by_the_times_so_far(corpus: Path) -> None:
    """Two microbatches a step: 8, 16 and 24 are too few, 32 and 40 come into effect 32 steps after they were seen."""
    data = real_data(corpus)
    times = StepTimes(calibrator=Fitted(), place_every_n_steps=4)
    trainer = make_trainer(max_steps=22, accumulate_grad_batches=2, callbacks=[times])
    trainer.fit(Model(), datamodule=data)
    costs = data.position()["costs"]
    given = [[step, [{"constant": 9.0, "per_token": 2.0 * (step - 32)}]] for step in (48, 52)]
    assert costs == {"now": [], "changes": given}


def test_what_is_wrong_with_placing_is_said() -> None:
    with pytest.raises(ConfigError, match="place_every_n_steps must be a whole number of at least 1, not 0"):
        StepTimes(place_every_n_steps=0)
    trainer = SimpleNamespace(datamodule=None)
    with pytest.raises(ConfigError, match=r"StepTimes\(place_every_n_steps=...\) needs a MegaScaleDataModule"):
        StepTimes(place_every_n_steps=5).setup(trainer, Model(), "fit")  # type: ignore[arg-type]


def by_patches(lengths: Any, patches: Any) -> Any:
    return lengths + patches


PLACING = StepTimes(place_every_n_steps=4, images=lambda batch: {"patches": 4, "images": 1})


@pytest.mark.parametrize(
    ("times", "strategy", "said"),
    [
        (StepTimes(place_every_n_steps=4), HybridVLM(TokenCount(), TokenCount()), "2 costs .* take a strategy of one"),
        (PLACING, None, "some of .*'patches'.*described by lengths alone"),
        (PLACING, Curriculum("score", [(0, 1)]), r"described by \['score'\]"),
    ],
)
def test_what_rows_cannot_be_placed_by_is_refused_at_once(times: StepTimes, strategy: Any, said: str) -> None:
    data = MegaScaleDataModule(sources=[Source("all", "x.parquet")], rows=PackedRows(8, 1), strategy=strategy)
    trainer = SimpleNamespace(datamodule=data)
    with pytest.raises(ConfigError, match=said):
        times.setup(trainer, Model(), "fit")  # type: ignore[arg-type]
    times.setup(trainer, Model(), "validate")  # type: ignore[arg-type]


def test_rows_are_placed_by_what_is_described_alone() -> None:
    """Of what there is to see in a batch is known only once it is there."""
    strategy = Balanced(CostOf(by_patches, ("patches",)))
    data = MegaScaleDataModule(sources=[Source("all", "x.parquet")], rows=PackedRows(8, 1), strategy=strategy)
    info = SimpleNamespace(step=0, row_weights=np.ones(1), lengths=np.array([5]))
    clocked = SimpleNamespace(device=torch.device("cpu"), parameters=lambda: iter(()), automatic_optimization=True)
    patches = StepTimes(place_every_n_steps=4, images=lambda batch: {"patches": 4})
    for times, allowed in ((patches, True), (PLACING, False)):
        times.setup(SimpleNamespace(datamodule=data), clocked, "fit")  # type: ignore[arg-type]
        times.on_train_epoch_start(None, clocked)  # type: ignore[arg-type]
        refused = pytest.raises(ConfigError, match=r"images= gives \['images'\], .* \['patches'\]")
        with nullcontext() if allowed else refused:
            times.on_train_batch_start(None, None, {"megascale": info}, 0)  # type: ignore[arg-type]
