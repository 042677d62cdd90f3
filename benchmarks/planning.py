"""How long the planner takes for a step, and how even and how full its rows are, at the sizes of large trainers.

See benchmarks/README.md.

    python benchmarks/planning.py             all sizes, about a minute
    python benchmarks/planning.py --quick     fewer steps
    python benchmarks/planning.py --json      the last line is one JSON object
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from planning_metadata import Shape, describe, stream_of
from text_report import commit, machine, versions

from megascale_lightning.planning.planner import Planner
from megascale_lightning.types import NotYet, StepPlan

SHAPES = {
    "64_ranks": Shape(ranks=64, groups=16, sources=306, samples=4_096),
    "256_ranks": Shape(ranks=256, groups=32, sources=306, samples=8_192),
    "1024_ranks": Shape(ranks=1024, groups=128, sources=306, samples=16_384),
    "4096_ranks": Shape(ranks=4096, groups=512, sources=306, samples=65_536),
}
STEPS, QUICK_STEPS = 20, 5


def measure(shape: Shape, steps: int) -> dict[str, float]:
    """Plan so many steps, the metadata at hand; the first is no part of the figures."""
    planner = Planner({"train": stream_of(shape)}, lambda key: "loader/0")
    planner.open("train", "generation", 0, None)
    times, plans = [], []
    gc.disable()  # its pauses depend on what else the process holds
    for step in range(steps + 1):
        while True:
            start = time.perf_counter()
            answer = planner.plan("train", "generation", step, 1)
            spent = time.perf_counter() - start
            _serve(planner, shape)
            if not isinstance(answer, NotYet):
                break
        times.append(spent)
        plans.append(answer.steps[0])
        planner.consumed("train", "generation", {0: step})
    gc.enable()
    return {
        "ranks": shape.ranks,
        "groups": shape.groups,
        "samples": median(len(plan.pieces) for plan in plans[1:]),
        "rows": len(plans[0].row_offsets) - 1,
        "plan_ms": round(median(times[1:]) * 1e3, 2),
        "worst_ms": round(max(times[1:]) * 1e3, 2),
        "us_per_sample": round(median(times[1:]) / median(len(plan.pieces) for plan in plans[1:]) * 1e6, 2),
        "max_over_bound": round(max(plan.balance["max_over_bound"] for plan in plans), 4),
        "max_over_mean": round(max(plan.balance["max_over_mean"] for plan in plans), 4),
        "max_over_mean_before": round(median(plan.balance["max_over_mean_before"] for plan in plans), 4),
        "packing_efficiency": round(min(_fill(plan, shape) for plan in plans), 4),
    }


def _fill(plan: StepPlan, shape: Shape) -> float:
    """Share of the rows' tokens that are no padding."""
    return float(plan.pieces["length"].sum(dtype=np.int64)) / ((len(plan.row_offsets) - 1) * shape.row_tokens)


def _serve(planner: Planner, shape: Shape) -> None:
    for call in planner.wants():
        planner.answered(call, describe(call.args[0], shape) if call.method == "describe" else None)


def run(steps: int) -> dict[str, Any]:
    """All sizes, one after another, on one core."""
    before = machine()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found = {}
    for name, shape in SHAPES.items():
        found[name] = {**measure(shape, steps), "settings": asdict(shape)}
        shown = {key: value for key, value in found[name].items() if key != "settings"}
        print(f"{name}: {shown}", file=sys.stderr, flush=True)
    return {
        "plan_ms": {name: one["plan_ms"] for name, one in found.items()},
        "max_over_bound": max(one["max_over_bound"] for one in found.values()),
        "packing_efficiency": min(one["packing_efficiency"] for one in found.values()),
        "shapes": found,
        "steps": steps,
        "versions": versions(),
        "machine": before,
    }


COLUMNS = (
    "ranks",
    "groups",
    "rows",
    "samples",
    "plan_ms",
    "worst_ms",
    "us_per_sample",
    "max_over_bound",
    "max_over_mean",
    "max_over_mean_before",
    "packing_efficiency",
)


def table(found: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(str(one[name]) for name in COLUMNS) + " |" for one in found["shapes"].values()]
    return "\n".join(lines)


def markdown(found: dict[str, Any], command: str) -> str:
    """A page to keep under benchmarks/results/."""
    about = {"command": f"`{command}`", "commit": commit(), **found["machine"], **found["versions"]}
    parts = ["# The planner alone", "\n".join(f"- {name}: {value}" for name, value in about.items()), table(found)]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--record", type=Path, help="Markdown file to write the results to")
    args = parser.parse_args()
    found = run(QUICK_STEPS if args.quick else STEPS)
    print(table(found))
    if args.record:
        args.record.write_text(markdown(found, " ".join(["python benchmarks/planning.py", *sys.argv[1:]])))
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
