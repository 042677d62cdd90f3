"""Where ranks are, told from what they say of themselves: torchrun, SLURM and plain MASTER_ADDR, without Ray."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from megascale_lightning.errors import ConfigError
from megascale_lightning.runtime import ray_machines
from megascale_lightning.runtime.ray_environment import import_settings
from megascale_lightning.runtime.ray_machines import Machine, Machines, addresses_of, is_own_address, route_to
from megascale_lightning.runtime.ray_node import _arguments

NAMES = {"node01": "10.1.0.1", "node02": "10.1.0.2", "localhost": "127.0.0.1"}


def machine(name: str, *master: str, versions: str = "Ray 2, Python 3") -> Machine:
    return Machine(name=name, key=f"{name}/net", master=master, versions=versions)


@pytest.fixture
def node01(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    """This machine is node01 of a cluster; gives it as it sees itself."""
    own = (NAMES["node01"], "127.0.0.1")
    monkeypatch.setattr(ray_machines, "is_own_address", lambda address: address in own)
    monkeypatch.setattr(ray_machines, "addresses_of", lambda host: (NAMES[host],) if host in NAMES else ())
    monkeypatch.setattr(socket, "gethostname", lambda: "node01")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MASTER_"))]:
        monkeypatch.delenv(name)
    return Machine.here


def test_this_machine_is_one(node01: Callable[..., Machine]) -> None:
    machines = Machines([node01(), node01(), node01()])
    assert not machines.several
    assert [machines.hosts(rank) for rank in range(3)] == [False, False, False]
    assert pickle.loads(pickle.dumps(machines.of_ranks[0])) == machines.of_ranks[0]


def test_the_first_rank_of_each_other_machine_brings_its_node() -> None:
    """By what the ranks say, whatever order a launcher gave them in: no LOCAL_RANK is asked."""
    one, two, three = (machine(f"node0{number}") for number in (1, 2, 3))
    for ranks, expected in (
        ([one, one, two, two], [False, False, True, False]),
        ([one, two, one, two, three], [False, True, False, False, True]),
    ):
        machines = Machines(ranks)
        assert machines.several
        assert [machines.hosts(rank) for rank in range(len(ranks))] == expected


def test_torchrun_says_where_rank_0_is(node01: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MASTER_ADDR": "node01",
        "MASTER_PORT": "29500",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "none",
    }.items():
        monkeypatch.setenv(name, value)
    assert TorchElasticEnvironment.detect()
    assert Machines([node01(), machine("node02")]).head_address() == "10.1.0.1"


def test_slurm_says_where_rank_0_is(node01: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    """srun sets no MASTER_ADDR; Lightning does, from the list of nodes, before data are set up."""
    job = {"JOB_ID": "7", "NODELIST": "node[01-02]", "NTASKS": "2", "NTASKS_PER_NODE": "1"}
    for name, value in {**job, "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "gone")  # restored behind the test, whatever Lightning sets
    monkeypatch.delenv("MASTER_ADDR")
    assert node01().master == ()
    assert SLURMEnvironment(auto_requeue=False).main_address == "node01"
    assert node01().master == ("10.1.0.1",)
    assert Machines([node01(), machine("node02")]).head_address() == "10.1.0.1"


@pytest.mark.parametrize(
    ("said", "heard", "given", "expected"),
    [
        pytest.param("10.1.0.1", "10.1.0.1", None, "10.1.0.1", id="an address"),
        # /etc/hosts of many a machine calls itself 127.0.1.1; the others know better.
        pytest.param("localhost", "10.1.0.1", None, "10.1.0.1", id="loopback on rank 0"),
        pytest.param("localhost", "127.0.0.1", None, "10.1.0.1", id="loopback everywhere"),
        pytest.param(None, None, None, "10.1.0.1", id="by the host's name"),
        pytest.param("10.1.0.2", "10.1.0.2", None, "10.1.0.1", id="another machine's"),
        pytest.param("10.1.0.1", "10.1.0.1", "127.0.0.1", "127.0.0.1", id="an option"),
    ],
)
def test_master_addr(
    node01: Callable[..., Machine],
    monkeypatch: pytest.MonkeyPatch,
    said: str | None,
    heard: str | None,
    given: str | None,
    expected: str,
) -> None:
    monkeypatch.setattr(ray_machines, "addresses_of", lambda host: (NAMES.get(host, host),) if host else ())
    if said is not None:
        monkeypatch.setenv("MASTER_ADDR", said)
    machines = Machines([node01(), machine("node02", *([heard] if heard else []))])
    assert machines.head_address(given and {"_node_ip_address": given}) == expected


def test_an_address_that_rank_0_does_not_have(node01: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    here = node01()
    with pytest.raises(ConfigError, match=r"'10\.1\.0\.9'}: machine 'node01' of rank 0 has no such address"):
        Machines([here, machine("node02")]).head_address({"_node_ip_address": "10.1.0.9"})
    nameless = Machines([replace(here, name="box"), machine("node02", "10.1.0.2")])
    with pytest.raises(ConfigError, match=r"MASTER_ADDR means \['10\.1\.0\.2'\] there\. Set MASTER_ADDR to an address"):
        nameless.head_address()


def test_other_versions_are_named() -> None:
    machines = Machines([machine("node01"), machine("node02", versions="Ray 2, Python 4"), machine("node01")])
    with pytest.raises(ConfigError, match=r"there are: Ray 2, Python 3 on node01; Ray 2, Python 4 on node02$"):
        machines.check_versions()
    Machines([machine("node01"), machine("node02")]).check_versions()


def test_another_network_of_the_same_host_is_another_machine() -> None:
    """As with containers, which often share the host's name too."""
    code = "from megascale_lightning.runtime.ray_machines import Machine; print(Machine.here().key)"
    environment = {**os.environ, **import_settings()}
    shown = [
        subprocess.run([*how, sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        for how in ([], [], ["unshare", "--user", "--map-root-user", "--net"])
    ]
    if shown[2].returncode and "unshare" in shown[2].stderr:
        pytest.skip(f"a network of one's own needs the right to make user namespaces: {shown[2].stderr.strip()}")
    keys = [found.stdout for found in shown]
    assert keys[0] == keys[1] == Machine.here().key + "\n"
    assert keys[2].startswith(socket.gethostname())
    assert keys[2] != keys[0]


def test_addresses() -> None:
    assert addresses_of("") == addresses_of("no such host") == ()
    assert addresses_of("127.0.0.1") == ("127.0.0.1",)
    assert is_own_address("127.0.0.1")
    assert not is_own_address("192.0.2.1")
    assert route_to("127.0.0.1") == "127.0.0.1"


def test_what_a_node_is_told() -> None:
    options = {
        "num_cpus": 3,
        "resources": {"fast": 1},
        "labels": {"zone": "a"},
        "_temp_dir": "/t",
        "include_dashboard": 1,
    }
    assert _arguments(options) == [
        "--num-cpus=3",
        "--num-gpus=0",
        "--temp-dir=/t",
        '--resources={"fast": 1}',
        "--labels=zone=a",
    ]
