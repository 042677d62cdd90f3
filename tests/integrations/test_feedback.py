"""`LossFeedback`: shares that follow logged losses by the documented rule, from the checkpoint as if never stopped."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale_lightning import ConfigError, LossFeedback, MixtureCallback, StateError
from megascale_lightning.checkpointing.state import readable
from tests.integrations.corpora import real_data
from tests.integrations.fakes import SaveAt, make_trainer
from tests.integrations.models import Recorder

STEPS, LEAD = 48, 32


class Silent(Recorder):
    """Logs nothing."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return self.layer(batch["input_ids"][:, :2].float()).sum()


class Logs(Silent):
    """Says that the loss of code stays high, and that of web falls with the steps."""

    metrics = ("train_loss/web", "train_loss/code")

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        step = batch["megascale"].step
        for name, loss in zip(self.metrics, (2.0 / (1 + step), 2.0 + 0.01 * step), strict=True):
            self.log(name, loss)
        return super().training_step(batch, batch_idx)


def fit(corpus: Path, *, ckpt: Path | None = None, saver: Any = None, model: Any = None, **rule: Any) -> Any:
    data, feedback = real_data(corpus), LossFeedback(step_size=0.2, floor=0.05, **rule)
    callbacks = [MixtureCallback(feedback, 4), *([saver] if saver else [])]
    trainer = make_trainer(max_steps=STEPS, accumulate_grad_batches=2, callbacks=callbacks)
    trainer.fit(model or Logs(), datamodule=data, ckpt_path=ckpt)
    return data, feedback


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    saver = SaveAt(tmp_path_factory.mktemp("saves"))
    return (*fit(corpus, saver=saver), saver.saved)


def test_the_source_with_the_higher_loss_gets_more(undisturbed: Any) -> None:
    data, feedback, _ = undisturbed
    mixture = readable(data.position())["mixture"]
    assert mixture["replaced"]
    assert mixture["weights"]["code"] / sum(mixture["weights"].values()) > 0.4
    assert feedback.shares["code"] > 0.8
    assert feedback.shares["web"] >= 0.05
    assert sum(feedback.shares.values()) == pytest.approx(1)


@pytest.mark.parametrize("step", [3, 4, 5, 21, 40])
def test_resumed_it_is_as_if_never_stopped(corpus: Path, undisturbed: Any, step: int) -> None:
    data, feedback = fit(corpus, ckpt=undisturbed[2][2 * step - 1])
    assert feedback.state_dict() == undisturbed[1].state_dict()
    assert data.certificate == undisturbed[0].certificate


class Rank:
    """What the rule sees of a trainer, with values of other ranks in its reductions."""

    def __init__(self, metrics: dict[str, float], *others: list[list[float]]) -> None:
        self.callback_metrics = {name: torch.tensor(value) for name, value in metrics.items()}
        self.datamodule = SimpleNamespace(position=lambda: POSITION)
        self.strategy = SimpleNamespace(reduce=lambda mine, reduce_op: sum(map(torch.tensor, others), mine))


POSITION: dict[str, Any] = {}
MODULE: Any = SimpleNamespace(device="cpu")


@pytest.fixture(autouse=True)
def position(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sources in a state, a and b, of weights 3 and 1."""
    import numpy as np

    from megascale_lightning.checkpointing.state import pack_weights

    packed = pack_weights(np.array([3.0, 1.0, 0.0]), ["a", "b", "off"])
    monkeypatch.setitem(POSITION, "sources", {"a": {}, "b": {}, "off": {}})
    monkeypatch.setitem(POSITION, "mixture", {"weights": packed})


def test_the_formula() -> None:
    rule = LossFeedback("loss_{source}", {"a": 1.0}, step_size=0.5, smoothing=0.75, floor=0.1)
    rule(Rank({"loss_a": 2.0, "loss_b": 0.5}), MODULE, 1)  # type: ignore[arg-type]
    found = rule(Rank({"loss_a": 4.0}), MODULE, 2)  # type: ignore[arg-type]

    def update(shares: tuple[float, float], losses: tuple[float, float]) -> tuple[float, float]:
        a = shares[0] * math.exp(0.5 * max(losses[0] - 1.0, 0))
        b = shares[1] * math.exp(0.5 * losses[1])
        return 0.1 + 0.8 * a / (a + b), 0.1 + 0.8 * b / (a + b)

    shares = update(update((0.75, 0.25), (2.0, 0.5)), (0.75 * 2 + 0.25 * 4, 0.5))
    assert found == pytest.approx({"a": 4 * shares[0], "b": 4 * shares[1]})
    assert rule.losses == {"a": 2.5, "b": 0.5}


def test_a_loss_below_its_reference_takes_nothing_away() -> None:
    rule = LossFeedback("{source}", 5.0, floor=0.0)
    assert rule(Rank({"a": 1.0, "b": 4.0}), MODULE, 1) == {"a": 3.0, "b": 1.0}  # type: ignore[arg-type]


def test_ranks_that_have_logged_a_loss_are_averaged() -> None:
    rule = LossFeedback("{source}")
    rule(Rank({"a": 1.0, "b": math.nan}, [[3.0, 0.0], [1.0, 0.0]], [[0.0, 7.0], [0.0, 1.0]]), MODULE, 1)  # type: ignore[arg-type]
    assert rule.losses == {"a": 2.0, "b": 7.0}


def test_a_huge_loss_does_not_overflow() -> None:
    rule = LossFeedback("{source}", step_size=1.0, floor=0.2)
    found = rule(Rank({"a": 1.0, "b": 1e6}), MODULE, 1)  # type: ignore[arg-type]
    assert found == pytest.approx({"a": 4 * 0.2, "b": 4 * 0.8})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metric": "loss"}, r"metric must hold {source}"),
        ({"reference": "x"}, "reference must be"),
        ({"step_size": 0}, "step_size must be a number above 0"),
        ({"smoothing": 1.0}, "smoothing must be"),
        ({"floor": -0.1}, "floor must be"),
    ],
)
def test_refused_settings(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossFeedback(**settings)


def test_refusals_in_training(corpus: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none of \['train_loss/code', 'train_loss/web'\] is logged; logged are \[\]"
    ):
        fit(corpus, model=Silent())
    with pytest.raises(ConfigError, match=r"a floor of 0\.5 for each of 2 sources"):
        LossFeedback(floor=0.5)(Rank({}), MODULE, 1)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="no state of a LossFeedback"):
        LossFeedback().load_state_dict({"shares": {"a": "x"}, "losses": {}, "total": 1})
