"""Every place of a mesh gets its part of its group's batch, and none of it changes what the batches hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale_lightning import (
    AttentionCost,
    ClientPlaceTree,
    CollatedRows,
    ConfigError,
    DGraph,
    LoaderConfig,
    MegaScaleLoader,
    PackedRows,
    PaddedRows,
)

from .conftest import SEQ_LEN
from .data import Corpus, make_corpus
from .harness import World, run_world, without_run

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

PADDED_TO = 8
PACKED = PackedRows(
    SEQ_LEN, 2, pack_ahead=16, pad_documents_to=PADDED_TO, shift_labels=True, token_fields=("loss_mask",)
)


def config_for(corpus: Corpus, rows: Any = PACKED, **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {"sources": corpus.sources(), "global_batch_size": 8, "seed": 3, "runtime": "local"}
    return LoaderConfig(rows=rows, **(base | changes))


def even_rows(graph: DGraph) -> DGraph:
    return graph.mix().pack(even=AttentionCost(64)).distribute()


class TestPaddedDocuments:
    """`pad_documents_to` belongs to the order: it counts when rows are packed, whoever gets them."""

    @pytest.mark.parametrize("strategy", [None, even_rows], ids=["default", "even"])
    def test_rows_hold_their_documents_as_padded(self, with_fields: Corpus, strategy: Any) -> None:
        steps = run_world(config_for(with_fields, strategy=strategy), 2)
        pieces: Counter[Any] = Counter()
        for step in steps:
            pieces.update(step.pieces())
            for mb in step.microbatches():
                check_segments(mb)
        assert max(pieces.values()) == 1
        wanted = {name: int((-(-files.lengths // SEQ_LEN)).sum()) for name, files in with_fields.files.items()}
        assert Counter(piece[0] for piece in pieces) == wanted

    def test_no_more_is_drawn_than_rows_hold_as_padded(self, tmp_path: Path) -> None:
        """Two of these fill a row; `pack_ahead` more are drawn, and carried on."""
        short = make_corpus(tmp_path, {"web": 50}, seq_len=16, lengths={"web": [3] * 50})
        rows = PackedRows(16, 1, pack_ahead=3, pad_documents_to=8)
        config = config_for(short, rows, sources=short.sources(epochs=None), global_batch_size=1)
        with World(config, keep_states=True) as world:
            steps = world.steps(20)
        assert [len(row) for step in steps for row in step.rows] == [2] * 20
        assert [step.state["carry"]["count"] for step in steps if step.state] == [3] * 20

    def test_the_order_does_not_depend_on_who_cuts_what(self, with_fields: Corpus) -> None:
        certificates = set()
        for mode in ("full", "head_tail", "contiguous"):
            for dp, cp in ((1, 1), (2, 1), (1, 4), (2, 2)):
                config = config_for(with_fields, context_parallel=mode)
                certificates.add(certificate_of(config, ClientPlaceTree.from_sizes(dp=dp, cp=cp)))
        plain = config_for(with_fields, replace(PACKED, pad_documents_to=None))
        assert len(certificates) == 1
        assert certificate_of(plain, ClientPlaceTree.from_sizes()) not in certificates

    def test_a_state_of_one_mesh_goes_on_in_another(self, with_fields: Corpus) -> None:
        config = config_for(with_fields, context_parallel="head_tail")
        with World(config, 2, keep_states=True) as world:
            steps = world.steps()
        stop = len(steps) // 2
        tree = ClientPlaceTree.from_sizes(cp=2, tp=2)
        with MegaScaleLoader(config, tree=tree, rank=3) as loader:
            assert steps[stop].state is not None
            loader.load_state_dict(steps[stop].state)
            for _ in loader:
                pass
            assert loader.certificate == steps[-1].certificate
            assert steps[-1].state is not None
            assert without_run(loader.state_dict()) == without_run(steps[-1].state)

    def test_together_counts_as_padded(self) -> None:
        rows = PackedRows(16, 1, pad_documents_to=8)
        given = {"a": {"length": [3, 9], "together": [1, 1]}}
        tree = ClientPlaceTree.from_sizes()
        with pytest.raises(ConfigError, match="have 24 tokens, a row holds 16"):
            DGraph.from_buffer_infos(given).init(tree).mix().pack(rows).distribute().plan()
        fits = {"a": {"length": [3, 8, 8], "together": [1, 1, 2]}}
        graph = DGraph.from_buffer_infos(fits).init(tree).mix().pack(rows).distribute()
        assert graph.rows == [[0, 1]]


def check_segments(mb: Any) -> None:
    """Each document takes up its padded length, and the rest of its row is a segment of its own."""
    laid_out, real = (mb.tensors[name].diff().tolist() for name in ("cu_seq_lens_q", "cu_seq_lens_q_unpadded"))
    lengths = iter(mb.info.lengths.tolist())
    expected: list[tuple[int, int]] = []
    for pieces in mb.rows:
        room = SEQ_LEN
        for _ in pieces:
            length = next(lengths)
            expected.append((length, -(-length // PADDED_TO) * PADDED_TO))
            room -= expected[-1][1]
        assert room >= 0, "a row is longer than it may be"
        expected += [(room, room)] if room else []
    assert list(zip(real, laid_out, strict=True)) == expected
    assert mb.tensors["max_length_q"] == max(laid_out)
    starts = mb.tensors["cu_seq_lens_q"][:-1].long()
    assert not mb.tensors["position_ids"].flatten()[starts].any()
    assert mb.info.num_loss_tokens == int((mb.tensors["labels"] != -100).sum())


def certificate_of(config: LoaderConfig, tree: ClientPlaceTree) -> str:
    """Of the whole stream, as the last rank sees it."""
    with MegaScaleLoader(config, tree=tree, rank=tree.world_size - 1) as loader:
        for _ in loader:
            pass
        return loader.certificate


@st.composite
def jobs(draw: st.DrawFn) -> tuple[ClientPlaceTree, Any, str]:
    """A mesh of at most 16 ranks in any layout, rows, and how they are cut."""
    sizes = draw(st.tuples(*[st.integers(1, 4)] * 4).filter(lambda sizes: int(np.prod(sizes)) <= 16))
    order = draw(st.permutations(range(4)))
    shape = [sizes[axis] for axis in order]
    ranks = np.array(draw(st.permutations(range(int(np.prod(shape)))))).reshape(shape)
    names = [("pp", "dp_shard", "context_parallel", "tp")[axis] for axis in order]
    rows: Any = PaddedRows(SEQ_LEN, 2, shift_labels=True, token_fields=("loss_mask",))
    if draw(st.booleans()):
        rows = PackedRows(
            48,
            2,
            pack_ahead=4,
            pad_documents_to=24,
            shift_labels=True,
            flatten=draw(st.booleans()),
            token_fields=("loss_mask",),
        )
    return ClientPlaceTree.from_ranks(ranks, names), rows, draw(st.sampled_from(["full", "head_tail", "contiguous"]))


@settings(max_examples=25)
@given(job=jobs())
def test_parts_of_a_mesh_make_up_what_was_built(with_fields: Corpus, job: tuple[ClientPlaceTree, Any, str]) -> None:
    """Loaders at all places of a mesh, beside those of a mesh with dp alone."""
    tree, rows, mode = job
    dp, cp, pp = tree.num_groups, tree.size("cp"), tree.size("pp")
    multiple = 1 if cp == 1 else cp if mode == "contiguous" else 2 * cp
    changes = {"global_batch_size": 4 * dp, "sources": with_fields.sources(epochs=None)}
    whole = run_world(config_for(with_fields, replace(rows, pad_to_multiple_of=multiple), **changes), dp, steps=2)
    config = config_for(with_fields, rows, context_parallel=mode, **changes)
    with_places = {tree.place(rank): MegaScaleLoader(config, tree=tree, rank=rank) for rank in tree.ranks}
    iterators = {place: iter(loader) for place, loader in with_places.items()}
    for step in whole:
        for index in range(len(step.ranks[0])):
            got = {place: next(iterator) for place, iterator in iterators.items()}
            for group in range(dp):
                built = step.ranks[group][index]
                mine = {place: batch for place, batch in got.items() if place.dp == group}
                check_group(mine, built.tensors, built.info, (pp, cp), mode)
    for loader in with_places.values():
        loader.close()


def check_group(parts: dict[Any, Any], built: dict[str, Any], info: Any, sizes: tuple[int, int], mode: str) -> None:
    pp, cp = sizes
    for place, part in parts.items():
        assert part["megascale"].sample_ids() == info.sample_ids()
        assert part["megascale"].num_loss_tokens == info.num_loss_tokens
        assert ("input_ids" in part) == (place.pp == 0)
        assert ("labels" in part) == (place.pp == pp - 1)
        for name in part.keys() - {"megascale"}:
            expected = built[name]
            if isinstance(expected, torch.Tensor) and not name.startswith("cu_") and mode != "full":
                expected = expected_slice(expected, built, mode, place.cp, cp)
            assert torch.equal(torch.as_tensor(part[name]), torch.as_tensor(expected)), (place, name)
        assert {*built} - {*part} <= {"input_ids", "labels"}
        assert None not in part.values()
    last = [part["megascale"].rank_loss_tokens for place, part in parts.items() if place.pp == place.tp == 0]
    assert last == [info.num_loss_tokens] * cp if mode == "full" else sum(last) == info.num_loss_tokens


def expected_slice(whole: torch.Tensor, built: dict[str, Any], mode: str, rank: int, cp: int) -> torch.Tensor:
    """Chunks put side by side, document by document."""
    if mode == "contiguous":
        return whole.chunk(cp, dim=1)[rank]
    if "cu_seq_lens_q" not in built:
        chunks = whole.chunk(2 * cp, dim=1)
        return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]], dim=1)
    documents = whole.flatten().split(built["cu_seq_lens_q"].diff().tolist())
    pairs = [document.chunk(2 * cp) for document in documents]
    cut = torch.cat([torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]]) for chunks in pairs])
    return cut.reshape(whole.shape[0], -1)


class TestEvaluation:
    def test_its_streams_are_cut_alike(self, with_fields: Corpus) -> None:
        config = config_for(with_fields, val_sources=with_fields.sources(), context_parallel="head_tail")
        widths = set()
        for rank in range(2):
            with MegaScaleLoader(config, tree=ClientPlaceTree.from_sizes(cp=2), rank=rank, stream="val/0") as loader:
                widths |= {batch["input_ids"].shape for batch in loader}
        assert widths == {(2, SEQ_LEN // 2)}


class TestRefusals:
    """What cannot be cut is said before anything starts."""

    @pytest.mark.parametrize("mode", ["head_tail", "contiguous"])
    def test_collated_rows(self, with_fields: Corpus, mode: str) -> None:
        with pytest.raises(ConfigError, match=r"a collate_fn returns is handed out as it is.*\"full\""):
            config_for(with_fields, CollatedRows(2), context_parallel=mode)
        with pytest.raises(ConfigError, match="eval_rows: context_parallel"):
            config_for(with_fields, eval_rows=CollatedRows(2), context_parallel=mode)
        config_for(with_fields, CollatedRows(2))

    @pytest.mark.parametrize("rows", [PackedRows(SEQ_LEN, 2), PaddedRows(SEQ_LEN, 2)])
    def test_unshifted_labels(self, with_fields: Corpus, rows: Any) -> None:
        with pytest.raises(ConfigError, match=rf"shift_labels=True of {type(rows).__name__}.*lies on another rank"):
            config_for(with_fields, rows, context_parallel="contiguous")

    def test_another_mode(self, with_fields: Corpus) -> None:
        with pytest.raises(ConfigError, match=r"context_parallel must be one of \('full', 'head_tail', 'contiguous'\)"):
            config_for(with_fields, context_parallel="ring")

    @pytest.mark.parametrize(
        ("seq_len", "padded_to", "cp", "told"),
        [
            (64, None, 2, r"PackedRows\(pad_documents_to=4\);"),
            (64, 4, 4, r"PackedRows\(pad_documents_to=8\);"),
            (60, 4, 3, r"PackedRows\(pad_documents_to=12\);"),
            (64, 4, 3, r"PackedRows\(pad_documents_to=12\) and seq_len=72;"),
        ],
    )
    def test_documents_that_cannot_be_cut(
        self, with_fields: Corpus, seq_len: int, padded_to: int | None, cp: int, told: str
    ) -> None:
        rows = PackedRows(seq_len, 2, pad_documents_to=padded_to, shift_labels=True)
        config = config_for(with_fields, rows, context_parallel="head_tail")
        with pytest.raises(ConfigError, match=told):
            MegaScaleLoader(config, tree=ClientPlaceTree.from_sizes(cp=cp))
        MegaScaleLoader(config).close()

    @pytest.mark.parametrize(("padded_to", "told"), [(0, "at least 1"), (24, "take 72"), (100, "take 100")])
    def test_documents_that_would_not_fit(self, padded_to: int, told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            PackedRows(64, 2, pad_documents_to=padded_to)
