"""The environment of all tests, set before Ray is imported: quiet, offline, without GPUs, never waiting for ever."""

from __future__ import annotations

import faulthandler
import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.pop("RAY_ADDRESS", None)  # tests never join a cluster that happens to be there
os.environ.update(
    {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_prestart_worker_first_driver": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
)
faulthandler.enable()

settings.register_profile("quiet", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("quiet"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "quiet")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Translate our marks into those of the plugins.

    `@pytest.mark.watchdog(20)`: a test that must not hang says how long it may take at most, in seconds. Where tests
    run side by side, those that start Ray or trainers, and look for what these leave behind, do so one after another.
    """
    watchdog = item.get_closest_marker("watchdog")
    if watchdog is not None:
        item.add_marker(pytest.mark.timeout(*watchdog.args, **watchdog.kwargs))
    if item.get_closest_marker("ray") or item.get_closest_marker("ddp"):
        item.add_marker(pytest.mark.xdist_group("machine"))
