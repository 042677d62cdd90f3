"""In which order ranks leave a run on several machines, and what all hear when one machine cannot join."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from megascale_lightning.client.starting import RanksTogether, Started, _nodes
from megascale_lightning.errors import ConfigError, RayUnreachableError, RuntimeFailure
from megascale_lightning.runtime.ray_machines import Machine, Machines

pytestmark = pytest.mark.watchdog(60)


class FakeRuntime:
    def __init__(self, name: str, log: list[str], host_left: threading.Event) -> None:
        self.name, self.log, self.host_left, self.closed = name, log, host_left, False

    def port(self) -> Any: ...

    def stats(self) -> dict[str, Any]:
        return {}

    def end_roles(self) -> None:
        self.host_left.wait(0.2)  # whoever does not wait for the end of the actors is given the time to go ahead
        self.log.append(f"{self.name} ends the actors")

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.log.append(f"{self.name} leaves")
            if self.name == "host":
                self.host_left.set()


def leave(several: bool, with_barrier: bool = True) -> list[str]:
    """Four ranks on two machines (or one) leave at once; the order in which they did."""
    log: list[str] = []
    barrier, host_left = threading.Barrier(4), threading.Event()
    ranks = [("lead", True, False), ("beside it", False, False), ("host", False, several), ("guest", False, False)]
    threads = [
        threading.Thread(
            target=Started(FakeRuntime(name, log, host_left), leads=leads, brings_node=brings, several=several).close,
            args=((lambda: barrier.wait(20)) if with_barrier else None,),
        )
        for name, leads, brings in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not barrier.broken
    return log


def test_who_is_served_by_another_leaves_before_it() -> None:
    log = leave(several=True)
    assert sorted(log[:2]) == ["beside it leaves", "guest leaves"]
    assert log[2:] == ["lead ends the actors", "host leaves", "lead leaves"]


def test_on_one_machine_rank_0_leaves_last() -> None:
    log = leave(several=False)
    assert len(log) == 4
    assert log[-1] == "lead leaves"


def test_nobody_is_waited_for_after_an_exception() -> None:
    assert sorted(leave(several=True, with_barrier=False)) == [
        "beside it leaves",
        "guest leaves",
        "host leaves",
        "lead leaves",
    ]


def test_every_machine_has_its_node_in_the_order_of_the_ranks() -> None:
    one, two = (Machine(name="box", key=f"box/{net}", master=(), versions="") for net in "ab")
    machines = Machines([one, two, one, two])
    found = _nodes(machines, [("n1", None), ("n2", None), (None, None), (None, None)])
    assert list(found.items()) == [("box/a", "n1"), ("box/b", "n2")]
    refused = RayUnreachableError("no way")
    with pytest.raises(RayUnreachableError, match="no way"):
        _nodes(machines, [("n1", None), (None, refused), (None, None), (None, None)])
    with pytest.raises(RuntimeFailure, match="machine 'box': no way; machine 'box': torn"):
        _nodes(machines, [("n1", None), (None, refused), (None, OSError("torn")), (None, None)])


def test_one_process_is_all_ranks() -> None:
    ranks = RanksTogether(3, None)
    assert ranks.leads
    assert ranks.gather("here") == ["here"]
    with pytest.raises(ConfigError, match="wrong"):
        ranks(_wrong)


def test_without_torch_distributed_a_rank_knows_of_itself_alone() -> None:
    ranks = RanksTogether(1, lambda value: ("of rank 0", None))
    assert not ranks.leads
    assert ranks.gather("here") == ["here"]
    assert ranks(_wrong) == "of rank 0"


def _wrong() -> str:
    raise ConfigError("wrong")
