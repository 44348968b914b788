"""Faults of local workers: death, hanging calls, lack of memory, unpicklable items, badly behaved stages."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import multiprocessing
import operator
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dovetail as dt
from dovetail.engines.local.exit_cause import OomKillCounter
from runtime.aids import (
    PLACE,
    engine_of,
    forkserver_of,
    is_there,
    kill_one,
    losses,
    no_worker_is_left,
    ready_pids_of,
    run_of,
)
from waiting import LONG, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.time_limit, pytest.mark.usefixtures("by_value")]


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def slowly(items: list[int]) -> list[int]:
    time.sleep(0.002)
    return [item + 1 for item in items]


class Once:
    """Executes an action at certain items, once per item in the whole run."""

    def __init__(self, folder: Path, numbers: set[int], what: Callable[[], object]) -> None:
        self._folder, self._numbers, self._what = folder, numbers, what

    def __call__(self, items: list[int]) -> list[int]:
        for item in items:
            if item in self._numbers:
                try:
                    os.close(os.open(self._folder / f"once-{item}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                self._what()
        return items


class Sticky:
    """Raises from a certain item on until its worker is replaced."""

    def __init__(self, bad: int, folder: Path) -> None:
        self._bad, self._folder, self._broken = bad, folder, False

    def setup(self) -> None:
        self._count("setups")

    def _count(self, what: str) -> None:
        with (self._folder / what).open("a") as counts:
            counts.write("1")

    def __call__(self, items: list[int]) -> list[int]:
        if self._bad in items:
            self._count("calls")
            self._broken = True
        if self._broken:
            raise RuntimeError("nothing works any more")
        return items


class Fussy:
    """Raises for some items, and records its setups and its calls."""

    def __init__(self, bad: frozenset[int], folder: Path) -> None:
        self._bad, self._folder = bad, folder

    def setup(self) -> None:
        self._record("setups", os.getpid())

    def _record(self, what: str, number: int) -> None:
        with (self._folder / what).open("a") as lines:
            lines.write(f"{number}\n")

    def __call__(self, items: list[int]) -> list[int]:
        for item in items:
            self._record("calls", item)
        if self._bad.intersection(items):
            raise ValueError("a bad row")
        return items


class Always:
    """Executes the action every time it gets one of these items."""

    def __init__(self, numbers: set[int], what: Callable[[], object]) -> None:
        self._numbers, self._what = numbers, what

    def __call__(self, items: list[int]) -> list[int]:
        if self._numbers.intersection(items):
            self._what()
        return items


def segfault() -> None:
    faulthandler.disable()
    ctypes.string_at(0)


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def never_ends() -> None:
    threading.Event().wait()


# Loss of workers


def test_random_kills_lose_and_duplicate_no_item() -> None:
    items, kills = (20_000, 20) if LONG else (4_000, 4)
    dice = random.Random(7)
    moments = {(n + 1) * items // (kills + 1) for n in range(kills)}
    often: dict[str, Any] = {"fuse": False, "retries": 50}  # an item may be hit several times by chance
    stages = [dt.Stage("double", double, **often), dt.Stage("slow", slowly, batch_size=8, **often)]
    handle: list[dt.Run] = []
    there = threading.Event()
    killed = []

    def source() -> Iterator[int]:
        there.wait()
        for number in range(items):
            if number in moments:
                killed.append(kill_one(handle[0], dice=dice))
            yield number

    handle.append(run_of(*stages, source=source()))
    there.set()
    run = handle[0]
    assert sorted(run) == [2 * number + 1 for number in range(items)]
    assert losses(run) == len(killed) == kills
    assert run.status == "finished"
    no_worker_is_left(run)


def test_an_item_that_segfaults_is_recorded_and_all_others_are_delivered() -> None:
    items = 5_000 if LONG else 600
    bad = items // 2 + 7
    run = run_of(dt.Stage("bad", Always({bad}, segfault), batch_size=64, on_error="skip"), source=range(items))
    assert sorted(run) == [number for number in range(items) if number != bad]
    (error,) = run.errors
    assert error.item == bad
    assert error.key == (bad,)
    assert "signal" in error.error + error.traceback
    assert "SIGSEGV" in error.error + error.traceback
    assert 1 <= losses(run) <= 4


def test_an_item_that_always_kills_its_worker_fails_the_run_with_the_cause() -> None:
    run = run_of(dt.Stage("bad", Always({57}, segfault), batch_size=8), source=range(100))
    with pytest.raises(dt.RunError, match=r"bad.*") as raised:
        list(run)
    assert "SIGSEGV" in str(raised.value)
    assert (raised.value.problems[0].place, raised.value.problems[0].evidence[0]) == ("item 57", "item: 57")
    no_worker_is_left(run)


def test_os_exit_is_a_worker_loss_and_the_item_is_retried(tmp_path: Path) -> None:
    run = run_of(dt.Stage("exits", Once(tmp_path, {3, 77}, lambda: os._exit(0)), batch_size=4), source=range(100))
    assert sorted(run) == list(range(100))
    assert losses(run) == 2


def test_an_item_that_always_exits_is_recorded_with_its_exit_code() -> None:
    run = run_of(dt.Stage("exits", Always({5}, lambda: os._exit(33)), on_error="skip"), source=range(20))
    assert len(list(run)) == 19
    (error,) = run.errors
    assert "33" in error.error + error.traceback
    assert (error.place, error.item) == ("item 5", 5)


@pytest.mark.parametrize("what", [sys.exit, exec], ids=["sys.exit", "exec"])
def test_sys_exit_in_a_stage_is_an_exception_and_no_worker_loss(what: Callable[[str], object]) -> None:
    text = "raise KeyboardInterrupt" if what is exec else "enough"
    run = run_of(dt.Stage("exits", Always({5}, lambda: what(text)), on_error="skip"), source=range(20))
    assert len(list(run)) == 19
    (error,) = run.errors
    assert error.error.startswith("KeyboardInterrupt" if what is exec else "SystemExit: enough")
    assert losses(run) == 0


def test_a_call_that_exceeds_its_timeout_is_recorded_and_others_succeed() -> None:
    """On Ray the way there and back counts, too: longer, so that no other item meets it twice on a busy machine."""
    timeout = 2.0 if PLACE else 0.5
    stage = dt.Stage("hangs", Always({13}, never_ends), timeout=timeout, on_error="skip", retries=0)
    run = run_of(stage, source=range(40))
    assert sorted(run) == [number for number in range(40) if number != 13]
    (error,) = run.errors
    assert error.item == 13
    assert "timeout" in error.error + error.traceback
    no_worker_is_left(run)


def test_a_call_that_hung_once_is_retried(tmp_path: Path) -> None:
    run = run_of(dt.Stage("hangs", Once(tmp_path, {13}, never_ends), batch_size=4, timeout=0.5), source=range(40))
    assert sorted(run) == list(range(40))


class Sleeps:
    def __call__(self, items: list[int]) -> list[int]:
        if 3 in items:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            ctypes.PyDLL(None).sleep(1000)  # holds the GIL
        return items


def test_c_code_that_holds_the_gil_is_ended_at_its_timeout() -> None:
    stage = dt.Stage("c", Sleeps, timeout=0.5, on_error="skip", retries=0)
    run = run_of(stage, source=range(20))
    assert sorted(run) == [number for number in range(20) if number != 3]
    no_worker_is_left(run)


# Unpicklable items


class Prickly:
    """An item that cannot be unpickled if its number ends in 3."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> dict[str, int]:
        return {"number": self.number}

    def __setstate__(self, state: dict[str, int]) -> None:
        if state["number"] % 10 == 3:
            raise ValueError(f"{state['number']} does not like to travel")
        self.number = state["number"]


def numbers_of(items: list[Prickly]) -> list[int]:
    return [item.number for item in items]


async def numbers_awaited(items: list[Prickly]) -> list[int]:
    return [item.number for item in items]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(("slots", "awaited"), [(1, False), (3, False), (3, True)])
def test_only_items_that_cannot_be_unpickled_are_recorded_as_failed(slots: int, awaited: bool) -> None:
    function = numbers_awaited if awaited else numbers_of
    stage = dt.Stage("read", function, batch_size=4, slots=slots, on_error="skip")
    run = run_of(stage, source=[Prickly(number) for number in range(100)])
    assert sorted(run) == [number for number in range(100) if number % 10 != 3]
    assert sorted(error.key or () for error in run.errors) == [(number,) for number in range(3, 100, 10)]
    for error in run.errors:
        assert "does not like to travel" in error.error
    assert losses(run) == 0


def made_prickly(items: list[int]) -> list[Prickly]:
    return [Prickly(item) for item in items]


@pytest.mark.usefixtures("in_process")
def test_items_that_cannot_be_unpickled_between_two_stages_fail_at_the_second() -> None:
    stages = [
        dt.Stage("make", made_prickly, fuse=False),
        dt.Stage("read", numbers_of, batch_size=4, fuse=False, on_error="skip"),
    ]
    run = run_of(*stages, source=range(60))
    assert sorted(run) == [number for number in range(60) if number % 10 != 3]
    assert {error.stage for error in run.errors} == {"read"}
    assert len(run.errors) == 6


def lock_at_seven(items: list[int]) -> list[object]:
    return [threading.Lock() if item == 7 else item for item in items]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("slots", [1, 2])
def test_a_result_that_cannot_be_pickled_names_its_stage(slots: int) -> None:
    run = run_of(dt.Stage("locks", lock_at_seven, slots=slots), source=range(20))
    with pytest.raises(dt.RunError) as raised:
        list(run)
    assert "locks" in str(raised.value)
    assert "cannot be pickled" in str(raised.value)
    assert "return data (numbers, texts, lists, dicts, arrays)" in str(raised.value)
    assert "lock" in str(raised.value)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("slots", [1, 2])
def test_only_results_that_cannot_be_pickled_are_recorded_as_failed(slots: int) -> None:
    run = run_of(dt.Stage("locks", lock_at_seven, slots=slots, on_error="skip"), source=range(20))
    assert sorted(run) == [number for number in range(20) if number != 7]
    assert [error.item for error in run.errors] == [7]


class Leaves:
    def __reduce__(self) -> Any:
        raise SystemExit("while it is pickled")


def leaves_at_seven(items: list[int]) -> list[object]:
    return [Leaves() if item == 7 else item for item in items]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("slots", [1, 2])
def test_a_result_that_exits_while_it_is_pickled_blocks_no_run(slots: int) -> None:
    run = run_of(dt.Stage("leaves", leaves_at_seven, slots=slots, on_error="skip"), source=range(20))
    assert sorted(run) == [number for number in range(20) if number != 7]
    assert len(run.errors) == 1


# Setup


class BadSetup:
    def __init__(self, what: Callable[[], object]) -> None:
        self._what = what

    def setup(self, worker: object) -> None:
        self._what()

    def __call__(self, items: list[int]) -> list[int]:
        return items


def no_model() -> None:
    raise FileNotFoundError("there is no model.bin")


@pytest.mark.usefixtures("in_process")
def test_a_setup_that_raises_fails_the_run_with_its_message() -> None:
    run = run_of(dt.Stage("model", BadSetup(no_model)), source=range(10))
    with pytest.raises(dt.RunError, match=r"model.*setup.*there is no model\.bin") as raised:
        list(run)
    assert "in the setup of stage 'model'" in str(raised.value) or "no_model" in str(raised.value)
    no_worker_is_left(run)


@pytest.mark.parametrize(
    ("what", "text"), [(kill_myself, "SIGKILL"), (lambda: os._exit(12), "exit code 12"), (segfault, "SIGSEGV")]
)
def test_a_worker_that_dies_in_setup_fails_the_run_with_the_cause(what: Callable[[], object], text: str) -> None:
    run = run_of(dt.Stage("model", BadSetup(what)), source=range(10))
    with pytest.raises(dt.RunError, match="model") as raised:
        list(run)
    assert text in str(raised.value)
    no_worker_is_left(run)


@pytest.mark.usefixtures("in_process")
def test_a_module_that_cannot_be_imported_is_reported_with_its_own_frames_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_a_missing_module.py").write_text("import no_such_package\n\ndef f(rows): return rows\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(dt.RunError) as raised:
        list(run_of(dt.Stage("s", "imports_a_missing_module:f"), source=range(3)))
    (problem,) = raised.value.problems
    assert problem.message.endswith("ModuleNotFoundError: No module named 'no_such_package'")
    assert problem.evidence[:4] == (
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/imports_a_missing_module.py", line 1, in <module>',
        "    import no_such_package",
        "ModuleNotFoundError: No module named 'no_such_package'",
    )


def test_a_setup_that_exceeds_its_timeout_fails_the_run() -> None:
    run = run_of(dt.Stage("model", BadSetup(never_ends), setup_timeout=0.3), source=range(10))
    with pytest.raises(dt.RunError, match="model"):
        list(run)
    no_worker_is_left(run)


# Memory


def no_more_than_four(items: list[int]) -> list[int]:
    if len(items) > 4:
        raise MemoryError("too many at once")
    return items


@pytest.mark.usefixtures("in_process")
def test_a_batch_that_runs_out_of_memory_is_split() -> None:
    run = run_of(dt.Stage("large", no_more_than_four, batch_size=16), source=range(200))
    assert sorted(run) == list(range(200))
    assert run.errors == []
    assert losses(run) == 0


class DiesOfMemory:
    """Dies as by the OOM killer: increments the counter, then sends the signal."""

    def __init__(self, counter: str, most: int) -> None:
        self._counter, self._most = counter, most

    def __call__(self, items: list[int]) -> list[int]:
        if len(items) > self._most:
            with open(self._counter, "r+") as file:  # noqa: PTH123
                count = int(file.read().split()[1]) + 1
                file.seek(0)
                file.write(f"oom_kill {count}\n")
            kill_myself()
        return items


def test_an_oom_kill_is_recognised_and_leads_to_smaller_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 4\n")
    monkeypatch.setattr(
        "dovetail.engines.local.engine.OomKillCounter", lambda: OomKillCounter(((str(counter), "oom_kill"),))
    )
    run = run_of(dt.Stage("large", DiesOfMemory(str(counter), 4), batch_size=16, workers=1), source=range(160))
    assert sorted(run) == list(range(160))
    assert losses(run) >= 2
    assert any("out of memory" in text for _, text in run.stats.errors)


def test_a_kill_that_the_kernel_did_not_count_is_not_reported_as_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom_kill 4\n")
    monkeypatch.setattr(
        "dovetail.engines.local.engine.OomKillCounter", lambda: OomKillCounter(((str(counter), "oom_kill"),))
    )
    run = run_of(dt.Stage("dies", Once(tmp_path, {5}, kill_myself)), source=range(20))
    assert sorted(run) == list(range(20))
    assert not any("out of memory" in text for _, text in run.stats.errors)
    assert any("SIGKILL" in text for _, text in run.stats.errors)


# Badly behaved stages


def starts_threads(items: list[int]) -> list[int]:
    threading.Thread(target=never_ends).start()  # not a daemon: the interpreter would wait for it at exit
    return items


def forks_a_pool(items: list[int]) -> list[int]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(operator.neg, items)


def forks_and_forgets(items: list[int]) -> list[int]:
    if not os.fork():
        time.sleep(1000)
        os._exit(0)
    return items


def daemonises(items: list[int]) -> list[int]:
    if not os.fork():
        os.setsid()
        if not os.fork():
            time.sleep(1000)
        os._exit(0)
    return items


def closes_standard_files(items: list[int]) -> list[int]:
    for fd in (0, 1, 2):
        try:
            os.close(fd)
        except OSError:
            continue
    return items


def changes_folder(items: list[int]) -> list[int]:
    os.chdir("/")
    return items


def ignores_signals(items: list[int]) -> list[int]:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    return items


def runs_a_program(items: list[int]) -> list[int]:
    return [int(subprocess.run(["echo", str(item)], capture_output=True, check=True).stdout) for item in items]


def prints_much(items: list[int]) -> list[int]:
    for stream in (sys.stdout, sys.stderr):
        stream.write("x" * 100_000)
    return items


def changes_the_environment(items: list[int]) -> list[int]:
    os.environ.clear()
    sys.path.clear()
    return items


RUDE = (
    starts_threads,
    forks_and_forgets,
    daemonises,
    closes_standard_files,
    changes_folder,
    ignores_signals,
    runs_a_program,
    prints_much,
    changes_the_environment,
)


def test_badly_behaved_stages_lose_no_item_and_leave_no_process() -> None:
    stages = [dt.Stage(stage.__name__, stage, batch_size=5, fuse=False, workers=1) for stage in RUDE]
    run = run_of(*stages, dt.Stage("last", double, fuse=False, workers=1), source=range(20), cluster="1x(10cpu, 20GB)")
    assert sorted(run) == [2 * number for number in range(20)]
    assert [(unit.name, unit.lost) for unit in run.stats.units if unit.lost] == []
    no_worker_is_left(run)


def test_a_stage_may_use_a_pool_of_forked_processes() -> None:
    run = run_of(dt.Stage("pool", forks_a_pool, batch_size=10), source=range(40))
    assert sorted(run) == [-number for number in reversed(range(40))]


class Daemons:
    """Leaves processes in their own sessions behind, and returns their pids."""

    def __call__(self, items: list[int]) -> list[int]:
        return [subprocess.Popen(["sleep", "1000"], start_new_session=item % 2 == 0).pid for item in items]


def test_processes_that_stages_started_are_gone_after_the_run() -> None:
    run = run_of(dt.Stage("daemons", Daemons), source=range(6))
    pids = list(run)
    assert len(pids) == 6
    until(lambda: not any(map(is_there, pids)), "what was left behind is gone")


class StopsItself:
    def __call__(self, items: list[int]) -> list[int]:
        os.kill(os.getpid(), signal.SIGSTOP)
        return items


def test_a_worker_stopped_by_a_signal_exceeds_its_timeout() -> None:
    stage = dt.Stage("stops", StopsItself, timeout=0.5, on_error="skip", retries=0, workers=1)
    run = run_of(stage, source=range(2))
    assert list(run) == []
    assert len(run.errors) == 2
    no_worker_is_left(run)


def arrays(items: list[int]) -> list[Any]:
    return [np.full(100_000, item, dtype=np.float64) for item in items]


def firsts(items: list[Any]) -> list[float]:
    return [float(item[0]) for item in items]


def return_items(items: list[Any]) -> list[Any]:
    time.sleep(0.001)
    return items


def closes_standard_files_each_time(items: list[int]) -> list[Any]:
    closes_standard_files(items)
    return arrays(items)


@pytest.mark.parametrize("mode", ["streaming", "waves"])
def test_files_of_a_worker_do_not_get_numbers_of_standard_files(mode: str) -> None:
    stages = [
        dt.Stage("make", closes_standard_files_each_time, batch_size=1, fuse=False, workers=1),
        dt.Stage("read", firsts, fuse=False, workers=1),
    ]
    run = run_of(*stages, source=range(100), cluster="1x(2cpu, 8GB)", mode=mode)
    assert sorted(run) == list(map(float, range(100)))
    assert [(unit.name, unit.lost, unit.failed) for unit in run.stats.units if unit.lost or unit.failed] == []


def sums_and_closes_standard_files(items: list[Any]) -> list[Any]:
    return [{"sum": value} for value in firsts(closes_standard_files(items))]


@pytest.mark.parametrize("mode", ["streaming", "waves"])
def test_spool_and_part_files_do_not_get_numbers_of_standard_files(tmp_path: Path, mode: str) -> None:
    stages = [
        dt.Stage("make", closes_standard_files_each_time, batch_size=1, fuse=False, workers=1),
        dt.Stage("read", sums_and_closes_standard_files, fuse=False, workers=1),
    ]
    out = tmp_path / "out.jsonl"
    run = dt.run(stages, range(100), sink=str(out), cluster="1x(2cpu, 8GB)", mode=mode)
    run.wait()
    assert sorted(json.loads(line)["sum"] for line in out.read_text().splitlines()) == list(range(100))
    assert [(unit.name, unit.lost, unit.failed) for unit in run.stats.units if unit.lost or unit.failed] == []


def test_large_payloads_of_dead_workers_stay_readable() -> None:
    stages = [
        dt.Stage("make", arrays, fuse=False, workers=1, retries=20),
        dt.Stage("pass", return_items, fuse=False, workers=1),
        dt.Stage("read", firsts, fuse=False, workers=1),
    ]
    handle: list[dt.Run] = []
    there = threading.Event()

    def source() -> Iterator[int]:
        there.wait()
        for number in range(200):
            if number % 50 == 20:
                kill_one(handle[0], "make")
            yield number

    handle.append(run_of(*stages, source=source(), cluster="1x(4cpu, 8GB)"))
    there.set()
    assert sorted(handle[0]) == list(map(float, range(200)))
    assert engine_of(handle[0])._payloads._orphans == {}


async def awaited(items: list[Any]) -> list[Any]:
    return items


class KeepsAFew:
    """Checks whether the items that it keeps have changed."""

    def setup(self) -> None:
        self._kept: list[Any] = []

    def __call__(self, items: list[Any]) -> list[int]:
        self._kept = [*self._kept, *items][-20:]
        assert all((array == array[0]).all() for array in self._kept)
        return [int(item[0]) for item in items]


@pytest.mark.parametrize("seed", range(6 if LONG else 1))
def test_combined_random_faults_lose_and_duplicate_no_item(seed: int) -> None:
    """Large payloads, slots, async stages, recycled workers; workers and fork servers are killed by several signals."""
    dice = random.Random(seed)
    items = 1000 if LONG else 300
    handle: list[dt.Run] = []
    there = threading.Event()

    def source() -> Iterator[int]:
        there.wait()
        for number in range(items):
            if number % 60 == 30:
                servers = forkserver_of(os.getpid())
                pids = servers if servers is not None and dice.random() < 0.2 else ready_pids_of(handle[0])
                with suppress(ProcessLookupError, IndexError):
                    os.kill(dice.choice(pids), dice.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
            yield number

    common: dict[str, Any] = {"fuse": False, "retries": 50}  # an item may be hit several times by chance
    stages = [
        dt.Stage("make", arrays, batch_size=dice.choice([1, 4]), **common),
        dt.Stage("pass", return_items, batch_size=dice.choice([1, 8]), slots=dice.choice([None, 3]), **common),
        dt.Stage("awaited", awaited, slots=4, **common),
        dt.Stage("keep", KeepsAFew, batch_size=3, slots=dice.choice([None, 2]), recycle=30, **common),
    ]
    handle.append(run_of(*stages, source=source(), cluster="1x(5cpu, 8GB)"))
    there.set()
    assert sorted(handle[0]) == list(range(items))
    no_worker_is_left(handle[0])


def test_a_stage_that_cannot_be_pickled_is_an_error_with_its_name_and_the_reason() -> None:
    lock = threading.Lock()

    def holds_a_lock(items: list[int]) -> list[int]:
        with lock:
            return items

    with pytest.raises(dt.ConfigError, match=r"'locked'.*cannot be sent to a worker"):
        list(run_of(dt.Stage("locked", holds_a_lock), source=range(3)))


@pytest.mark.parametrize("workers", [1, 4])
def test_an_item_that_breaks_its_worker_for_good_costs_no_other_item(tmp_path: Path, workers: int) -> None:
    stage = dt.Stage("sticky", Sticky(150, tmp_path), dt.Resources(cpus=0.25), workers=workers, on_error="skip")
    run = run_of(stage, source=range(400))
    out = list(run)
    assert sorted(out) == [item for item in range(400) if item != 150]
    assert [failed.error for failed in run.errors] == ["RuntimeError: nothing works any more"]
    assert len((tmp_path / "calls").read_text()) <= 3
    assert len((tmp_path / "setups").read_text()) <= workers + 2


@pytest.mark.long
def test_ordinary_bad_rows_cost_no_restart_and_one_call_each_of_a_real_worker(tmp_path: Path) -> None:
    bad = frozenset(random.Random(19).sample(range(10_000), 1000))
    stage = dt.Stage("fussy", Fussy(bad, tmp_path), workers=1, batch_size=1, retries=0, on_error="skip")
    run = run_of(stage, source=range(10_000))
    assert sorted(run) == [item for item in range(10_000) if item not in bad]
    assert len(run.errors) == 1000
    assert sorted(map(int, (tmp_path / "calls").read_text().split())) == list(range(10_000))
    assert len((tmp_path / "setups").read_text().split()) == 1
