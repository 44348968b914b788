"""Messages between driver and workers: wake-ups, full sockets, cancellation, shared memory, forked processes,
signals."""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dovetail as dt
from dovetail.control.commands import Cancel, HostedObject, RunBatches, StartWorker
from dovetail.control.events import BatchesDone, BatchesReturned, Drain, LossCause, WorkerLost
from dovetail.engines.local import protocol
from dovetail.engines.local.engine import LocalEngine
from dovetail.resources.seat import Seat
from runtime.aids import Script, memory_files, run_of
from waiting import PATIENCE_S, knows_pids, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dovetail.control.events import Event
    from dovetail.engines.worker_context import Worker

pytestmark = [pytest.mark.time_limit, pytest.mark.usefixtures("by_value")]


class LocalEngineScene:
    """A local engine whose workers host one object each, and the log of its events."""

    def __init__(self, folder: Path) -> None:
        self.engine = LocalEngine(folder)
        self.log: list[Event] = []

    def ready(self, worker: int, work: object, slots: int = 1) -> None:
        self.start(worker, work, slots)
        self.until(lambda: self.engine.is_ready(worker), f"worker {worker} is ready")
        self.until(lambda: knows_pids(self.engine, worker), f"the pid of worker {worker} is known")

    def start(self, worker: int, work: object, slots: int = 1) -> None:
        self.engine.submit([StartWorker(worker, (Seat("node-0", 100),), (HostedObject("u", work, slots),))])

    def send(self, message: int, *items: Any, worker: int = 1, cut: int = 100) -> None:
        """Send each item in its own segment, with one call for all."""
        parts = [(self.engine.store([message], [item]), 0, 1) for item in items]
        self.engine.submit([RunBatches(message, worker, "u", parts, len(items), len(items), cut)])

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"timeout: waited until {what}; received {self.log}"
            self.log += self.engine.poll(0.05)

    def begun(self, message: int, worker: int = 1) -> None:
        self.until(lambda: message in self.engine.running(worker), f"message {message} runs")

    def done(self, message: int) -> BatchesDone:
        self.until(lambda: message in self.messages(BatchesDone), f"message {message} is done")
        (found,) = [event for event in self.log if isinstance(event, BatchesDone) and event.message == message]
        return found

    def values(self, done: BatchesDone) -> list[Any]:
        assert done.failures == []
        return [item for segment in done.segments for item in self.engine.load(segment)[1]]

    def lost(self, worker: int) -> WorkerLost:
        def ends() -> list[WorkerLost]:
            return [event for event in self.log if isinstance(event, WorkerLost) and event.worker == worker]

        self.until(ends, f"worker {worker} is gone")
        return ends()[0]

    def messages(self, kind: type[BatchesDone | BatchesReturned]) -> list[int]:
        return [event.message for event in self.log if isinstance(event, kind)]

    def pid(self, worker: int = 1) -> int:
        (pid,) = self.engine.processes()[worker][1]
        return pid


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LocalEngineScene]:
    made = LocalEngineScene(tmp_path / "engine")
    yield made
    made.engine.close()


def wait_for(path: str) -> None:
    while not os.path.exists(path):  # noqa: PTH110
        time.sleep(0.002)


def note(path: str, text: object) -> None:
    with open(path, "a") as file:  # noqa: PTH123
        file.write(f"{text}\n")


def noted(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


# Wake-ups


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_post_during_a_wake_up_does_not_suppress_later_ones(
    bench: LocalEngineScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, really = bench.engine, os.eventfd_read
    numbers = iter(range(4))

    def post() -> None:
        engine.post(Drain(str(next(numbers))))

    def read(fd: int) -> int:
        in_a_thread(post)
        value = really(fd)
        in_a_thread(post)
        return value

    engine.poll(0)
    in_a_thread(post)
    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd_read", read)
        bench.until(lambda: len(bench.log) == 3, "all three arrive")
    in_a_thread(post)
    assert engine._epoll.poll(0), "a thread that sleeps in poll would not wake"
    bench.until(lambda: len(bench.log) == 4, "the last one arrives")


def test_posts_from_another_thread_always_wake_poll(bench: LocalEngineScene, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rounds, at_once = bench.engine, 1000, 3
    all_received = threading.Semaphore(1)
    really = os.eventfd_read

    def read(fd: int) -> int:
        time.sleep(0)  # let other threads run
        value = really(fd)
        time.sleep(0)
        return value

    monkeypatch.setattr(os, "eventfd_read", read)

    def posts() -> None:
        for round_ in range(rounds):
            all_received.acquire()
            for number in range(at_once):
                engine.post(Drain(f"{round_}.{number}"))
                time.sleep(0)

    thread = threading.Thread(target=posts, daemon=True)
    thread.start()
    received = 0
    while received < rounds * at_once:
        began = engine.now()
        received += len(engine.poll(PATIENCE_S))
        assert engine.now() - began < PATIENCE_S / 2, f"it slept after {received} events"
        if received % at_once == 0:
            all_received.release()
    thread.join()


# Sending


def waits(items: list[Any]) -> list[Any]:
    threading.Event().wait()
    return items


def test_a_worker_that_dies_while_its_socket_is_full_is_lost(bench: LocalEngineScene) -> None:
    bench.ready(1, waits)
    bench.send(0, b"")
    bench.begun(0)
    (rank,) = bench.engine._workers[1].ranks
    for message in range(1, 200):
        if rank.has_unsent:
            break
        bench.send(message, os.urandom(100_000))
    assert rank.has_unsent
    os.kill(bench.pid(), 9)
    assert bench.lost(1).cause is LossCause.SIGNAL
    bench.ready(2, same)
    bench.send(1000, 5, worker=2)
    assert bench.values(bench.done(1000)) == [5]


def same(items: list[Any]) -> list[Any]:
    return items


@pytest.mark.parametrize("short_of", [errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS])
def test_a_momentary_kernel_memory_shortage_loses_no_message(
    bench: LocalEngineScene, monkeypatch: pytest.MonkeyPatch, short_of: int
) -> None:
    bench.ready(1, same)
    really = protocol._send_some
    refused: list[Any] = []

    def send_some(*args: Any) -> None:
        if len(refused) < 3:
            refused.append(args)
            raise OSError(short_of, os.strerror(short_of))
        really(*args)

    monkeypatch.setattr(protocol, "_send_some", send_some)
    bench.send(1, 7)
    bench.send(2, 8)
    assert bench.values(bench.done(1)) == [7]
    assert bench.values(bench.done(2)) == [8]
    assert len(refused) == 3


# Cancellation


class NotesAndWaits:
    """Records the messages that it runs; the first waits for a file."""

    def __init__(self, log: Path, gate: Path) -> None:
        self._log, self._gate = str(log), str(gate)

    def __call__(self, items: list[tuple[int, bytes]]) -> list[int]:
        note(self._log, items[0][0])
        if items[0][0] == 1:
            wait_for(self._gate)
        return [items[0][0]]


def test_a_message_behind_large_ones_is_never_both_cancelled_and_run(bench: LocalEngineScene, tmp_path: Path) -> None:
    """One read from the socket ends after every descriptor."""
    bench.ready(1, NotesAndWaits(tmp_path / "log", tmp_path / "gate"))
    bench.send(1, (1, b""))
    bench.begun(1)
    bench.send(2, (2, b""))
    for message in (3, 4, 5):
        bench.send(message, (message, os.urandom(300_000)))
    bench.engine.submit([Cancel(2, 1), Cancel(4, 1)])
    bench.until(lambda: set(bench.messages(BatchesReturned)) == {2, 4}, "both are taken back")
    (tmp_path / "gate").touch()
    bench.done(5)
    assert noted(tmp_path / "log") == [1, 3, 5]
    assert bench.messages(BatchesDone) == [1, 3, 5]


class CallsFirst:
    """Its first message calls another worker, so that a thread reads from then on."""

    def __init__(self, log: Path) -> None:
        self._log = str(log)
        self._called = False
        self._dice = random.Random(0)

    def setup(self, worker: Worker) -> None:
        self._worker = worker

    def ping(self, number: int) -> int:
        return number

    def __call__(self, items: list[int]) -> list[int]:
        if not self._called:
            self._called = self._worker.call(2, "u", "ping", 1).result() == 1
        note(self._log, items[0])
        end = time.perf_counter() + self._dice.random() * 0.002
        while time.perf_counter() < end:
            pass
        return items


def test_a_worker_that_has_called_another_runs_no_cancelled_message(bench: LocalEngineScene, tmp_path: Path) -> None:
    for worker in (1, 2):
        bench.ready(worker, CallsFirst(tmp_path / "log"))
    dice, sent, last = random.Random(0), 0, 1200

    def answered() -> list[int]:
        return bench.messages(BatchesDone) + bench.messages(BatchesReturned)

    bench.log.clear()
    while sent < last:
        while sent < last and sent - len(bench.log) < 4:
            sent += 1
            bench.send(sent, sent)
        bench.engine.submit([Cancel(sent - dice.randint(0, 1), 1)])
        bench.log += bench.engine.poll(PATIENCE_S)
    bench.until(lambda: len(bench.log) == last, "all are answered")
    bench.send(last + 1, last + 1)
    bench.done(last + 1)  # all messages before it are processed
    assert sorted(answered()) == list(range(1, last + 2))
    ran, returned = noted(tmp_path / "log"), set(bench.messages(BatchesReturned))
    assert returned
    assert sorted(ran) == sorted(bench.messages(BatchesDone))
    assert not returned & set(ran)


class AsksInVain:
    """Abandons a call that has no answer yet."""

    def __init__(self, gate: Path) -> None:
        self._gate = str(gate)

    def setup(self, worker: Worker) -> None:
        self._worker = worker

    def slow(self) -> str:
        wait_for(self._gate)
        return "too late"

    def ping(self) -> str:
        return "pong"

    def __call__(self, items: list[str]) -> list[str]:
        if items[0] == "give up":
            self._worker.call(2, "u", "slow").cancel()
            return items
        found: str = self._worker.call(2, "u", "ping").result()
        return [found]


def test_an_abandoned_call_does_not_stop_a_worker_from_reading(bench: LocalEngineScene, tmp_path: Path) -> None:
    for worker in (1, 2):
        bench.ready(worker, AsksInVain(tmp_path / "gate"))
    bench.send(1, "give up")
    assert bench.values(bench.done(1)) == ["give up"]
    (tmp_path / "gate").touch()
    bench.send(2, "ask again")  # answered after the abandoned one
    assert bench.values(bench.done(2)) == ["pong"]
    assert not any(isinstance(event, WorkerLost) for event in bench.log)


# Async objects


class LeavesInSetup:
    async def setup(self) -> None:
        sys.exit("no licence")

    async def __call__(self, items: list[int]) -> list[int]:
        return items


def test_an_async_setup_that_exits_is_a_failed_setup(bench: LocalEngineScene) -> None:
    bench.start(1, LeavesInSetup)
    end = bench.lost(1)
    assert end.cause is LossCause.SETUP_FAILED
    assert "no licence" in end.detail


class StartsLeaver:
    """Each call starts a task that exits."""

    async def __call__(self, items: list[int]) -> list[int]:
        import asyncio

        async def leaves() -> None:
            sys.exit(1)

        task = asyncio.create_task(leaves())
        while not task.done():
            await asyncio.sleep(0)
        return items


def test_a_user_task_that_exits_does_not_stop_other_tasks(bench: LocalEngineScene) -> None:
    bench.ready(1, StartsLeaver, slots=2)
    for message in range(1, 4):
        bench.send(message, message)
    for message in range(1, 4):
        assert bench.values(bench.done(message)) == [message]


# Memory


class KeepsAndFails:
    """Keeps its first input; its output exceeds the file size limit."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def __call__(self, items: list[Any]) -> list[Any]:
        import resource

        no_limit = resource.RLIM_INFINITY
        if not self._kept:
            self._kept += items
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, no_limit))
            return [np.ones(2 << 20, np.uint8)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (no_limit, no_limit))
        return [(int(kept.min()), int(kept.max())) for kept in self._kept]


def test_input_kept_from_a_message_whose_output_was_spilled_never_changes(bench: LocalEngineScene) -> None:
    bench.ready(1, KeepsAndFails)
    bench.send(100, np.full(1 << 20, 100, np.uint8))
    assert bench.done(100).failures
    for message in range(6):
        bench.send(message, np.full(1 << 20, message, np.uint8))
        assert bench.values(bench.done(message)) == [(100, 100)]
        bench.log.clear()


class FindsNoRoom:
    def __call__(self, items: list[int]) -> list[Any]:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, resource.RLIM_INFINITY))
        return [np.zeros(2 << 20, np.uint8), np.zeros(8 << 20, np.uint8)]


def test_messages_whose_output_was_spilled_leave_no_memory(bench: LocalEngineScene) -> None:
    bench.ready(1, FindsNoRoom)
    before = memory_files(bench.pid())
    for message in range(20):
        bench.send(message, message, cut=1)
        assert bench.done(message).failures
    bench.until(lambda: memory_files(bench.pid()) <= before + 3, "the worker has let go of what it placed")


def writes_and_forks(items: list[Any]) -> list[int]:
    """Writes into its input; after some messages payloads are copied."""
    array = items[0]
    array += 1
    child = os.fork()
    if not child:
        array[:] = 99
        os._exit(0)
    os.waitpid(child, 0)
    return [int(array.max())]


def test_writes_of_a_forked_process_into_its_arrays_are_private(bench: LocalEngineScene) -> None:
    bench.ready(1, writes_and_forks)
    found = []
    for message in range(25):
        bench.send(message, np.zeros(1 << 20, np.uint8))
        found += bench.values(bench.done(message))
        bench.log.clear()
    assert found == [1] * 25


class SavesInBackground:
    """A forked process reads the first array long after its call has ended."""

    def __init__(self, folder: Path) -> None:
        self._gate, self._saved = str(folder / "gate"), str(folder / "saved")

    def __call__(self, items: list[tuple[int, Any]]) -> list[int]:
        ((number, array),) = items
        if number == 0 and not os.fork():
            wait_for(self._gate)
            note(self._saved + ".part", array.min())
            note(self._saved + ".part", array.max())
            os.rename(self._saved + ".part", self._saved)  # noqa: PTH104
            os._exit(0)
        return [number]


def test_a_process_forked_by_a_call_can_always_read_its_input(bench: LocalEngineScene, tmp_path: Path) -> None:
    bench.ready(1, SavesInBackground(tmp_path))
    for message in range(12):
        bench.send(message, (message, np.full(1 << 20, message, np.uint8)))
        assert bench.values(bench.done(message)) == [message]
        bench.log.clear()
    (tmp_path / "gate").touch()
    until((tmp_path / "saved").exists, "it is saved")
    assert noted(tmp_path / "saved") == [0, 0]


def writes_in_a_hurry(items: list[Any]) -> list[int]:
    sys.setswitchinterval(1e-6)
    for array in items:
        array += 1
    return [int(array.max()) for array in items]


def test_concurrent_calls_that_write_into_their_inputs_share_no_memory(bench: LocalEngineScene) -> None:
    bench.ready(1, writes_in_a_hurry, slots=4)
    messages = 160
    for message in range(messages):
        bench.send(message, *(np.zeros(200_000, np.uint8) for _ in range(4)))
        bench.until(lambda: message - len(bench.messages(BatchesDone)) < 8, "few are on their way")  # noqa: B023
    for message in range(messages):
        assert bench.values(bench.done(message)) == [1] * 4


# Forks and signals


def forks_and_leaves(items: list[int]) -> list[int]:
    child = os.fork()
    if not child:
        sys.exit(0)
    if items[0] % 2:
        os.waitpid(child, 0)
    return items


def test_a_process_forked_by_a_call_that_returns_is_no_second_worker() -> None:
    assert sorted(run_of(dt.Stage("forks", forks_and_leaves), source=range(60))) == list(range(60))


FORKING = """
import os, sys, time
import dovetail as dt
from dovetail.engines.local import forkserver_client
from dovetail.runtime import run_handle
forkserver_client.EXIT_TIMEOUT_S = run_handle.EXIT_TIMEOUT_S = 1000

def naps(items):
    time.sleep(0.01)
    return items

run = dt.run(dt.Pipeline([dt.Stage("naps", naps)]), range(40), cluster="1x(2cpu, 4GB)", run_dir="run")
results = iter(run)
found = [next(results)]
child = os.fork()
if not child:
    CHILD
found += results
run.wait()
print("RESULTS", sorted(found) == list(range(40)), run.status, flush=True)
AFTER
"""


def forking_script(folder: Path, *, child: str, after: str) -> Script:
    return Script(folder, FORKING.replace("CHILD", child).replace("AFTER", after), warm=True)


def test_a_process_forked_by_the_driver_does_not_delay_the_end_of_a_run(tmp_path: Path) -> None:
    with forking_script(tmp_path, child="time.sleep(1000)", after="os.kill(child, 9)") as script:
        assert "RESULTS True finished" in script.finish()
        script.all_gone()


def test_a_process_forked_by_the_driver_may_exit_during_the_run(tmp_path: Path) -> None:
    after = "print('its code', os.waitpid(child, 0)[1])"
    with forking_script(tmp_path, child="sys.exit(0)", after=after) as script:
        output = script.finish()
        assert "RESULTS True finished" in output
        assert "its code 0" in output
        script.all_gone()


def test_a_driver_that_blocks_signals_detects_the_exit_of_its_workers(tmp_path: Path) -> None:
    text = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT})
import dovetail as dt
from dovetail.engines.local import forkserver_client
forkserver_client.EXIT_TIMEOUT_S = 1000
run = dt.run(dt.Pipeline([dt.Stage("same", lambda items: items)]), range(10), cluster="1x(2cpu, 4GB)", run_dir="run")
print("RESULTS", sorted(run), run.status, flush=True)
"""
    with Script(tmp_path, text, warm=True) as script:
        assert f"RESULTS {list(range(10))} finished" in script.finish()
        script.all_gone()
