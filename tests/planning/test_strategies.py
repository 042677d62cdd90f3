"""Ready strategies, and the one of the docs: what they declare, how even it is, and against all assignments."""

import re
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from megascale_lightning import Balanced, ClientPlaceTree, DGraph, HybridVLM, PackedRows, PaddedRows
from megascale_lightning.planning import presets
from megascale_lightning.planning.strategies import declared_by
from tests.planning.fakes import Drive, FakeData

DOCS = Path(__file__).resolve().parents[2] / "docs/planning.md"


@cache
def run_docs():
    """The names that the blocks of the page make."""
    found = {}
    for block in re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL):
        exec(compile(block, str(DOCS), "exec"), found)
    return found


def test_the_docs_run():
    found = run_docs()
    strategy = found["even_microbatches"]
    source = Path(DOCS).read_text("utf-8").split("def even_microbatches", 1)[1].split("```", 1)[0]
    assert len(source.strip().splitlines()) <= 15
    data = FakeData([300], longest=90)
    spec = data.spec(rows=16, groups=4, micro=1, epochs=None, strategy=strategy)
    early, late = Drive(data, spec), Drive(data, replace(spec, strategy=lambda graph: strategy(Later(graph))))
    mine, plain = early.run(3), Drive(data, replace(spec, strategy=Balanced(found["MODEL"]))).run(3)
    assert all((one.placement == other.placement).all() for one, other in zip(mine, plain, strict=True))
    each = Drive(data, replace(spec, strategy=Balanced(found["MODEL"], sync="microbatch"))).run(3)
    assert all((one.placement == other.placement).all() for one, other in zip(late.run(3), each, strict=True))


class Later(DGraph):
    """The graph of a step a hundred steps on."""

    def __init__(self, graph):
        super().__init__(graph._source, graph.declared)

    step = property(lambda self: self._source.step + 100)


@pytest.mark.parametrize(
    ("shape", "most"), [((2, 2, 1), 1), ((2, 3, 1), 1), ((3, 2, 1), 1), ((4, 1, 2), 1), ((2, 2, 2), 1.03)]
)
def test_the_strategy_of_the_docs_against_all_assignments(shape, most):
    """Even in sum at first, then at every microbatch: the best of all ways to deal so few rows, or close to it."""
    strategy, model = run_docs()["even_microbatches"], run_docs()["MODEL"]
    groups, microbatches, micro = shape
    data = FakeData([300], longest=120_000, capacity=131_072)
    spec = data.spec(rows=groups * microbatches * micro, groups=groups, micro=micro, epochs=None)
    every = np.array(list(permutations(range(spec.rows_per_step)))).reshape(-1, *shape)
    for declares, span in (
        (strategy, lambda loads: loads.sum(axis=-1).max(axis=-1)),
        (lambda graph: strategy(Later(graph)), lambda loads: loads.max(axis=-2).sum(axis=-1)),
    ):
        for plan in Drive(data, replace(spec, strategy=declares)).run(12):
            rows = np.split(model(plan.pieces["length"]), plan.row_offsets[1:-1])
            costs = np.array([row.sum() for row in rows])
            least = span(costs[every].sum(axis=-1)).min()
            assert 1 - 1e-9 <= span(costs[plan.placement].sum(axis=-1)) / least <= most + 1e-9


class TestVisionAndLanguage:
    """An encoder of images in front of a backbone of 12B parameters, 30 % of the samples text alone."""

    ENCODER, BACKBONE = presets.vit_2b(), presets.llama_12b()
    STRATEGY = HybridVLM(ENCODER, BACKBONE)

    def uneven(self, rows, count, seed, strategy):
        """Largest over mean of 64 groups: in encoder and backbone."""
        rng = np.random.default_rng(seed)
        images = np.minimum(rng.lognormal(7, 0.9, count), 16384).astype(int)
        patches = np.where(rng.random(count) < 0.3, 0, images)
        lengths = np.clip(rng.lognormal(5.2, 1.3, count), 1, 16384 - 4096).astype(int) + patches // 4
        graph = DGraph.from_buffer_infos({"pairs": {"length": lengths, "patches": patches}})
        graph = graph.init(ClientPlaceTree.from_sizes(dp=64), global_batch_size=64 * (64 if count == 4096 else 8))
        said = declared_by(strategy)
        plan = graph.mix().pack(rows).distribute("dp").cost(*said.costs).balance(sync=said.sync).plan()
        placed = lengths[plan.pieces["row"]]
        found = []
        for costs in (self.ENCODER(placed, patches=patches[plan.pieces["row"]]), self.BACKBONE(placed)):
            totals = np.concatenate([[0], np.cumsum(costs)])
            of_rows = np.append(totals[plan.row_offsets[1:]] - totals[plan.row_offsets[:-1]], 0)
            loads = of_rows[plan.placement].sum(axis=(1, 2))
            found.append(loads.max() / loads.mean())
        return found

    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_one_sample_a_row(self, seed):
        even = self.uneven(PaddedRows(16384, 1), 4096, seed, self.STRATEGY)
        assert max(even) <= 1.01
        encoder, backbone = self.uneven(PaddedRows(16384, 1), 4096, seed, Balanced(self.BACKBONE))
        assert encoder > 1.3
        assert backbone <= 1.01

    def test_packed_rows(self):
        assert max(self.uneven(PackedRows(16384, 1), 12000, 0, self.STRATEGY)) <= 1.01
        assert self.uneven(PackedRows(16384, 1), 12000, 0, Balanced(self.BACKBONE))[0] > 1.2

    def test_what_it_declares(self):
        found = declared_by(HybridVLM(self.ENCODER, self.BACKBONE, sync="microbatch"))
        assert (found.costs, found.sync) == ((self.ENCODER, self.BACKBONE), "microbatch")
        assert found.fields == ("patches",)
