"""Cases that users of Lightning reported of other loaders: each docstring says what goes wrong there.

docs/guarantees.md lists the reports, these tests, and the tests elsewhere that hold the rest of them.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megascale_lightning import CollatedRows, MegaScaleDataModule, Source
from megascale_lightning.client.session import LoadingSession
from megascale_lightning.types import BatchWindow
from tests.integrations.corpora import held_out, real_data
from tests.integrations.fakes import FakeSession, SaveAt, make_data, make_trainer
from tests.integrations.models import Recorder
from tests.integrations.processes import train
from tests.integrations.scripts.reports import BAD, HELD, RECORDS

pytestmark = pytest.mark.timeout(200)


class Reader(Recorder):
    """Keeps the samples of each microbatch, in training and in validation, and a loss that depends on them."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.rows: list[tuple[int, int, Any]] = []
        self.rounds: dict[int, list[Any]] = {}
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        info = batch["megascale"]
        x = batch["input_ids"].float().mean(-1, keepdim=True).expand(-1, 2) / 100
        loss = super().training_step({"megascale": info, "x": x}, batch_idx)
        self.rows.append((info.step, info.microbatch, info.sample_ids()))
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        self.rounds.setdefault(self.trainer.global_step, []).append(batch["megascale"].sample_ids())
        self.log("loss", batch["input_ids"].float().mean(), batch_size=1)

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))


def fit(data: MegaScaleDataModule, ckpt: Path | None = None, **trainer: Any) -> Reader:
    model = Reader()
    make_trainer(**{"limit_val_batches": 0, **trainer}).fit(model, datamodule=data, ckpt_path=ckpt)
    return model


class Counting:
    """A dataset that counts how often each of its records is asked for."""

    def __init__(self, length: int) -> None:
        self.length, self.asked = length, Counter[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, int]:
        self.asked[index] += 1
        return {"x": index}


class Records(L.LightningModule):
    """Trains on batches of `Counting`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained.append(batch["x"].tolist())
        return self.layer(batch["x"][:, None].float()).sum() / 1000

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def records(data: Any, **more: Any) -> MegaScaleDataModule:
    return MegaScaleDataModule(
        **{"sources": [Source("all", data)], "rows": CollatedRows(4), "runtime": "local", **more}
    )


class TestResume:
    @pytest.mark.parametrize(
        ("settings", "stops", "hook"),
        [
            pytest.param({"steps_per_epoch": 3}, (3, 6, 9), "epoch", id="at the ends of epochs"),
            pytest.param({"steps_per_epoch": 3}, (1, 2, 3, 7, 9), "batch", id="several times in an epoch"),
            pytest.param({"prefetch_steps": 4}, (2, 5, 9), "batch", id="without a length"),
            pytest.param({"prefetch_steps": 0, "plan_window": 1}, (4, 5, 9), "batch", id="without read-ahead"),
        ],
    )
    def test_a_chain_of_short_runs_is_one_long_run(
        self, corpus: Path, tmp_path: Path, settings: dict[str, Any], stops: tuple[int, ...], hook: str
    ) -> None:
        """A step comes twice or never where an epoch ended, or from the second resume on."""
        whole = fit(real_data(corpus), max_steps=9, accumulate_grad_batches=2).rows
        path, rows = None, []
        for number, stop in enumerate(stops):
            saver = SaveAt(tmp_path / str(number))
            trainer = make_trainer(max_steps=stop, accumulate_grad_batches=2, callbacks=[saver], limit_val_batches=0)
            model, data = Reader(), real_data(corpus, **settings)
            trainer.fit(model, datamodule=data, ckpt_path=path)
            assert trainer.global_step == data.next_step == stop
            rows += model.rows
            path = next(saved for saved in reversed(saver.saved) if saved.stem.endswith(hook))
        assert rows == whole

    def test_the_length_of_an_epoch_is_not_that_of_its_rest(self, corpus: Path, tmp_path: Path) -> None:
        """A loader that is as long as what is left ends the run before its last step."""
        lengths: list[int] = []

        class Asking(Callback):
            def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
                lengths.append(len(trainer.train_dataloader))  # type: ignore[arg-type]

        saver = SaveAt(tmp_path)
        settings = {"max_steps": 10, "accumulate_grad_batches": 2, "callbacks": [saver, Asking()]}
        whole = fit(real_data(corpus, steps_per_epoch=10), **settings)
        path = next(path for path in saver.saved if path.stem == "015-batch")
        rest = fit(real_data(corpus, steps_per_epoch=10), path, **{**settings, "callbacks": [Asking()]})
        assert rest.rows == whole.rows[16:]
        assert set(lengths) == {20}

    def test_nothing_that_is_behind_is_read_again(self, tmp_path: Path) -> None:
        """The epoch is gone through again from its start, in silence, or with a warning that cannot be followed."""
        saver = SaveAt(tmp_path)
        whole = Records()
        make_trainer(max_epochs=2, callbacks=[saver]).fit(whole, datamodule=records(Counting(40)))
        assert len(whole.trained) == 20
        path = next(path for path in saver.saved if path.stem == "005-batch")
        data, model = Counting(40), Records()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(max_epochs=2).fit(model, datamodule=records(data), ckpt_path=path)
        assert model.trained == whole.trained[6:]
        assert data.asked == Counter(index for batch in model.trained for index in batch)
        assert not [warning for warning in caught if "resum" in str(warning.message).lower()]

    @pytest.mark.parametrize("hook", ["batch", "validation"])
    def test_validation_after_a_resume_is_whole(self, corpus: Path, tmp_path: Path, hook: str) -> None:
        """The validations behind a resume end after their first batch, and log the loss of that one."""
        settings = {"max_steps": 15, "val_check_interval": 5, "check_val_every_n_epoch": None, "limit_val_batches": 3}
        saver = SaveAt(tmp_path)
        held = held_out(corpus)["b"]
        whole = fit(real_data(corpus, val_sources=held), **settings, callbacks=[saver])
        assert [len(batches) for batches in whole.rounds.values()] == [3, 3, 3]
        saved = [path for path in saver.saved if path.stem.endswith(hook)]
        for path in (saved[0], saved[4] if hook == "batch" else saved[1]):
            first = torch.load(path, weights_only=True)["global_step"]
            rest = fit(real_data(corpus, val_sources=held), path, **settings)
            assert [row[0] for row in rest.rows] == list(range(first, 15))
            # One that was due with the very save, and had not begun, is lost to Lightning itself.
            assert rest.rounds == {step: batches for step, batches in whole.rounds.items() if step > first}
            assert rest.losses == whole.losses[len(whole.losses) - len(rest.losses) :]

    def test_a_checkpoint_can_be_opened_without_a_trainer(self, sessions: list[FakeSession], tmp_path: Path) -> None:
        """`load_from_checkpoint` brings the state to a DataModule that no trainer has, and it starts, or fails."""

        class Plain(Recorder):
            pass

        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = make_trainer(max_steps=4, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(Plain(), datamodule=make_data(runtime="ray"))
        sessions.clear()
        own = make_data(runtime="ray").config
        settings = {"sources": own.sources, "rows": own.rows, "runtime": "ray"}
        data = MegaScaleDataModule.load_from_checkpoint(tmp_path / "step=2.ckpt", **settings)
        assert Plain.load_from_checkpoint(tmp_path / "step=2.ckpt").trained == []
        assert data.next_step == 2
        assert sessions == []
        model = Plain()
        make_trainer(max_steps=2).fit(model, datamodule=data)
        assert model.trained == [(2, 0), (3, 0)]


class TestIterators:
    def test_iterators_that_nobody_uses_read_nothing(self) -> None:
        """Each `iter()` takes batches out of the queue, which nobody ever sees."""
        source = Counting(400)
        data = records(source)
        data.setup("fit")
        try:
            loader = data.train_dataloader()
            for _ in range(3):
                iter(loader)
            assert not source.asked
            used = iter(loader)
            first = next(used)["x"].tolist()
            for _ in range(3):
                iter(loader)
            assert next(used)["x"].tolist() != first
            assert next(iter(loader))["x"].tolist() == first, "nothing was marked as consumed"
        finally:
            data.teardown("fit")

    def test_epochs_that_are_cut_short_lose_nothing(self) -> None:
        """What was read ahead when `limit_train_batches` ended an epoch is thrown away."""
        long, short, again = Records(), Records(), Records()
        make_trainer(max_steps=9).fit(long, datamodule=records(Counting(100)))
        data = records(Counting(100), prefetch_steps=4)
        trainer = make_trainer(max_epochs=2, limit_train_batches=3)
        trainer.fit(short, datamodule=data)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(again, datamodule=data)
        assert short.trained + again.trained == long.trained

    def test_many_short_epochs_leave_nothing_behind(self, corpus: Path) -> None:
        """Each epoch or validation that is cut short leaves its iterator behind, with its threads and batches."""
        threads: list[int] = []
        windows: list[int] = []

        class Look(Callback):
            def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
                threads.append(threading.active_count())
                if trainer.current_epoch in (3, 13):
                    gc.collect()
                    windows.append(sum(type(thing) is BatchWindow for thing in gc.get_objects()))

        data = real_data(corpus, prefetch_steps=3, plan_window=2, val_sources=held_out(corpus)["b"])
        fit(data, max_epochs=14, limit_train_batches=3, limit_val_batches=1, callbacks=[Look()])
        assert max(threads[4:]) <= max(threads[:4]) + 1, threads
        assert windows[1] <= windows[0] + 2, windows

    @pytest.mark.parametrize("settings", [{"steps_per_epoch": 7}, {}], ids=["declared", "of a pass"])
    def test_the_length_asks_nobody(self, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
        """A call that fails inside `__len__` looks like a loader without a length."""
        data = records(Counting(40), **settings)
        seen: list[Any] = []

        class Unreachable:
            def __getattr__(self, name: str) -> Any:
                raise AssertionError(f"{name} was called")

        class Asking(Callback):
            def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
                session = data._session
                assert isinstance(session, LoadingSession)
                with monkeypatch.context() as patch:
                    patch.setattr(session, "port", Unreachable())
                    patch.setattr(session, "_runtime", Unreachable())
                    seen.append(len(data.train_dataloader()))

        make_trainer(max_epochs=1, callbacks=[Asking()]).fit(Records(), datamodule=data)
        assert seen == [settings.get("steps_per_epoch", 10)]


class TestSignals:
    @pytest.mark.timeout(60)
    def test_a_signal_that_saves_while_the_trainer_waits(self, corpus: Path, tmp_path: Path) -> None:
        """A save from a signal handler meets a lock that the waiting `next()` holds."""
        saved, path = threading.Event(), tmp_path / "signal.ckpt"
        reached = threading.Event()

        def hold(sample: dict[str, Any]) -> dict[str, Any]:
            # Runs in the thread that reads ahead: the trainer has used up what was there, and waits.
            if armed.is_set() and not reached.is_set():
                reached.set()
                assert waiting.wait(20)
                os.kill(os.getpid(), signal.SIGUSR1)
                assert saved.wait(20), "the save did not come back"
            return sample

        armed, waiting = threading.Event(), threading.Event()

        class Watched(MegaScaleDataModule):
            def _interrupted(self) -> bool:
                if reached.is_set():
                    waiting.set()
                return super()._interrupted()

        data = Watched(
            sources=[Source("web", str(corpus / "web/*.parquet"), transform=hold, thread_safe=True)],
            rows=real_data(corpus).config.rows,
            runtime="local",
            prefetch_steps=1,
            plan_window=1,
            window_units=1,
            part_bytes=300,
        )
        model = Reader()
        trainer = make_trainer(max_steps=30, limit_val_batches=0)

        def save(*_: Any) -> None:
            trainer.save_checkpoint(path)
            saved.set()

        class Arm(Callback):
            def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
                if trainer.global_step == 3:
                    armed.set()

        trainer.callbacks.append(Arm())  # type: ignore[attr-defined]
        before = signal.signal(signal.SIGUSR1, save)
        try:
            trainer.fit(model, datamodule=data)
        finally:
            signal.signal(signal.SIGUSR1, before)
        checkpoint = torch.load(path, weights_only=True)
        step = checkpoint["callbacks"]["megascale_lightning"]["step"]
        assert step == checkpoint["global_step"] >= 3
        armed.clear()
        rest = fit(data, path, max_steps=30)
        assert rest.rows == [row for row in model.rows if row[0] >= step]

    def test_a_terminated_run_does_not_say_that_it_has_finished(self, tmp_path: Path) -> None:
        """The exit code after SIGTERM is that of success, and whoever restarts jobs takes the run for finished."""

        class Terminated(Records):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                if self.trainer.global_step == 4:
                    os.kill(os.getpid(), signal.SIGTERM)
                return super().training_step(batch, batch_idx)

        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        settings = {"sources": [Source("all", Counting(40), epochs=1)], "prefetch_steps": 9}
        data, model = records(None, **settings), Terminated()
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises((SIGTERMException, SystemExit)):
                make_trainer(max_steps=50, callbacks=[saver], enable_checkpointing=True).fit(model, datamodule=data)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert data.ended is False
        saved = torch.load(tmp_path / "step=5.ckpt", weights_only=True)["MegaScaleDataModule"]
        assert (saved["step"], saved["ended"]) == (5, False)
        rest, other = Records(), records(None, **settings)
        make_trainer(max_steps=50).fit(rest, datamodule=other, ckpt_path=tmp_path / "step=5.ckpt")
        assert sorted(x for batch in model.trained + rest.trained for x in batch) == list(range(40))
        assert other.ended is True


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two real processes wrote down, which would wait for each other for ever if one had a batch more."""
    out = tmp_path_factory.mktemp("ranks")
    train(out, out, script="reports.py", timeout_s=170)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def indices(ranks: list[dict[str, Any]], run: str, what: str) -> Counter[int]:
    """How often each record came, over both ranks."""
    return Counter(
        piece[2] * 1024 + piece[3]
        for rank in ranks
        for kind, _, ids in rank[run]
        if kind == what
        for row in ids
        for piece in row
    )


@pytest.mark.slow
@pytest.mark.ddp
def test_data_that_only_one_rank_could_fill(ranks: list[dict[str, Any]]) -> None:
    """The rank that has a batch left waits for the others, or one validates while another trains."""
    events = [[(kind, step) for kind, step, _ in rank["runs dry"]] for rank in ranks]
    assert events[0] == events[1]
    steps = -(-RECORDS // 4)
    assert [step for kind, step in events[0] if kind == "trained"] == list(range(steps))
    # Lightning itself validates once more with the last batch of a loader without a length.
    assert {step for kind, step in events[0] if kind == "validated"} == {3, 6, 9, steps}
    last = [
        row
        for rank in ranks
        for kind, step, ids in rank["runs dry"]
        if (kind, step) == ("trained", steps - 1)
        for row in ids
    ]
    assert sum(map(bool, last)) == RECORDS % 4 == 1, "the other rank's last batch is filler"
    assert indices(ranks, "runs dry", "trained") == Counter(range(RECORDS))
    assert indices(ranks, "runs dry", "validated") == Counter(dict.fromkeys(range(HELD), 4))


@pytest.mark.slow
@pytest.mark.ddp
def test_a_pass_that_filtering_makes_shorter(ranks: list[dict[str, Any]]) -> None:
    """With fewer batches than announced the last gradients are never applied, and validation never comes."""
    left = [index for index in range(RECORDS) if index % BAD]
    assert indices(ranks, "filtered", "trained") == Counter(dict.fromkeys(left, 2))
    steps = -(-len(left) // 16)
    for rank in ranks:
        stepped = [step for kind, step, _ in rank["filtered"] if kind == "steps"]
        assert stepped[-1] == 2 * steps
        assert {step for kind, step, _ in rank["filtered"] if kind == "validated"} == {steps, 2 * steps}
        assert len(stepped) == 2 * (len(left) // 16 * 4 + -(-(len(left) % 16) // 4)), "no batch without a sample"
