"""The command line of the tokenizer benchmark, and the measurement of one loader in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from apart import run_apart
from process_tree import adopt_orphans, cpu_seconds
from text_report import commit, machine, versions
from tokenize_corpus import FORMATS, write_corpus

__all__ = ["main"]

LOADERS = ("bare", "megascale", "dataloader")
"""In the order of a round: what is compared to within a tenth is measured side by side."""
WORKERS = 2
"""Threads that encode: of the library in `bare`, of ours, and the DataLoader's workers with one each."""


@dataclass(frozen=True)
class Settings:
    """How much and how often is measured."""

    rounds: int = 5
    characters: int = 60_000_000


QUICK = Settings(rounds=1, characters=3_000_000)


@dataclass(frozen=True)
class Measurement:
    """One pass over the corpus with one loader."""

    tokens: int
    wall_s: float
    """From the first request for a batch, everything started, to the end of the data."""
    cpu_s: float
    """Of all processes, within that time."""
    to_first_s: float
    """Of that time, until the first batch."""


def measure(name: str, root: Path) -> Measurement:
    """Run one loader in this process, over all of the corpus once."""
    loader, _, kind = name.partition("/")
    adopt_orphans()
    if loader == "bare":
        return _measured(_count_alone(root, kind))
    import torch  # noqa: F401  (its import is no part of what is measured)

    return _measured(_count_batches(loader, root, kind))


def _count_alone(root: Path, kind: str) -> Any:
    from tokenize_loaders import encode_alone

    return encode_alone(root, kind)


def _count_batches(loader: str, root: Path, kind: str) -> Any:
    from tokenize_loaders import PAD_ID, our_batches, plain_batches

    if loader == "dataloader":
        yield 0
        batches = plain_batches(root, kind, WORKERS)
    else:
        batches = our_batches(root, kind, WORKERS)
        next(batches)
        yield 0
    for batch in batches:
        yield int((batch["input_ids"] != PAD_ID).sum()) if batch else 0


def _measured(counts: Any) -> Measurement:
    next(counts)
    cpu, start = cpu_seconds(os.getpid()), time.perf_counter()
    tokens = next(counts)
    to_first = time.perf_counter() - start
    wall, used = to_first, 0.0
    for count in counts:
        tokens += count
        wall = time.perf_counter() - start
        if not count:  # the last, before the loader ends its processes, with which their time is gone
            used = cpu_seconds(os.getpid()) - cpu
    used = used or cpu_seconds(os.getpid()) - cpu
    return Measurement(tokens=tokens, wall_s=wall, cpu_s=used, to_first_s=to_first)


def measure_apart(name: str, root: Path) -> Measurement | str:
    """Measure one loader in a process of its own; the end of its error output if it fails."""
    threads = WORKERS if name.startswith("bare") else 1
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": str(threads > 1).lower()}
    script = str(Path(__file__).with_name("tokenize.py"))
    found = run_apart([sys.executable, script, "--data", str(root), "--child", name], 240.0, environment)
    return found if isinstance(found, str) else Measurement(**found)


def run(root: Path, settings: Settings) -> dict[str, Any]:
    """All rounds: every loader once a round over every format, in turn forwards and backwards."""
    before = machine()
    write_corpus(root, settings.characters)
    names = [f"{loader}/{kind}" for kind in FORMATS for loader in LOADERS]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    problems = []
    for number in range(settings.rounds):
        for name in names[:: -1 if number % 2 else 1]:
            found = measure_apart(name, root)
            if isinstance(found, str):
                problems.append(f"{name}, round {number + 1}: {found}")
                print(problems[-1], file=sys.stderr, flush=True)
                continue
            rounds[name].append({**asdict(found), "tokens_per_s": found.tokens / found.wall_s})
            rate = f"{found.tokens / found.wall_s / 1e6:.2f} M tokens/s, {found.cpu_s:.1f} CPU s, {found.tokens} tokens"
            print(f"round {number + 1}/{settings.rounds}  {name:20} {rate}", file=sys.stderr, flush=True)
    medians = {
        name: {what: median(one[what] for one in found) for what in found[0]} for name, found in rounds.items() if found
    }
    shares = {kind: _ratio(rounds, f"megascale/{kind}", f"bare/{kind}") for kind in FORMATS}
    ratios = {kind: _ratio(rounds, f"megascale/{kind}", f"dataloader/{kind}") for kind in FORMATS}
    return {
        "share_of_bare": _least(shares),
        "vs_dataloader": _least(ratios),
        "share_of_bare_by_format": shares,
        "vs_dataloader_by_format": ratios,
        "cpu_vs_bare": _least({kind: _ratio(rounds, f"megascale/{kind}", f"bare/{kind}", "cpu_s") for kind in FORMATS}),
        "loaders": medians,
        "rounds": rounds,
        "settings": {**asdict(settings), "workers": WORKERS},
        "versions": versions(),
        "machine": before,
        "problems": problems,
    }


def _ratio(
    rounds: dict[str, list[dict[str, float]]], ours: str, theirs: str, what: str = "tokens_per_s"
) -> float | None:
    """Ours over theirs, the median over the rounds, in each of which both saw the same machine; None: one failed."""
    pairs = zip(rounds[ours], rounds[theirs], strict=False)
    found = [one[what] / other[what] for one, other in pairs]
    return round(median(found), 3) if found else None


def _least(ratios: dict[str, float | None]) -> float | None:
    return None if None in ratios.values() else min(ratio for ratio in ratios.values() if ratio is not None)


def table(found: dict[str, Any]) -> str:
    """The medians as a Markdown table."""
    lines = ["| loader | M tokens/s | CPU s per M tokens | first batch s |", "|---|---|---|---|"]
    for name, one in found["loaders"].items():
        cpu = one["cpu_s"] / one["tokens"] * 1e6
        lines.append(f"| {name} | {one['tokens_per_s'] / 1e6:.2f} | {cpu:.2f} | {one['to_first_s']:.1f} |")
    ratios = {**found["share_of_bare_by_format"]}, {**found["vs_dataloader_by_format"]}
    lines += ["", f"Share of bare `encode_batch`: {ratios[0]}; over the DataLoader with {WORKERS} workers: {ratios[1]}"]
    return "\n".join(lines)


def markdown(found: dict[str, Any], command: str) -> str:
    """A page to keep under benchmarks/results/."""
    about = {"command": f"`{command}`", "commit": commit(), **found["machine"], **found["versions"]}
    spread = [
        f"- {name}: " + ", ".join(f"{one['tokens_per_s'] / 1e6:.2f}" for one in rounds)
        for name, rounds in found["rounds"].items()
    ]
    parts = [
        "# Raw text through a tokenizer",
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        table(found),
        "M tokens/s in each round:",
        "\n".join(spread),
        *found["problems"],
    ]
    return "\n\n".join(parts) + "\n"


def main(description: str | None = None) -> int:
    """Run the benchmark; 1 if a loader failed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round on little data")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--data", type=Path, help="folder to keep the data in (default: a temporary one)")
    parser.add_argument("--rounds", type=int, help="how often each loader is measured")
    parser.add_argument("--record", type=Path, help="Markdown file to write the results to")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        args.result.write_text(json.dumps(asdict(measure(args.child, args.data))))
        return 0
    settings = QUICK if args.quick else Settings()
    if args.rounds:
        settings = Settings(rounds=args.rounds, characters=settings.characters)
    with contextlib.ExitStack() as stack:
        folder = args.data or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = run(folder / ("quick" if args.quick else "full"), settings)
    print(table(found))
    if args.record:
        args.record.write_text(markdown(found, " ".join(["python benchmarks/tokenize.py", *sys.argv[1:]])))
    if args.json:
        print(json.dumps(found))
    return 1 if found["problems"] else 0
