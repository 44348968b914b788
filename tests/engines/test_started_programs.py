"""Programs that workers start end with their run: whichever of driver, guard, supervisor, fork server, agent and
raylet are killed, and however the programs detach themselves."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from random import Random
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import dovetail as dt
from ray_aids import add_node, driver, patiently
from runtime.aids import Script, child_pids, forkserver_of, is_there, run_of
from waiting import LONG, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ray_aids import FakeCluster

GONE_S = 5.0
"""Limit for the end of all programs on an idle machine; it takes some 20 ms."""
PROGRAMS = 4
"""That each worker starts."""

STAGE = """
import json, os, subprocess, time

SLEEP = ["sleep", "3000"]

def daemon():
    read, write = os.pipe()
    if not os.fork():
        os.setsid()
        pid = os.fork()
        if not pid:
            os.execvp(SLEEP[0], SLEEP)
        os.write(write, str(pid).encode())
        os._exit(0)
    os.wait()
    return int(os.read(read, 20))

class StartsPrograms:
    def __init__(self, folder):
        self.folder = folder

    def setup(self, worker):
        pids = [
            subprocess.Popen(SLEEP).pid,
            subprocess.Popen(SLEEP, start_new_session=True).pid,
            subprocess.Popen(SLEEP, start_new_session=True, env={}).pid,
            daemon(),
        ]
        path = f"{self.folder}/started-{os.getpid()}"
        with open(path + ".tmp", "w") as file:
            json.dump({"node": worker.node, "pids": pids}, file)
        os.rename(path + ".tmp", path)

    def __call__(self, items):
        time.sleep(0.005)
        return items
"""
DRIVER = (
    STAGE
    + """
import dovetail as dt

def numbers():
    number = 0
    while True:
        yield number
        number += 1

if __name__ == "__main__":
    own = subprocess.Popen(SLEEP, start_new_session=True, env={}).pid
    with open("own", "w") as file:
        file.write(str(own))
    address, labels = os.environ.get("DOVETAIL_TEST_RAY"), {"fake": "d"}
    where = {"engine": "ray:" + address} if address else {"cluster": "1x(2cpu, 4GB)"}
    needs = dt.Resources(labels=labels) if address else dt.Resources()
    stage = dt.Stage("starts", StartsPrograms(os.getcwd()), needs, workers=2, batch_size=1)
    run = dt.run(dt.Pipeline([stage]), numbers(), sink=dt.sink("out.jsonl"), run_dir="run", **where)
    run.wait()
"""
)


class Started:
    """Programs that the workers of a run have started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before: set[Path] = set()
        """Reports that were read already."""

    def next_programs(self, workers: int) -> dict[str, dict[int, list[int]]]:
        """Node -> worker -> its programs, of workers that have started since the last call."""

        def reports() -> set[Path]:
            return {path for path in self._folder.glob("started-*") if path.suffix != ".tmp"} - self._before

        until(lambda: len(reports()) >= workers, f"{workers} workers have started programs")
        found: dict[str, dict[int, list[int]]] = {}
        for path in reports():
            self._before.add(path)
            report = json.loads(path.read_text())
            found.setdefault(report["node"], {})[int(path.name.partition("-")[2])] = report["pids"]
        return found


def programs_of(workers: dict[int, list[int]]) -> list[int]:
    return [pid for pids in workers.values() for pid in pids]


def the_forkserver_of(driver_pid: int) -> dict[str, int]:
    """Guard, supervisor and fork server. Waits for them: a child whose thread ends while children are listed is seen
    only the next time."""
    found: list[tuple[int, int, int] | None] = [None]

    def is_found() -> bool:
        found[0] = forkserver_of(driver_pid)
        return found[0] is not None

    until(is_found, "the fork server is there")
    assert found[0] is not None
    return dict(zip(("guard", "supervisor", "fork server"), found[0], strict=True))


def until_gone(pids: list[int]) -> None:
    try:
        until(lambda: not any(map(is_there, pids)), "the programs have ended", patiently(GONE_S))
    finally:
        for pid in filter(is_there, pids):
            os.kill(pid, signal.SIGKILL)


def end_own_program(folder: Path) -> None:
    """The program that the driver itself started is not of the run; end it."""
    pid = int((folder / "own").read_text())
    assert is_there(pid), "a process that no worker started was killed"
    os.kill(pid, signal.SIGKILL)


KILLS: dict[str, dict[str, signal.Signals]] = {
    "driver": {},
    "driver and fork server": {"fork server": signal.SIGKILL},
    "driver and supervisor": {"supervisor": signal.SIGKILL},
    "driver and guard": {"guard": signal.SIGKILL},
    "all but the fork server": {"guard": signal.SIGKILL, "supervisor": signal.SIGKILL},
    "all but the supervisor": {"guard": signal.SIGKILL, "fork server": signal.SIGKILL},
    "all but the guard": {"supervisor": signal.SIGKILL, "fork server": signal.SIGKILL},
    "driver of a stopped fork server": {"fork server": signal.SIGSTOP},
    "driver of a stopped supervisor": {"supervisor": signal.SIGSTOP},
    "driver of a stopped guard": {"guard": signal.SIGSTOP},
    "driver and guard of a stopped supervisor": {"guard": signal.SIGKILL, "supervisor": signal.SIGSTOP},
}
"""What happens to others than the driver, which is killed."""


@pytest.mark.parametrize("case", KILLS)
def test_programs_end_when_their_driver_is_killed(tmp_path: Path, case: str) -> None:
    with Script(tmp_path, DRIVER, warm=True) as script:
        (workers,) = Started(tmp_path).next_programs(2).values()
        programs = programs_of(workers)
        assert len([pid for pid in programs if is_there(pid)]) == 2 * PROGRAMS
        servers = the_forkserver_of(script.process.pid)
        victims = {servers[who]: how for who, how in KILLS[case].items()}
        for pid in (script.process.pid, *victims):
            os.kill(pid, signal.SIGSTOP)  # none of them acts before all are killed
        for pid, how in victims.items():
            os.kill(pid, how)
        script.kill()
        until_gone([*programs, *workers, *servers.values()])
        end_own_program(tmp_path)
        script.all_gone()


REPLACEMENTS: dict[str, dict[str, signal.Signals]] = {
    "guard": {"guard": signal.SIGKILL},
    "supervisor": {"supervisor": signal.SIGKILL},
    "fork server": {"fork server": signal.SIGKILL},
    "guard and supervisor": {"guard": signal.SIGKILL, "supervisor": signal.SIGKILL},
    "guard and fork server": {"guard": signal.SIGKILL, "fork server": signal.SIGKILL},
    "supervisor and fork server": {"supervisor": signal.SIGKILL, "fork server": signal.SIGKILL},
    "fork server of a stopped supervisor": {"supervisor": signal.SIGSTOP, "fork server": signal.SIGKILL},
}
"""What happens to them while the driver runs."""


@pytest.mark.usefixtures("by_value")
@pytest.mark.parametrize("case", REPLACEMENTS)
def test_programs_end_when_the_fork_server_is_replaced_and_the_run_continues(tmp_path: Path, case: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(STAGE, names)
    go_on = threading.Event()

    def source() -> Iterator[int]:
        yield from range(20)
        go_on.wait()
        yield from range(20, 40)

    run = run_of(dt.Stage("starts", names["StartsPrograms"](str(tmp_path)), workers=2), source=source())
    started = Started(tmp_path)
    try:
        (workers,) = started.next_programs(2).values()
        servers = the_forkserver_of(os.getpid())
        victims = {servers[who]: how for who, how in REPLACEMENTS[case].items()}
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        for pid, how in victims.items():
            os.kill(pid, how)
        until_gone([*programs_of(workers), *workers, *servers.values()])
        (again,) = started.next_programs(2).values()
        assert all(map(is_there, programs_of(again)))
    finally:
        go_on.set()
    assert sorted(run) == list(range(40))
    until_gone(programs_of(again))


PROGRAM = """
import json, os, subprocess, time

CLEAN_EXIT_CODE = None

def prepare(body):
    pass

def main(sock, breadcrumbs, cells, spec):
    programs = [subprocess.Popen(["sleep", "3000"], start_new_session=True).pid for _ in range(10)]
    sock.sendall(json.dumps([os.getpid(), *programs]).encode())
    time.sleep(3000)
"""
PARENT = """
import os, signal, socket
from dovetail.engines.local.forkserver_client import NO_BREADCRUMBS, ForkServerClient

client = ForkServerClient(NO_BREADCRUMBS, {**os.environ, "PYTHONPATH": os.getcwd()}, "starts_programs")
ours, theirs = socket.socketpair()
log = os.open(os.devnull, os.O_WRONLY)
client.spawn(1, b"", [theirs.fileno(), log], (), dict(os.environ), fresh=False)
client.flush()
with open("started.tmp", "wb") as file:
    file.write(ours.recv(4096))
os.rename("started.tmp", "started")
signal.pause()
"""


@pytest.mark.parametrize("seed", range(100 if LONG else 5))
def test_programs_end_when_a_parent_that_is_killed_kills_its_children_while_they_end(tmp_path: Path, seed: int) -> None:
    """Ray kills the children of an agent that exits, just after its fork server was killed."""
    (tmp_path / "starts_programs.py").write_text(PROGRAM)
    dice = Random(seed)
    with Script(tmp_path, PARENT, warm=True) as parent:
        until((tmp_path / "started").exists, "the programs run")
        programs = json.loads((tmp_path / "started").read_text())
        servers = the_forkserver_of(parent.process.pid)
        children = child_pids(parent.process.pid)
        os.kill(servers["fork server"], signal.SIGKILL)
        time.sleep(dice.random() * 0.005)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        parent.kill()
        until_gone([*programs, *servers.values()])
        parent.all_gone()


def burn(items: list[float]) -> list[float]:
    import time

    for seconds in items:
        until_cpu_s = time.process_time() + seconds
        while time.process_time() < until_cpu_s:
            pass
    return items


@pytest.mark.usefixtures("by_value")
def test_the_cpu_time_of_workers_counts_as_that_of_children_of_the_driver() -> None:
    """`time` and job schedulers count it: guard, supervisor and fork server wait for their children."""

    def cpu_s_of_children() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = cpu_s_of_children()
    assert list(run_of(dt.Stage("burn", burn), source=[0.3])) == [0.3]
    assert cpu_s_of_children() - before >= 0.3


# Ray


def agent_of(worker: int) -> int:
    """The agent above a worker: fork server, supervisor and guard are between them."""
    *between, agent = psutil.Process(worker).parents()[:4]
    assert "ray::" in " ".join(agent.cmdline()), (between, agent)
    return int(agent.pid)


@pytest.mark.ray
@pytest.mark.time_limit(600 if LONG else 150)
@pytest.mark.parametrize("attempt", range(5 if LONG else 1))
def test_programs_on_ray_end_with_their_agent_node_or_driver(
    ray_cluster: FakeCluster, tmp_path: Path, attempt: int
) -> None:
    here = ray_cluster.nodes["d"].dovetail_name
    with (
        add_node(ray_cluster, num_cpus=1, labels={"fake": "d"}) as extra,
        driver(ray_cluster, tmp_path, DRIVER.replace("workers=2", "workers=5")) as script,
    ):
        started = Started(tmp_path)
        by_node = started.next_programs(5)
        os.kill(agent_of(min(by_node[here])), signal.SIGKILL)
        until_gone([*programs_of(by_node[here]), *by_node[here]])
        again = started.next_programs(4)
        extra.kill(signal.SIGKILL if LONG else signal.SIGTERM)  # Ray detects a killed node 14 s later
        on_extra = by_node[extra.dovetail_name]
        until_gone([*programs_of(on_extra), *on_extra])
        script.kill()
        left = [*programs_of(again[here]), *again[here]]
        until_gone(left)
        end_own_program(tmp_path)
        script.all_gone()
