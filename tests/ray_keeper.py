"""Process that holds the Ray cluster of the tests. It answers requests, one line of JSON each, and ends with the
process that started it, together with all processes of Ray."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

ATTEMPTS = 3
PR_SET_CHILD_SUBREAPER = 36
LOG_LINES = 6


STUB = """
import os, sys, time
folder, node, port, *names = sys.argv[1:]
for name in names:
    path = os.path.join(folder, f"{name}_{node}")
    with open(path + ".new", "w") as file:
        file.write(port)
    os.replace(path + ".new", path)
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.2)
"""
"""Takes the place of a Ray process that no test uses and that costs a CPU-second: writes its ports, and ends with the
raylet."""
NO_SERVICE, NOTHING_LISTENS = "-1", "1"
STUBS = {
    "dashboard_agent": (NO_SERVICE, ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")),
    "runtime_env_agent": (NOTHING_LISTENS, ("runtime_env_agent_port",)),
}


class NoNode(Exception):
    """Ray did not start a node; the message has the error lines of the raylet."""


class Keeper:
    def __init__(self, folder: Path) -> None:
        from ray._private import services  # late: it reads variables that are set first
        from ray.cluster_utils import Cluster

        self._start_process: Any = services.start_ray_process
        services.start_ray_process = self._start_with_stubs
        self._stubs: tuple[str, ...] = ()
        self._folder = folder
        self._cluster: Any = Cluster()
        self._nodes: dict[str, Any] = {}

    def _start_with_stubs(self, command: list[str], *arguments: Any, **named: Any) -> Any:
        """Start a process of Ray; if it is a raylet, with stubs instead of its agents."""
        for place, word in enumerate(command):
            option, _, agent = str(word).partition("_command=")
            if (kind := option.removeprefix("--")) in self._stubs:
                port, names = STUBS[kind]
                options = dict(one.split("=", 1) for one in agent.split() if one.startswith("--") and "=" in one)
                words = [options["--session-dir"], options["--node-id"], port, *names]
                stub = subprocess.list2cmdline([sys.executable, "-I", "-S", "-c", STUB, *words])
                command[place] = f"{option}_command={stub}"
        return self._start_process(command, *arguments, **named)

    def add(self, name: str, *, runtime_env: bool = False, **arguments: Any) -> dict[str, Any]:
        """Add a node, with several attempts: a raylet whose agents are slow ends itself. `runtime_env`: workers on it
        may have a runtime_env."""
        self._stubs = tuple(kind for kind in STUBS if kind != "runtime_env_agent" or not runtime_env)
        for attempt in range(ATTEMPTS):
            try:
                return self._added(name, arguments)
            except Exception as failure:  # Ray raises bare Exceptions
                message = f"attempt {attempt + 1} of {ATTEMPTS}: {failure}\n{self._last_words()}"
                sys.stderr.write(message + "\n")
                _kill(self._strays())
                if attempt == ATTEMPTS - 1 or self._cluster.head_node is None:
                    raise NoNode(message) from failure
        raise AssertionError("unreachable")

    def _added(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        less = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        node = self._cluster.add_node(wait=False, **less, **arguments)
        self._nodes[name] = node
        raylet = node.all_processes["raylet"][0].process.pid
        return {"node_id": node.node_id, "raylet_pid": raylet, "address": self._cluster.address}

    def remove(self, name: str) -> None:
        """Remove a node that runs, is stopped or is dead."""
        node = self._nodes.pop(name)
        for process in _processes(node):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
        self._cluster.worker_nodes.discard(node)
        _kill(self._strays())

    def available(self) -> dict[str, Any]:
        found: dict[str, Any] = self._cluster.global_state.available_resources_per_node()
        return found

    def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._cluster.global_state.node_table()
        return found

    def groups(self) -> list[dict[str, Any]]:
        return list(self._cluster.global_state.placement_group_table().values())

    def actors(self) -> list[dict[str, Any]]:
        return list(self._cluster.global_state.actor_table(None, None, "ALIVE").values())

    def _strays(self) -> list[psutil.Process]:
        """Children that belong to no node: processes left by dead raylets are reparented to this process, the
        subreaper."""
        known = {process.pid for node in self._nodes.values() for process in _processes(node)}
        return [
            one for child in psutil.Process().children() if child.pid not in known for one in [child, *_family(child)]
        ]

    def _last_words(self) -> str:
        """The last error lines of the newest raylet, from `raylet.err`."""
        files = sorted(self._folder.glob("ray/session_2*/logs/raylet*.err"), key=lambda path: path.stat().st_mtime)
        lines = [line for path in files[-1:] for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-LOG_LINES:]) or "raylet.err is empty"


def _processes(node: Any) -> list[Any]:
    return [info.process for kind in node.all_processes.values() for info in kind]


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=10)


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def answer(keeper: Keeper, line: str) -> dict[str, Any]:
    asked = json.loads(line)
    do: Callable[..., Any] = getattr(keeper, asked.pop("do"))
    try:
        return {"answer": do(**asked)}
    except Exception as failure:  # reported to the caller; the next request may succeed
        return {"failed": f"{type(failure).__name__}: {failure}"}


def main(folder: Path) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of Ray is no answer
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    Thread(target=_end_with, args=(os.getppid(), folder), daemon=True).start()
    keeper = Keeper(folder)
    while line := sys.stdin.readline():
        out.write(json.dumps(answer(keeper, line), default=str) + "\n")
    _end(folder)


def _end_with(parent: int, folder: Path) -> None:
    """Watch the parent in a thread: Ray may hang, and a fork of the parent may hold our input open."""
    while os.getppid() == parent:
        time.sleep(0.2)
    _end(folder)


def _end(folder: Path) -> NoReturn:
    """Kill all processes of Ray and exit."""
    _kill(psutil.Process().children(recursive=True))
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(Path(sys.argv[1]))
