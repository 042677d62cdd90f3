"""`set_mixture` and `MixtureCallback` under a real trainer: the same data, whatever the ranks and the saves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from megascale_lightning import ConfigError, MixtureCallback
from megascale_lightning.checkpointing.state import readable
from tests.integrations.corpora import real_data
from tests.integrations.fakes import SaveAt, make_trainer
from tests.integrations.models import Recorder

STEPS, CALL, LEAD = 60, 10, 32
EFFECT = CALL + LEAD


class Mixed(Recorder):
    """Writes down where the samples of each step came from."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[int, Counter[str]] = {}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        info = batch["megascale"]
        counts = self.drawn.setdefault(info.step, Counter())
        counts.update(name for row in info.sample_ids() for name, *_ in row)
        return self.layer(batch["input_ids"][:, :2].float()).sum()


def once(trainer: L.Trainer, module: L.LightningModule, step: int) -> dict[str, float] | None:
    return {"web": 0.02, "code": 0.98} if step == CALL else None


def fit(corpus: Path, *, ckpt: Path | None = None, max_steps: int = STEPS, saver: Any = None, **more: Any) -> Any:
    data, model = real_data(corpus, **more), Mixed()
    callbacks = [MixtureCallback(once), *([saver] if saver else [])]
    make_trainer(max_steps=max_steps, accumulate_grad_batches=2, callbacks=callbacks).fit(
        model, datamodule=data, ckpt_path=ckpt
    )
    return data, model


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, list[Path]]:
    saver = SaveAt(tmp_path_factory.mktemp("saves"))
    return (*fit(corpus, saver=saver), saver.saved)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_the_same_certificate_whatever_is_read_ahead(corpus: Path, undisturbed: Any, prefetch: int) -> None:
    data, _ = fit(corpus, prefetch_steps=prefetch)
    assert data.certificate == undisturbed[0].certificate


def test_it_takes_effect_where_it_says(corpus: Path, undisturbed: Any) -> None:
    before = sum((undisturbed[1].drawn[step] for step in range(EFFECT)), Counter())
    late = sum((undisturbed[1].drawn[step] for step in range(EFFECT + 3, STEPS)), Counter())
    assert before["web"] > before["code"]
    assert late["code"] > 5 * late["web"]


@pytest.mark.parametrize("step", [CALL - 1, CALL, CALL + 1, EFFECT - 1, EFFECT, EFFECT + 1])
def test_a_save_between_call_and_effect(corpus: Path, undisturbed: Any, step: int) -> None:
    """The callback of the resumed run is asked nothing more: what it said is in the checkpoint."""
    saved = undisturbed[2][2 * step - 1]  # two microbatches a step
    data, model = fit(corpus, ckpt=saved)
    assert min(model.drawn) == step
    assert data.certificate == undisturbed[0].certificate


def test_every_n_steps(corpus: Path) -> None:
    asked: list[int] = []

    def ask(trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        asked.append(step)

    data = real_data(corpus)
    trainer = make_trainer(max_steps=11, accumulate_grad_batches=2, callbacks=[MixtureCallback(ask, 3)])
    trainer.fit(Mixed(), datamodule=data)
    assert asked == [3, 6, 9]
    assert readable(data.position())["mixture"]["changes"] == {}


def test_called_by_hand(corpus: Path) -> None:
    data = real_data(corpus)
    with pytest.raises(ConfigError, match="setup"):
        data.set_mixture({"web": 1.0})

    class ByHand(Mixed):
        def on_train_batch_end(self, *_: Any) -> None:
            if data.next_step == 4:
                assert data.set_mixture({"web": 0.9, "code": 0.1}, at_step=40) == 40

    make_trainer(max_steps=6).fit(ByHand(), datamodule=data)
    assert readable(data.position())["mixture"]["changes"] == {40: {"code": 0.1, "web": 0.9}}


def test_refusals(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="every_n_steps"):
        MixtureCallback(once, 0)
    with pytest.raises(ConfigError, match=r"MixtureCallback: .*<lambda> gave 'web' after step 0: .* mapping"):
        make_trainer(max_steps=2, callbacks=[MixtureCallback(lambda *_: "web")]).fit(  # type: ignore[arg-type,return-value]
            Mixed(), datamodule=real_data(corpus)
        )
    with pytest.raises(ConfigError, match="MegaScaleDataModule"):
        make_trainer(max_steps=1, callbacks=[MixtureCallback(once)]).fit(Mixed(), [{"x": 1}])
