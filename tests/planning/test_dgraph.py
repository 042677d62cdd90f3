"""`DGraph`: what primitives declare and refuse, and what comes of it, against brute force and by properties."""

from collections import Counter
from dataclasses import replace
from itertools import combinations, permutations
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning import (
    AttentionCost,
    Balanced,
    ClientPlaceTree,
    CostOf,
    DGraph,
    PackedRows,
    PaddedRows,
    RoundRobin,
    TokenCount,
    ViTCost,
)
from megascale_lightning.errors import ConfigError, EmptySourceError
from megascale_lightning.planning.blocks import BlockStore
from megascale_lightning.planning.stepping import StepPlanner
from megascale_lightning.planning.strategies import declared_by
from megascale_lightning.planning.twolevel import assign_two_levels
from megascale_lightning.streams import initial_state
from megascale_lightning.types import PartKey
from tests.planning.fakes import Drive, FakeData


def square(lengths):
    return lengths.astype(float) ** 2


def graph_of(lengths, *, dp=2, rows=None, **more):
    infos = lengths if isinstance(lengths, dict) else {"web": lengths}
    return DGraph.from_buffer_infos(infos).init(ClientPlaceTree.from_sizes(dp=dp), global_batch_size=rows, **more)


def rows_of(plan):
    return [row.tolist() for row in np.split(plan.pieces["length"], plan.row_offsets[1:-1])]


def test_rows_of_one_length_differ_in_attention_as_the_paper_says():
    step = graph_of([50, 50, 30, 70]).mix().pack(PackedRows(100, 1)).distribute("dp").cost(square)
    plan = step.plan()
    assert rows_of(plan) == [[70, 30], [50, 50]]
    assert plan.group_costs.max() / plan.group_costs.min() == pytest.approx(1.16)
    assert (plan.group_costs_before == plan.group_costs).all()


class TestDeclarations:
    def test_graphs_are_immutable_and_branch(self):
        packed = graph_of([9, 8, 1, 2] * 4, rows=4).mix().pack(PackedRows(20, 2)).distribute("dp").cost(square)
        before = packed.declared
        even, dealt = packed.balance().plan(), packed.plan()
        assert packed.declared is before
        assert even.group_costs.max() <= dealt.group_costs.max()
        assert (even.pieces == dealt.pieces).all()

    @pytest.mark.parametrize(
        ("declare", "said"),
        [
            (lambda graph: graph.mix(), r"mix\(\) needs init\(\)"),
            (
                lambda graph: graph.init(TREE).pack(ROWS),
                r"pack\(\) needs mix\(\) before it; declared is graph.init\(\)",
            ),
            (lambda graph: graph.init(TREE).mix().distribute(), r"distribute\(\) needs pack\(\)"),
            (lambda graph: graph.init(TREE).mix().pack(ROWS).distribute().balance(), r"balance\(\) needs cost\(\)"),
            (
                lambda graph: graph.init(TREE).mix().pack(ROWS).cost(square).balance(),
                r"balance\(\) needs distribute\(\)",
            ),
            (lambda graph: graph.init(TREE).mix().mix(), r"mix\(\) is declared twice: graph.init\(\).mix\(\).mix\(\)"),
            (lambda graph: graph.init(TREE).mix().pack(ROWS).plan(), r"plan\(\) needs distribute\(\)"),
            (lambda graph: graph.plan(), r"plan\(\) needs init\(\) and mix\(\) and pack\(\) and distribute\(\)"),
            (lambda graph: graph.init(4), "ClientPlaceTree is wanted"),
            (
                lambda graph: graph.init(TREE, global_batch_size=0),
                "global_batch_size must be a whole .* not 0",
            ),
            (lambda graph: graph.init(TREE, global_batch_size=True), "global_batch_size must be a whole .* not True"),
            (lambda graph: graph.init(TREE).mix().pack(), "the kind of rows is wanted"),
            (lambda graph: graph.init(TREE).mix().pack(4096), "rows must be"),
            (lambda graph: graph.init(TREE).mix().pack(ROWS, even="tokens"), "even must be a function"),
            (lambda graph: graph.init(TREE).mix().pack(PaddedRows(8, 1), even=square), "evens packed rows"),
            (lambda graph: graph.init(TREE).mix().pack(ROWS).distribute("tp"), r"distribute\('tp'\)"),
            (lambda graph: graph.init(TREE).cost("attention"), "functions of lengths"),
            (lambda graph: graph.init(TREE).cost(None), "functions of lengths .* not None"),
            (lambda graph: graph.init(TREE).cost(), "functions of lengths .* not nothing"),
            (lambda graph: declared(graph).balance("best"), r"balance\('best'\)"),
            (lambda graph: graph.init(TREE).mix().pack(ROWS).distribute("dp", 0), "group_size must be .* not 0"),
            (
                lambda graph: graph.init(TREE).mix().pack(ROWS).distribute("dp", group_size=3).plan(),
                "2 data-parallel groups do not make whole buckets of 3",
            ),
            (lambda graph: graph.init(TREE).mix().pack(ROWS).broadcast_at("tp"), r"needs distribute\(\) before it"),
            (lambda graph: declared(graph).broadcast_at(), "an axis is wanted"),
            (lambda graph: declared(graph).broadcast_at("tp", "fsdp"), "cannot be broadcast along dp"),
            (lambda graph: declared(graph).broadcast_at("rows"), "unknown axis 'rows'"),
            (lambda graph: declared(graph).broadcast_at("tp").broadcast_at("cp"), "broadcast_at.. is declared twice"),
            (lambda graph: declared(graph).balance(sync="rank"), r"sync='rank'"),
            (
                lambda graph: graph.init(TREE).mix().pack(ROWS).distribute().cost(square, square).balance(KK),
                "evens one cost, and .* several",
            ),
            (lambda graph: graph.init(TREE).mix({"code": 1}).pack(ROWS).distribute().plan(), "weights are of"),
            (lambda graph: graph.init(TREE).mix([1]), "a mapping by source name"),
            (lambda graph: graph.init(TREE).mix({"web": "1"}).pack(ROWS).distribute().plan(), "at least 0"),
            (lambda graph: graph.init(TREE).mix({"web": -1}).pack(ROWS).distribute().plan(), "at least 0"),
            (lambda graph: graph.init(TREE).mix({"web": 0}).pack(ROWS).distribute().plan(), "at least 0"),
            (lambda graph: declared(graph, rows=PackedRows(2, 1)).plan(), "sample 1 has 3 tokens, a row holds 2"),
            (lambda graph: declared(graph, cost=lambda n: n[:1] * 1.0).plan(), "one number for each"),
            (lambda graph: declared(graph, cost=lambda n: n * np.nan).plan(), "finite"),
        ],
    )
    def test_what_is_missing_doubled_or_wrong_is_named(self, declare, said):
        with pytest.raises(ConfigError, match=said):
            declare(DGraph.from_buffer_infos({"web": [1, 3, 2]}))

    @pytest.mark.parametrize(
        "infos",
        [
            *({}, [3], {1: [3]}, {"web": [0]}, {"web": [1.5]}, {"web": [[1]]}, {"web": [[1], [1, 2]]}, {"web": ["a"]}),
            {"web": [np.zeros((2, 3)), np.zeros((2, 4))]},
        ],
    )
    def test_odd_infos(self, infos):
        with pytest.raises(ConfigError, match="from_buffer_infos"):
            DGraph.from_buffer_infos(infos)

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            (PackedRows(8, 1), "sample 2 and those together with it have 9 tokens, a row holds 8"),
            (PaddedRows(8, 1), "want PackedRows, not PaddedRows"),
        ],
    )
    def test_what_cannot_stay_together(self, rows, said):
        infos = {"pairs": {"length": [3, 4, 4, 5], "together": [0, 0, 1, 1]}}
        with pytest.raises(ConfigError, match=said):
            graph_of(infos).mix().pack(rows).distribute("dp").plan()

    def test_a_source_without_samples(self):
        with pytest.raises(EmptySourceError, match="'code'"):
            declared(DGraph.from_buffer_infos({"web": [1], "code": []})).plan()

    @pytest.mark.parametrize(
        ("strategy", "said"),
        [
            (lambda graph: graph.init(TREE), "known in a run"),
            (lambda graph: graph.mix({"web": 1}), "those of its config"),
            (lambda graph: graph.mix().pack(ROWS), "those of its config"),
            (lambda graph: graph.mix().pack(), r"plan\(\) needs distribute"),
            (lambda graph: None, "gave NoneType"),
            (lambda graph: declared(DGraph.from_buffer_infos({"web": [1]})), "gave the graph of other samples"),
            (lambda graph: len(graph.mix().pack().distribute().rows), "no samples yet"),
            (Balanced, "strategy must be"),
            ("balanced", "strategy must be"),
        ],
    )
    def test_a_strategy_that_does_not_declare_a_step_is_refused(self, strategy, said):
        with pytest.raises(ConfigError, match=said):
            declared_by(strategy)

    def test_what_a_strategy_declares(self):
        found = declared_by(Balanced(AttentionCost(512), sync="microbatch", method=KK))
        assert found.done == ("init", "mix", "pack", "distribute", "cost", "balance")
        assert (found.costs, found.sync, found.method) == ((AttentionCost(512),), "microbatch", KK)
        assert declared_by(RoundRobin()).sync is None
        costs = square, CostOf(square, ("a",)), CostOf(square, ("b", "a"))
        even = declared_by(lambda graph: graph.mix().pack(even=CostOf(square, ("a",))).distribute())
        assert (even.fields, declared_by(Balanced()).order) == (("a",), {})
        assert even.order == {"pack.even": "CostOf(function=tests.planning.test_dgraph.square, fields=('a'))"}
        several = declared_by(lambda graph: graph.mix().pack().distribute().cost(*costs))
        assert (several.fields, several.cost_names) == (("a", "b"), "square, CostOf, CostOf")


TREE, ROWS, KK = ClientPlaceTree.from_sizes(dp=2), PackedRows(8, 1), "karmarkar_karp"


def declared(graph, rows=ROWS, cost=square):
    return graph.init(TREE).mix().pack(rows).distribute("dp").cost(cost)


def brute_force(costs, groups):
    """The least load of the fullest of so many groups of equal count."""

    def best(left, groups):
        if groups == 1:
            return sum(costs[item] for item in left)
        size = len(left) // groups
        first, *others = left
        return min(
            max(
                sum(costs[item] for item in (first, *chosen)),
                best([item for item in others if item not in chosen], groups - 1),
            )
            for chosen in combinations(others, size - 1)
        )

    return best(list(range(len(costs))), groups)


@pytest.mark.parametrize("method", ["greedy", KK])
@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(2, 3), (2, 4), (3, 2), (3, 3)]), st.data())
def test_small_steps_against_brute_force(method, shape, data):
    groups, each = shape
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=groups * each, max_size=groups * each))
    graph = graph_of(lengths, dp=groups, rows=groups * each).mix().pack(PaddedRows(60, 1)).distribute("dp").cost(square)
    plan = graph.balance(method).plan()
    least = brute_force([length**2 for length in lengths], groups)
    assert least <= plan.group_costs.max() + 1e-9
    assert plan.group_costs.max() <= least * 4 / 3
    for name, costs in (("max_over_bound", plan.group_costs), ("max_over_bound_before", plan.group_costs_before)):
        assert plan.balance[name] >= costs.max() / least - 1e-9, "the bound is none"


def test_brute_force_is_met_where_swaps_are_enough():
    for lengths in permutations([9, 7, 6, 5, 4, 2]):
        graph = graph_of(list(lengths), rows=6).mix().pack(PaddedRows(60, 1)).distribute("dp").cost(square)
        assert graph.balance().plan().group_costs.max() == brute_force([length**2 for length in lengths], 2)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(1, 64), min_size=1, max_size=60), min_size=1),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["step", "microbatch"]),
    st.sampled_from(["greedy", KK]),
    st.sampled_from(["padded", "packed", "packed evenly"]),
)
def test_properties_of_any_step(infos, dp, micro, sync, method, kind):
    padded = kind == "padded"
    rows = PaddedRows(64, micro) if padded else PackedRows(64, micro, pack_ahead=8)
    graph = graph_of(infos, dp=dp, rows=2 * dp * micro).mix().pack(rows, even=square if "evenly" in kind else None)
    dealt = graph.distribute("dp").cost(square)
    even = dealt.balance(method, sync=sync)
    plan = even.plan()
    # Every sample that was drawn has one place, or is carried on.
    drawn = Counter(map(tuple, even.drawn.pieces[["source", "row"]].tolist()))
    placed = Counter(map(tuple, plan.pieces[["source", "row"]].tolist()))
    carried = Counter(map(tuple, even.carry[["source", "row"]].tolist()))
    assert placed + carried == drawn
    assert max(drawn.values()) == 1
    # Rows keep to their capacity, each real one has a place, and all groups have as many.
    assert all(sum(row) <= 64 for row in rows_of(plan))
    real = [row for row, members in enumerate(rows_of(plan)) if members]
    assert sorted(plan.placement[plan.placement >= 0].tolist()) == real
    assert plan.placement.shape == (dp, 2, micro)
    # Never worse than dealing in turn, of the same rows.
    assert (dealt.plan().pieces == plan.pieces).all()
    loads = costs_of(plan)
    assert plan.group_costs == pytest.approx(loads.sum(axis=1)) or padded
    in_turn = costs_of(dealt.plan())
    if sync == "step":
        assert plan.group_costs.max() <= dealt.plan().group_costs.max() * (1 + 1e-9)
    elif not padded:
        assert loads.max(axis=0).sum() <= in_turn.max(axis=0).sum() * (1 + 1e-9)
    life = {name: even.summary()[name] for name in ("placed", "carried_on")}
    assert life == {"placed": sum(placed.values()), "carried_on": sum(carried.values())}


def test_the_method_that_is_declared_places_the_rows():
    graph = graph_of([17, 15, 12, 11, 9, 6, 5, 1], rows=8).mix().pack(PaddedRows(17, 1)).distribute("dp")
    rows = graph.cost(TokenCount())
    loads = {method: rows.balance(method).plan().group_costs.max() for method in ("greedy", KK)}
    assert loads == {"greedy": 39, KK: 38}


@pytest.mark.parametrize(
    ("costs", "dp", "micro", "sync", "dealt", "placed"),
    [([7, 8, 2, 7, 4, 6, 3, 5, 9], 3, 1, "step", 17, 18), ([4, 1, 9, 12, 1, 3, 4, 1], 2, 2, "microbatch", 18, 20)],
)
def test_rows_are_dealt_in_turn_where_that_is_more_even(costs, dp, micro, sync, dealt, placed):
    values = np.array(costs, float)
    shape = {"num_groups": dp, "num_microbatches": len(costs) // dp // micro, "per_microbatch": micro, "sync": sync}

    def slowest(loads):
        return loads.sum(axis=1).max() if sync == "step" else loads.max(axis=0).sum()

    assert slowest(values[assign_two_levels(values, **shape)].sum(axis=2)) == placed
    infos = {"web": {"length": [8] * len(costs), "n": costs}}
    graph = DGraph.from_buffer_infos(infos).init(ClientPlaceTree.from_sizes(dp=dp), global_batch_size=len(costs))
    graph = graph.mix().pack(PackedRows(8, micro)).distribute("dp")
    plan = graph.cost(CostOf(lambda lengths, n: n + 0 * lengths, ("n",))).balance(sync=sync).plan()
    assert slowest(values[plan.pieces["row"]][plan.placement].sum(axis=2)) == dealt


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 16), min_size=1, max_size=4), st.booleans()), min_size=1, max_size=40),
    st.lists(st.integers(1, 64), min_size=1, max_size=20),
    st.integers(1, 2),
    st.sampled_from([None, square]),
)
def test_what_stays_together_is_in_one_row_or_carried_on(groups, alone, dp, even):
    lengths = [length for of, _ in groups for length in of]
    ids = np.repeat(np.arange(len(groups)), [len(of) for of, _ in groups])
    infos = {"pairs": {"length": lengths, "together": ids}, "web": alone}
    rows = graph_of(infos, dp=dp, rows=2 * dp).mix().pack(PackedRows(64, 1, pack_ahead=4), even=even)
    graph = rows.distribute("dp").cost(square)
    plan = graph.balance().plan()
    row_of = np.repeat(np.arange(len(plan.row_offsets) - 1), np.diff(plan.row_offsets))
    found = {}
    for row, piece in zip([*row_of.tolist(), *[-1] * len(graph.carry)], [*plan.pieces, *graph.carry], strict=True):
        if piece["source"] == 0:
            found.setdefault(int(ids[piece["row"]]), []).append((row, int(piece["row"])))
    for group, members in found.items():
        assert len({row for row, _ in members}) == 1
        assert sorted(row for _, row in members) == np.flatnonzero(ids == group).tolist()
    assert all(sum(row) <= 64 for row in rows_of(plan))
    edges = [(int(one["row"]), int(other["row"])) for one, other in graph.drawn.pieces[graph.edges]]
    assert sorted(edges) == sorted(
        (a, a + 1) for members in found.values() for _, a in members if a + 1 < len(ids) and ids[a] == ids[a + 1]
    )


def test_nothing_changes_where_every_sample_stands_alone():
    lengths = np.random.default_rng(0).integers(1, 40, 200)
    plain = graph_of(lengths, rows=8).mix().pack(PackedRows(64, 1)).distribute("dp").plan()
    infos = {"web": {"length": lengths, "together": np.arange(200)}}
    alone = graph_of(infos, rows=8).mix().pack(PackedRows(64, 1)).distribute("dp")
    assert (alone.plan().pieces == plain.pieces).all()
    assert (alone.plan().placement == plain.placement).all()
    assert alone.edges.shape == (0, 2)


def costs_of(plan):
    """float64 [groups, microbatches]"""
    rows = np.array([sum(length**2 for length in row) for row in rows_of(plan)] + [0], float)
    return rows[plan.placement].sum(axis=2)


def test_lineage_follows_a_sample_to_its_place():
    infos = {"web": [9, 8, 7, 6, 5], "code": [4, 4, 4]}
    step = graph_of(infos, rows=2).mix({"web": 5, "code": 3}).pack(PackedRows(12, 1)).distribute("dp")
    plan = step.plan()
    lives = {}
    for source, lengths in infos.items():
        for row in range(len(lengths)):
            found = step.lineage(source, 0, row)
            lives[source, row] = found.life
            if found.life == "placed":
                assert plan.placement[found.group, found.microbatch, found.slot] == found.row
                members = plan.pieces[plan.row_offsets[found.row] : plan.row_offsets[found.row + 1]]
                assert (list(infos).index(source), row) in members[["source", "row"]].tolist()
    assert Counter(lives.values()) == {"placed": len(plan.pieces), "carried": 8 - len(plan.pieces)}
    assert step.lineage("web", 0, 5) is None
    with pytest.raises(ConfigError, match="no source 'pdf'"):
        step.lineage("pdf", 0, 0)


def test_mermaid_draws_what_was_declared():
    drawn = declared(DGraph.from_buffer_infos({"web": [1, 3, 2]})).balance().to_mermaid().splitlines()
    assert drawn[0] == "flowchart LR"
    assert [line.split('["')[0].strip() for line in drawn[1:7]] == [
        "init",
        "mix",
        "pack",
        "distribute",
        "cost",
        "balance",
    ]
    assert "mix --> pack" in [line.strip() for line in drawn]


def test_who_fetches_is_in_what_can_be_looked_at():
    step = declared(DGraph.from_buffer_infos({"web": [1, 3, 2]}))
    assert step.broadcast_at("tp", "context").summary()["broadcast_at"] == ("cp", "tp")
    assert 'broadcast_at["broadcast at cp, tp"]' in step.balance().broadcast_at("tp", "context").to_mermaid()
    assert "broadcast_at" not in step.summary()


class TestInARun:
    """The planner's steps are those of the graph that the strategy declares."""

    def drive(self, strategy, **changes):
        data = FakeData([200, 100], longest=90)
        return Drive(data, data.spec(rows=16, groups=2, micro=2, epochs=None, strategy=strategy, **changes))

    def test_strategies_move_rows_and_no_samples(self):
        drives = [self.drive(strategy) for strategy in (Balanced(), RoundRobin(), Balanced(sync="microbatch"))]
        plans = [drive.run(5) for drive in drives]
        for even, dealt, each in zip(*plans, strict=True):
            assert (even.pieces == dealt.pieces).all()
            assert (even.pieces == each.pieces).all()
            assert even.group_costs.max() <= dealt.group_costs.max() * (1 + 1e-9)
            assert (even.group_costs_before == dealt.group_costs).all()
        assert any((even.placement != each.placement).any() for even, _, each in zip(*plans, strict=True))
        assert len({drive.states[5].certificate for drive in drives}) == 1

    def test_a_strategy_is_asked_at_every_step(self):
        asked = []

        def strategy(graph):
            asked.append(graph.step)
            return RoundRobin()(graph) if graph.step % 2 else Balanced()(graph)

        plans = self.drive(strategy).run(4)
        assert set(asked) >= {0, 1, 2, 3}
        dealt = [bool((plan.group_costs == plan.group_costs_before).all()) for plan in plans]
        assert dealt == [False, True, False, True]

    def test_even_rows_are_declared_for_all_steps_or_none(self):
        def strategy(graph):
            return graph.mix().pack(even=None if graph.step < 2 else square).distribute()

        with pytest.raises(ConfigError, match=r"at step 2 it declares .*pack.even.* and nothing before"):
            self.drive(strategy).run(3)

    @pytest.mark.parametrize(
        ("later", "said"),
        [
            (lambda graph: None, "gave NoneType: return the graph"),
            (lambda graph: declared(DGraph.from_buffer_infos({"web": [1]})), "gave the graph of other samples"),
            (
                lambda graph: graph.mix().pack().distribute().cost(ViTCost(8, 1, 1)),
                r"at step 2 its costs are by \['patches'\] .* began with costs by lengths alone",
            ),
        ],
    )
    def test_what_a_later_step_gives_is_looked_at_as_the_first_is(self, later, said):
        with pytest.raises(ConfigError, match=said):
            self.drive(lambda graph: RoundRobin()(graph) if graph.step < 2 else later(graph)).run(3)

    def test_who_fetches_is_declared_and_settled_once(self):
        def strategy(graph):
            return Balanced()(graph).broadcast_at("tensor_parallel", "pp")

        assert declared_by(strategy).broadcast == ("pp", "tp")
        plans = self.drive(strategy, broadcast=("pp", "tp")).run(3)
        plain = self.drive(Balanced()).run(3)
        assert all((one.placement == other.placement).all() for one, other in zip(plans, plain, strict=True))
        with pytest.raises(ConfigError, match="declare the same at every step"):
            self.drive(strategy).run(1)

    def test_buckets_are_those_that_are_declared(self):
        def strategy(graph, **more):
            return graph.mix().pack().distribute("dp", **more).cost(square).balance(sync="microbatch")

        data = FakeData([400], longest=90)
        spec = data.spec(rows=32, groups=4, micro=1, epochs=None, strategy=lambda graph: strategy(graph, group_size=2))
        found, flat = Drive(data, spec).run(4), Drive(data, replace(spec, strategy=strategy)).run(4)
        assert all((one.pieces == other.pieces).all() for one, other in zip(found, flat, strict=True))
        spans = [[costs_of(plan).reshape(2, 2, 8).max(axis=1).sum(axis=1).max() for plan in of] for of in (found, flat)]
        assert sum(spans[0]) < sum(spans[1])

    def test_a_state_that_was_gone_on_from_gives_its_step_again(self):
        data = FakeData([50], longest=90)
        spec = data.spec(rows=4, epochs=None)
        blocks = BlockStore()
        for window in range(data.num_windows(0)):
            part = 0
            while True:
                blocks.add(data.describe(PartKey("train", 0, 0, window, part)))
                if blocks.get(PartKey("train", 0, 0, window, part)).last_in_window:
                    break
                part += 1
        planner, start = StepPlanner(spec, blocks), initial_state(spec)
        first, after = planner.plan(start, {})
        again, once_more = planner.plan(start, {})
        assert (first.pieces == again.pieces).all()
        assert once_more.certificate == after.certificate
        assert (planner.plan(after, {})[0].pieces == planner.plan(once_more, {})[0].pieces).all()


class TestMetadata:
    """Costs by more than the length."""

    INFOS: ClassVar = {
        "text": {"length": [40, 60, 50, 50], "patches": [0, 0, 0, 0]},
        "image": {"length": [10, 10, 10, 10], "patches": [900, 100, 500, 100.0]},
    }

    def graph(self, cost, rows=ROWS):
        graph = DGraph.from_buffer_infos(self.INFOS).init(TREE, global_batch_size=8)
        return graph.mix().pack(rows).distribute("dp").cost(cost)

    @pytest.mark.parametrize("rows", [PackedRows(64, 1), PaddedRows(64, 1)])
    def test_a_cost_gets_what_it_names(self, rows):
        cost = CostOf(lambda lengths, patches: lengths + patches, ("patches",))
        plan = self.graph(cost, rows).balance().plan()
        assert plan.group_costs.sum() == sum(sum(c["length"]) + sum(c["patches"]) for c in self.INFOS.values())
        by_length = self.graph(TokenCount(), rows).balance().plan()
        assert plan.group_costs.max() < plan.group_costs_before.max()
        if isinstance(rows, PaddedRows):
            each = [sum(pair) for columns in self.INFOS.values() for pair in zip(*columns.values(), strict=True)]
            assert plan.group_costs.max() == brute_force(each, 2)
        assert (plan.pieces == by_length.pieces).all()

    @pytest.mark.parametrize("rows", [PackedRows(128, 1, pack_ahead=2), PaddedRows(64, 1)])
    def test_a_field_can_be_looked_at_alone(self, rows):
        infos = {**self.INFOS, "image": {name: [*values] * 3 for name, values in self.INFOS["image"].items()}}
        graph = DGraph.from_buffer_infos(infos).init(TREE, global_batch_size=2 if isinstance(rows, PackedRows) else 7)
        step = graph.mix().pack(rows).distribute("dp").cost(square).balance()
        images, plan = step.select("patches"), step.plan()
        assert (images.plan().pieces == plan.pieces).all()
        assert (images.plan().placement == plan.placement).all()
        found, whole = images.summary(), step.summary()
        patches = np.array(infos["image"]["patches"])
        groups = []
        for of_group in plan.placement.reshape(2, -1):
            members = [plan.pieces[plan.row_offsets[row] : plan.row_offsets[row + 1]] for row in of_group if row >= 0]
            groups.append(sum(patches[piece["row"]] for row in members for piece in row if piece["source"] == 1))
        assert found["group_totals"] == groups
        assert found["total"] == sum(groups) > 0
        assert found["max_over_mean"] == max(groups) / (sum(groups) / 2)
        assert found["placed"] == (plan.pieces["source"] == 1).sum() < whole["placed"]
        assert found["carried_on"] == (step.carry["source"] == 1).sum()
        assert found["mixed"] == found["placed"] + found["carried_on"]
        assert found["rows"] <= whole["rows"]
        assert images.lineage("text", 0, 0) is None
        assert images.lineage("image", 0, 0) == step.lineage("image", 0, 0) is not None
        assert images.to_mermaid() == step.to_mermaid()

    def test_a_field_that_is_not_there_cannot_be_selected(self):
        with pytest.raises(ConfigError, match=r"what is declared wants the metadata \['pixels'\]"):
            self.graph(square, PackedRows(64, 1)).select("pixels").summary()
        with pytest.raises(ConfigError, match="name of a number"):
            self.graph(square).select(3)

    def test_what_is_missing_or_no_number_is_named(self):
        cost = CostOf(lambda lengths, pixels: lengths + pixels, ("pixels",))
        with pytest.raises(ConfigError, match=r"wants the metadata \['pixels'\]"):
            self.graph(cost, PackedRows(64, 1)).plan()
        for wrong in ([1, 2], [1, 2, float("nan")], ["a", "b", "c"]):
            with pytest.raises(ConfigError, match="'patches' must be 3 finite numbers"):
                DGraph.from_buffer_infos({"web": {"length": [1, 2, 3], "patches": wrong}})
        with pytest.raises(ConfigError, match="lengths are whole numbers"):
            DGraph.from_buffer_infos({"web": {"patches": [1]}})

    @pytest.mark.parametrize("rows", [PackedRows(128, 1), PaddedRows(64, 1)])
    @pytest.mark.parametrize("sync", ["step", "microbatch"])
    def test_several_costs_are_even_at_once(self, rows, sync):
        rng = np.random.default_rng(0)
        infos = {"web": {"length": rng.integers(1, 65, 2000), "patches": rng.lognormal(3, 1, 2000)}}
        graph = DGraph.from_buffer_infos(infos).init(ClientPlaceTree.from_sizes(dp=4), global_batch_size=512)
        graph = graph.mix().pack(rows).distribute("dp")
        patches = CostOf(lambda lengths, patches: patches + 0 * lengths, ("patches",))
        both = graph.cost(patches, square)
        one = graph.cost(square).balance(sync=sync).plan()

        def uneven(plan):
            rows_of_group = plan.placement.reshape(4, -1)
            return max(uneven_in(plan, rows_of_group, infos["web"], cost) for cost in ("length", "patches"))

        plan = both.balance(sync=sync).plan()
        assert uneven(plan) < 1.01 if sync == "step" else uneven(plan) < uneven(one)
        assert uneven(one) > 1.03
        if isinstance(rows, PackedRows):
            assert plan.balance["max_over_mean"] == pytest.approx(uneven(plan))
            assert plan.group_costs.max() == pytest.approx(plan.balance["max_over_mean"])
        assert plan.balance["max_over_mean"] <= plan.balance["max_over_mean_before"] + 1e-9


def uneven_in(plan, rows_of_group, columns, name):
    """Largest over mean of the groups: squares of the lengths, or the patches."""
    values = columns[name][plan.pieces["row"]] ** (2.0 if name == "length" else 1.0)
    totals = np.concatenate([[0], np.cumsum(values)])
    of_rows = np.append(totals[plan.row_offsets[1:]] - totals[plan.row_offsets[:-1]], 0)
    loads = of_rows[rows_of_group].sum(axis=1)
    return loads.max() / loads.mean()
