"""Sources that are read in slices (large compressed files, iterables): exactly once, resume, order, bad data."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from megascale_lightning import CollatedRows, DataError, LoaderConfig, MegaScaleLoader, PackedRows, PaddedRows, Source
from megascale_lightning.errors import EmptySourceError
from megascale_lightning.sources import build_manifest
from megascale_lightning.sources.stores import plaintext

from .harness import Step, World, count_tokens, run_world

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::megascale_lightning.errors.MegaScaleWarning"),
]

FILES = 3
PER_FILE = 70


@pytest.fixture(autouse=True)
def _all_compressed_files_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plaintext, "SLICED_BYTES", 100)


def sample_of(number: int) -> list[int]:
    """Tokens that name their sample: at most 9 of them, 10 x (number + 1) on."""
    return list(range(10 * (number + 1), 10 * (number + 1) + 1 + number * 7 % 9))


def write_shards(folder: Path, codec: str = "zstd", suffix: str = ".zst") -> str:
    for file in range(FILES):
        numbers = range(file * PER_FILE, (file + 1) * PER_FILE)
        with (
            pa.OSFile(str(folder / f"ü {file}.jsonl{suffix}"), "wb") as sink,
            pa.CompressedOutputStream(sink, codec) as stream,
        ):
            for number in numbers:
                stream.write(json.dumps({"input_ids": sample_of(number), "pad": "x" * (number % 5)}).encode() + b"\n")
    return str(folder / f"*.jsonl{suffix}")


def stream_samples() -> Iterator[dict[str, Any]]:
    """64 samples, whose tokens are drawn from the global generator; four slices of 16, and an empty one."""
    for number in range(64):
        yield {"input_ids": [1000 * (number + 1) + random.randrange(10, 1000), *[7] * (5 + number % 7)]}


def config_of(*sources: Source, **changes: Any) -> LoaderConfig:
    base: dict[str, Any] = {
        "sources": sources,
        "rows": PackedRows(16, 2, pack_ahead=6),
        "global_batch_size": 8,
        "seed": 3,
        "runtime": "local",
        "part_bytes": 700,
        "prefetch_steps": 2,
        "plan_window": 3,
    }
    return LoaderConfig(**(base | changes))


SHARDS = "shards"
STREAM = "stream"


def sources_of(kind: str, folder: Path, epochs: int | None = 2) -> list[Source]:
    if kind == STREAM:
        return [Source("stream", stream_samples, epochs=epochs, format_options={"slice_records": 16})]
    return [Source("shards", write_shards(folder), epochs=epochs)]


def certificates_of(steps: list[Step]) -> list[str]:
    return [step.certificate for step in steps]


def test_the_shards_are_sliced(tmp_path: Path) -> None:
    manifest = build_manifest(sources_of(SHARDS, tmp_path)[0])
    assert (manifest.sliced, manifest.num_units, manifest.num_records) == (True, FILES, -1)


@pytest.mark.parametrize(("codec", "suffix"), [("zstd", ".zst"), ("gzip", ".gz"), ("bz2", ".bz2"), ("lz4", ".lz4")])
def test_every_sample_of_two_epochs(tmp_path: Path, codec: str, suffix: str) -> None:
    config = config_of(Source("shards", write_shards(tmp_path, codec, suffix), epochs=2))
    steps = run_world(config, dp=2)
    tokens = count_tokens(steps)
    expected = [token for number in range(FILES * PER_FILE) for token in sample_of(number)]
    assert sorted(tokens) == expected
    assert set(tokens.values()) == {2}
    ids = [piece[1:4] for step in steps for piece in step.pieces()]
    assert len(set(ids)) == 2 * FILES * PER_FILE
    assert {row for _, _, row in ids} == set(range(PER_FILE)), "rows are numbered through the file"


def test_the_codec_does_not_change_the_order(tmp_path: Path) -> None:
    """Slices are of the plain content, so the codec does not matter."""
    found = []
    for codec, suffix in (("zstd", ".zst"), ("gzip", ".gz")):
        folder = tmp_path / codec
        folder.mkdir()
        steps = run_world(config_of(Source("shards", write_shards(folder, codec, suffix), epochs=1)))
        found.append(certificates_of(steps))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", [SHARDS, STREAM])
def test_the_order_does_not_depend_on_loaders_ranks_or_read_ahead(tmp_path: Path, kind: str) -> None:
    sources = sources_of(kind, tmp_path)
    alone = run_world(config_of(*sources, num_loaders=1, prefetch_steps=0, plan_window=1))
    for changes, dp in (({"num_loaders": 2}, 2), ({"num_loaders": 3, "prefetch_steps": 4, "plan_window": 8}, 4)):
        steps = run_world(config_of(*sources, **changes), dp=dp)
        assert certificates_of(steps) == certificates_of(alone)
        assert count_tokens(steps) == count_tokens(alone)


@pytest.mark.parametrize("rows", [PackedRows(16, 2, pack_ahead=6), PaddedRows(16, 2)], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", [SHARDS, STREAM])
def test_resume_at_every_step(tmp_path: Path, kind: str, rows: Any) -> None:
    config = config_of(*sources_of(kind, tmp_path), rows=rows)
    with World(config, 1, keep_states=True) as world:
        steps = world.steps()
    assert len(steps) > 8
    for at, step in enumerate(steps[:-1]):
        with World(config, 2, state=step.state) as resumed:
            following = resumed.steps(2)
        expected = steps[at + 1 : at + 3]
        assert certificates_of(following) == certificates_of(expected)
        assert count_tokens(following) == count_tokens(expected), "the same draws"


def test_a_stream_of_two_epochs(tmp_path: Path) -> None:
    steps = run_world(config_of(*sources_of(STREAM, tmp_path)))
    tokens = count_tokens(steps)
    drawn = sorted(token for token in tokens if token != 7)
    assert [token // 1000 for token in drawn] == sorted([*range(1, 65), *range(1, 65)]), "each epoch draws anew"
    assert tokens[7] == 2 * sum(5 + number % 7 for number in range(64))
    before = random.getstate()
    run_world(config_of(*sources_of(STREAM, tmp_path)), steps=2)
    assert random.getstate() == before


def test_a_small_buffer_reads_slices_again(tmp_path: Path) -> None:
    """What was let go of is read again from the beginning: slower, the same samples."""
    config = config_of(*sources_of(SHARDS, tmp_path), *sources_of(STREAM, tmp_path))
    assert count_tokens(run_world(replace(config, loader_buffer_bytes=1))) == count_tokens(run_world(config))


@pytest.mark.parametrize("kind", [SHARDS, STREAM])
def test_a_loader_that_dies_before_every_step_changes_no_batch(tmp_path: Path, kind: str) -> None:
    """Its replacement starts over and skips."""
    config = config_of(*sources_of(kind, tmp_path))
    undisturbed = run_world(config)
    found = []
    with World(config) as world:
        runtime = world.loaders[0]._session._runtime
        while step := world.steps(1):
            found += step
            runtime.kill("loader/0")
    assert certificates_of(found) == certificates_of(undisturbed)
    assert count_tokens(found) == count_tokens(undisturbed)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_two_ray_loaders_give_the_local_order(tmp_path: Path) -> None:
    config = config_of(*sources_of(SHARDS, tmp_path), *sources_of(STREAM, tmp_path))
    local = run_world(config)
    on_ray = replace(config, runtime="ray", num_loaders=2)
    with World(on_ray, 2, keep_states=True) as world:
        steps = world.steps(6)
    with World(on_ray, 1, state=steps[-1].state) as world:
        steps += world.steps()
    assert certificates_of(steps) == certificates_of(local)
    assert count_tokens(steps) == count_tokens(local)


class TestBroken:
    def shards(self, tmp_path: Path, **changes: Any) -> Source:
        pattern = write_shards(tmp_path)
        second = sorted(tmp_path.iterdir())[1]
        second.write_bytes(second.read_bytes()[:-9])
        return Source("shards", pattern, epochs=1, **changes)

    def test_a_file_cut_short_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(
            DataError, match=r"source 'shards'.*ü 1\.jsonl\.zst.*the file ends in the middle at plain byte"
        ):
            run_world(config_of(self.shards(tmp_path)))

    def test_or_one_dropped_record(self, tmp_path: Path) -> None:
        with World(config_of(self.shards(tmp_path, on_error="skip"))) as world:
            steps = world.steps()
            dropped = world.state()["sources"]["shards"]["dropped"]
        assert list(dropped.values()) == [1]
        found = {token // 10 - 1 for token in count_tokens(steps)}
        good = set(range(PER_FILE)) | set(range(2 * PER_FILE, 3 * PER_FILE))
        assert found >= good
        assert found - good == set(range(PER_FILE, PER_FILE + len(found - good))), "those before the break"


def collate(samples: list[Any]) -> list[Any]:
    return samples


def test_text_and_any_objects_are_collated(tmp_path: Path) -> None:
    (tmp_path / "a.txt.zst").write_bytes(
        pa.compress(b"\n".join(b"line %d" % i for i in range(40)), "zstd", asbytes=True)
    )
    sources = [
        Source("text", str(tmp_path / "*.zst"), epochs=1),
        Source("numbers", lambda: iter(range(24)), epochs=1, format_options={"slice_records": 8}),
    ]
    config = config_of(*sources, rows=CollatedRows(2, collate_fn=collate), global_batch_size=4)
    with MegaScaleLoader(config) as loader:
        found = [sample for batch in loader for sample in loader_batch(batch)]
    texts = [sample["text"] for sample in found if isinstance(sample, dict)]
    numbers = [sample for sample in found if isinstance(sample, int)]
    assert sorted(texts) == sorted(f"line {i}" for i in range(40))
    assert sorted(numbers) == list(range(24))


def loader_batch(batch: Any) -> list[Any]:
    return list(batch)


def test_an_iterable_without_records(tmp_path: Path) -> None:
    with pytest.raises(EmptySourceError, match="nothing"):
        run_world(config_of(Source("nothing", lambda: iter([]), epochs=1)))


def test_an_endless_iterable(tmp_path: Path) -> None:
    def endless() -> Iterator[dict[str, Any]]:
        number = 0
        while True:
            number += 1
            yield {"input_ids": [number]}

    steps = run_world(config_of(Source("endless", endless), rows=PaddedRows(4, 2)), steps=400)
    tokens = count_tokens(steps)
    assert len(tokens) == 3200
    assert set(tokens.values()) == {1}
