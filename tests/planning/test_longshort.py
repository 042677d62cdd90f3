"""`LongShort`: even work where few documents are very long and steps are few rows, in one step and in a run."""

import inspect

import numpy as np
import pytest

from megascale_lightning import Balanced, ClientPlaceTree, DGraph, LongShort, PackedRows, TokenCount, TransformerCost
from megascale_lightning.planning.costs import cost_of_rows
from megascale_lightning.planning.strategies import declared_by
from tests.planning.fakes import Drive, FakeData

MODEL = TransformerCost(768, 12, 12, gated=False)
"""Of the size of GPT-2 small, without its logits: attention costs as much as all else at 9,216 tokens."""


def lengths_of(count, seed):
    """95 % log-normal around 400 tokens, up to 4,096; 5 % of 16,384 to 32,768."""
    rng = np.random.default_rng(seed)
    short = np.clip(rng.lognormal(6, 1.2, count), 1, 4096).astype(int)
    return np.where(rng.random(count) < 0.95, short, rng.integers(16384, 32769, count))


def plan_of(strategy, seq_len, rows_each, seed, groups=64):
    """A step of a strategy outside of a run, where the rows are given with pack()."""
    declared = declared_by(strategy)
    num_rows = groups * rows_each
    lengths = lengths_of(num_rows * seq_len // 1500, seed)
    graph = DGraph.from_buffer_infos({"web": lengths})
    graph = graph.init(ClientPlaceTree.from_sizes(dp=groups), global_batch_size=num_rows).mix()
    graph = graph.pack(PackedRows(seq_len, 1), even=declared.even).distribute("dp").cost(*declared.costs)
    return graph.balance(sync=declared.sync).plan()


def loads_of(plan):
    """float64 [groups, microbatches], by the model's cost."""
    rows = cost_of_rows(MODEL, plan.pieces["length"].astype(np.int64), plan.row_offsets)
    return rows[plan.placement].sum(axis=2)


def uneven(plan, sync="step"):
    """How much longer a step takes than with even work."""
    loads = loads_of(plan)
    slowest = loads.sum(axis=1).max() if sync == "step" else loads.max(axis=0).sum()
    return slowest / loads.sum(axis=1).mean()


@pytest.mark.parametrize(("seq_len", "rows_each"), [(131072, 1), (65536, 2)])
def test_groups_are_even_where_token_balance_leaves_them_uneven(seq_len, rows_each):
    """64 groups with one row of 131,072 tokens each, or two of 65,536; rows are full either way."""
    found, by_tokens = [], []
    for seed in range(4):
        plan = plan_of(LongShort(MODEL), seq_len, rows_each, seed)
        assert plan.pieces["length"].sum() >= 0.99 * 64 * rows_each * seq_len
        found.append(uneven(plan))
        assert plan.balance["max_over_mean"] == pytest.approx(found[-1])
        by_tokens.append(uneven(plan_of(Balanced(TokenCount()), seq_len, rows_each, seed)))
    assert max(found) <= 1.05
    assert np.mean(by_tokens) > 1.3
    assert min(by_tokens) > 1.25


def test_every_microbatch_is_even_where_placing_alone_cannot_make_it_so():
    found = [plan_of(LongShort(MODEL, sync="microbatch"), 65536, 2, seed) for seed in range(2)]
    placed = [plan_of(Balanced(MODEL, sync="microbatch"), 65536, 2, seed) for seed in range(2)]
    assert max(uneven(plan, "microbatch") for plan in found) <= 1.05
    assert min(uneven(plan, "microbatch") for plan in placed) > 1.2


def test_in_a_run_nothing_is_lost_and_each_step_is_as_even():
    data = FakeData([400, 200], longest=20, capacity=80)
    strategy = LongShort(TransformerCost(1, 4, 1))
    spec = data.spec(rows=8, groups=4, strategy=strategy, epochs=1, order=declared_by(strategy).order)
    plans = Drive(data, spec).run()
    plain = Drive(data, data.spec(rows=8, groups=4, strategy=Balanced(strategy.cost), epochs=1)).run()
    assert len(plans) == len(plain)
    ids = [[tuple(piece) for plan in of for piece in plan.pieces[["source", "row"]].tolist()] for of in (plans, plain)]
    assert sorted(ids[0]) == sorted(ids[1]) == [(source, row) for source in (0, 1) for row in range(data.sizes[source])]
    tokens = [np.add.reduceat(plan.pieces["length"], plan.row_offsets[:-1]) for plan in plans[:-1]]
    assert max(map(np.max, tokens)) <= 80
    worst = [[plan.balance["max_over_mean"] for plan in of[:-1]] for of in (plans, plain)]
    assert np.mean(worst[0]) <= np.mean(worst[1])


def test_a_strategy_is_a_few_primitives():
    found = declared_by(LongShort(MODEL, sync="microbatch"))
    assert (found.even, found.costs, found.sync, found.method) == (MODEL, (MODEL,), "microbatch", "greedy")
    assert found.order == {"pack.even": "TransformerCost(hidden=768, layers=12, heads=12, gated=False)"}
    assert len(inspect.getsource(LongShort).splitlines()) <= 30
