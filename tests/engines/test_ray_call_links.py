"""Calls of the driver to workers of its own machine, which go over a socket of their own and not through Ray."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.control.commands import StopWorker
from dovetail.control.engine import CallNotSentError, CallOptions, DeadlineExceededError, WorkerLostError
from dovetail.control.events import WorkerReady, WorkerStopped
from dovetail.engines.local.protocol import encode_frame
from engines.ray_runs import RayEngineScene, agent_pids
from runtime.aids import is_there
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.engines.ray.agent_link import AgentLink
    from ray_aids import FakeCluster

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("by_value")]
MB = 1 << 20
SHORT_S = 0.2


class Recorder:
    """Remembers its calls."""

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def note(self, number: int, data: bytes = b"") -> int:
        self._numbers.append(number)
        return len(data)

    def noted(self) -> list[int]:
        return self._numbers

    def pid(self) -> int:
        return os.getpid()

    def fork_and_sleep(self, path: str) -> None:
        """Leave a process that has all sockets of this one."""
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        Path(path).write_text(str(child))
        time.sleep(600)


@pytest.fixture
def bench(ray_cluster: FakeCluster, tmp_path: Path) -> Iterator[RayEngineScene]:
    made = RayEngineScene(ray_cluster, tmp_path, "d")
    yield made
    made.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent may be silent for as long as a test takes."""
    monkeypatch.setattr("dovetail.engines.ray.agent_link.SILENCE_TIMEOUT_S", 2 * PATIENCE_S)


@contextmanager
def stopped_agent(bench: RayEngineScene) -> Iterator[None]:
    (pid,) = agent_pids(bench.engine).values()
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def agent_of(bench: RayEngineScene) -> AgentLink:
    (link,) = bench.engine.agents.links()
    return link


def has_socket(address: str) -> bool:
    """Whether any process has a socket of this name, or a connection that it has accepted."""
    return f"@{address}\n" in Path("/proc/net/unix").read_text()


def test_calls_do_not_pass_the_agent(bench: RayEngineScene, patient: None) -> None:
    bench.ready(1, Recorder, "d")
    pid = bench.result(bench.engine.call(1, "it", "pid"))
    with stopped_agent(bench):
        assert bench.result(bench.engine.call(1, "it", "pid")) == pid
        assert bench.result(bench.engine.call(1, "it", "note", 1, bytes(30 * MB))) == 30 * MB


def test_calls_from_another_machine_pass_the_agent(
    ray_cluster: FakeCluster, tmp_path: Path, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.engines.ray.agent_pool.machine_id", lambda: "another machine")
    bench = RayEngineScene(ray_cluster, tmp_path, "d")
    try:
        bench.ready(1, Recorder, "d")
        assert not agent_of(bench).call_address
        assert bench.result(bench.engine.call(1, "it", "pid"))
        with stopped_agent(bench):
            late = bench.engine.call_with(CallOptions(deadline_s=SHORT_S), 1, "it", "note", 1)
            bench.until(late.done)
            assert isinstance(late.exception(), DeadlineExceededError)
        assert bench.result(bench.engine.call(1, "it", "note", 2)) == 0
    finally:
        bench.close()


@pytest.mark.parametrize("wrong", ["call_address", "call_secret"])
def test_calls_pass_an_agent_that_refuses_a_socket(bench: RayEngineScene, wrong: str) -> None:
    """This includes calls made before the refusal."""
    bench.ready(1, Recorder, "d")
    setattr(agent_of(bench), wrong, "wrong")
    calls = [bench.engine.call(1, "it", "note", number, bytes(number % 2 * MB)) for number in range(20)]
    assert [bench.result(call) for call in calls] == [number % 2 * MB for number in range(20)]
    assert bench.result(bench.engine.call(1, "it", "noted")) == list(range(20))
    assert not agent_of(bench).call_address


def test_a_call_past_its_deadline_ends_while_the_agent_that_should_pass_the_socket_on_is_stopped(
    bench: RayEngineScene, patient: None
) -> None:
    bench.ready(1, Recorder, "d")
    with stopped_agent(bench):
        late = bench.engine.call_with(CallOptions(deadline_s=SHORT_S), 1, "it", "note", 1)
        bench.until(late.done)
        assert isinstance(late.exception(), DeadlineExceededError)
        after = bench.engine.call(1, "it", "note", 2)
    assert bench.result(after) == 0
    assert bench.result(bench.engine.call(1, "it", "noted")) == [2]


def test_calls_keep_their_order_when_their_way_changes(bench: RayEngineScene) -> None:
    """The first calls are calls of Ray, some of them large and in several pieces."""
    bench.start(1, Recorder, "d")
    calls: list[Any] = []
    while not any(isinstance(event, WorkerReady) for event in bench.log) or len(calls) < 100:
        calls.append(bench.engine.call(1, "it", "note", len(calls), bytes(9 * MB if len(calls) % 10 == 0 else 10)))
        bench.log += bench.engine.poll(0.01)
    calls += [bench.engine.call(1, "it", "note", len(calls) + number, bytes(MB)) for number in range(20)]
    for call in calls:
        bench.result(call)
    assert bench.result(bench.engine.call(1, "it", "noted")) == list(range(len(calls)))


def test_a_killed_worker_ends_its_calls_although_a_process_of_its_own_has_its_socket(
    bench: RayEngineScene, tmp_path: Path
) -> None:
    bench.ready(1, Recorder, "d")
    worker = bench.result(bench.engine.call(1, "it", "pid"))
    path = tmp_path / "child"
    call = bench.engine.call(1, "it", "fork_and_sleep", str(path))
    bench.until(lambda: path.exists() and path.read_text())
    os.kill(worker, signal.SIGKILL)
    bench.until(call.done)
    assert isinstance(call.exception(), WorkerLostError)
    bench.lost(1)
    assert isinstance(bench.engine.call(1, "it", "pid").exception(0), CallNotSentError)
    until(lambda: not is_there(int(path.read_text())), "the process that it forked has ended, too")


def open_for_calls(address: str) -> list[str]:
    """Descriptors of this process that are connected to this socket, or are shared memory of calls."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed meanwhile, or is not a connected socket
            target = str(path.readlink())
            if target.startswith("/memfd:call"):
                found.append(target)
            elif target.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as sock:
                    if sock.getpeername() == f"\0{address}".encode():
                        found.append(target)
    return found


def test_no_socket_and_no_descriptor_is_left(bench: RayEngineScene) -> None:
    bench.ready(1, Recorder, "d")
    address = agent_of(bench).call_address
    bench.result(bench.engine.call(1, "it", "note", 1, bytes(MB)))
    assert len(open_for_calls(address)) == 1
    bench.engine.submit([StopWorker(1)])
    bench.wait_for_event(WorkerStopped, 1)
    assert open_for_calls(address) == []
    assert has_socket(address)
    bench.ready(2, Recorder, "d")
    bench.result(bench.engine.call(2, "it", "note", 1, bytes(MB)))
    bench.engine.close()
    assert open_for_calls(address) == []
    until(lambda: not has_socket(address), "no process has a socket of this name")


@pytest.mark.parametrize("secret", ["", "wrong", 7])
def test_only_who_knows_the_secret_gets_a_socket(bench: RayEngineScene, secret: Any) -> None:
    bench.ready(1, Recorder, "d")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(f"\0{agent_of(bench).call_address}")
        sock.send(encode_frame(("link", secret, 1, 0, 0))[0])
        assert sock.recv(1) == b""
    assert bench.result(bench.engine.call(1, "it", "note", 1)) == 0
