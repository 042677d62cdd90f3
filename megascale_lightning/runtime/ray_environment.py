"""What Ray reads from the environment: set before Ray is imported, put back when we are done."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import sysconfig
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from megascale_lightning.errors import ConfigError

__all__ = [
    "EMBEDDED_SETTINGS",
    "RUN_SETTINGS",
    "RayEnvironment",
    "available_cpus",
    "import_settings",
    "process_token",
    "token_settings",
]

RUN_SETTINGS: Final[Mapping[str, str]] = {
    # Idle workers of 45 MB each that no actor of ours would use.
    "RAY_prestart_worker_first_driver": "0",
    # Stack traces on SIGTERM, which is a normal end.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    # Under `uv run` Ray would upload the working directory for every actor.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Actors without a GPU see none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Notes of every call for a dashboard that is off; a process that leaves a dead Ray would wait 5 s to hand them in.
    "RAY_task_events_report_interval_ms": "0",
}
"""For a Ray of our own. What the user has set stays."""

EMBEDDED_SETTINGS: Final[Mapping[str, str]] = {
    # Binds all of Ray to 127.0.0.1.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    **RUN_SETTINGS,
}
"""For one that serves a single machine."""

_READ_AT_IMPORT: Final = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "ENABLE_RAY_CLUSTER",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "RAY_ENABLE_UV_RUN_RUNTIME_ENV",
}
"""Variable -> constant in `ray._private.ray_constants`."""

_TOKEN = uuid.uuid4().hex + uuid.uuid4().hex


def process_token() -> str:
    """The token of every local Ray that this process starts; a secret."""
    return _TOKEN


def token_settings(token: str) -> dict[str, str]:
    """Variables under which a process may use a Ray that has this token."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def import_settings() -> dict[str, str]:
    """Variables under which another Python process imports this package; empty where it is installed."""
    root = Path(__file__).resolve().parents[2]
    if str(root) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return {}
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{root}{os.pathsep}{before}" if before else str(root)}


def available_cpus() -> int:
    """CPUs that this process may use: the affinity mask, and the quota of its cgroup, not what the host has."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(allowed, math.ceil(quota))) if quota else allowed


def _cgroup_quota() -> float | None:
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit, period = (root / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):
        limit, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else None
    return None


class RayEnvironment:
    """Variables set in this process for Ray, and what they were before."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}
        self._constants: dict[str, Any] = {}

    def set(self, settings: Mapping[str, str], *, override: bool = False) -> None:
        """Set variables, those that are set already only with `override`, and make an imported Ray read them.

        Raises:
            ConfigError: Ray was imported earlier and does not read them again.
        """
        for name, value in settings.items():
            if override or name not in os.environ:
                self._before.setdefault(name, os.environ.get(name))
                os.environ[name] = value
        if "ray" in sys.modules and self._is_rays():
            self._refresh_ray()

    def restore(self) -> None:
        """Put everything back."""
        rays = self._is_rays()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before = {}
        if not rays or "ray" not in sys.modules:
            return
        with contextlib.suppress(ImportError, AttributeError):
            constants = importlib.import_module("ray._private.ray_constants")
            for name, before in self._constants.items():
                setattr(constants, name, before)
            _forget_authentication()
        self._constants = {}

    def _is_rays(self) -> bool:
        return any(name.startswith("RAY_") for name in self._before)

    def _refresh_ray(self) -> None:
        # Ray reads the mode and these constants when it is imported, the token when it is first used. A local Ray
        # whose token its own driver does not know fails only after 20 seconds, without saying why.
        try:
            constants = importlib.import_module("ray._private.ray_constants")
            for variable, name in _READ_AT_IMPORT.items():
                if variable in self._before:
                    self._constants.setdefault(name, getattr(constants, name))
                    setattr(constants, name, os.environ[variable] in ("1", "true"))
            mode = _forget_authentication()
        except (ImportError, AttributeError) as error:
            self.restore()
            raise ConfigError(_TOO_LATE) from error
        if mode != os.environ.get("RAY_AUTH_MODE", mode).lower():
            self.restore()
            raise ConfigError(_TOO_LATE)


def _forget_authentication() -> str:
    """Make Ray read mode and token again; the mode it has then."""
    raylet = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    return "token" if raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN else "disabled"


_TOO_LATE: Final = (
    "ray was imported before the loader set the token that its local cluster needs, and this version of Ray does not "
    "read it again. Either remove `import ray` from the script (and from what it imports) or move it behind the "
    "loader's start, or call ray.init(...) yourself: an initialised Ray is used as it is"
)
