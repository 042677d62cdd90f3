"""Collation on the rank: what comes out is what `collate_fn` returned; what a `collate_fn` may not hold."""

from __future__ import annotations

import functools
import sys
import threading
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megascale_lightning.client.collating import check_collate_fn, collate
from megascale_lightning.client.finish import finish
from megascale_lightning.errors import ConfigError, DataError, StreamError
from megascale_lightning.rows import CollatedRows
from megascale_lightning.types import Ragged
from tests.constructing.fakes import World, make_spec, make_step, name_of


def fetched(group: int = 0) -> tuple[Any, Any]:
    spec = make_spec(rows=CollatedRows(2))
    return World(spec).fetch(0, group=group), spec


def test_the_batch_is_the_object_that_collate_fn_returned() -> None:
    window, spec = fetched()
    made: list[Any] = []

    def collate_fn(samples: list[Any]) -> Any:
        assert type(samples) is list
        made.append(types.SimpleNamespace(names=[sample[0] for sample in samples]))
        return made[-1]

    found = list(collate(window, spec, collate_fn))
    assert len(found) == 3 * 3
    for (batch, info), own in zip(found, made, strict=True):
        assert batch is own
        plan = make_step(spec, info.step)
        rows = [row for row in plan.placement[0, info.microbatch].tolist() if row >= 0] or [-1, -1]
        assert batch.names == [name_of(plan.pieces[max(row, 0)]) for row in rows]
        assert info.row_weights.tolist() == [float(row >= 0) for row in rows]
        assert [len(pieces) for pieces in info.sample_ids()] == [int(row >= 0) for row in rows]


def test_batches_are_made_when_asked_for_from_a_step_on() -> None:
    window, spec = fetched()
    calls: list[int] = []
    batches = collate(window, spec, lambda samples: calls.append(len(samples)), first_step=1)
    assert not calls
    assert next(batches)[1].step == 1
    assert calls == [2]
    assert len(list(batches)) == 5


def test_a_failure_of_collate_fn_names_all_there_is_to_know() -> None:
    window, spec = fetched()

    def never(samples: list[Any]) -> Any:
        raise StopIteration("odd")

    with pytest.raises(DataError, match=r"'.*never' failed on step 0, microbatch 0, samples \['\w+' epoch 0 unit") as e:
        next(collate(window, spec, functools.partial(never)))
    assert isinstance(e.value.__cause__, StopIteration)
    with pytest.raises(DataError, match="SystemExit"):
        next(collate(window, spec, lambda _: sys.exit(3)))


def test_a_sample_that_does_not_unpickle_is_an_error() -> None:
    window, spec = fetched()
    broken = replace(window, payload=Ragged(np.full_like(window.payload.values, 255), window.payload.offsets))
    with pytest.raises(DataError, match=r"step 0, microbatch 0, .*cannot be unpickled on this rank"):
        next(collate(broken, spec, None))


def test_windows_of_other_rows_are_refused() -> None:
    window, spec = fetched()
    with pytest.raises(StreamError, match="other micro_batch_size"):
        next(collate(window, replace(spec, rows=CollatedRows(3)), None))
    with pytest.raises(StreamError, match="other rows"):
        next(collate(replace(window, payload=None), spec, None))


@pytest.mark.parametrize("kind", ["packed", "collated"])
def test_the_last_microbatch_of_a_pass_says_so(kind: str) -> None:
    spec = make_spec() if kind == "packed" else make_spec(rows=CollatedRows(2))
    window = World(spec).fetch(0)
    states = [replace(state, passes=passes) for state, passes in zip(window.states, (4, 4, 5, 5), strict=True)]
    window = replace(window, states=tuple(states))
    made: Any = finish(window, spec) if kind == "packed" else collate(window, spec, list)
    last = [(info.step, info.microbatch) for _, info in made if info.is_last_in_pass]
    assert last == [(1, 2)]


class Collator:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __call__(self, samples: list[Any]) -> Any:
        return samples

    def method(self, samples: list[Any]) -> Any:
        return samples


class LightningModule:
    """Known by its name, as Lightning is not imported for it."""


class Net(LightningModule):
    def collate(self, samples: list[Any]) -> Any:
        return samples


def takes_more(samples: list[Any], model: Any = None) -> Any:
    return samples


def closing_over(value: Any) -> Any:
    return lambda samples: (value, samples)


def with_default(value: Any) -> Any:
    def collate_fn(samples: list[Any], default: Any = value, *, other: Any = None) -> Any:
        return samples

    return collate_fn


HOLDERS = {
    "closure": closing_over,
    "default": with_default,
    "argument": lambda value: functools.partial(takes_more, model=value),
    "attribute": lambda value: Collator(net=value),
    "method": lambda value: Collator(net=value).method,
    "deep": lambda value: closing_over(functools.partial(takes_more, model=Collator(net=value))),
    "list": lambda value: Collator(nets=[value]),
    "dict": lambda value: closing_over({"net": value}),
}


@pytest.mark.parametrize("model", [Net(), torch.nn.Linear(2, 2)], ids=["lightning", "torch"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_the_model_may_not_be_reached(holder: str, model: Any) -> None:
    with pytest.raises(ConfigError, match=rf"collate_fn .* is a {type(model).__name__}: .*read-ahead.*move what it"):
        check_collate_fn(HOLDERS[holder](model))


def test_a_method_of_the_model_is_refused_and_named() -> None:
    with pytest.raises(ConfigError, match=r"'Net.collate': its bound object is a Net"):
        check_collate_fn(Net().collate)


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_large_is_named(holder: str) -> None:
    with pytest.raises(ConfigError, match=r"larger than 10 MB pickled \(its .*ndarray\); .*move what it needs"):
        check_collate_fn(HOLDERS[holder](np.zeros(11_000_000, np.uint8)))
    check_collate_fn(HOLDERS[holder](np.zeros(9_000_000, np.uint8)))


def test_what_is_fine() -> None:
    check_collate_fn(None)
    check_collate_fn(torch.utils.data.default_collate)
    check_collate_fn(closing_over(torch.nn.Dropout()))
    check_collate_fn(closing_over(threading.Lock()))  # does not pickle
    check_collate_fn(Collator(trainer=Collator(model=Net(), large=np.zeros(11_000_000, np.uint8))).method)


def test_mixup_of_torchvision_is_fine() -> None:
    transforms = pytest.importorskip("torchvision.transforms.v2")
    mix = transforms.RandomChoice([transforms.MixUp(num_classes=10), transforms.CutMix(num_classes=10)])
    check_collate_fn(closing_over(mix))
    check_collate_fn(mix)


def test_tokenizers_do_not_count() -> None:
    class PreTrainedTokenizerBase(Collator):
        """By name, as transformers need not be there."""

    tokenizer = PreTrainedTokenizerBase(vocabulary=np.zeros(11_000_000, np.uint8))
    check_collate_fn(Collator(tokenizer=tokenizer))
    with pytest.raises(ConfigError, match=r"attribute 'table', a ndarray"):
        check_collate_fn(Collator(tokenizer=tokenizer, table=np.zeros(11_000_000, np.uint8)))
