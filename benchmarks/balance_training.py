"""How much faster steps get when rows are balanced: two DDP ranks train the same data dealt in turn, and balanced.

Two processes, one thread each, train a small transformer whose attention runs per document (gloo, `no_sync` but for
the last microbatch of a step) on packed rows of 2,048, 4,096 and 8,192 tokens, a quarter of them from long documents.
Two copies of the model take the same steps by turns in one run, one with `RoundRobin`, one with `Balanced`. The cost
that both plan with is calibrated to this model on this machine first. See benchmarks/README.md.

    python benchmarks/balance_training.py             the full run, some minutes
    python benchmarks/balance_training.py --quick     under a minute, to see that it works
    python benchmarks/balance_training.py --json      the last line is one JSON object
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.multiprocessing as mp
from balance_plot import loss_plot
from balance_ranks import WORLD, Leg, run_rank
from text_report import commit, machine, versions

HEAVY = ("2048", "4096", "8192")
EQUAL = "equal"
FULL = (
    Leg("2048", 2048, steps=32, warmup=5, calls=6, rounds=2),
    Leg("4096", 4096, steps=16, warmup=5, calls=4, rounds=2),
    Leg("8192", 8192, steps=12, warmup=5, calls=3, rounds=2),
    Leg(EQUAL, 2048, steps=40, warmup=5, calls=4, rounds=2, equal=True),
)
QUICK = tuple(replace(leg, steps=4, warmup=2, calls=1, rounds=1, rows=2) for leg in FULL)
BLOCK = 4
"""Steps of a block, of which the spread is shown: each strategy is first as often as second."""


def measure(legs: Sequence[Leg]) -> dict[str, Any]:
    """Run both ranks; what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(list(legs), folder), nprocs=WORLD)
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
    return found


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Ratios of every leg, over the steps behind the warm-up."""
    rows = {name: _ratios(one) for name, one in found.items()}
    return {
        "speedup": {name: rows[name]["speedup"] for name in HEAVY},
        "predicted": {name: rows[name]["predicted"] for name in HEAVY},
        "equal_lengths": rows[EQUAL]["speedup"],
        "loss_rel_diff": max(row["loss_rel_diff"] for row in rows.values()),
        "legs": rows,
    }


def _ratios(one: dict[str, Any]) -> dict[str, Any]:
    turn, balanced = one["strategies"]["round_robin"], one["strategies"]["balanced"]
    warmup = one["leg"]["warmup"]
    before, after = (np.array(run["seconds"][warmup:]) for run in (turn, balanced))
    planned_before, planned = (np.array(balanced[key][warmup:]) for key in ("planned_in_turn", "planned"))
    assert np.allclose(planned_before, turn["planned"][warmup:]), "what is dealt in turn is what the plan compares with"
    blocks = [float(before[at : at + BLOCK].sum() / after[at : at + BLOCK].sum()) for at in range(0, len(after), BLOCK)]
    losses = np.array(turn["losses"]), np.array(balanced["losses"])
    speedup, predicted = float(before.sum() / after.sum()), float(planned_before.sum() / planned.sum())
    return {
        "speedup": round(speedup, 4),
        "predicted": round(predicted, 4),
        "gain_share": round((speedup - 1) / (predicted - 1), 3) if predicted > 1.001 else None,
        "predicted_dealt_at_random": round(_dealt_at_random(turn["row_costs"][warmup:]) / float(planned.sum()), 4),
        "cpu_speedup": round(sum(turn["cpu_seconds"][warmup:]) / sum(balanced["cpu_seconds"][warmup:]), 4),
        "block_quartiles": [round(float(np.quantile(blocks, at)), 3) for at in (0.25, 0.5, 0.75)],
        "step_ms": {"round_robin": _ms(before), "balanced": _ms(after)},
        "planned_step_ms": {"round_robin": _ms(planned_before), "balanced": _ms(planned)},
        "loss_rel_diff": float(np.max(np.abs(losses[0] - losses[1]) / losses[0])),
        "cost": one["cost"],
    }


def _ms(seconds: npt.NDArray[np.float64]) -> float:
    return round(float(seconds.mean()) * 1e3, 1)


def _dealt_at_random(row_costs: list[list[float]], deals: int = 200) -> float:
    """Sum over steps of the fullest rank's cost, rows [steps, rows] being dealt at random: the mean over deals."""
    rng = np.random.default_rng(0)
    costs = rng.permuted(np.repeat(np.array(row_costs)[None], deals, axis=0), axis=2)
    return float(costs.reshape(deals, len(row_costs), WORLD, -1).sum(axis=3).max(axis=2).sum(axis=1).mean())


def table(legs: dict[str, dict[str, Any]]) -> str:
    """As Markdown."""
    lines = [
        "| data | in turn ms | balanced ms | speed-up | plan predicts | share of the gain | blocks, quartiles | by CPU "
        "time | plan predicts against rows dealt at random | losses apart by at most |",
        "|---" * 10 + "|",
    ]
    for name, row in legs.items():
        share = "" if row["gain_share"] is None else f"{row['gain_share']:.2f}"
        label = "equal lengths" if name == EQUAL else f"{int(name):,} tokens a row"
        lines.append(
            f"| {label} | {row['step_ms']['round_robin']:,.0f} | {row['step_ms']['balanced']:,.0f} | "
            f"{row['speedup']:.3f} | {row['predicted']:.3f} | {share} | "
            f"{', '.join(f'{at:.3f}' for at in row['block_quartiles'])} | {row['cpu_speedup']:.3f} | "
            f"{row['predicted_dealt_at_random']:.3f} | {row['loss_rel_diff']:.1e} |"
        )
    return "\n".join(lines)


def page(summary: dict[str, Any], command: str, plot: str) -> str:
    """What is kept under benchmarks/results/."""
    about = {"command": f"`{command}`", "commit": commit(), **summary["machine"], **summary["versions"]}
    parts = [
        "# Training with balanced rows",
        "\n".join(f"- {name}: {value}" for name, value in about.items()),
        f"Two DDP ranks on one thread each; {summary['long_share']:.0%} of the tokens come from a source of long "
        "documents. The time of a step is that of the slowest rank, from a barrier to the end of its update, data "
        "included; the shortest over the rounds. What the plan predicts is the sum over the steps of the fullest "
        "rank's cost, dealt in turn over balanced. A mixture is even, so that long documents come every so many rows: "
        "dealt in turn to two ranks, they may fall to one of them more often than chance would have it. What the plan "
        "predicts against rows that are dealt at random stands beside it. By CPU time: the same ratio with the most "
        "CPU time that a rank took for a step.",
        table(summary["legs"]),
        f"![Losses of both strategies over the steps]({plot})",
    ]
    return "\n\n".join(parts) + "\n"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and small steps, to see that it works")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--record", type=Path, help="Markdown file to write the results to, with a plot beside it")
    parser.add_argument("--long-share", type=float, default=0.25, help="of the tokens, from long documents")
    return parser.parse_args()


def main() -> int:
    """Run the benchmark."""
    args = parse()
    before = machine()
    found = measure([replace(leg, long_share=args.long_share) for leg in (QUICK if args.quick else FULL)])
    summary = {**summarise(found), "long_share": args.long_share, "versions": versions(), "machine": before}
    print(table(summary["legs"]))
    if args.record:
        plot = args.record.with_suffix(".svg")
        plot.write_text(loss_plot({name: _losses(one) for name, one in found.items()}))
        command = " ".join(["python benchmarks/balance_training.py", *sys.argv[1:]])
        args.record.write_text(page(summary, command, plot.name))
    if args.json:
        print(json.dumps(summary))
    return 0


def _losses(one: dict[str, Any]) -> dict[str, list[float]]:
    return {name: run["losses"] for name, run in one["strategies"].items()}


if __name__ == "__main__":
    sys.exit(main())
