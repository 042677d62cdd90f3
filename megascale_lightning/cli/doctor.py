"""`megascale doctor`: what the loader needs of this machine, and whether it is there."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

from packaging.requirements import InvalidRequirement, Requirement

from megascale_lightning.runtime.ray_machines import addresses_of, is_own_address

__all__ = [
    "Finding",
    "add_parser",
    "check_master",
    "check_packages",
    "check_ray_environment",
    "check_shared_memory",
    "examine",
]

Verdict = Literal["ok", "note", "problem"]

_DISTRIBUTION: Final = "megascale-lightning"
_UNLISTED: Final = ("lightning", "numpy", "pyarrow", "ray", "torch")
_GIB: Final = 1 << 30
_ENOUGH_SHARED_MEMORY: Final = _GIB
_CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    topic: str
    text: str
    """What is there and, where it is not as it should be, what to do."""


def add_parser(commands: Any) -> None:
    """Add the command to argparse's sub-parsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor", help="check versions, cores, memory and Ray's environment", description=__doc__
    )
    parser.set_defaults(run=_run)


def _run(_: argparse.Namespace) -> int:
    findings = list(examine(os.environ))
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        print(f"{finding.verdict:8}{finding.topic:{width}}  {finding.text}")
    return int(any(finding.verdict == "problem" for finding in findings))


def examine(environ: Mapping[str, str]) -> Iterator[Finding]:
    """All findings about this process' machine."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from check_packages()
    yield Finding("ok", "cores", _describe_cores())
    yield Finding("ok", "memory", _describe_memory())
    yield check_shared_memory(Path("/dev/shm"))
    yield check_master(environ.get("MASTER_ADDR"))
    yield from check_ray_environment(environ, Path.home())


def check_packages() -> Iterator[Finding]:
    """What this package requires against what is installed."""
    try:
        requirements = [Requirement(text) for text in metadata.requires(_DISTRIBUTION) or ()]
        yield Finding("ok", _DISTRIBUTION, metadata.version(_DISTRIBUTION))
    except (metadata.PackageNotFoundError, InvalidRequirement):
        requirements = [Requirement(name) for name in _UNLISTED]
        yield Finding("note", _DISTRIBUTION, "not installed (run from its sources?), so versions are not checked")
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _check_package(requirement)


def _check_package(requirement: Requirement) -> Finding:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Finding("problem", requirement.name, f"missing; pip install '{requirement}'")
    if requirement.specifier.contains(version, prereleases=True):
        return Finding("ok", requirement.name, version)
    return Finding("problem", requirement.name, f"{version} is not allowed; pip install '{requirement}'")


def check_shared_memory(folder: Path) -> Finding:
    """Whether Ray's object store fits where it wants to be."""
    topic = str(folder)
    if not folder.is_dir():
        return Finding("note", topic, "not there: Ray keeps batches in a file under /tmp, which is slower")
    total, _, free = shutil.disk_usage(folder)
    text = f"{total / _GIB:.1f} GiB, {free / _GIB:.1f} GiB free"
    if free < _ENOUGH_SHARED_MEMORY:
        return Finding(
            "note", topic, f"{text}: little for batches; in a container raise it, e.g. docker run --shm-size=8g"
        )
    return Finding("ok", topic, text)


def check_master(name: str | None) -> Finding:
    """Whether the machine of rank 0 is known here, as a run on several machines needs it."""
    topic = "MASTER_ADDR"
    if not name:
        return Finding("ok", topic, "not set: one machine, or a launcher sets it")
    found = addresses_of(name)
    if not found:
        return Finding("problem", topic, f"{name} is not known on this machine: set it to an address of rank 0's")
    here = is_own_address(found[0])
    text = f"{name} is {', '.join(found)}, {'this machine' if here else 'another machine'}"
    if found[0].startswith("127."):
        return Finding("note", topic, f"{text}: other machines cannot reach that; fine where there are none")
    return Finding("ok", topic, text)


def check_ray_environment(environ: Mapping[str, str], home: Path) -> Iterator[Finding]:
    """Whether the variables by which Ray finds and trusts a cluster fit together.

    Args:
        environ: The variables; read, never set.
        home: Where `.ray/auth_token` may lie.
    """
    address = environ.get("RAY_ADDRESS")
    mode = environ.get("RAY_AUTH_MODE")
    has_token = _has_token(environ, home)
    if address and address.startswith("ray://"):
        yield Finding("problem", "RAY_ADDRESS", f"{address} is a Ray Client, which copies every batch; give host:port")
    elif address:
        yield Finding("ok", "RAY_ADDRESS", f"joins the cluster at {address}")
    else:
        yield Finding(
            "ok",
            "RAY_ADDRESS",
            "not set: a Ray is started, on 127.0.0.1 where one machine has all ranks, with a token of its own",
        )
    if mode not in (None, "token", "disabled"):
        yield Finding("problem", "RAY_AUTH_MODE", f"must be 'token' or 'disabled', not {mode!r}")
    elif mode == "token" and address and not has_token:
        yield Finding("problem", "RAY_AUTH_MODE", "token, but there is none: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH")
    elif mode == "disabled":
        yield Finding("note", "RAY_AUTH_MODE", "disabled: whoever reaches Ray's ports can run code as you")
    elif address and mode is None:
        yield Finding("note", "RAY_AUTH_MODE", "not set: a cluster that asks for a token will refuse this process")
    else:
        yield Finding("ok", "RAY_AUTH_MODE", mode or "not set, which is fine for a local Ray")


def _has_token(environ: Mapping[str, str], home: Path) -> bool:
    """Where Ray looks, in its order."""
    if environ.get("RAY_AUTH_TOKEN"):
        return True
    if path := environ.get("RAY_AUTH_TOKEN_PATH"):
        return Path(path).is_file()
    return (home / ".ray" / "auth_token").is_file()


def _describe_cores() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{usable} usable of {os.cpu_count()}"
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        text += f", limited to the time of {int(quota) / int(period):g}"
    return text


def _describe_memory() -> str:
    found = {key: int(kib) << 10 for key, kib in re.findall(r"(?m)^(\w+):\s+(\d+) kB", _read(Path("/proc/meminfo")))}
    if not found:
        return "unknown on this system"
    text = f"{found['MemTotal'] / _GIB:.1f} GiB, {found.get('MemAvailable', 0) / _GIB:.1f} GiB available"
    limit = _read(_CGROUP / "memory.max").strip()
    if limit.isdigit():
        text += f", limited to {int(limit) / _GIB:.1f} GiB"
    return text


def _read(path: Path) -> str:
    """The text of a file of the kernel, empty where there is none."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
