"""Which machines the ranks of a run are on, and where the first of them can be reached from the others."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megascale_lightning.errors import ConfigError

__all__ = ["Machine", "Machines", "addresses_of", "is_own_address", "route_to"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a rank runs, as the rank itself sees it. Picklable; every rank hands its own to all."""

    name: str
    """The host's name, for people: containers share it, and so do machines that nobody named."""
    key: str
    """Equal for ranks that one node of Ray can serve: one network, one shared memory, one folder of sockets."""
    master: tuple[str, ...]
    """What MASTER_ADDR means here: addresses, none where it is not set or not known."""
    versions: str
    """Of Ray and Python, which must be the same in all of a cluster."""

    @classmethod
    def here(cls) -> Machine:
        """The machine of this process."""
        return cls(
            name=socket.gethostname(),
            key=_key(),
            master=addresses_of(os.environ.get("MASTER_ADDR", "")),
            versions=f"Ray {metadata.version('ray')}, Python {platform.python_version()}",
        )


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of all ranks, in the order of the ranks."""

    of_ranks: Sequence[Machine]

    @property
    def several(self) -> bool:
        """Whether one node of Ray cannot serve all ranks."""
        return len({machine.key for machine in self.of_ranks}) > 1

    def hosts(self, rank: int) -> bool:
        """Whether a rank is the first of its machine, which speaks for it, and not rank 0."""
        keys = [machine.key for machine in self.of_ranks]
        return rank > 0 and keys.index(keys[rank]) == rank

    def check_versions(self) -> None:
        """Refuse what Ray would refuse later, machine by machine.

        Raises:
            ConfigError: Two machines have different versions.
        """
        found: dict[str, list[str]] = {}
        for machine in self.of_ranks:
            names = found.setdefault(machine.versions, [])
            if machine.name not in names:
                names.append(machine.name)
        if len(found) > 1:
            said = "; ".join(f"{versions} on {', '.join(names[:5])}" for versions, names in found.items())
            raise ConfigError(f"all machines of a run need the same versions of Ray and Python, and there are: {said}")

    def head_address(self, ray_init: Mapping[str, object] | None = None) -> str:
        """The address of this machine, rank 0's, by which the others reach it.

        Args:
            ray_init: `_node_ip_address` in it says it; else it is what MASTER_ADDR means here or, where that is
                127.0.0.1, on the other machines.

        Raises:
            ConfigError: None of these is an address of this machine.
        """
        given = (ray_init or {}).get("_node_ip_address")
        if given:
            if is_own_address(str(given)):
                return str(given)
            raise ConfigError(
                f"ray_init={{'_node_ip_address': {given!r}}}: machine {self.of_ranks[0].name!r} of rank 0 has no such "
                "address"
            )
        meant = dict.fromkeys(address for machine in self.of_ranks for address in machine.master)
        own = dict.fromkeys(addresses_of(self.of_ranks[0].name))
        for address in (*meant, *own):
            if not _is_loopback(address) and is_own_address(address):
                return address
        raise ConfigError(
            f"ranks are on {len({machine.key for machine in self.of_ranks})} machines, and it is not known by which "
            f"address they reach that of rank 0: MASTER_ADDR means {sorted(meant) or 'nothing'} there. Set MASTER_ADDR "
            f"to an address of {self.of_ranks[0].name!r}, or ray_init={{'_node_ip_address': ...}}"
        )


def addresses_of(host: str) -> tuple[str, ...]:
    """The IPv4 addresses, or else IPv6 ones, of a host's name; none where it is not known."""
    if not host:
        return ()
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, UnicodeError):
            found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
            return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    return ()


def is_own_address(address: str) -> bool:
    """Whether an address is one of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trying:
        trying.bind((address, 0))
        return True
    return False


def route_to(address: str) -> str:
    """The address of this machine from which it speaks to another. Raises: OSError: There is no way to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect((address, 9))  # sends nothing
        return str(asking.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _key() -> str:
    """Host name, start of its kernel, network, and where memory and sockets are shared.

    Containers of one host may have one name and one kernel, and yet hear nothing of each other.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(_BOOT_ID.read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink(_NETWORK))
    for folder in ("/dev/shm", "/tmp"):
        with suppress(OSError):
            found = os.stat(folder)
            parts.append(f"{found.st_dev}:{found.st_ino}")
    return "/".join(parts)
