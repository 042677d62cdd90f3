"""Law 6 as the object store has it: however many ranks of a machine fetch a window, its bytes lie there once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from megascale_lightning import ClientPlaceTree, LoaderConfig, PackedRows
from megascale_lightning.client.session import LoadingSession
from megascale_lightning.types import BatchWindow

from .data import make_corpus

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.usefixtures("shared_ray")]

SEQ_LEN = 8192
TREE = ClientPlaceTree.from_sizes(dp=2, cp=2, tp=2)


def bytes_stored() -> int:
    """Used bytes of the object stores of this Ray."""
    import ray
    from ray._private import internal_api

    address = ray.get_runtime_context().gcs_address
    reply = internal_api.get_memory_info_reply(internal_api.get_state_from_address(address))
    return int(reply.store_stats.object_store_bytes_used)


def wait_until_stored(least: float, most: float, timeout_s: float = 60.0) -> None:
    """Blocks of samples on their way to the constructor are in the store for a moment, too."""
    end = time.monotonic() + timeout_s
    while not least <= (found := bytes_stored()) <= most:
        assert time.monotonic() < end, f"{found} bytes are stored, not {least} to {most}"
        time.sleep(0.1)


def fetch(session: LoadingSession, rank: int) -> BatchWindow:
    while True:
        answer = session.port.fetch("train", "g", TREE.data_group(rank), rank, 0, -1)
        if isinstance(answer, BatchWindow):
            return answer


def test_ranks_of_a_machine_share_one_copy(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, {"web": 500, "code": 500}, seq_len=SEQ_LEN)
    config = LoaderConfig(
        sources=corpus.sources(epochs=None),
        rows=PackedRows(SEQ_LEN, 8, pack_ahead=16),
        global_batch_size=64,
        plan_window=1,
        prefetch_steps=1,
    )
    session = LoadingSession(config, tree=TREE)
    before = bytes_stored()
    for rank in TREE.ranks:
        session.port.open("train", "g", rank, None)
    sizes: dict[int, int] = {}
    for number, rank in enumerate(sorted(TREE.ranks, key=TREE.data_group), 1):
        window = fetch(session, rank)
        sizes[TREE.data_group(rank)] = sum(values.nbytes for values in (*window.tokens.values(), window.pieces))
        expected = sum(sizes.values())
        assert expected > 500_000 * len(sizes)
        wait_until_stored(before + 0.98 * expected, before + 1.02 * expected + 20_000 * len(sizes))
        constructor: Any = session.stats()["constructor/0"]
        assert constructor["role"]["fetches"] == number
        assert constructor["shared"] == len(sizes)
    assert len(sizes) == 2
    for rank in TREE.ranks:
        session.port.close("train", "g", rank)
    wait_until_stored(0, before + 20_000)
    session.close()
