"""How fast token batches reach a training process, and at what price: our loader against PyTorch's and torchdata's.

Eight pre-tokenized Parquet sources of log-normal lengths are mixed by sample and packed into rows of 4,096 tokens,
handed out in microbatches of four rows as torch int64 `input_ids` and `position_ids`. The consumer only takes batches.
Each loader runs in a fresh process, one after another, in rounds; medians over the rounds are reported.
See benchmarks/README.md.

    python benchmarks/text_throughput.py             the full run, about 10 minutes
    python benchmarks/text_throughput.py --quick     under a minute, to see that it works
    python benchmarks/text_throughput.py --json      the last line is one JSON object
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from apart import run_apart
from process_tree import adopt_orphans, cpu_seconds, process_tree, pss_bytes
from text_corpus import PAD_ID, WEIGHTS, CorpusSize, corpus_files, write_corpus
from text_report import Summary, machine, summarise

ROWS, SEQ_LEN, MICROBATCHES = 4, 4096, 64
"""Rows of a microbatch, tokens of a row, microbatches of a step."""
SLOTS = ROWS * SEQ_LEN
LOADERS = (
    "dataloader/0",
    "dataloader/1",
    "dataloader/2",
    "stateful/0",
    "stateful/1",
    "stateful/2",
    "megascale/local",
    "megascale/ray",
)
QUICK_LOADERS = tuple(name for name in LOADERS if name not in ("stateful/0", "stateful/2"))


@dataclass(frozen=True)
class Settings:
    """How long and how often is measured."""

    rounds: int = 5
    warmup_s: float = 3.0
    """Batches taken for at least this long, and at least two steps of them, before anything is measured."""
    measure_s: float = 8.0
    corpus: CorpusSize = field(default_factory=CorpusSize)


QUICK = Settings(rounds=1, warmup_s=0.5, measure_s=1.0, corpus=CorpusSize(files=2, row_groups=2, documents=1024))


@dataclass(frozen=True)
class Measurement:
    """One loader in one round."""

    slots_per_s: float
    """Row slots, padding included."""
    fill: float
    """Share of the slots that holds tokens."""
    cpu_s_per_million_slots: float
    """Over all processes of the loader and the consumer."""
    pss_mib: float
    """Of all these processes, at the end."""
    processes: int
    first_batch_s: float
    """From the start of the loader, imports done, to its first batch."""


@contextlib.contextmanager
def open_loader(name: str, data: Path) -> Iterator[Iterator[dict[str, Any]]]:
    """Batches without end from the loader of that name."""
    family, _, kind = name.partition("/")
    if family == "megascale":
        from megascale_lightning import LoaderConfig, MegaScaleLoader, PackedRows, Source

        config = LoaderConfig(
            sources=[
                Source(source, [str(path) for path in files], weight=weight, columns=("input_ids",))
                for (source, files), weight in zip(corpus_files(data).items(), WEIGHTS, strict=True)
            ],
            rows=PackedRows(seq_len=SEQ_LEN, micro_batch_size=ROWS, pad_id=PAD_ID),
            global_batch_size=ROWS * MICROBATCHES,
            runtime=kind,
        )
        with MegaScaleLoader(config) as loader:
            yield iter(loader)
        return
    from text_baselines import PackedText, plain_loader, stateful_loader

    make = {"dataloader": plain_loader, "stateful": stateful_loader}[family]
    yield iter(make(PackedText(corpus_files(data), rows=ROWS, seq_len=SEQ_LEN), int(kind)))


def take(batches: Iterator[Any], at_least_s: float, at_least: int = 1) -> tuple[int, float]:
    """Take batches and drop them; how many, in which time."""
    taken, start = 0, time.perf_counter()
    while True:
        next(batches)
        taken += 1
        elapsed = time.perf_counter() - start
        if elapsed >= at_least_s and taken >= at_least:
            return taken, elapsed


def measure(name: str, data: Path, settings: Settings) -> Measurement:
    """Run one loader in this process; all that it starts is accounted to it."""
    import torch  # noqa: F401  (its import is no part of the first batch's time)

    adopt_orphans()
    start = time.perf_counter()
    with open_loader(name, data) as batches:
        next(batches)
        first_batch_s = time.perf_counter() - start
        take(batches, settings.warmup_s, at_least=2 * MICROBATCHES)
        cpu = cpu_seconds(os.getpid())
        taken, elapsed = take(batches, settings.measure_s)
        cpu = cpu_seconds(os.getpid()) - cpu
        pids = process_tree(os.getpid())
        pss = pss_bytes(pids)
        filled = [int((next(batches)["input_ids"] != PAD_ID).sum()) for _ in range(2 * MICROBATCHES)]
    return Measurement(
        slots_per_s=taken * SLOTS / elapsed,
        fill=sum(filled) / (len(filled) * SLOTS),
        cpu_s_per_million_slots=cpu / (taken * SLOTS / 1e6),
        pss_mib=pss / 2**20,
        processes=len(pids),
        first_batch_s=first_batch_s,
    )


def measure_apart(name: str, data: Path, options: list[str]) -> Measurement | str:
    """Measure one loader in a process of its own; the end of its error output if it fails."""
    found = run_apart([sys.executable, __file__, *options, "--data", str(data), "--child", name], timeout_s=180.0)
    return found if isinstance(found, str) else Measurement(**found)


def run(data: Path, settings: Settings, loaders: tuple[str, ...], options: list[str]) -> Summary:
    """All rounds: every loader once a round, in turn forwards and backwards."""
    before = machine()
    write_corpus(data, settings.corpus)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in loaders}
    problems: list[str] = []
    for number in range(settings.rounds):
        for name in loaders[:: -1 if number % 2 else 1]:
            found = measure_apart(name, data, options)
            if isinstance(found, str):
                problems.append(f"{name}, round {number + 1}: {found}")
                print(problems[-1], file=sys.stderr, flush=True)
                continue
            rounds[name].append(asdict(found))
            rate = f"{found.slots_per_s / 1e6:.1f} M slots/s, {found.cpu_s_per_million_slots:.4f} CPU s per M slots"
            print(f"round {number + 1}/{settings.rounds}  {name:16} {rate}", file=sys.stderr, flush=True)
    return summarise(rounds, settings=asdict(settings), machine=before, problems=problems)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round on little data")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--data", type=Path, help="folder to keep the data in (default: a temporary one)")
    parser.add_argument("--rounds", type=int, help="how often each loader is measured")
    parser.add_argument("--loaders", help="comma-separated, of: " + ", ".join(LOADERS))
    parser.add_argument("--record", type=Path, help="Markdown file to write the results to")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Run the benchmark; 1 if a loader failed."""
    args = parse()
    settings = QUICK if args.quick else Settings()
    if args.child:
        args.result.write_text(json.dumps(asdict(measure(args.child, args.data, settings))))
        return 0
    if args.rounds:
        settings = Settings(**{**vars(settings), "rounds": args.rounds})
    default = QUICK_LOADERS if args.quick else LOADERS
    loaders = tuple(args.loaders.split(",")) if args.loaders else default
    if unknown := sorted(set(loaders) - set(LOADERS)):
        raise SystemExit(f"unknown loaders {unknown}; there are {', '.join(LOADERS)}")
    options = ["--quick"] if args.quick else []
    with contextlib.ExitStack() as stack:
        folder = args.data or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        summary = run(folder / ("quick" if args.quick else "full"), settings, loaders, options)
    print(summary.table())
    if args.record:
        args.record.write_text(summary.markdown(" ".join(["python benchmarks/text_throughput.py", *sys.argv[1:]])))
    if args.json:
        print(json.dumps(summary.as_json()))
    return 1 if summary.problems else 0


if __name__ == "__main__":
    sys.exit(main())
