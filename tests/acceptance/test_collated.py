"""Collated rows through `MegaScaleLoader`: batches are what `collate_fn` returns for the very samples they name."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import default_collate

from megascale_lightning import CollatedRows, ConfigError, DataError, MegaScaleLoader, RoundRobin
from megascale_lightning.types import MetaBlock

from .collated import Augmented, Boxes, Images, Sized, Texts, config_of, index_of, read, same
from .test_laws import Witness

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]


def padding_collator() -> Callable[[list[Any]], Any]:
    """Transformers' own, with a tokenizer of three words."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1, "b": 2}, unk_token="[PAD]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    return transformers.DataCollatorWithPadding(tokenizer)


CASES = {
    "image tuples": (Images, lambda: None),
    "padded dicts": (Texts, padding_collator),
    "lists of tensors": (Boxes, lambda: list),
    "own class": (Boxes, lambda: Sized),
}


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_batches_are_collate_fn_of_the_named_samples(case: str, dp: int) -> None:
    make, function = CASES[case]
    collate_fn = function()
    data = make()
    found = read(config_of(make(), CollatedRows(4, collate_fn), global_batch_size=20 if dp == 1 else 40), dp)
    counted: Counter[int] = Counter()
    for got in found.got:
        real = [index for index in got.indices if index is not None]
        counted.update(real)
        assert got.info.row_weights.tolist() == [float(index is not None) for index in got.indices]
        assert got.info.num_loss_tokens == len(real)
        if len(real) == 4:
            assert same(got.batch, (collate_fn or default_collate)([data[index] for index in real]))
    assert counted == Counter(range(len(data)))
    assert sum(len(got.indices) == 4 for got in found.got) == len(found.got)


def test_lists_of_tensors_go_to_a_device() -> None:
    """What Lightning moves is what `collate_fn` returned."""
    got = read(config_of(Boxes(), CollatedRows(4, Sized)), steps=1).got[0]
    assert got.batch.to("cpu") == got.batch


def order_of(config_data: Any, **changes: Any) -> list[list[int]]:
    """Draw order of each step: with one microbatch of samples of one length, the rows stand in it."""
    found = read(config_of(config_data, CollatedRows(16, list), **changes))
    return [[index for index in got.indices if index is not None] for got in found.got]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_filler_repeats_the_first_sample_of_its_step(dp: int) -> None:
    """Where a microbatch has no real row; weight 0, in no id, and the certificate is that of one rank."""
    order = order_of(Images())
    found = read(config_of(Images(), CollatedRows(2, list)), dp)
    assert found.certificates == read(config_of(Images(), CollatedRows(16, list))).certificates
    assert found.steps() == [frozenset(indices) for indices in order]
    fillers = sum(index is None for got in found.got for index in got.indices)
    assert fillers == {1: 0, 2: 0, 4: 4}[dp], "two microbatches of two ranks that the other two are in step with"
    for got in found.got:
        assert len(set(map(type, got.indices))) == 1, "real rows alone, or filler alone"
        for (image, label), index, weight in zip(got.batch, got.indices, got.info.row_weights, strict=True):
            shown = order[got.info.step][0] if index is None else index
            assert label == shown
            assert torch.equal(image, torch.full((3, 2, 2), float(shown)))
            assert weight == float(index is not None)
        assert got.info.step_loss_tokens == len(order[got.info.step])


def test_a_last_batch_is_as_short_as_that_of_a_dataloader() -> None:
    found = read(config_of(Images(10), CollatedRows(4, list), global_batch_size=4))
    assert [len(got.batch) for got in found.got] == [4, 4, 2]
    assert [got.info.row_weights.tolist() for got in found.got] == [[1.0] * 4, [1.0] * 4, [1.0] * 2]
    two = read(config_of(Images(9), CollatedRows(4, list), global_batch_size=8), 2)
    assert [(got.rank, len(got.batch), got.info.row_weights.sum()) for got in two.got if got.info.step] == [
        (0, 1, 1),
        (1, 4, 0),
    ], "a rank without a sample gets repeats, so that all take as many steps"


def test_filler_samples_are_objects_of_their_own() -> None:
    """A `collate_fn` may change what it gets."""
    seen: list[int] = []

    def marking(samples: list[Any]) -> list[int]:
        for sample in samples:
            sample["seen"] += 1
            seen.append(sample["seen"])
        return []

    read(config_of([{"seen": 0}], CollatedRows(4, marking), global_batch_size=8), 2)
    assert seen == [1] * (1 + 4)


def test_rows_of_equal_length_stand_in_draw_order() -> None:
    """Dealt in turn: every microbatch holds neighbours of the draw order."""
    order = order_of(Images(96))
    found = read(config_of(Images(96), CollatedRows(4, list), strategy=RoundRobin()))
    for step, drawn in enumerate(order):
        dealt = {tuple(got.indices) for got in found.got if got.info.step == step}
        assert dealt == {tuple(drawn[at : at + 4]) for at in range(0, 16, 4)}


def test_length_puts_similar_samples_together() -> None:
    config = config_of(Texts(), CollatedRows(4, list), length=lambda sample: len(sample["input_ids"]))
    for dp in (1, 2):
        found = read(config, dp)
        for step in range(3):
            sizes = [[len(s["input_ids"]) for s in got.batch] for got in found.got if got.info.step == step]
            infos = [got.info for got in found.got if got.info.step == step]
            assert {(info.num_loss_tokens, info.step_loss_tokens) for info in infos} == {(4, 16)}, "rows, not tokens"
            ordered = sorted((size for sizes_of_one in sizes for size in sizes_of_one), reverse=True)
            assert sorted(sizes, reverse=True) == [ordered[at : at + 4] for at in range(0, 16, 4)]


@pytest.mark.parametrize("dp", [1, 2])
def test_records_of_parquet_files(tmp_path: Path, dp: int) -> None:
    rows = [np.arange(n % 5 + 1, dtype=np.int32) for n in range(100)]
    pq.write_table(
        pa.table({"input_ids": rows, "text": [f"t{n}" for n in range(100)], "n": np.arange(100)}),
        tmp_path / "a.parquet",
        row_group_size=30,
    )
    found = read(config_of(str(tmp_path / "a.parquet"), CollatedRows(4, list)), dp)
    numbers = []
    for got in found.got:
        for sample, pieces in zip(got.batch, got.info.sample_ids(), strict=True):
            assert sample.keys() == {"input_ids", "text", "n"}
            assert same(sample["input_ids"], rows[sample["n"]])
            assert sample["text"] == f"t{sample['n']}"
            if pieces:
                assert pieces[0][2] * 30 + pieces[0][3] == sample["n"]
                numbers.append(sample["n"])
    assert sorted(numbers) == list(range(100))


def odd_halves(sample: Any) -> Any:
    return None if sample[1] % 2 else (sample[1] // 2, "even")


def test_a_transform_may_drop_and_give_anything() -> None:
    found = read(config_of(Images(), CollatedRows(4, tuple), transform=odd_halves), 2)
    assert sorted(i for got in found.got for i in got.indices if i is not None) == list(range(0, 100, 2))
    for got in found.got:
        assert type(got.batch) is tuple
        for sample, index in zip(got.batch, got.indices, strict=True):
            assert index is None or sample == (index // 2, "even")
    assert found.states[-1]["sources"]["images"]["dropped"] == {"filtered": 50}


def test_each_sample_is_fetched_once_an_epoch() -> None:
    """And by no look ahead: what is not due is not touched."""
    data = Images(3000)
    with MegaScaleLoader(config_of(data, global_batch_size=8)) as loader:
        for _ in range(2):
            next(iter(loader))
        fetched = sum(data.asked.values())
    assert fetched <= 8 * (1 + 2 + 3 + 3)
    data = Images(96)
    for dp in (1, 2):
        data.asked.clear()
        read(config_of(data), dp)
        assert data.asked == Counter(range(96))


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_two_readings_draw_the_same(early: bool) -> None:
    """By sample and epoch, whatever the ranks, and whatever the caller has drawn."""
    changes: dict[str, Any] = {"length": lambda _: 1} if early else {}
    found = []
    for dp, seed in ((1, 1), (2, 2)):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        got = read(config_of(Augmented(40), CollatedRows(4, list), epochs=2, **changes), dp).got
        pairs = [
            (pieces[0], s) for one in got for pieces, s in zip(one.info.sample_ids(), one.batch, strict=True) if pieces
        ]
        assert all(index == index_of(piece) for piece, (index, _) in pairs)
        found.append({piece: tuple(drawn.tolist()) for piece, (_, drawn) in pairs})
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 2 * 40


@pytest.mark.parametrize("count", [0, 1, 4, 7])
@pytest.mark.parametrize("data", [Augmented, Texts])
def test_resume(data: Any, count: int) -> None:
    config = config_of(data(), CollatedRows(4, list), epochs=None)
    whole = read(config, 2, steps=9)
    state = whole.states[count - 1] if count else None
    rest = read(config, 2, steps=9 - count, state=state)
    assert rest.certificates == whole.certificates[count:]
    for one, other in zip(rest.got, whole.got[count * 4 :], strict=True):
        assert one.info.sample_ids() == other.info.sample_ids()
        assert same(one.batch, other.batch)
    assert read(config, 4, steps=9 - count, state=state).steps() == whole.steps()[count:]


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_no_payload_goes_through_the_planner(early: bool) -> None:
    """Some 50 bytes for a sample of 4 KB."""
    changes: dict[str, Any] = {"length": len} if early else {}
    with MegaScaleLoader(config_of([bytes(4000)] * 300, CollatedRows(4, list), **changes)) as loader:
        runtime = loader._session._runtime
        witness = runtime._roles["planner"] = Witness(runtime._roles["planner"])
        assert all(batch == [bytes(4000)] * 4 for batch in loader)
    assert {call.method for call in witness.wanted} <= {"describe", "release"}
    described = [value for value in witness.given if isinstance(value, MetaBlock)]
    assert sum(len(meta.pieces) for meta in described) == 300
    for meta in described:
        assert len(pickle.dumps(meta)) < 100 * len(meta.pieces) + 1500


@pytest.mark.parametrize("victim", ["planner", "constructor/0", "loader/0"])
def test_a_role_that_dies_before_every_step_changes_no_batch(victim: str) -> None:
    config = config_of(Augmented(100), CollatedRows(4, list))
    undisturbed = [got.batch for got in read(config).got]
    with MegaScaleLoader(config) as loader:
        batches = []
        for batch in loader:
            batches.append(batch)
            if loader.last_info.is_last_in_step:
                loader._session._runtime.kill(victim)
    assert same(batches, undisturbed)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.watchdog(120)
def test_ray_gives_the_same() -> None:
    """Batches of a random dataset, and fillers, through actors of other processes."""
    found = []
    for runtime in ("local", "ray"):
        got = read(config_of(Augmented(40), CollatedRows(4), runtime=runtime), 2)
        found.append(got)
    assert found[0].certificates == found[1].certificates
    for one, other in zip(found[0].got, found[1].got, strict=True):
        assert one.info.sample_ids() == other.info.sample_ids()
        assert type(one.batch) is list
        assert same(one.batch, other.batch)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.watchdog(120)
def test_errors_come_through_actors() -> None:
    with pytest.raises(DataError, match=r"'images', <dataset>, unit 0, row 7, index 7: .*image 7 is broken"):
        read(config_of(Images(16, fails=(7,)), runtime="ray"))


SCRIPT = """
import dataclasses, json, torch
from megascale_lightning import CollatedRows, LoaderConfig, MegaScaleLoader, Source

@dataclasses.dataclass
class Pair:
    image: torch.Tensor
    label: int

class Pairs:
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return Pair(torch.full((2,), float(index)), index)

def collate(samples):
    assert all(type(sample) is Pair for sample in samples)
    return [(sample.image.tolist(), sample.label) for sample in samples]

if __name__ == "__main__":
    rows = CollatedRows(4, collate)
    config = LoaderConfig(sources=[Source("s", Pairs(), epochs=1)], rows=rows, global_batch_size=4, runtime="ray")
    with MegaScaleLoader(config) as loader:
        print(json.dumps([pair for batch in loader for pair in batch]))
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.watchdog(120)
def test_classes_of_a_script(tmp_path: Path) -> None:
    """Dataset, samples and `collate_fn` are defined in the script that runs, which no actor can import."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    assert sorted(json.loads(lines[0])) == [[[float(n)] * 2, n] for n in range(12)]


def test_a_failing_item_is_named_or_skipped() -> None:
    with pytest.raises(DataError, match=r"'images', <dataset>, unit 0, row 7, index 7: .*image 7 is broken") as error:
        read(config_of(Images(40, fails=(7,))))
    assert isinstance(error.value.__cause__, OSError)
    found = read(config_of(Images(40, fails=(7, 9)), CollatedRows(4, list), on_error="skip"), 2)
    assert frozenset().union(*found.steps()) == frozenset(range(40)) - {7, 9}
    assert found.states[-1]["sources"]["images"]["dropped"] == {"read_error": 2}


def test_a_failing_collate_fn_is_named() -> None:
    def stacked(samples: list[Any]) -> Any:
        return torch.stack(samples)

    with pytest.raises(
        DataError, match=r"collate_fn '.*stacked' failed on step 0, microbatch 0, samples \['images'"
    ) as e:
        read(config_of(Boxes(), CollatedRows(4, stacked)))
    assert isinstance(e.value.__cause__, RuntimeError)


def test_a_sample_that_cannot_travel_is_named() -> None:
    with pytest.raises(
        DataError, match=r"'images', <dataset>, unit 0, row \d+: the sample, a function, does not pickle"
    ):
        read(config_of([(lambda: 0) for _ in range(8)]))


def test_a_collate_fn_that_holds_the_model_is_refused_when_the_loader_is_made() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"variable 'model' is a Linear"):
        MegaScaleLoader(config_of(Boxes(), CollatedRows(4, lambda samples: model(samples[0]))))
