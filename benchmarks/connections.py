"""How many connections a store sees at 1, 4 and 8 ranks: our loader, and DataLoaders that read the same files.

A web server on this machine, which knows range requests and counts its connections, holds Parquet files of tokens. All
ranks of a job take batches from it; from the first batch of the last rank on, the most that is open at once is counted,
and before that the most that the start took. Ours: one `MegaScaleLoader` per rank, with the roles in Ray actors. Beside
it: one `torch.utils.data.DataLoader` with two workers per rank, each worker with its share of the files, read through
fsspec. All ranks of a job live in one process here; their workers and actors are processes of their own.

    python benchmarks/connections.py             16 files of 4 MB, a few minutes
    python benchmarks/connections.py --quick     small files
    python benchmarks/connections.py --json      the last line is one JSON object
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from range_server import RangeServer
from text_report import commit, machine, versions

WORKERS = 2
LOADERS = ("megascale/ray", f"dataloader/{WORKERS}")
SEQ_LEN, ROWS = 2048, 2
BLOCK_BYTES = 64 << 10
"""What a worker of a DataLoader asks for at once. A client closes a connection that is idle for 15 s: with the 5 MB of
fsspec a worker that has read ahead would be counted or not, as the machine is slow or fast."""


@dataclass(frozen=True)
class Settings:
    """What is read."""

    files: int = 16
    documents: int = 2000
    """Of each file; 512 tokens of 4 bytes."""
    batches: int = 200
    """That each rank takes while connections are counted."""


QUICK = Settings(documents=200, batches=20)


@dataclass(frozen=True)
class Measurement:
    """One loader at one number of ranks."""

    connections: int
    """The most that were open at once while batches were taken."""
    at_start: int
    """The most that were open at once until every rank had its first batch."""
    requests: int
    mib: float
    """Sent by the server."""


def write_files(folder: Path, settings: Settings) -> None:
    """The corpus."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    for index in range(settings.files):
        tokens = rng.integers(0, 50_000, settings.documents * 512, dtype=np.int32)
        offsets = np.arange(0, len(tokens) + 1, 512, dtype=np.int32)
        table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)})
        pq.write_table(table, folder / f"{index:03}.parquet", row_group_size=max(settings.documents // 16, 1))


def open_ours(url: str, files: int, ranks: int) -> Iterator[Any]:
    """Batches of all ranks in turn."""
    from megascale_lightning import ClientPlaceTree, LoaderConfig, MegaScaleLoader, PackedRows, Source

    config = LoaderConfig(
        sources=[Source("web", f"{url}/{{000..{files - 1:03}}}.parquet", columns=("input_ids",))],
        rows=PackedRows(seq_len=SEQ_LEN, micro_batch_size=ROWS),
        num_loaders=1,
    )
    tree = ClientPlaceTree.from_sizes(dp=ranks)
    loaders = [MegaScaleLoader(config, tree=tree, rank=rank) for rank in range(ranks)]
    iterators = [iter(loader) for loader in loaders]
    try:
        while True:
            for iterator in iterators:
                yield next(iterator)
    finally:
        for loader in loaders:
            loader.close()


def open_plain(url: str, files: int, ranks: int) -> Iterator[Any]:
    """The same, of DataLoaders."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Tokens(IterableDataset[Any]):
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __iter__(self) -> Iterator[Any]:
            import fsspec
            import numpy as np
            import pyarrow.parquet as pq

            info = get_worker_info()
            assert info is not None
            mine = list(range(files))[self.rank * WORKERS + info.id :: ranks * WORKERS] or [self.rank % files]
            fs = fsspec.filesystem("http")
            while True:
                for index in mine:
                    with fs.open(f"{url}/{index:03}.parquet", block_size=BLOCK_BYTES) as stream:
                        file = pq.ParquetFile(stream)
                        for group in range(file.num_row_groups):
                            tokens = file.read_row_group(group)["input_ids"].combine_chunks().flatten()
                            rows = np.array(tokens)[: len(tokens) // SEQ_LEN * SEQ_LEN].reshape(-1, SEQ_LEN)
                            yield from torch.from_numpy(rows.astype(np.int64))

    loaders = [DataLoader(Tokens(rank), batch_size=ROWS, num_workers=WORKERS) for rank in range(ranks)]
    iterators = [iter(loader) for loader in loaders]
    while True:
        for iterator in iterators:
            yield next(iterator)


def serve_child(name: str, url: str, ranks: int, settings: Settings) -> None:
    """Take batches on all ranks, say so, and keep all open until a line comes."""
    make = open_ours if name == LOADERS[0] else open_plain
    batches = make(url, settings.files, ranks)
    for word, count in (("started", 1), ("taken", settings.batches)):
        for _ in range(count * ranks):
            next(batches)
        print(word, flush=True)
    sys.stdin.readline()
    batches.close()  # type: ignore[attr-defined]


def measure(server: RangeServer, name: str, ranks: int, options: list[str]) -> Measurement | str:
    """One loader in a process of its own; the end of its error output if it fails."""
    command = [sys.executable, __file__, *options, "--child", name, "--url", server.url, "--ranks", str(ranks)]
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        assert child.stdout is not None
        ready = any(line.strip() == "started" for line in child.stdout)
        at_start, asked, sent = server.peak_connections, len(server.requests), server.bytes_sent
        server.reset()
        ready = any(line.strip() == "taken" for line in child.stdout) and ready
        asked, sent = asked + len(server.requests), sent + server.bytes_sent
        found = Measurement(server.peak_connections, at_start, asked, round(sent / 2**20, 1))
        try:
            child.communicate("\n", timeout=60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
        if ready and child.returncode == 0:
            return found
        log.seek(0)
        return f"exit status {child.returncode}: " + " | ".join(log.read().splitlines()[-3:])


def table(found: dict[str, dict[int, Measurement]]) -> str:
    """What was counted as a Markdown table."""
    lines = ["| loader | ranks | connections | at the start | requests | MiB sent |", "|---|---|---|---|---|---|"]
    for name, by_ranks in found.items():
        for ranks, one in by_ranks.items():
            lines.append(f"| {name} | {ranks} | {one.connections} | {one.at_start} | {one.requests} | {one.mib} |")
    return "\n".join(lines)


def summarise(found: dict[str, dict[int, Measurement]]) -> dict[str, Any]:
    """Connections, and those at the most ranks over those at the fewest."""
    growth = {}
    for name, by_ranks in found.items():
        counts = [by_ranks[ranks].connections for ranks in sorted(by_ranks)]
        growth[name] = round(counts[-1] / counts[0], 2) if counts and counts[0] else None
    return {
        "connections": {name: {str(ranks): one.connections for ranks, one in by.items()} for name, by in found.items()},
        "growth": growth,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small files, few batches")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--counts", default="1,4,8", help="numbers of ranks")
    parser.add_argument("--record", type=Path, help="Markdown file to write the results to")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Run the benchmark; 1 if a loader failed."""
    args = parse()
    settings = QUICK if args.quick else Settings()
    if args.child:
        serve_child(args.child, args.url, args.ranks, settings)
        return 0
    options = ["--quick"] if args.quick else []
    before = machine()
    found: dict[str, dict[int, Measurement]] = {name: {} for name in LOADERS}
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), settings)
        for name in LOADERS:
            for ranks in map(int, args.counts.split(",")):
                # A server of its own: what the last one's clients left open counts nowhere.
                with RangeServer(Path(folder)) as server:
                    one = measure(server, name, ranks, options)
                if isinstance(one, str):
                    problems.append(f"{name}, {ranks} ranks: {one}")
                    print(problems[-1], file=sys.stderr, flush=True)
                else:
                    found[name][ranks] = one
                    print(f"{name:14} {ranks} ranks: {one.connections} connections", file=sys.stderr, flush=True)
    summary = summarise(found)
    text = table(found)
    print(text)
    if args.record:
        command = " ".join(["python benchmarks/connections.py", *sys.argv[1:]])
        about = {"command": f"`{command}`", "commit": commit(), **before, **versions()}
        about_lines = "\n".join(f"- {name}: {value}" for name, value in about.items())
        args.record.write_text("\n\n".join(["# Connections to a store", about_lines, text, *problems]) + "\n")
    if args.json:
        rows = {name: {str(ranks): asdict(one) for ranks, one in by.items()} for name, by in found.items()}
        about = {"settings": asdict(settings), "versions": versions(), "machine": before, "problems": problems}
        print(json.dumps({**summary, "measurements": rows, **about}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
