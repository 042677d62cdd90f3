"""`RayRuntime` in this process: batches, errors, deaths, weight of the actors, forks."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from megascale_lightning.errors import ConfigError, DataError, ForkError, NotOpenError, RoleMissingError, RuntimeFailure
from megascale_lightning.runtime.plan import RoleRecipe, RuntimePlan
from megascale_lightning.runtime.ray_handles import _LOST
from megascale_lightning.runtime.ray_runtime import RayRuntime, detached
from megascale_lightning.types import BatchWindow, NotYet
from tests.runtime.fakes import FakeLoader, expected, fake_plan, numbers, state

pytestmark = pytest.mark.ray


def fetch(port: Any, first: int, group: int = 0, client: int = 0, generation: str = "g") -> BatchWindow:
    end = time.monotonic() + 90
    while time.monotonic() < end:
        try:
            answer = port.fetch("train", generation, group, client, first, first - 1)
        except NotOpenError:
            port.open("train", generation, client, state(first))
            continue
        if isinstance(answer, BatchWindow):
            return answer
    raise TimeoutError(f"no window from step {first}")


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


@pytest.mark.slow
def test_actors_are_light(ray_runtime: RayRuntime) -> None:
    """The first test of its runtime: what batches of other tests have left in the actors is not their weight."""
    stats = ray_runtime.stats()
    fetch(ray_runtime.port(), 0, generation="light")
    weights = {name: psutil.Process(stats[name]["pid"]).memory_full_info().uss / 1e6 for name in stats}
    assert max(weights.values()) < 75, weights
    assert not stats["planner"]["role"]["torch"]
    assert not stats["constructor/0"]["role"]["torch"]
    ray_runtime.port().consumed("train", "light", 0, 3)
    until(lambda: ray_runtime.stats()["constructor/0"]["shared"] == 0)
    ray_runtime.port().close("train", "light", 0)


def test_windows_come_and_are_shared(ray_runtime: RayRuntime) -> None:
    port = ray_runtime.port()
    for client in (0, 1):
        port.open("train", "shared", client, None)
    one, two = (fetch(port, 0, client=client, generation="shared") for client in (0, 1))
    np.testing.assert_array_equal(numbers(one), expected(0, 0, 2))
    np.testing.assert_array_equal(numbers(two), numbers(one))
    assert not one.tokens["input_ids"].flags.writeable
    stored = [ray_runtime._caller.ask("constructor/0", "fetch", ("train", "shared", 0, 1, 0, -1), 1.0) for _ in "ab"]
    assert np.shares_memory(*(window.tokens["input_ids"] for window in stored)), "one copy in the object store"
    assert detached(stored[0], 1000) is stored[0], "a large window stays there"
    assert not np.shares_memory(one.tokens["input_ids"], stored[0].tokens["input_ids"]), "a small one is copied"
    assert ray_runtime.stats()["constructor/0"]["shared"] == 1
    for client in (0, 1):
        port.consumed("train", "shared", client, 3)
    until(lambda: ray_runtime.stats()["constructor/0"]["shared"] == 0)
    np.testing.assert_array_equal(numbers(one), expected(0, 0, 2))
    for client in (0, 1):
        port.close("train", "shared", client)


def test_not_yet_comes_with_its_reason(ray_runtime: RayRuntime) -> None:
    port = ray_runtime.port()
    port.open("train", "early", 0, None)
    answers = [port.fetch("train", "early", 0, 0, 400, -1) for _ in range(2)]
    assert all(isinstance(answer, NotYet) for answer in answers)
    assert "too far ahead" in answers[-1].reason
    port.close("train", "early", 0)


def test_a_roles_error_arrives_as_it_was(ray_runtime: RayRuntime) -> None:
    with pytest.raises(DataError, match="source 'web', unit 3, row 4: torn") as caught:
        ray_runtime._caller("loader/0", "rotten", ("torn",))
    assert type(caught.value) is DataError
    assert "in rotten" in str(caught.value.__cause__), "the traceback in the actor stays visible"
    with pytest.raises(NotOpenError, match="nobody"):
        ray_runtime._caller("planner", "plan", ("train", "nobody", 0, 4))


@pytest.mark.parametrize("victim", ["loader/1", "constructor/0", "planner"])
def test_a_killed_role_is_replaced_and_changes_no_batch(ray_runtime: RayRuntime, victim: str) -> None:
    port = ray_runtime.port()
    generation = f"kill {victim}"
    port.open("train", generation, 0, None)
    before = ray_runtime.stats()[victim]
    for first in range(0, 24, 4):
        if first == 12:
            os.kill(before["pid"], signal.SIGKILL)
        np.testing.assert_array_equal(numbers(fetch(port, first, generation=generation)), expected(first, 0, 2))
    after = ray_runtime.stats()[victim]
    assert after["pid"] != before["pid"]
    assert after["deaths"] == before["deaths"] + 1
    port.close("train", generation, 0)


def test_a_window_whose_owner_died_is_asked_for_again(ray_runtime: RayRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    assert issubclass(ray.exceptions.OwnerDiedError, _LOST)
    caller, lost = ray_runtime._caller, []
    get = caller._get

    def flaky(handle: Any, reference: Any) -> Any:
        value = get(handle, reference)
        if isinstance(value, BatchWindow) and len(lost) < 2:
            lost.append(value)
            raise ray.exceptions.OwnerDiedError(reference.hex(), None, "")
        return value

    monkeypatch.setattr(caller, "_get", flaky)
    np.testing.assert_array_equal(numbers(fetch(ray_runtime.port(), 0, generation="owner")), expected(0, 0, 2))
    assert len(lost) == 2


def test_the_name_is_taken_again_at_once(ray_runtime: RayRuntime) -> None:
    before = ray_runtime.stats()["loader/0"]
    begun = time.monotonic()
    os.kill(before["pid"], signal.SIGKILL)
    assert ray_runtime._caller("loader/0", "describe", (7,)) == 7
    assert time.monotonic() - begun < 20
    assert ray_runtime.stats()["loader/0"]["pid"] != before["pid"]


def test_a_forked_child_is_refused_at_once(ray_runtime: RayRuntime) -> None:
    port = ray_runtime.port()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            port.fetch("train", "g", 0, 0, 0, -1)
        except ForkError as error:
            code = 42 if "num_workers" in str(error) else 2
        except BaseException:
            code = 3
        finally:
            os._exit(code)
    begun = time.monotonic()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 42
    assert time.monotonic() - begun < 10


def test_the_address_hides_its_token(ray_runtime: RayRuntime) -> None:
    address = ray_runtime.address()
    assert address.token
    assert address.token not in repr(address)
    assert address.address.startswith("127.0.0.1:")
    assert pickle.loads(pickle.dumps(address)) == address


def test_another_process_connects_and_reads(ray_runtime: RayRuntime, scenario: Any, tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_bytes(pickle.dumps(ray_runtime.address()))
    other = scenario("rank", str(file))
    assert other.hear() == {"numbers": expected(0, 1, 2).tolist(), "roles": sorted(ray_runtime.address().roles)}
    assert other.hear() == {"left": []}
    assert other.process.wait(30) == 0


def test_a_run_of_its_own_in_a_running_cluster(ray_runtime: RayRuntime, scenario: Any, tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_bytes(pickle.dumps(ray_runtime.address()))
    other = scenario("joined", str(file))
    said = other.hear()
    assert said["numbers"] == expected(0, 0, 2).tolist()
    assert len(said["warned"]) == 1
    assert "['num_cpus', 'object_store_memory'] has no effect" in said["warned"][0]
    assert other.hear() == {"left": ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN"]}, "what the user set stays"
    until(lambda: not any(psutil.pid_exists(pid) for pid in said["pids"]))
    assert other.process.wait(30) == 0


def test_two_runs_of_one_process_share_its_ray(ray_runtime: RayRuntime) -> None:
    second = RayRuntime.start(fake_plan("second"))
    port = second.port()
    np.testing.assert_array_equal(numbers(fetch(port, 0)), expected(0, 0, 2))
    pids = [stats["pid"] for stats in second.stats().values()]
    assert second.address().address == ray_runtime.address().address
    second.close()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert ray_runtime.stats()
    with pytest.raises(RuntimeFailure, match="closed"):
        port.fetch("train", "g", 0, 0, 0, -1)
    with pytest.raises(RuntimeFailure, match="closed"):
        second.stats()


def test_groups_are_shared_between_constructors(ray_runtime: RayRuntime) -> None:
    pair = RayRuntime.start(fake_plan("pair"), num_constructors=2)
    port = pair.port()
    for client in (0, 1):
        port.open("train", "g", client, None)
    for group in (0, 1):
        np.testing.assert_array_equal(numbers(fetch(port, 0, group, group)), expected(0, group, 2))
    before = pair.stats()
    assert [before[f"constructor/{number}"]["shared"] for number in (0, 1)] == [1, 1]
    os.kill(before["constructor/1"]["pid"], signal.SIGKILL)
    for first in (4, 8, 12):
        for group in (0, 1):
            window = fetch(port, first, group, group)
            np.testing.assert_array_equal(numbers(window), expected(first, group, 2))
    assert pair.stats()["constructor/1"]["pid"] != before["constructor/1"]["pid"]
    for client in (0, 1):
        port.consumed("train", "g", client, 15)
    until(lambda: [pair.stats()[f"constructor/{number}"]["shared"] for number in (0, 1)] == [0, 0])
    pair.close()


def unmakeable(**_: Any) -> FakeLoader:
    raise DataError("source 'web': no file matches data/*.parquet")


def test_a_role_that_cannot_be_made_says_why(ray_runtime: RayRuntime) -> None:
    plan = fake_plan("unmade")
    broken = RoleRecipe(name="loader/0", factory=unmakeable)
    plan = RuntimePlan(run=plan.run, planner=plan.planner, constructor=plan.constructor, loaders=(broken,))
    with pytest.raises(DataError, match="no file matches"):
        RayRuntime.start(plan)
    assert ray_runtime.stats(), "the Ray of the other run goes on"


def test_a_role_that_does_not_pickle_says_what_to_do(ray_runtime: RayRuntime) -> None:
    plan = fake_plan("unpickled")
    broken = RoleRecipe(name="loader/0", factory=FakeLoader, kwargs={"seed": (x for x in ())})
    plan = RuntimePlan(run=plan.run, planner=plan.planner, constructor=plan.constructor, loaders=(broken,))
    with pytest.raises(RuntimeFailure, match="runtime='local'"):
        RayRuntime.start(plan)


@pytest.mark.slow
def test_a_role_that_always_dies_is_given_up(ray_runtime: RayRuntime) -> None:
    runtime = RayRuntime.start(fake_plan("dying"))
    with pytest.raises(RoleMissingError, match=r"died 6 times and was given up; the last time: ActorDiedError"):
        runtime._caller("loader/0", "die", ())
    runtime.close()


def test_settings_that_are_not_the_users() -> None:
    with pytest.raises(ConfigError, match="set ray_address instead"):
        RayRuntime.start(fake_plan(), ray_init={"address": "auto"})
    with pytest.raises(ConfigError, match="Ray Client"):
        RayRuntime.start(fake_plan(), address="ray://head:10001")
