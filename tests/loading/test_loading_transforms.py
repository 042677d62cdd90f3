import errno
import functools
import random
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale_lightning.errors import DataError
from megascale_lightning.loading import LoadedSource, SourceLoader
from megascale_lightning.loading.transforms import takes_rng
from megascale_lightning.rows import PackedRows
from megascale_lightning.sources import Source, build_manifest
from megascale_lightning.types import PartKey, TakeRequest

RECORDS = [{"n": n} for n in range(12)]


def ids_by_row(transform, data=None, *, seed=0, epoch=0, **more):
    """Row -> ids, as described, released and taken again."""
    source = Source("web", RECORDS if data is None else data, transform=transform, **more)
    loader = SourceLoader(
        {"train": [LoadedSource(source, build_manifest(source))]}, {"train": PackedRows(64, 1)}, seed, 4, 1 << 20, 1
    )
    meta = loader.describe(PartKey("train", 0, epoch, 0, 0))
    pieces = meta.pieces[meta.kept]
    loader.release([meta.key])
    ragged = loader.take([TakeRequest(meta.key, pieces)]).tokens["input_ids"]
    assert loader.stats()["made"] == 2
    bounds = zip(pieces["row"].tolist(), ragged.offsets[:-1], ragged.offsets[1:], strict=True)
    return {row: ragged.values[a:b].tolist() for row, a, b in bounds}


def with_rng(sample, rng):
    return {"input_ids": rng.integers(0, 1000, 1 + sample["n"])}


def keyword_rng(sample, *, rng):
    return with_rng(sample, rng)


def by_position(sample, generator):
    return with_rng(sample, generator)


def with_globals(sample):
    torch = pytest.importorskip("torch")
    drawn = [random.randrange(1000), int(np.random.randint(1000)), int(torch.randint(1000, (1,)))]  # noqa: NPY002
    return {"input_ids": drawn * (1 + random.randrange(3))}


def test_who_takes_a_rng():
    assert takes_rng(with_rng)
    assert takes_rng(keyword_rng)
    assert takes_rng(by_position)
    assert takes_rng(functools.partial(lambda extra, sample, rng: None, 1))
    assert not takes_rng(with_globals)
    assert not takes_rng(lambda sample, flag=True: None)
    assert not takes_rng(dict)


@pytest.mark.parametrize("transform", [with_rng, keyword_rng, by_position, with_globals])
def test_randomness_is_a_function_of_seed_and_sample(transform):
    base = ids_by_row(transform)
    assert len({tuple(ids) for ids in base.values()}) > 6
    assert ids_by_row(transform, shuffle=False) == base
    assert ids_by_row(transform, seed=1) != base
    assert ids_by_row(transform, epoch=1) != base


def drawn_by_argument(sample, rng):
    return {"input_ids": rng.integers(1 << 30, size=4)}


def drawn_from_python(sample):
    return {"input_ids": [random.randrange(1 << 30) for _ in range(4)]}


def drawn_from_numpy(sample):
    return {"input_ids": np.random.randint(1 << 30, size=4)}  # noqa: NPY002


def drawn_from_torch(sample):
    return {"input_ids": pytest.importorskip("torch").randint(1 << 30, (4,)).tolist()}


DRAWN = [drawn_by_argument, drawn_from_python, drawn_from_numpy, drawn_from_torch]


@pytest.mark.parametrize("transform", DRAWN)
def test_every_name_of_a_sample_counts_and_where_it_lies_in_a_part_does_not(tmp_path, transform):
    """Source, epoch, unit and row: no two samples share a draw; and none changes with the cut into parts."""
    pq.write_table(
        pa.table({"x": [list(range(50 * n, 50 * n + 50)) for n in range(40)]}),
        tmp_path / "a.parquet",
        row_group_size=20,
    )

    def draws(part_bytes):
        sources = [Source(name, str(tmp_path / "a.parquet"), transform=transform) for name in ("web", "code")]
        loaded = [LoadedSource(source, build_manifest(source)) for source in sources]
        loader = SourceLoader({"train": loaded}, {"train": PackedRows(64, 1)}, 0, 2, part_bytes, 1 << 20)
        found = {}
        for source, epoch in ((0, 0), (1, 0), (0, 1)):
            for part in range(99):
                meta = loader.describe(PartKey("train", source, epoch, 0, part))
                ids = loader.take([TakeRequest(meta.key, meta.pieces)]).tokens["input_ids"].values.reshape(-1, 4)
                names = meta.pieces[["unit", "row"]].tolist()
                found |= {(source, epoch, *name): tuple(drawn) for name, drawn in zip(names, ids.tolist(), strict=True)}
                if meta.last_in_window:
                    break
        return found, part

    whole, last = draws(1 << 30)
    assert len(whole) == len(set(whole.values())) == 3 * 40
    cut, last_of_cut = draws(500)
    assert last_of_cut > last == 0
    assert cut == whole


@pytest.mark.parametrize("transform", DRAWN)
def test_what_the_caller_has_drawn_before_does_not_matter(transform):
    torch = pytest.importorskip("torch")
    found = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        found.append(ids_by_row(transform))
    assert found[0] == found[1]


def test_code_that_may_draw_from_global_states_is_alone_with_them():
    inside, most, met = [], [], threading.Event()

    def transform(sample):
        inside.append(1)
        most.append(len(inside))
        if len(inside) > 1:
            met.set()
        elif sample["n"] == 0:
            met.wait(0.3)
        inside.pop()
        return {"input_ids": [sample["n"]]}

    source = Source("web", RECORDS, transform=transform)
    streams = {name: [LoadedSource(source, build_manifest(source))] for name in "ab"}
    loader = SourceLoader(streams, dict.fromkeys("ab", PackedRows(64, 1)), 0, 4, 1 << 20, 1)
    threads = [threading.Thread(target=loader.describe, args=(PartKey(name, 0, 0, 0, 0),)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(most) == 2 * len(RECORDS)
    assert max(most) == 1


def test_the_callers_random_states_are_untouched():
    torch = pytest.importorskip("torch")
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    expected = (random.random(), np.random.random(), torch.rand(1).item())  # noqa: NPY002
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    ids_by_row(with_globals)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected  # noqa: NPY002


def test_thread_safe_code_runs_without_seeding(monkeypatch):
    monkeypatch.setattr(random, "seed", lambda *_: pytest.fail("seeded"))
    assert ids_by_row(lambda sample: {"input_ids": [sample["n"]]}, thread_safe=True)[3] == [3]


def test_a_random_dataset_is_seeded_too():
    class Augmented:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            return {"input_ids": [index, random.randrange(10**6)]}

    base = ids_by_row(None, Augmented())
    assert [base[row][0] for row in range(9)] == list(range(9))
    assert ids_by_row(None, Augmented()) == base
    assert ids_by_row(None, Augmented(), seed=1) != base


def meta_of(transform, **more):
    source = Source("web", RECORDS[:3], transform=transform, shuffle=False, **more)
    loader = SourceLoader(
        {"train": [LoadedSource(source, build_manifest(source))]}, {"train": PackedRows(64, 1)}, 0, 4, 1 << 20, 1
    )
    return loader.describe(PartKey("train", 0, 0, 0, 0))


def test_none_drops_the_sample():
    meta = meta_of(lambda sample: {"input_ids": [1]} if sample["n"] != 1 else None)
    assert [meta.reasons[r] for r in meta.reason] == ["", "filtered", ""]
    assert meta.kept.tolist() == [True, False, True]


def test_a_list_or_a_missing_field_is_an_error_even_when_errors_are_skipped():
    with pytest.raises(DataError, match=r"'web'.*gave a list for unit 0, row 0.*one dict"):
        meta_of(lambda sample: [sample], on_error="skip")
    with pytest.raises(DataError, match=r"'web'.*without 'input_ids'; its keys are \['n'\]"):
        meta_of(dict, on_error="skip")


def test_targets_that_nobody_declared_are_not_ignored():
    with pytest.raises(DataError, match=r"'web'.*'loss_mask'.*token_fields=\('loss_mask',\)"):
        meta_of(lambda _: {"input_ids": [1, 2], "loss_mask": [0, 1]}, on_error="skip")


def test_leaving_the_process_is_a_failure_of_the_sample():
    def leaves(sample):
        raise SystemExit(3)

    with pytest.raises(DataError, match=r"'web', <dataset>, unit 0, row 0: transform .*leaves.* failed: SystemExit: 3"):
        meta_of(leaves)


def test_truth_values_are_no_token_ids():
    with pytest.raises(DataError, match=r"'web', <dataset>, unit 0, row 0: 'input_ids' holds bool"):
        meta_of(lambda _: {"input_ids": [True, False]})


def failing(sample):
    if sample["n"] == 1:
        raise KeyError("text")
    return {"input_ids": [sample["n"] + 1]}


def test_a_transform_that_fails_names_the_record_or_drops_it():
    with pytest.raises(
        DataError, match=r"'web', <dataset>, unit 0, row 1: transform 'failing' failed: KeyError"
    ) as info:
        meta_of(failing)
    assert isinstance(info.value.__cause__, KeyError)
    meta = meta_of(failing, on_error="skip")
    assert [meta.reasons[r] for r in meta.reason] == ["", "transform_error", ""]


@pytest.mark.parametrize(
    ("ids", "problem"),
    [([[1, 2]], "has shape"), ([1.5], "holds float64"), ([2**31], "does not fit int32"), ("text", "has shape")],
)
def test_ids_that_are_none_are_per_record_failures(ids, problem):
    with pytest.raises(DataError, match=problem):
        meta_of(lambda sample: {"input_ids": ids})
    meta = meta_of(lambda sample: {"input_ids": ids if sample["n"] else [1]}, on_error="skip")
    assert meta.kept.tolist() == [True, False, False]


def test_a_flaky_device_is_tried_again_and_never_skipped():
    failures = [OSError(errno.EIO, "flaky")]

    def once(sample):
        if failures:
            raise failures.pop()
        return {"input_ids": [1]}

    def always(sample):
        raise OSError(errno.EIO, "gone")

    def missing(sample):
        raise FileNotFoundError(errno.ENOENT, "no such image")

    assert meta_of(once, on_error="skip").kept.all()
    with pytest.raises(DataError, match=r"'web', unit 0, row 0: .*failed 3 times"):
        meta_of(always, on_error="skip")
    assert not meta_of(missing, on_error="skip").kept.any()


class RequestError(Exception):
    """As a client library gives it: no OSError, with a status."""

    status = 503


@pytest.mark.parametrize("error", [TimeoutError("t"), ConnectionResetError(), RequestError("busy")], ids=repr)
@pytest.mark.parametrize("setting", ["transform", "transform_batched"])
def test_a_network_without_an_errno_is_no_record_either(error, setting):
    def fails(sample):
        raise error

    transforms = {"transform": None, setting: fails}
    with pytest.raises(DataError, match=rf"'web', unit 0, rows? 0.*failed 3 times: {type(error).__name__}"):
        meta_of(on_error="skip", **transforms)


def test_too_little_memory_is_no_record():
    def fails(sample):
        raise MemoryError

    with pytest.raises(DataError, match=r"'web', unit 0, row 0: .*failed: MemoryError"):
        meta_of(fails, on_error="skip")


class Flaky:
    """Items and transforms that draw; if `fails`, every other call of a transform fails."""

    def __init__(self, fails):
        self.fails = fails
        self.calls = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"n": random.randrange(1000)}

    def single(self, sample):
        return {"input_ids": [sample["n"], *self.drawn()]}

    def batched(self, columns):
        return {"input_ids": [[n, *self.drawn(index)] for index, n in enumerate(columns["n"])]}

    def drawn(self, index=0):
        drawn = [random.randrange(1000), int(np.random.randint(1000))]  # noqa: NPY002
        if index == 0:
            self.calls += 1
            if self.fails and self.calls % 2:
                raise TimeoutError("t")
        return drawn


@pytest.mark.parametrize("setting", ["transform", "transform_batched"])
@pytest.mark.parametrize("draws_items", [False, True])
def test_what_is_tried_again_draws_the_same(setting, draws_items):
    found = []
    for fails in (False, True):
        flaky = Flaky(fails)
        call = flaky.single if setting == "transform" else flaky.batched
        transforms = {"transform": None, setting: call}
        found.append(ids_by_row(data=flaky if draws_items else [{"n": 1}, {"n": 2}], **transforms))
        assert flaky.calls == (1 + fails) * 2 * (1 if setting == "transform_batched" else len(found[0]))
    assert found[1] == found[0]


def test_a_transform_may_change_its_sample():
    data = [{"n": n} for n in range(12)]
    failures = [TimeoutError("t")]

    def pops(sample):
        n = sample.pop("n")
        if failures:
            raise failures.pop()
        return {"input_ids": [n]}

    assert ids_by_row(pops, data) == {n: [n] for n in range(12)}  # made twice
    assert data == [{"n": n} for n in range(12)]


def test_a_panic_of_a_library_is_a_failure_of_the_sample():
    class Panic(BaseException):
        """As libraries written in Rust raise it."""

    def panics(sample):
        if sample["n"] == 1:
            raise Panic("index out of bounds")
        return {"input_ids": [1]}

    with pytest.raises(DataError, match=r"'web', <dataset>, unit 0, row 1: transform .*panics.* failed: Panic"):
        meta_of(panics)
    assert meta_of(panics, on_error="skip").kept.tolist() == [True, False, True]


@pytest.mark.parametrize("setting", ["transform", "transform_batched"])
def test_an_error_says_what_shows_the_record(setting):
    """In words that fit a bare loop and a trainer, where there is no `loader` in sight."""

    def fails(given):
        raise ValueError("bad")

    source = Source("web", RECORDS, shuffle=False, **{setting: fails})
    loaded = LoadedSource(source, build_manifest(source))
    loader = SourceLoader({"train": [loaded]}, {"train": PackedRows(64, 1)}, 0, 4, 1 << 20, 1 << 20)
    shown = r": ValueError: bad.*; \.sample\(\('web', 3, 0, 0\)\)\S* of the loader or the data module (shows|makes)"
    with pytest.raises(DataError, match=shown):
        loader.describe(PartKey("train", 0, 3, 0, 0))


def test_what_a_transform_changes_in_place_is_its_own():
    """Also where it is called again for the same record: behind an error that passes, or in the next epoch."""
    records = [{"n": n, "ids": [n, [n]], "array": np.zeros(2, np.int64)} for n in range(3)]
    failures = [TimeoutError("passes")]

    def changes(sample):
        sample["ids"].append(7)
        sample["ids"][1].append(7)
        sample["array"] += 1
        if sample["n"] == 1 and failures:
            raise failures.pop()
        return {"input_ids": [len(sample["ids"]), len(sample["ids"][1]), *sample["array"]]}

    source = Source("web", records, transform=changes, shuffle=False)
    loaded = LoadedSource(source, build_manifest(source))
    loader = SourceLoader({"train": [loaded]}, {"train": PackedRows(64, 1)}, 0, 4, 1 << 20, 1 << 20)
    for epoch in range(2):
        meta = loader.describe(PartKey("train", 0, epoch, 0, 0))
        block = loader.take([TakeRequest(meta.key, meta.pieces)])
        assert block.tokens["input_ids"].values.reshape(3, 4).tolist() == [[3, 2, 1, 1]] * 3
    assert not failures
