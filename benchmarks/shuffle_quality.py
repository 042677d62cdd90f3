"""How well an epoch is shuffled, and what that costs: this package's orders beside those of other loaders.

    python benchmarks/shuffle_quality.py [--quick] [--json] [--record FILE]

No data are read: an order depends on the sizes of files and units alone. What a peer's package gives is asked of the
package itself; one that is not installed is left out, and named.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import sys
import time
from dataclasses import asdict
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from shuffle_measures import held_units, measure_order
from shuffle_orders import ORDERS, Corpus, Method
from text_report import commit, machine, versions

FULL = Corpus(files=64, units_per_file=4, records_per_unit=4000, record_bytes=4096)
QUICK = Corpus(files=16, units_per_file=4, records_per_unit=1000, record_bytes=16384)
BATCH = 256
DISTRIBUTIONS = {"streaming": "mosaicml-streaming"}
COLUMNS = {
    "rank_correlation": ("rank correlation", "{:+.3f}"),
    "neighbours_1": ("neighbours 1 apart", "{:.4%}"),
    "neighbours_in_batch": ("neighbours in a batch", "{:.3%}"),
    "files_per_batch": ("files in a batch", "{:.1f}"),
    "file_spread": ("spread of a file", "{:.3f}"),
    "held_mib": ("held MiB", "{:,.0f}"),
    "cpu_us_per_sample": ("CPU us per sample", "{:.3f}"),
    "memory_mib_per_million": ("memory MiB per M samples", "{:.1f}"),
}

MEANINGS = {
    "rank correlation": "Spearman's, of the position in the epoch and the place in the files",
    "neighbours 1 apart": "of the pairs that are stored next to each other, the share that still is",
    "neighbours in a batch": "of the same pairs, the share that is in one batch",
    "files in a batch": "from how many files the records of a batch come, on average",
    "spread of a file": "how far the records of a file reach over the epoch: 1 as far as all do, 0 all in one place",
    "held MiB": "stored bytes of the units, files or records that are begun and not done with at once, at most; 0: "
    "each record is read by itself, at random",
}


def load(method: Method) -> bool:
    """Import what a method needs; False if it is not installed."""
    try:
        if method.package:
            importlib.import_module(method.package)
    except ImportError:
        return False
    return True


def run(method: Method, corpus: Corpus) -> dict[str, Any]:
    """Order one epoch in a process of its own; what is measured of it."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(method, corpus, sender))
    child.start()
    sender.close()
    try:
        found: dict[str, Any] = receiver.recv()
    except EOFError:
        found = {}
    child.join()
    if child.exitcode or not found:
        raise RuntimeError(f"exit status {child.exitcode}")
    return found


def _measure(method: Method, corpus: Corpus, sender: Connection) -> None:
    out = np.ones(corpus.records, np.int64)  # not zeros, whose memory comes with their first use
    method.fill(Corpus(2, 1, 64, 1024), np.zeros(128, np.int64))  # imports, and what is made once
    gc.collect()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    cpu = time.process_time()
    method.fill(corpus, out)
    cpu = time.process_time() - cpu
    peak = _memory("VmHWM")
    sender.send(
        {
            **measure_order(out, corpus.group(corpus.records_per_file), BATCH),
            "held_mib": _held(method, corpus, out) * corpus.record_bytes / 2**20,
            "cpu_us_per_sample": cpu / corpus.records * 1e6,
            "memory_mib_per_million": max(peak - before, 0) / 2**10 / corpus.records * 1e6,
        }
    )


def _held(method: Method, corpus: Corpus, order: np.ndarray[Any, Any]) -> int:
    """Records that are read before they are due, at most."""
    sizes = {"unit": corpus.records_per_unit, "file": corpus.records_per_file}
    if method.held in sizes:
        return held_units(order, corpus.group(sizes[method.held])) * sizes[method.held]
    return int(method.held or 0)


def _memory(field: str) -> int:
    """KiB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def table(rows: dict[str, dict[str, Any]]) -> str:
    """As Markdown."""
    titles = " | ".join(title for title, _ in COLUMNS.values())
    lines = [f"| order | {titles} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, found in rows.items():
        lines.append(f"| {name} | " + " | ".join(form.format(found[key]) for key, (_, form) in COLUMNS.items()) + " |")
    return "\n".join(lines)


def packages() -> dict[str, str]:
    """Versions of the peers that are there."""
    names = sorted({method.package for method in ORDERS.values()} - {"", "torch"})
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(DISTRIBUTIONS.get(name, name))
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def page(summary: dict[str, Any], command: str) -> str:
    """What is kept under benchmarks/results/."""
    corpus = summary["corpus"]
    about = {"command": f"`{command}`", "commit": commit(), **summary["machine"], **summary["versions"]}
    per_file = corpus["units_per_file"] * corpus["records_per_unit"]
    parts = [
        "# Shuffling quality",
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        f"{corpus['files'] * per_file:,} records of {corpus['record_bytes']:,} stored bytes in {corpus['files']} files "
        f"of {corpus['units_per_file']} units (row groups); batches of {summary['batch']}. The order of one epoch, on "
        "one rank with one worker. The figures of quality and `held MiB` are exact and do not depend on the machine. "
        "CPU and memory were measured on a machine whose cores others used at the same time; of both, only what making "
        "the order takes is counted, and reading is not.",
        "\n".join(f"- {title}: {what}" for title, what in MEANINGS.items()),
        table(summary["orders"]),
        *summary["problems"],
    ]
    return "\n\n".join(parts) + "\n"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few records, to see that it works")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--record", type=Path, help="Markdown file to write the results to")
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; 1 if an order failed. One whose package is missing is no failure."""
    args = parse()
    corpus = QUICK if args.quick else FULL
    before = machine()
    rows: dict[str, dict[str, Any]] = {}
    problems, failed = [], False
    for name, method in ORDERS.items():
        if not load(method):
            problems.append(f"{name}: {method.package} is not installed")
            continue
        try:
            rows[name] = run(method, corpus)
        except RuntimeError as error:
            problems.append(f"{name}: {error}")
            failed = True
        print(problems[-1] if name not in rows else f"{name} done", file=sys.stderr, flush=True)
    summary = {
        "orders": rows,
        "corpus": asdict(corpus),
        "batch": BATCH,
        "versions": {**versions(), **packages()},
        "machine": before,
        "problems": problems,
    }
    print(table(rows))
    print(*problems, sep="\n")
    if args.record:
        args.record.write_text(page(summary, " ".join(["python benchmarks/shuffle_quality.py", *sys.argv[1:]])))
    if args.json:
        print(json.dumps(summary))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
