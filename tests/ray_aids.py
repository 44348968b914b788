"""Ray cluster of the tests: nodes with fake resources on this machine, nodes that may be killed, foreign actors, and
checks that all resources are free again."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from runtime.aids import Script
from waiting import LONG, until

if TYPE_CHECKING:
    from collections.abc import Iterator

ADDRESS = "DOVETAIL_TEST_RAY"
"""Environment variable with the address of the cluster, for scripts."""
QUIET = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_prestart_worker_first_driver": "0",
    **({} if LONG else {"RAY_health_check_period_ms": "500"}),
}
"""Settings of every Ray of the tests. No workers are prestarted: most tests use only the actors of agents. A killed
raylet is detected after 3 to 6 s; in `make test-long`, as by default, after 14 s."""
START_S = 120.0
"""Limit for the start of a node on a machine with five busy processes per core; Ray ends an attempt after 30 s."""
RESTORED_S = 2.0
GB = 10**9
MB = 2**20

NODES: dict[str, dict[str, Any]] = {
    "a": {"num_cpus": 4, "runtime_env": True},
    "b": {"num_cpus": 4, "num_gpus": 2, "resources": {"accelerator_type:L40S": 1}},
    "c": {"num_cpus": 4, "num_gpus": 2, "resources": {"accelerator_type:A100": 1}},
    "d": {"num_cpus": 4, "runtime_env": True},
}
"""The first node is the head; drivers connect to it, so it must not be killed. On nodes with `runtime_env` workers may
have one."""


@dataclass(frozen=True, slots=True)
class FakeNode:
    name: str
    node_id: str
    raylet_pid: int

    @property
    def dovetail_name(self) -> str:
        """The name in Dovetail: all nodes share a hostname, so it contains the id."""
        return f"node-{self.node_id[:8]}"

    def kill(self, how: int = signal.SIGKILL) -> None:
        """Signal the raylet only. SIGKILL: a crash; SIGTERM: a regular exit; SIGSTOP: a hung node."""
        os.kill(self.raylet_pid, how)


class RayWouldNotStart(Exception):
    """Ray did not start after all attempts; the message has the error lines of the raylet."""


class FakeCluster:
    """Nodes on this machine with fake resources, in the process of `ray_keeper.py`."""

    def __init__(self, folder: Path, nodes: dict[str, dict[str, Any]] = NODES) -> None:
        self.nodes: dict[str, FakeNode] = {}
        self.address = ""
        self._folder = folder
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the cluster
        self._keeper = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ray_keeper.py")), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **QUIET, "RAY_TMPDIR": str(folder)},
            start_new_session=True,  # Ctrl-C goes to pytest only; the keeper ends with pytest
        )
        try:
            for name, resources in nodes.items():
                self.add(name, **resources)
        except BaseException:
            self.close()
            raise

    def add(self, name: str, **resources: Any) -> FakeNode:
        """Add a node with `num_cpus`, `num_gpus`, `resources`, `labels`, ... of Ray's `RayParams`."""
        given = {"memory": 4 * GB, "object_store_memory": 128 * MB, "labels": {"fake": name}} | resources
        answer = self._ask("add", patience_s=3 * START_S, name=name, **given)
        self.address = answer["address"]
        self.nodes[name] = FakeNode(name, answer["node_id"], answer["raylet_pid"])
        return self.nodes[name]

    def remove(self, name: str) -> None:
        """Stop a node and all of its processes, and wait until Ray lists it as dead, which takes a while if its raylet
        was killed."""
        gone = self.nodes.pop(name)
        self._ask("remove", name=name)
        until(lambda: gone.node_id not in self.alive(), f"Ray sees that node {name} is gone", START_S)

    def available(self) -> dict[str, dict[str, float]]:
        """Available resources as in `ray.available_resources()`, by name of the present nodes."""
        answer = self._ask("available")
        return {
            name: {
                what: amount for what, amount in answer.get(node.node_id, {}).items() if not what.startswith("node:")
            }
            for name, node in self.nodes.items()
        }

    def alive(self) -> set[str]:
        """Ids of the nodes that Ray lists as alive; Ray takes up to 66 s to detect a dead one."""
        return {row["NodeID"] for row in self._ask("nodes") if row["Alive"]}

    def actors(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("actors")
        return found

    def groups(self) -> list[dict[str, Any]]:
        """Placement groups, without removed ones."""
        return [row for row in self._ask("groups") if row["state"] != "REMOVED"]

    def close(self) -> None:
        stdin, stdout = self._keeper.stdin, self._keeper.stdout
        assert stdin
        assert stdout
        try:
            stdin.close()
            self._keeper.wait(30)
        except (BrokenPipeError, subprocess.TimeoutExpired):  # Ray hangs
            for process in psutil.Process(self._keeper.pid).children(recursive=True):
                process.kill()
            self._keeper.kill()
            self._keeper.wait()
        stdout.close()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, do: str, patience_s: float = START_S, **more: Any) -> Any:
        stdin, stdout = self._keeper.stdin, self._keeper.stdout
        assert stdin
        assert stdout
        try:
            stdin.write(json.dumps({"do": do, **more}) + "\n")
            stdin.flush()
            is_readable = bool(select.select([stdout], [], [], patience_s)[0])
            line = stdout.readline() if is_readable else ""
        except BrokenPipeError:
            line = ""
        if not line:
            raise RayWouldNotStart(f"the keeper of Ray did not answer {do!r}:\n{self._keeper_log()}")
        answer = json.loads(line)
        if "failed" in answer:
            raise RayWouldNotStart(answer["failed"])
        return answer["answer"]

    def _keeper_log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:]


def short_folder() -> Path:
    """Path of a new folder for Ray: a socket path has at most 107 bytes, of which Ray uses 75 below this folder. Ray
    creates it when needed."""
    return Path(f"/tmp/dt{uuid.uuid4().hex[:8]}")


def start(attempts: int = 3) -> FakeCluster:
    """Start a cluster. Each attempt starts a new head: one that failed to start cannot be reused."""
    for left in reversed(range(attempts)):
        try:
            return FakeCluster(short_folder())
        except RayWouldNotStart:
            if not left:
                raise
    raise AssertionError("attempts is 0")


@contextmanager
def add_node(cluster: FakeCluster, **resources: Any) -> Iterator[FakeNode]:
    """Add a node that the test may kill; it is removed afterwards."""
    name = f"extra{sum(known.startswith('extra') for known in cluster.nodes) + 1}"
    node = cluster.add(name, **({"num_cpus": 4} | resources))
    try:
        yield node
    finally:
        cluster.remove(name)


def node_id_of(cluster: FakeCluster, name: str) -> str:
    return cluster.nodes[name].node_id


def patiently(seconds: float) -> float:
    """Scale a time limit for an idle machine by the load per core of this one."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def until_available_is(
    cluster: FakeCluster, before: dict[str, dict[str, float]], within_s: float | None = None
) -> float:
    """Wait until all resources are free again; returns the seconds. Nodes that joined or left are not compared."""
    within_s = patiently(RESTORED_S) if within_s is None else within_s
    began = time.monotonic()
    while differences := _differences(before, cluster.available()):
        assert time.monotonic() - began < within_s, f"not given back after {within_s} s: {differences}"
        time.sleep(0.02)
    return time.monotonic() - began


STORE, PULSE_BYTES = "object_store_memory", 64
"""The raylet probe of an agent stores an object of two bytes, which Ray has counted for up to 16 s after a run."""


def _differences(before: dict[str, dict[str, float]], now: dict[str, dict[str, float]]) -> list[str]:
    """Resources with less free than before. More is no difference: a foreign holder may have released it."""
    return [
        f"node {name}: {what} was {before[name].get(what, 0)}, is {now[name].get(what, 0)}"
        for name in sorted(before.keys() & now.keys())
        for what in sorted(before[name].keys() | now[name].keys())
        if "_group_" not in what  # shares of what counts as CPU, GPU and so on already
        and before[name].get(what, 0) - now[name].get(what, 0) > (PULSE_BYTES if what == STORE else 0)
    ]


def driver(cluster: FakeCluster, folder: Path, text: str, *, stdin: bool = False, **env: str) -> Script:
    """Run a program in its own process, with the address of the cluster in `os.environ["DOVETAIL_TEST_RAY"]`."""
    return Script(folder, text, stdin=stdin, warm=False, **{ADDRESS: cluster.address, **env})


HOLDS = """
import json, os, time, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

@ray.remote
class Holder:
    def gpus(self):
        return ray.get_gpu_ids()

asked = json.loads(os.environ["ASKED"])
ray.init(address=os.environ["DOVETAIL_TEST_RAY"], log_to_driver=False, logging_level="ERROR")
if "node" in asked:
    asked["scheduling_strategy"] = NodeAffinitySchedulingStrategy(asked.pop("node"), soft=False)
holder = Holder.options(**asked).remote()
print("HELD", json.dumps(ray.get(holder.gpus.remote())), "", flush=True)
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.5)
"""


def steady(cluster: FakeCluster) -> dict[str, dict[str, float]]:
    """Available resources once they no longer change: an earlier run may still release some."""
    found = cluster.available()
    while True:
        time.sleep(0.3)  # Ray reports changes every tenth of a second
        before, found = found, cluster.available()
        if before == found:
            return found


@contextmanager
def foreign_actor(cluster: FakeCluster, folder: Path, *, node: str | None = None, **asked: Any) -> Iterator[list[int]]:
    """An actor of another program holds `num_gpus`, `num_cpus`, `memory`; yields the ids of its GPUs."""
    before = steady(cluster)
    place = {} if node is None else {"node": node_id_of(cluster, node)}
    with driver(cluster, folder, HOLDS, ASKED=json.dumps({"num_cpus": 0, **asked, **place})) as script:
        script.says("HELD ")
        until(lambda: "] \n" in script.output, "it has printed the ids of its GPUs")
        held: list[int] = json.loads(script.output.partition("HELD ")[2].partition("]")[0] + "]")
        until(lambda: not asked or cluster.available() != before, "the cluster says that it is held")
        yield held
    until_available_is(cluster, before, within_s=10 * RESTORED_S)


SPINS = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""


@contextmanager
def spinning(per_core: int) -> Iterator[list[int]]:
    """Run this many busy processes per core; yields their pids."""
    with ExitStack() as stack:
        pids = []
        for _ in range(per_core * (os.cpu_count() or 1)):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", SPINS]))
            stack.callback(process.kill)
            pids.append(process.pid)
        yield pids
