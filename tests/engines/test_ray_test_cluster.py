"""The Ray cluster of the tests (`ray_aids.py`): nodes, foreign actors, killed nodes, cleanup."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from ray_aids import (
    NODES,
    FakeCluster,
    RayWouldNotStart,
    add_node,
    driver,
    foreign_actor,
    node_id_of,
    short_folder,
    spinning,
    until_available_is,
)
from runtime.aids import is_there
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.own_attachment
TESTS = Path(__file__).resolve().parents[1]

ATTACHES = """
import os, ray
ray.init(address=os.environ["DOVETAIL_TEST_RAY"], log_to_driver=False, logging_level="ERROR")
alive = [node for node in ray.nodes() if node["Alive"]]  # Ray lists removed nodes as dead
print("ON", ray.get_runtime_context().get_node_id(), len(alive), flush=True)
"""


def test_the_cluster_has_the_nodes_of_the_table(ray_cluster: FakeCluster) -> None:
    available = ray_cluster.available()
    assert list(available) == list(NODES)
    assert [node["CPU"] for node in available.values()] == [4, 4, 4, 4]
    assert [node.get("GPU", 0) for node in available.values()] == [0, 2, 2, 0]
    assert available["b"]["accelerator_type:L40S"] == available["c"]["accelerator_type:A100"] == 1
    assert ray_cluster.alive() == {node_id_of(ray_cluster, name) for name in NODES}


@pytest.mark.ray
def test_all_tests_on_ray_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """xdist runs tests whose ids end in the same group in one process; otherwise every process would start a Ray."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("there is only one process without -n")
    assert request.node.nodeid.endswith("@ray")


def test_drivers_get_the_address_and_connect_to_the_head(
    ray_cluster: FakeCluster, ray_address: str, tmp_path: Path
) -> None:
    host, _, port = ray_address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=5).close()
    with driver(ray_cluster, tmp_path, ATTACHES) as script:
        assert f"ON {node_id_of(ray_cluster, 'a')} 4" in script.finish()


def test_a_driver_in_this_process_raises_no_warning(ray_cluster: FakeCluster) -> None:
    import ray

    class Counts:  # pickled by value: the workers of Ray do not have this module
        def __init__(self) -> None:
            self._count = 0

        def one_more(self) -> int:
            self._count += 1
            return self._count

    interrupted = signal.getsignal(signal.SIGINT)
    ray.init(address=ray_cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        actor = ray.remote(num_cpus=0)(Counts).remote()
        assert ray.get([actor.one_more.remote() for _ in range(3)]) == [1, 2, 3]
        assert {row["NodeID"] for row in ray.nodes() if row["Alive"]} == ray_cluster.alive()
    finally:
        ray.shutdown()
    assert signal.getsignal(signal.SIGINT) is interrupted


def test_a_foreign_actor_holds_a_gpu_and_releases_it(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    before = ray_cluster.available()
    with foreign_actor(ray_cluster, tmp_path, node="c", num_gpus=1) as gpus:
        assert gpus == [0]
        now = ray_cluster.available()
        assert now["c"]["GPU"] == 1
        assert now["b"] == before["b"]
        holders = [actor for actor in ray_cluster.actors() if actor["ActorClassName"] == "Holder"]
        assert [actor["Address"]["NodeID"] for actor in holders] == [node_id_of(ray_cluster, "c")]
        with pytest.raises(AssertionError, match=r"node c: GPU was 2\.0, is 1\.0"):
            until_available_is(ray_cluster, before, within_s=0.1)
    until_available_is(ray_cluster, before)


# Ray takes 14 s to detect a killed raylet
KILLS = [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long), signal.SIGSTOP]


@pytest.mark.parametrize("how", KILLS, ids=lambda how: how.name)
def test_a_killed_node_leaves_no_process_and_no_resources(ray_cluster: FakeCluster, how: signal.Signals) -> None:
    before = ray_cluster.available()
    with add_node(ray_cluster, num_gpus=1) as node:
        raylet = psutil.Process(node.raylet_pid)
        until(lambda: len(raylet.children()) >= 2, "its agents are there")
        family = [raylet.pid, *(child.pid for child in raylet.children(recursive=True))]
        assert node.node_id in ray_cluster.alive()
        node.kill(how)
        gone = psutil.STATUS_STOPPED if how == signal.SIGSTOP else psutil.STATUS_ZOMBIE
        until(lambda: not raylet.is_running() or raylet.status() == gone, "the signal has done its work")
    assert [pid for pid in family if is_there(pid)] == []
    assert node.node_id not in ray_cluster.alive()
    until_available_is(ray_cluster, before)


@pytest.fixture
def folder() -> Iterator[Path]:
    made = short_folder()
    made.mkdir()
    yield made
    assert not made.exists()


@pytest.mark.ray
def test_a_ray_that_cannot_start_is_an_error_with_the_message_of_the_raylet(folder: Path) -> None:
    with pytest.raises(RayWouldNotStart, match="plasma directory file /nowhere does not exist"):
        FakeCluster(folder, {"a": {"num_cpus": 1, "plasma_directory": "/nowhere"}})


@pytest.mark.ray
def test_a_killed_pytest_leaves_no_ray(folder: Path, tmp_path: Path) -> None:
    text = (
        "import sys, pathlib, os, signal, psutil\n"
        f"sys.path[:0] = [{str(TESTS)!r}]\n"
        "from ray_aids import FakeCluster\n"
        f"cluster = FakeCluster(pathlib.Path({str(folder)!r}), {{'a': {{'num_cpus': 1}}}})\n"
        "pids = [one.pid for one in psutil.Process().children(recursive=True)]\n"
        "os.fork() or signal.pause()\n"  # the fork holds the pipe to the cluster process open
        "print(*pids, flush=True)\n"
        "signal.pause()\n"
    )
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True) as process:
        assert process.stdout
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    try:
        assert len(pids) > 4
        until(lambda: not any(map(is_there, pids)) and not folder.exists(), "Ray is gone with it")
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the fork
        for pid in filter(is_there, pids):
            os.kill(pid, signal.SIGKILL)


def test_spinning_processes_use_every_core() -> None:
    with spinning(2) as pids:
        assert len(pids) == 2 * (os.cpu_count() or 1)
        until(lambda: all(psutil.Process(pid).cpu_times().user > 0.05 for pid in pids), "each of them has spun")
    assert not any(map(is_there, pids))
