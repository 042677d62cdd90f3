"""This process's connection to Ray: found, joined or started; shared by all runs of the process; ended only if ours."""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from megascale_lightning.errors import (
    ConfigError,
    ForkError,
    MegaScaleError,
    MegaScaleWarning,
    RayUnreachableError,
    RuntimeFailure,
)
from megascale_lightning.runtime.ray_environment import (
    EMBEDDED_SETTINGS,
    RUN_SETTINGS,
    RayEnvironment,
    available_cpus,
    import_settings,
    process_token,
    token_settings,
)
from megascale_lightning.runtime.ray_init import init_ray, is_forked, shut_down_ray
from megascale_lightning.runtime.ray_machines import Machine
from megascale_lightning.runtime.ray_node import RayNode, node_address
from megascale_lightning.runtime.ray_orphans import OrphanGuard

__all__ = ["RayAddress", "RayCluster", "RaySession"]

logger = logging.getLogger(__name__)

_START_ONLY: Final = frozenset(
    {
        *("num_cpus", "num_gpus", "resources", "labels", "object_store_memory", "include_dashboard", "dashboard_host"),
        *(
            "dashboard_port",
            "object_spilling_directory",
            "enable_resource_isolation",
            "cgroup_path",
            "system_reserved_cpu",
        ),
        *("system_reserved_memory", "_system_config", "_temp_dir", "_plasma_directory", "_object_spilling_directory"),
        *("_enable_object_reconstruction", "_node_name", "_memory", "_redis_max_memory", "_metrics_export_port"),
        *("_driver_object_store_memory", "_tracing_startup_hook", "_node_ip_address"),
    }
)
"""Keywords of `ray.init` that mean something only to whoever starts a cluster."""

_KNOCK_S: Final = 10.0

_FORKED: Final = (
    "this process was forked from one that has used Ray, and Ray does not work on this side of a fork: calls would "
    "hang, a start would crash. In a notebook, start the kernel anew and let trainer.fit(strategy='ddp_notebook') be "
    "the first to use Ray; or set runtime='local', or devices=1"
)

_OURS: Final = {
    "address": "set ray_address instead",
    "namespace": "each run has its own",
    "ignore_reinit_error": "an initialised Ray is used as it is",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayCluster:
    """Where a Ray is: picklable, to be handed to the other ranks. Holds a secret, the `token`."""

    address: str
    """host:port of its head."""
    token: str | None = field(repr=False)
    """None: the cluster has none, or every process finds it by itself."""
    host: str
    """Key of the machine that it alone listens on (see `Machine`); "" where other machines can reach it."""
    ours: bool
    """It was started for this run, which brings all of its nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayAddress(RayCluster):
    """Where the roles of a run are: likewise."""

    namespace: str
    """Ray namespace of the run's actors."""
    run: str
    planner: str
    constructors: Mapping[str, tuple[str, ...]]
    """Key of a machine -> the constructors there, between which its groups are shared; rank 0's machine first."""
    roles: tuple[str, ...]
    restart_timeout: float
    """Seconds."""


@dataclass(slots=True)
class _Connection:
    pid: int
    cluster: RayCluster
    initialised_by_us: bool
    environment: RayEnvironment
    raylet: str = ""
    """Socket of this machine's raylet, where we made the connection."""
    guard: OrphanGuard | None = None
    """Where this process started the head."""
    node: RayNode | None = None
    """Where it brought a node."""
    users: int = 0


_lock = threading.RLock()
_connection: _Connection | None = None
_lost = ""
"""Address of a Ray that died under us, and that this process cannot leave."""


class RaySession:
    """One user of this process's connection; the last one that we made the connection for ends it."""

    def __init__(self, connection: _Connection) -> None:
        connection.users += 1
        self._connection = connection
        self._released = False

    @classmethod
    def start(
        cls,
        address: str | None,
        ray_init: Mapping[str, Any] | None,
        head_address: Callable[[], str] | None = None,
    ) -> RaySession:
        """Use the initialised Ray, else join `address` (or RAY_ADDRESS), else start one.

        Args:
            address: An existing cluster.
            ray_init: Further keywords of `ray.init`.
            head_address: Gives the address that a Ray which is started listens at, for other machines; None: this
                machine alone uses it.

        Raises:
            ConfigError: `ray_init` has keys that are not the user's, or Ray was imported too early.
            RayUnreachableError: The cluster does not answer.
        """
        options = dict(ray_init or {})
        wrong = [f"{key!r} ({_OURS[key]})" for key in sorted(_OURS.keys() & options.keys())]
        if wrong:
            raise ConfigError(f"ray_init may not hold {', '.join(wrong)}")
        address = address or os.environ.get("RAY_ADDRESS") or None
        if address is not None and address.startswith("ray://"):
            raise ConfigError(
                f"ray_address {address!r} is a Ray Client address: batches would be copied through one proxy. Run the "
                "trainer on a node of the cluster and give host:port, or 'auto'"
            )
        with _lock:
            connection = _existing(address)
            if connection is None:
                if address is None or address == "local":
                    connection = _start(options, head_address() if head_address is not None else "")
                else:
                    connection = _join(RayCluster(address=address, token=None, host="", ours=False), options)
            elif options:
                _warn(f"ray_init {sorted(options)} has no effect: Ray is initialised already")
            return cls(_remember(connection))

    @classmethod
    def join(
        cls, cluster: RayCluster, ray_init: Mapping[str, Any] | None = None, *, bring_node: bool = False
    ) -> RaySession:
        """Connect to the Ray that another rank runs its roles in.

        Args:
            cluster: That Ray.
            ray_init: Keywords of `ray.init` that say how a node of a Ray of our own is to be.
            bring_node: This machine has no node of it yet: start one, which ends when the session does.

        Raises:
            RayUnreachableError: It does not answer, or the token is not its own.
            RuntimeFailure: This process is connected to another Ray, or its node does not start.
        """
        here = Machine.here().key
        if cluster.host and cluster.host != here:
            there, here = (key.partition("/")[0] for key in (cluster.host, here))
            raise RuntimeFailure(
                f"the run's local Ray listens on machine {there!r} alone, and this rank runs on {here!r}. For several "
                "machines start Ray on each of them (`ray start`) and set ray_address or RAY_ADDRESS"
            )
        with _lock:
            connection = _existing(None)
            if connection is None:
                connection = _join(cluster, dict(ray_init or {}) if cluster.ours else {}, bring_node)
            elif connection.cluster.address != cluster.address:
                raise RuntimeFailure(
                    f"this process is connected to the Ray at {connection.cluster.address}, the run's roles are in the "
                    f"one at {cluster.address}: call ray.shutdown() first, or start the run in this process"
                )
            return cls(_remember(connection))

    @property
    def cluster(self) -> RayCluster:
        """What another process needs to connect; holds a secret."""
        return self._connection.cluster

    @property
    def node_id(self) -> str:
        """Ray's name for the node that this process is connected to."""
        import ray

        found: str = ray.get_runtime_context().get_node_id()
        return found

    def release(self) -> None:
        """Leave; the last one disconnects, and ends a Ray that we started. A second call does nothing."""
        global _connection, _lost
        with _lock:
            if self._released or self._connection.pid != os.getpid():
                return
            self._released = True
            self._connection.users -= 1
            if self._connection.users or self._connection is not _connection:
                return
            connection, _connection = self._connection, None
            if not connection.initialised_by_us:
                return
            cluster = connection.cluster
            elsewhere = connection.guard is None and not cluster.host
            left = shut_down_ray(connection.raylet, cluster.address if elsewhere else "")
            if connection.node is not None:
                connection.node.end()
            if not left:
                _lost = cluster.address
                return
            if connection.guard is not None:
                connection.guard.dismiss()
            connection.environment.restore()


def _existing(wanted: str | None) -> _Connection | None:
    """The connection there is, ours or the user's; None where Ray is not initialised here."""
    if is_forked():
        raise ForkError(_FORKED)
    if "ray" not in sys.modules:
        return None
    import ray

    if not ray.is_initialized():
        return None
    if _connection is not None:
        return _connection
    if _lost == ray.get_runtime_context().gcs_address:
        raise RayUnreachableError(
            f"the Ray at {_lost} has died, and this process cannot leave it: start the process (in a notebook: the "
            "kernel) anew, and resume from a checkpoint"
        )
    client: Any = ray.util.client.ray
    if client.is_connected():
        raise ConfigError("this process uses Ray Client (ray://): run the trainer on a node of the cluster instead")
    address = ray.get_runtime_context().gcs_address
    if wanted not in (None, "auto", "local", address):
        _warn(f"ray_address {wanted!r} has no effect: Ray is initialised already, at {address}")
    cluster = RayCluster(address=address, token=os.environ.get("RAY_AUTH_TOKEN"), host="", ours=False)
    return _Connection(os.getpid(), cluster, False, RayEnvironment())


def _remember(connection: _Connection) -> _Connection:
    global _connection
    if connection.initialised_by_us:
        _connection = connection
    return connection


def _start(options: dict[str, Any], head_address: str) -> _Connection:
    environment = RayEnvironment()
    environment.set(RUN_SETTINGS if head_address else EMBEDDED_SETTINGS)
    if os.environ.get("RAY_AUTH_MODE", "token").lower() == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        environment.set(token_settings(os.environ.get("RAY_AUTH_TOKEN") or process_token()))
    settings = {"num_cpus": available_cpus(), "num_gpus": 0, "include_dashboard": False, **_temp_dir(), **options}
    if head_address:
        settings["_node_ip_address"] = head_address
    imports = RayEnvironment()
    imports.set(import_settings(), override=True)
    try:
        address, raylet = init_ray(address="local", **settings)
    except BaseException:
        environment.restore()
        raise
    finally:
        imports.restore()
    logger.info("started a local Ray at %s", address)
    host = "" if head_address else Machine.here().key
    cluster = RayCluster(address=address, token=os.environ.get("RAY_AUTH_TOKEN"), host=host, ours=True)
    return _Connection(os.getpid(), cluster, True, environment, raylet, OrphanGuard())


def _join(cluster: RayCluster, options: dict[str, Any], bring_node: bool = False) -> _Connection:
    address, token = cluster.address, cluster.token
    settings: dict[str, Any] = {}
    if not cluster.ours:
        settings = {key: value for key, value in options.items() if key not in _START_ONLY}
        if dropped := sorted(options.keys() - settings.keys()):
            _warn(f"ray_init {dropped} has no effect: the Ray at {address} is running already")
    environment = RayEnvironment()
    if cluster.ours:
        environment.set(EMBEDDED_SETTINGS if cluster.host else RUN_SETTINGS)
    if token is not None:
        environment.set(token_settings(token), override=True)
    node = None
    try:
        _knock(address)
        if cluster.ours and not cluster.host:
            # Containers of one host may see each other's raylets.
            settings["_node_ip_address"] = node_address(address, options)
        if bring_node:
            node = _bring_node(address, options)
        found, raylet = init_ray(address=address, **settings)
    except BaseException as error:
        if node is not None:
            node.end()
        environment.restore()
        if isinstance(error, (OSError, RuntimeError, ValueError)) and not isinstance(error, MegaScaleError):
            raise RayUnreachableError(_cannot_join(cluster, error)) from error
        raise
    joined = replace(cluster, address=found, token=os.environ.get("RAY_AUTH_TOKEN"))
    return _Connection(os.getpid(), joined, True, environment, raylet, node=node)


def _bring_node(address: str, options: dict[str, Any]) -> RayNode:
    imports = RayEnvironment()
    imports.set(import_settings(), override=True)
    try:
        return RayNode(address, options)
    finally:
        imports.restore()


def _knock(address: str) -> None:
    """Raise `ConnectionError` where nobody listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not port.isdigit():
        return
    if host in ("localhost", "127.0.0.1") and os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0":
        import ray

        util: Any = ray.util
        host = util.get_node_ip_address()  # where Ray then looks for it
    deadline = time.monotonic() + _KNOCK_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"nobody listens at {host}:{port} ({error})") from error
        time.sleep(0.5)


def _cannot_join(cluster: RayCluster, error: BaseException) -> str:
    said = str(error).strip().splitlines() or [repr(error)]
    if cluster.ours and not cluster.host:
        return (
            f"this machine, {socket.gethostname()!r}, cannot connect to the Ray of rank 0 at {cluster.address}: "
            f"{said[0]}. Ray takes free TCP ports on every machine of the run: let these through between the machines "
            "(ray_init={'_node_ip_address': ...} chooses another network, RAY_GCS_SERVER_PORT on rank 0 the port of "
            "its head), or start Ray yourself with the ports that are open and set RAY_ADDRESS"
        )
    known = (
        "with the run's token"
        if cluster.token is not None
        else f"with RAY_AUTH_MODE={os.environ.get('RAY_AUTH_MODE', '(unset)')}"
    )
    return (
        f"cannot connect to the Ray at {cluster.address} ({known}): {said[0]}. Check that it runs, that this machine "
        "runs a node of it, that the versions of Ray and Python are the same, and that the token is its own "
        "(RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or ~/.ray/auth_token)"
    )


def _temp_dir() -> dict[str, str]:
    """A folder of our own where the usual one belongs to somebody else."""
    usual = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    if "RAY_TMPDIR" in os.environ or not usual.exists() or os.access(usual, os.W_OK):
        return {}
    return {"_temp_dir": f"{usual}-{os.getuid()}"}


def _warn(text: str) -> None:
    warnings.warn(text, MegaScaleWarning, stacklevel=4)
