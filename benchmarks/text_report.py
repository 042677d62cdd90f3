"""Medians, ratios and tables of the text benchmark."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["Summary", "machine", "summarise"]

PACKAGES = ("torch", "torchdata", "ray", "pyarrow", "numpy")


@dataclass(frozen=True)
class Summary:
    """What one run of the benchmark found."""

    settings: dict[str, Any]
    rounds: dict[str, list[dict[str, float]]]
    """Loader -> what was measured of it in each round."""
    machine: dict[str, Any]
    problems: list[str]
    loaders: dict[str, dict[str, float]] = field(default_factory=dict)
    """Loader -> medians over the rounds."""

    def better(self, *names: str) -> str | None:
        """The fastest of these loaders; None if none of them ran."""
        return max((n for n in names if n in self.loaders), key=lambda n: self.loaders[n]["slots_per_s"], default=None)

    def ratio(self, ours: str, theirs: str | None, quantity: str = "slots_per_s") -> float | None:
        """Ours over theirs; None if one of them did not run."""
        if ours not in self.loaders or theirs is None or theirs not in self.loaders:
            return None
        return round(self.loaders[ours][quantity] / self.loaders[theirs][quantity], 3)

    def ratios(self, quantity: str = "slots_per_s") -> dict[str, float | None]:
        """Ours over theirs: through Ray against the better of 1 and 2 workers, in process against 0 workers."""
        return {
            "vs_dataloader": self.ratio("megascale/ray", self.better("dataloader/1", "dataloader/2"), quantity),
            "vs_stateful": self.ratio("megascale/ray", self.better("stateful/1", "stateful/2"), quantity),
            "local_vs_dataloader0": self.ratio("megascale/local", self.better("dataloader/0"), quantity),
        }

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines."""
        cpu = "cpu_s_per_million_slots"
        return {
            "ratios": self.ratios(),
            "token_ratios": self.ratios("tokens_per_s"),
            "cpu_ratio_vs_dataloader": self.ratios(cpu)["vs_dataloader"],
            "cpu_ratio_local_vs_dataloader0": self.ratios(cpu)["local_vs_dataloader0"],
            "loaders": self.loaders,
            "rounds": self.rounds,
            "settings": self.settings,
            "versions": versions(),
            "machine": self.machine,
            "problems": self.problems,
        }

    def table(self) -> str:
        """The medians as a Markdown table."""
        lines = [
            "| loader | M slots/s | M tokens/s | fill | CPU s per M slots | PSS MiB | processes | first batch s |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, found in self.loaders.items():
            rates = f"{found['slots_per_s'] / 1e6:.1f} | {found['tokens_per_s'] / 1e6:.1f} | {found['fill']:.3f}"
            costs = f"{found['cpu_s_per_million_slots']:.4f} | {found['pss_mib']:.0f} | {found['processes']:.0f}"
            lines.append(f"| {name} | {rates} | {costs} | {found['first_batch_s']:.1f} |")
        named = {**self.ratios(), "CPU, vs_dataloader": self.ratios("cpu_s_per_million_slots")["vs_dataloader"]}
        lines += ["", "Ours over theirs: " + ", ".join(f"{name} {value}" for name, value in named.items())]
        return "\n".join(lines)

    def markdown(self, command: str) -> str:
        """A page to keep under benchmarks/results/."""
        spread = [
            f"- {name}: " + ", ".join(f"{one['slots_per_s'] / 1e6:.1f}" for one in found)
            for name, found in self.rounds.items()
        ]
        about = {"command": f"`{command}`", "commit": commit(), **self.machine, **versions()}
        parts = [
            "# Text throughput",
            "\n".join(f"- {name}: {value}" for name, value in about.items()),
            self.table(),
            "M slots/s in each round:",
            "\n".join(spread),
            *self.problems,
        ]
        return "\n\n".join(parts) + "\n"


def summarise(rounds: dict[str, list[dict[str, float]]], **about: Any) -> Summary:
    """Medians over the rounds of every loader that ran at least once; `about`: the other fields of the summary."""
    loaders = {
        name: {quantity: median(one[quantity] for one in found) for quantity in found[0]}
        for name, found in rounds.items()
        if found
    }
    for found in loaders.values():
        found["tokens_per_s"] = found["slots_per_s"] * found["fill"]
    return Summary(rounds=rounds, loaders=loaders, **about)


def versions() -> dict[str, str]:
    """What was measured."""
    from megascale_lightning import __version__

    found = {"python": platform.python_version(), "megascale-lightning": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> dict[str, Any]:
    """What is measured on, without names; the load is that of the minute before."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
    }


def commit() -> str:
    """The checkout's commit, marked if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
