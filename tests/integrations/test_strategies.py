"""Sharding strategies on real ranks: they restore late, their ranks stand in a mesh, and their checkpoints are folders.

Under `ModelParallelStrategy` and `FSDPStrategy` the state arrives behind `configure_optimizers`, where a schedule may
have asked the loader for its length, and with that for a batch.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale_lightning import Source, StateError
from megascale_lightning.checkpointing.filelists import FILES_KEY, unpack_lists
from megascale_lightning.cli import main as megascale
from megascale_lightning.cli.state import find_states, read_checkpoint
from tests.integrations.corpora import held_out, real_data
from tests.integrations.fakes import SaveAt, make_trainer
from tests.integrations.models import Recorder
from tests.integrations.processes import Finished, left_behind, steps_of, train
from tests.integrations.scripts.strategies import ENDS, GROUPS, LIVES, SCENES
from tests.integrations.test_loops import LateRestore

pytestmark = [pytest.mark.ddp, pytest.mark.slow, pytest.mark.timeout(600)]

Found = dict[str, Any]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks write and save."""
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def finished(corpus: Path, out: Path) -> Finished:
    """A program of two ranks, whose last trainer was made to fail."""
    return train(corpus, out, "--launch", "two", script="strategies.py", check=False)


@pytest.fixture(scope="module")
def two(finished: Finished, out: Path) -> list[Found]:
    """Of each rank: what it saw, by scene."""
    return [Seen(out / f"two-rank{rank}.json", finished.output) for rank in range(2)]


class Seen(dict[str, Any]):
    """Scene -> what a rank saw, as far as the program came."""

    def __init__(self, path: Path, output: str) -> None:
        super().__init__(json.loads(path.read_text()) if path.exists() else {})
        self.output = output

    def __missing__(self, scene: str) -> Any:
        raise AssertionError(f"the program ended before {scene!r} did: {self.output[-6000:]}")


@pytest.fixture(scope="module")
def one(corpus: Path, out: Path, two: list[Found]) -> Found:
    """What a rank alone saw, that went on with what the two saved."""
    train(corpus, out, "--launch", "one", script="strategies.py")
    found: Found = json.loads((out / "one-rank0.json").read_text())
    return found


def saved_step(path: Path) -> int:
    """Of the one state in a checkpoint: the DataModule's and the callback's are the same."""
    (state,) = find_states(read_checkpoint(path)).values()
    return int(state["step"])


def events_after(events: list[list[Any]], save: str, *, passes: bool) -> list[list[Any]]:
    """What is still to come behind a save."""
    found = [event for event in events[events.index([f"saved {save}", 0]) + 1 :] if not event[0].startswith("saved")]
    if save == "end" or (save == "last" and not passes):
        # The end it was saved in; where epochs are no passes, Lightning also leaves one out whose batches are all done.
        found.remove(next(event for event in found if event[0] == "ends"))
    return found


def check_goes_on(whole: Found, again: Found, first: int, save: str, *, passes: bool = True) -> None:
    """The resumed run is the rest of the whole one: rows, optimizer steps, learning rates, ends of epochs."""
    assert again["lines"] == [line for line in whole["lines"] if line["step"] >= first]
    assert again["events"] == events_after(whole["events"], save, passes=passes)
    assert again["certificate"] == whole["certificate"]
    assert again["end"] == whole["end"]


@pytest.mark.parametrize("scene", LIVES)
def test_a_late_state_goes_on_with_the_very_next_step(two: list[Found], out: Path, scene: str) -> None:
    name, strategy, reads_steps = LIVES[scene]
    saves = ["middle"] if name in ("endless", "early") else ["middle", "last", "end"]
    for rank in two:
        whole, again = rank[scene]["whole"], rank[scene]["again"]
        sharded = "FullyShardedDataParallel" if strategy.startswith(("fsdp", "hybrid")) else "Model"
        assert whole["wrapped"] == sharded
        microbatches = 1 + max(line["microbatch"] for line in whole["lines"])
        expected = [(step, microbatch) for step in range(whole["end"][0]) for microbatch in range(microbatches)]
        assert [(line["step"], line["microbatch"]) for line in whole["lines"]] == expected
        assert [line["stepped"] for line in whole["lines"]] == [at == microbatches - 1 for _, at in expected]
        assert list(again) == saves
        for save, run in again.items():
            assert run["asked_early"] == (reads_steps and name in ("early", "passes", "passes-accumulated", "collated"))
            first = saved_step(out / f"{name}-{strategy}-{reads_steps}" / f"{save}.ckpt")
            assert 0 < first < whole["end"][0]
            try:
                check_goes_on(whole, run, first, save, passes=name != "limited")
            except AssertionError as error:
                error.add_note(f"resumed from {save!r}, step {first}, rank {whole['rank']}")
                raise


@pytest.mark.parametrize("scene", LIVES)
def test_ranks_of_one_place_share_batches_and_others_do_not(two: list[Found], scene: str) -> None:
    groups = GROUPS.get(LIVES[scene][1], 2)
    runs = [rank[scene]["whole"] for rank in two]
    assert [run["rank"] for run in runs] == [0, 1]
    assert [run["groups"] for run in runs] == [groups, groups]
    assert runs[0]["certificate"] == runs[1]["certificate"]
    if groups == 1:
        assert runs[0]["lines"] == runs[1]["lines"]
        return
    first, second = ({tuple(piece) for piece in pieces_of(run)} for run in runs)
    assert first
    assert second
    assert not first & second


@pytest.mark.parametrize("scene", [scene for scene in LIVES if LIVES[scene][1].startswith("tp2")])
def test_of_ranks_that_share_batches_one_may_fetch_for_all(two: list[Found], scene: str) -> None:
    """`broadcast_at`, over the groups of the strategy's own mesh: no batch, state or save is another for it."""
    name, strategy, reads_steps = LIVES[scene]
    fetches = [rank[scene]["whole"]["fetches"] for rank in two]
    assert fetches[0] > 0
    assert (fetches[1] == 0) == (strategy == "tp2-shared")
    plain = next((other for other, life in LIVES.items() if life == (name, "tp2", reads_steps)), None)
    if plain is not None:
        for rank in two:
            assert rank[scene]["whole"] | {"fetches": 0} == rank[plain]["whole"] | {"fetches": 0}


def pieces_of(run: Found) -> list[list[Any]]:
    return [piece for line in run["lines"] for row in line["ids"] for piece in row]


@pytest.mark.parametrize("scene", [scene for scene in LIVES if scene.startswith(("passes", "collated"))])
def test_three_passes_give_each_sample_three_times(two: list[Found], scene: str) -> None:
    name, strategy, _ = LIVES[scene]
    runs = [rank[scene]["whole"] for rank in two][: GROUPS.get(strategy, 2)]
    samples = {tuple(piece[:5]) for run in runs for piece in pieces_of(run)}
    epochs = Counter(epoch for _, epoch, *_ in samples)
    count = {"passes": 19, "passes-accumulated": 19, "collated": 12, "collated-sized": 7}[name]
    assert len({tuple(sample[:4]) for sample in samples}) == 3 * count
    assert sorted(epochs) == [0, 1, 2]
    for run in runs:
        assert [event for event in run["events"] if event[0] == "ends"] == [["ends", epoch] for epoch in range(3)]


@pytest.mark.parametrize("before", ["dp2", "tp2", "fsdp-file"])
def test_another_topology_goes_on_with_the_same_rows(two: list[Found], one: Found, before: str) -> None:
    """Two data-parallel ranks, two tensor-parallel ones, one alone: one sequence of rows."""
    scene = f"from {before}"
    runs = {strategy: [rank[scene][strategy] for rank in two] for strategy in two[0][scene]}
    runs |= {strategy: [run] for strategy, run in one.get(scene, {}).items()}
    assert len(runs) > 1
    expected = steps_of(lines_of(before, runs[before]))
    assert sorted(expected) == list(range(6))
    for strategy, ranks in runs.items():
        if strategy != before:
            assert steps_of(lines_of(strategy, ranks)) == {step: expected[step] for step in range(3, 6)}, strategy
        for run in ranks:
            assert run["groups"] == GROUPS.get(strategy, 2)
            assert run["certificate"] == runs[before][0]["certificate"], strategy
            assert run["end"] == runs[before][0]["end"], strategy


def lines_of(strategy: str, runs: list[Found]) -> list[list[Found]]:
    """Of one rank for each data-parallel group."""
    return [run["lines"] for run in runs][: GROUPS.get(strategy, 2)]


@pytest.mark.parametrize("strategy", ["dp2", "fsdp"])
def test_files_that_came_meanwhile_are_left_out(two: list[Found], strategy: str) -> None:
    """The roles start anew with the files that the run began with, behind a batch from all files."""
    for rank in two:
        found = rank[f"frozen, {strategy}"]
        again = found["again"]["middle"]
        assert again["asked_early"]
        check_goes_on(found["whole"], again, 3, "middle")
        assert found["new"]["certificate"] != found["whole"]["certificate"], "the file would have been taken"


@pytest.mark.parametrize("strategy", ["tp2", "fsdp"])
def test_a_state_of_another_seed_is_refused_on_every_rank(two: list[Found], strategy: str) -> None:
    for rank in two:
        assert "seed: 0 | 5" in rank[f"refused, {strategy}"]["said"]


def test_a_refused_state_ends_every_process(finished: Finished, two: list[Found], out: Path) -> None:
    assert [set(SCENES["two"]) - set(rank) for rank in two] == [{ENDS}, {ENDS}], finished.output[-6000:]
    assert finished.code == 1
    assert left_behind(finished) == []
    for rank in range(2):
        assert "seed: 0 | 5" in (out / f"refused-rank{rank}").read_text()


@pytest.mark.parametrize("folder", ["early-dp2-True", "early-fsdp-True"])
def test_a_checkpoint_that_is_a_folder_holds_the_state(
    two: list[Found], out: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    path = out / folder / "middle.ckpt"
    assert {"meta.pt", ".metadata"} <= {entry.name for entry in path.iterdir()}
    checkpoint = torch.load(path / "meta.pt", weights_only=True)
    assert sorted(unpack_lists(checkpoint[FILES_KEY].numpy().tobytes())) == ["code", "web"]
    assert megascale(["state", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "callbacks/megascale_lightning:" in shown
    assert "\n  step: 3\n" in shown


@pytest.mark.parametrize(("epochs", "settings"), [(None, {"max_epochs": 3}), (2, {"max_epochs": -1})])
def test_any_save_of_data_that_end_goes_on_late(
    corpus: Path, tmp_path: Path, epochs: int | None, settings: dict[str, Any]
) -> None:
    """Also from the last save, behind which there is nothing but the batch that was fetched too early."""
    source = held_out(corpus)["a"][0]
    sources = [Source(source.name, source.data, epochs=epochs)]
    saver, whole = SaveAt(tmp_path), Asking()
    make_trainer(callbacks=[saver], **settings).fit(whole, datamodule=real_data(corpus, sources=sources))
    assert len(whole.trained) > 6
    for path in saver.saved:
        model = Asking()
        trainer = make_trainer(strategy=LateRestore(device="cpu"), **settings)
        trainer.fit(model, datamodule=real_data(corpus, sources=sources), ckpt_path=path)
        assert model.trained == whole.trained[saved_step(path) :], path.name


def test_a_late_state_that_no_callback_sees_is_refused(corpus: Path, tmp_path: Path) -> None:
    """Lightning calls no callback for a checkpoint without states of callbacks, and the loader is made already."""
    settings: dict[str, Any] = {"max_steps": 4, "max_epochs": 3}
    saver = SaveAt(tmp_path)
    make_trainer(callbacks=[saver], **settings).fit(Asking(), datamodule=real_data(corpus))
    checkpoint = torch.load(saver.saved[1], weights_only=True)
    del checkpoint["callbacks"]
    torch.save(checkpoint, saver.saved[1])
    trainer = make_trainer(strategy=LateRestore(device="cpu"), **settings)
    with pytest.raises(StateError, match=r"seed: 0 \| 5"):
        trainer.fit(Asking(), datamodule=real_data(corpus, seed=5), ckpt_path=saver.saved[1])


class Asking(Recorder):
    """Asks for the number of steps, and with that for a batch, before the state is there."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.trained.append((batch["megascale"].step, batch["megascale"].microbatch))
        return self.layer(batch["input_ids"][:, :2].float()).sum()

    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        assert self.trainer.max_epochs == -1 or self.trainer.datamodule.last_info is not None  # type: ignore[attr-defined]
        return super().configure_optimizers()
