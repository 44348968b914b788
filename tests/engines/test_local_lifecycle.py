"""Lifecycle of processes, descriptors and memory of the local engine; Ctrl-C; loss of the driver and of the fork
server."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dovetail as dt
from dovetail.control.commands import HostedObject, RunBatches, StartWorker
from dovetail.control.events import WorkerReady
from dovetail.engines.local.engine import LocalEngine
from dovetail.resources.seat import Seat
from ray_aids import patiently
from runtime.aids import (
    GatedSource,
    Script,
    descriptors,
    forkserver_of,
    is_there,
    kill_one,
    losses,
    marked_pids,
    memory_files,
    pids_of,
    run_of,
    say_when_waiting,
    workers_of,
)
from waiting import LONG, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.time_limit, pytest.mark.usefixtures("by_value")]

GONE_S = 1.0 if LONG else 5.0
"""It takes some 20 ms; in `make test` other tests run beside it."""


STUCK = """
import collections, ctypes, itertools, os, subprocess, sys, time
import dovetail as dt

def stuck(items):
    print("stuck", flush=True)
    open(f"stuck-{items[0]}", "w").close()
    if items[0] == 0:
        collections.deque(itertools.repeat(0), maxlen=0)  # C code that never releases the GIL
    elif items[0] == 1:
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    elif items[0] == 2:
        if not os.fork():
            os.setsid()
            if not os.fork():
                time.sleep(1000)
            os._exit(0)
    elif items[0] == 3:
        ctypes.PyDLL(None).sleep(1000)
    open(f"begun-{items[0]}", "w").close()
    time.sleep(1000)

run = dt.run(dt.Pipeline([dt.Stage("stuck", stuck, workers=4)]), range(4), cluster="1x(4cpu, 8GB)")
while sum(os.path.exists(f"stuck-{n}") for n in range(4)) + sum(os.path.exists(f"begun-{n}") for n in (1, 2)) < 6:
    time.sleep(0.01)
AFTER
SAYS
try:
    run.wait()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise
"""


def stuck_script(folder: Path, after: str = "", *, warm: bool = True) -> Script:
    says = say_when_waiting("all stuck")
    return Script(folder, STUCK.replace("AFTER", after).replace("SAYS", says), warm=warm)


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGKILL,
        signal.SIGTERM,
        *(pytest.param(how, marks=pytest.mark.long) for how in (signal.SIGHUP, signal.SIGSEGV)),
    ],
)
def test_no_process_is_left_after_the_driver_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    with stuck_script(tmp_path) as script:
        script.says("all stuck")
        script.kill(how)
        assert script.all_gone() < patiently(GONE_S)
        assert script.ended() == -how


def test_a_child_of_the_driver_that_holds_its_sockets_keeps_no_worker_alive(tmp_path: Path) -> None:
    fork = "child = os.fork()\nif not child:\n    time.sleep(1000)\nopen('child', 'w').write(str(child))\n"
    with stuck_script(tmp_path, after=fork, warm=False) as script:
        script.says("all stuck")
        child = int((tmp_path / "child").read_text())
        script.kill()
        until(lambda: marked_pids(script.mark) == [child], "only the child is left", patiently(GONE_S))
        os.kill(child, signal.SIGKILL)
        script.all_gone()


def test_a_driver_killed_during_worker_setup_leaves_no_process(tmp_path: Path) -> None:
    text = """
import dovetail as dt, time
class Slow:
    def setup(self, worker):
        open(f"in-setup-{worker.id}", "w").close()
        time.sleep(1000)
    def __call__(self, items):
        return items
run = dt.run(dt.Pipeline([dt.Stage("slow", Slow, workers=3)]), range(4), cluster="1x(4cpu, 8GB)")
print("begun", flush=True)
run.wait()
"""
    with Script(tmp_path, text, warm=True) as script:
        until(lambda: list(tmp_path.glob("in-setup-*")), "a worker is being set up")
        script.kill()
        assert script.all_gone() < patiently(GONE_S)


def test_a_nested_run_ends_with_the_outer_driver(tmp_path: Path) -> None:
    text = """
import dovetail as dt, time
def inner(items):
    open("inner", "w").close()
    time.sleep(1000)
def outer(items):
    return list(dt.run(dt.Pipeline([dt.Stage("inner", inner)]), items, cluster="1x(4cpu, 4GB)"))
dt.run(dt.Pipeline([dt.Stage("outer", outer, workers=1)]), range(1), cluster="1x(4cpu, 4GB)").wait()
"""
    with Script(tmp_path, text, warm=True) as script:
        until((tmp_path / "inner").exists, "the inner run works")
        script.kill()
        assert script.all_gone() < patiently(GONE_S)


def test_a_script_that_ends_during_its_run_leaves_no_process(tmp_path: Path) -> None:
    with stuck_script(tmp_path, after="sys.exit(0)") as script:
        assert script.ended() == 0
        assert script.all_gone() < patiently(GONE_S)


# Ctrl-C

SLOW = """
import os, sys, time
import dovetail as dt

def slow(items):
    time.sleep(0.02)
    return items

def numbers():
    for n in range(100_000):
        print("read", n, flush=True)
        yield n

run = dt.run(dt.Pipeline([dt.Stage("slow", slow)]), numbers(), cluster="1x(2cpu, 4GB)", run_dir="run")
found = []
LOOP
stats = run.stats
print("END", stats.status, stats.read, stats.finished, len(found), len(set(found)), flush=True)
"""
IN_RUN = """
for item in run:
    found.append(item)
    if len(found) == 20:
        print("twenty", flush=True)
"""
IN_BODY = """
for item in run:
    found.append(item)
    if len(found) == 20:
        print("twenty", flush=True)
    time.sleep(0.02)
"""
IN_WAIT = f"""
{say_when_waiting("twenty")}
run.wait()
"""


def ending(script: Script) -> tuple[str, int, int, int, int]:
    (line,) = [line for line in script.output.splitlines() if line.startswith("END")]
    _, status, *numbers = line.split()
    read, finished, found, different = map(int, numbers)
    return status, read, finished, found, different


def test_ctrl_c_drains_and_delivers_all_items_read(tmp_path: Path) -> None:
    with Script(tmp_path, SLOW.replace("LOOP", IN_RUN), warm=True) as script:
        script.says("twenty")
        script.kill(signal.SIGINT)
        output = script.finish()
        status, read, finished, found, different = ending(script)
        assert status == "drained"
        assert read == finished == found == different
        assert 20 <= read < 100_000
        assert "stopping at the next epoch" in output
        script.all_gone()


def test_ctrl_c_in_the_loop_over_the_results_drains(tmp_path: Path) -> None:
    with Script(tmp_path, SLOW.replace("LOOP", IN_BODY), warm=True) as script:
        script.says("twenty")
        script.kill(signal.SIGINT)
        script.finish()
        status, read, finished, found, different = ending(script)
        assert status == "drained"
        assert read == finished == found == different


def test_ctrl_c_while_waiting_drains(tmp_path: Path) -> None:
    with Script(tmp_path, SLOW.replace("LOOP", IN_WAIT), warm=True) as script:
        script.says("twenty")
        script.says("read 40")
        script.kill(signal.SIGINT)
        script.finish()
        status, read, finished, _, _ = ending(script)
        assert status == "drained"
        assert read == finished


def test_ctrl_c_twice_stops_at_once_with_keyboard_interrupt(tmp_path: Path) -> None:
    with stuck_script(tmp_path) as script:
        script.says("all stuck")
        script.kill(signal.SIGINT)
        script.says("stopping at the next epoch")
        script.kill(signal.SIGINT)
        assert script.ended() in (130, -signal.SIGINT)
        assert "KeyboardInterrupt" in script.output
        script.all_gone()


def test_ctrl_c_reaches_no_worker(tmp_path: Path) -> None:
    """SIGINT goes to the whole foreground process group, as from a terminal."""
    with Script(tmp_path, SLOW.replace("LOOP", IN_RUN), warm=True) as script:
        script.says("twenty")
        os.killpg(script.process.pid, signal.SIGINT)
        script.finish()
        status, read, finished, found, _ = ending(script)
        assert (status, read, finished) == ("drained", found, found)
        assert "KeyboardInterrupt" not in script.output


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("read", [dt.Run.wait, list])
def test_ctrl_c_that_does_not_wake_the_main_thread_is_handled(read: Callable[[dt.Run], object]) -> None:
    """A signal that arrives just before the main thread blocks does not wake it; nor does one in another thread."""
    stat = Path(f"/proc/self/task/{os.getpid()}/stat")
    source = GatedSource(0)
    run = run_of(dt.Stage("echo", echo), source=source)

    def interrupt() -> None:
        source.blocks.wait()
        until(lambda: signal.getsignal(signal.SIGINT) is not signal.default_int_handler, "the run handles Ctrl-C")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", "the main thread sleeps")
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        read(run)
    finally:
        source.released.set()
        thread.join()
    assert run.status == "drained"


# Fork server


class Naps:
    def __call__(self, items: list[int]) -> list[int]:
        time.sleep(0.003)
        return items


def forkserver_pid() -> int:
    """Pid of the fork server of this process; 0: there is none."""
    found = forkserver_of(os.getpid())
    return found[-1] if found is not None else 0


def kill_forkserver(killed: list[int]) -> None:
    """kill -9 of the fork server of this process, once there is another one than those that were killed before."""
    found = [0]

    def look() -> bool:
        found[0] = forkserver_pid()  # the kernel's list of children may miss one while others end
        return found[0] not in {0, *killed}

    until(look, "a fork server runs")
    killed.append(found[0])
    os.kill(found[0], signal.SIGKILL)


def test_a_killed_fork_server_loses_no_item() -> None:
    kills, each = (5, 400) if LONG else (2, 150)
    killed: list[int] = []
    workers: set[int] = set()
    handle: list[dt.Run] = []
    there = threading.Event()

    def source() -> Iterator[int]:
        there.wait()
        for number in range(each * (kills + 1)):
            if number and number % each == 0:
                until(lambda: pids_of(handle[0]) and forkserver_pid() not in {0, *killed}, "a fork server runs")
                workers.update(pids_of(handle[0]))
                kill_forkserver(killed)
                until(lambda: not any(map(is_there, workers)), "its workers are gone")
            yield number

    handle.append(run_of(dt.Stage("naps", Naps, retries=20), source=source()))
    there.set()
    assert sorted(handle[0]) == list(range(each * (kills + 1)))
    assert len(killed) == kills
    assert losses(handle[0]) >= kills
    until(lambda: not any(map(is_there, [*workers, *killed])), "no process is left")


class WaitsInSetup:
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def setup(self) -> None:
        self._wait("setup", "set-up-may-end")

    def __call__(self, items: list[int]) -> list[int]:
        self._wait("call", "call-may-end")
        return items

    def _wait(self, what: str, go_on: str) -> None:
        with open(f"{self._folder}/{what}-{os.getpid()}", "w"):  # noqa: PTH123
            pass
        while not os.path.exists(f"{self._folder}/{go_on}"):  # noqa: PTH110
            time.sleep(0.005)


def test_a_killed_fork_server_charges_no_item_and_fails_no_setup(tmp_path: Path) -> None:
    run = run_of(dt.Stage("waits", WaitsInSetup(str(tmp_path)), workers=1, retries=0), source=range(4))
    killed: list[int] = []
    for what, kills in (("setup", 4), ("call", 2)):
        for number in range(1, kills + 1):
            until(lambda: len(list(tmp_path.glob(f"{what}-*"))) == number, f"a worker is in its {what}")  # noqa: B023
            kill_forkserver(killed)
        if what == "setup":
            (tmp_path / "set-up-may-end").touch()
    (tmp_path / "call-may-end").touch()
    assert sorted(run) == [0, 1, 2, 3]
    assert run.errors == []


def test_a_run_ends_if_its_fork_server_is_killed_at_the_very_end() -> None:
    for _ in range(10 if LONG else 3):
        run = run_of(dt.Stage("naps", Naps), source=range(3))
        found = [next(iter(run))]
        forkserver = forkserver_pid()
        if forkserver:
            with suppress(ProcessLookupError):  # the run may end it at the same moment
                os.kill(forkserver, signal.SIGKILL)
        found += list(run)
        assert sorted(found) == [0, 1, 2]


def echo(items: list[Any]) -> list[Any]:
    return items


def test_many_workers_can_be_started_at_once(tmp_path: Path) -> None:
    count = 600 if LONG else 320  # about 280 reports of the fork server fill its socket
    engine = LocalEngine(tmp_path)
    try:
        hosted = (HostedObject("a", "builtins:sorted", 1),)
        engine.submit([StartWorker(number, (Seat("node-0", 10),), hosted) for number in range(count)])
        ready: set[int] = set()

        def all_ready() -> bool:
            ready.update(event.worker for event in engine.poll(0.1) if isinstance(event, WorkerReady))
            return len(ready) == count

        until(all_ready, "all are ready")
    finally:
        engine.close()
    assert not workers_of(tmp_path)


# Descriptors and memory


def big(items: list[int]) -> list[Any]:
    return [np.full(100_000, item, dtype=np.float64) for item in items]


def first(items: list[Any]) -> list[float]:
    return [float(item[0]) for item in items]


def held() -> Counter[Any]:
    """Descriptors and threads of this process."""
    gc.collect()
    return Counter([*(link.partition(":")[0] for link in descriptors()), *threading.enumerate()])


@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("deadly", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_run_leaves_no_descriptors_and_threads(deadly: bool) -> None:
    list(run_of(dt.Stage("warm", echo), source=range(3)))  # import modules and open what is opened once
    before = held()  # leftovers of earlier tests may disappear meanwhile
    handle: list[dt.Run] = []
    there = threading.Event()

    def source() -> Iterator[int]:
        there.wait()
        for number in range(150):
            if deadly and number in (50, 100):
                kill_one(handle[0])
            yield number

    stages = [dt.Stage("big", big, fuse=False, retries=20), dt.Stage("first", first, fuse=False, retries=20)]
    handle.append(run_of(*stages, source=source()))
    there.set()
    assert sorted(handle[0]) == list(map(float, range(150)))
    until(lambda: not held() - before, f"nothing is left: {before}, now {held()}")


@pytest.mark.usefixtures("collected")
def test_an_engine_closed_with_busy_workers_leaves_no_descriptors(tmp_path: Path) -> None:
    LocalEngine().close()
    before = held()
    engine = LocalEngine(tmp_path)
    hosted = (HostedObject("a", Naps, 1),)
    engine.submit([StartWorker(number, (Seat("node-0", 100),), hosted) for number in range(3)])
    until(lambda: any(isinstance(event, WorkerReady) for event in engine.poll(0.1)), "one is ready")
    items = [np.zeros(100_000) for _ in range(4)]
    segment = engine.store(range(4), items)
    for message in range(20):
        engine.submit([RunBatches(message, message % 3, "a", [(segment, 0, 4)], 4, 1, 100)])
    engine.close()
    assert not workers_of(tmp_path)
    del segment
    assert not held() - before


def test_shared_memory_of_ended_workers_is_released_during_the_run() -> None:
    items = 200 if LONG else 80
    most = memory_files() + 2 + 10  # two of the run, and one for each item in flight

    def source() -> Iterator[int]:
        yield from range(items - 10)
        until(lambda: memory_files() <= most, "the memory is released")
        yield from range(items - 10, items)

    stages = [
        dt.Stage("big", big, fuse=False, workers=1, recycle=10),
        dt.Stage("first", first, fuse=False, workers=1),
    ]
    run = run_of(*stages, source=source())
    assert sorted(run) == list(map(float, range(items)))
    assert run.stats.units[0].started > items // 20


def test_results_can_be_read_after_the_end_of_the_run() -> None:
    run = run_of(dt.Stage("big", big), source=range(20))
    until(lambda: run.done, "the run is over")
    assert sorted(float(item[0]) for item in run) == list(map(float, range(20)))


def test_errors_can_be_read_after_the_end_of_the_run() -> None:
    run = run_of(dt.Stage("picky", picky, on_error="skip"), source=[np.full(100_000, float(n)) for n in range(6)])
    list(run)
    assert sorted(float(error.item[0]) for error in run.errors) == [3.0]


def picky(items: list[Any]) -> list[float]:
    if items[0][0] == 3:
        raise ValueError("three")
    return [float(item[0]) for item in items]


def test_a_reader_that_stops_early_leaves_no_worker() -> None:
    with run_of(dt.Stage("naps", Naps), source=iter(range(10**9))) as run:
        assert next(iter(run)) is not None
    assert run.status == "cancelled"
    assert not workers_of(run.folder)


def test_a_source_that_raises_ends_the_run_with_its_exception() -> None:
    def source() -> Iterator[int]:
        yield from range(10)
        raise OSError("the disk is gone")

    run = run_of(dt.Stage("naps", Naps), source=source())
    with pytest.raises(OSError, match="the disk is gone"):
        list(run)
    assert not workers_of(run.folder)


def test_the_driver_may_have_closed_standard_descriptors(tmp_path: Path) -> None:
    text = """
import os
for fd in CLOSED:
    os.close(fd)
import dovetail as dt
def speaks(items):
    print("hello", flush=True)
    return items
run = dt.run(dt.Pipeline([dt.Stage("speaks", speaks)]), range(5), cluster="1x(2cpu, 4GB)", run_dir="run")
found = sorted(run)
with open("found", "w") as file:
    file.write(repr(found))
"""
    with Script(tmp_path, text.replace("CLOSED", "(0, 1, 2)")) as script:
        script.ended()
        assert (tmp_path / "found").exists()
        assert (tmp_path / "found").read_text() == "[0, 1, 2, 3, 4]"
        assert "hello" in "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("*.log"))
