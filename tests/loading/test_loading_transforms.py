import errno
import functools
import random

import numpy as np
import pytest

from megascale_lightning.config import PackedRows
from megascale_lightning.errors import DataError
from megascale_lightning.loading import LoadedSource, SourceLoader
from megascale_lightning.loading.transforms import takes_rng
from megascale_lightning.sources import Source, build_manifest
from megascale_lightning.types import PartKey, TakeRequest

RECORDS = [{"n": n} for n in range(12)]


def ids_by_row(transform, data=None, *, seed=0, epoch=0, **more):
    """Row -> ids, as described, released and taken again."""
    source = Source("web", RECORDS if data is None else data, transform=transform, **more)
    loader = SourceLoader(
        {"train": [LoadedSource(source, build_manifest(source))]}, PackedRows(64, 1), seed, 4, 1 << 20, 1
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
        {"train": [LoadedSource(source, build_manifest(source))]}, PackedRows(64, 1), 0, 4, 1 << 20, 1
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
