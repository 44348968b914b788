"""Faults on Ray: workers that die, hang or run out of memory, and agents that are killed."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.control.commands import Cancel, StopWorker
from dovetail.control.engine import WorkerLostError
from dovetail.control.events import BatchesReturned, LossCause, NodeJoined, NodeLeft
from engines import test_local_faults
from engines.ray_runs import RayEngineScene, agent_pids, on_ray, use_only_nodes
from engines.test_local_faults import (
    Once,
    double,
    slowly,
    test_a_call_that_exceeds_its_timeout_is_recorded_and_others_succeed,
    test_a_setup_that_raises_fails_the_run_with_its_message,
    test_an_item_that_breaks_its_worker_for_good_costs_no_other_item,
    test_an_item_that_segfaults_is_recorded_and_all_others_are_delivered,
    test_random_kills_lose_and_duplicate_no_item,
)
from engines.test_local_faults import (
    test_processes_that_stages_started_are_gone_after_the_run as _nothing_is_left_behind,
)
from ray_aids import add_node, patiently
from runtime.aids import engine_of, is_there, losses, run_of
from waiting import LONG, time_limit, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.engines.ray.engine import RayEngine
    from ray_aids import FakeCluster

__all__ = [
    "on_ray",
    "test_a_call_that_exceeds_its_timeout_is_recorded_and_others_succeed",
    "test_a_setup_that_raises_fails_the_run_with_its_message",
    "test_an_item_that_breaks_its_worker_for_good_costs_no_other_item",
    "test_an_item_that_segfaults_is_recorded_and_all_others_are_delivered",
    "test_random_kills_lose_and_duplicate_no_item",
]
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("on_ray", "by_value")]
BY_VALUE = (test_local_faults,)


# Causes of loss


class Dies:
    """Dies or hangs as the item requests."""

    def __call__(self, items: list[str]) -> list[str]:
        for item in items:
            getattr(self, item, lambda: None)()
        return items

    def segfault(self) -> None:
        faulthandler.disable()
        ctypes.string_at(0)

    def kill_9(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        os._exit(33)

    def leave_well(self) -> None:
        os._exit(0)

    def abort(self) -> None:
        faulthandler.disable()
        os.abort()

    def much(self) -> None:
        raise MemoryError("cannot allocate 7 TB")

    def much_of_a_card(self) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")

    def hangs(self) -> None:
        threading.Event().wait()

    def fills(self) -> None:
        """Fill all available memory."""
        kept = []
        while True:
            kept.append(b"x" * (64 << 20))


class DiesInSetup(Dies):
    def __init__(self, how: str) -> None:
        self._how = how

    def setup(self) -> None:
        getattr(self, self._how)()


@pytest.fixture(scope="module")
def bench(ray_cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayEngineScene]:
    made = RayEngineScene(ray_cluster, tmp_path_factory.mktemp("bench"), "a", "d")
    yield made
    made.close()


def test_each_cause_of_loss_is_reported_with_the_running_call(bench: RayEngineScene) -> None:
    expected = {
        "segfault": (LossCause.SIGNAL, "signal 11 (SIGSEGV"),
        "kill_9": (LossCause.SIGNAL, "signal 9 (SIGKILL"),
        "abort": (LossCause.SIGNAL, "signal 6 (SIGABRT"),
        "leave": (LossCause.EXIT, "exit code 33"),
        "leave_well": (LossCause.EXIT, "exit code 0"),
    }
    sent = {}
    for worker, how in enumerate(expected, 100):
        bench.start(worker, Dies, "ad"[worker % 2])
        sent[worker] = bench.send(worker, ["fine", "fine", how, "fine"])
    for worker, (cause, text) in enumerate(expected.values(), 100):
        lost = bench.lost(worker)
        assert (lost.cause, text in lost.detail) == (cause, True), lost
        assert [(crumb.message, crumb.index, crumb.exact) for crumb in lost.breadcrumbs] == [(sent[worker], 2, True)]


def test_a_memory_error_is_reported_as_out_of_memory(bench: RayEngineScene) -> None:
    bench.start(110, Dies, "d")
    done = bench.answer(bench.send(110, ["fine", "much", "much_of_a_card", "fine"]))
    reported = [(failure.start, failure.out_of_memory, failure.on_gpu) for failure in done.failures]
    assert reported == [(1, True, False), (2, True, True)]


def test_a_failed_setup_is_reported_with_its_exception(bench: RayEngineScene) -> None:
    expected = {
        "much": (LossCause.SETUP_FAILED, "cannot allocate 7 TB"),
        "segfault": (LossCause.SIGNAL, "SIGSEGV"),
        "leave": (LossCause.EXIT, "exit code 33"),
    }
    for worker, how in enumerate(expected, 120):
        bench.start(worker, DiesInSetup(how), "d")
    for worker, (cause, text) in enumerate(expected.values(), 120):
        lost = bench.lost(worker)
        assert (lost.cause, text in lost.detail) == (cause, True), lost
    assert 'raise MemoryError("cannot allocate 7 TB")' in bench.lost(120).detail  # the traceback


def test_a_stop_of_a_hung_call_is_quick_and_others_continue(bench: RayEngineScene) -> None:
    bench.ready(130, Dies, "d")
    bench.ready(131, Dies, "d")
    hung = bench.send(130, ["hangs"])
    behind = bench.send(130, ["fine"])
    bench.until(lambda: bench.engine.running(130) == (hung,))
    bench.engine.submit([Cancel(behind, 130)])
    assert bench.wait_for_event(BatchesReturned, 130).message == behind
    began = time.monotonic()
    bench.engine.submit([StopWorker(130, drain=False, reason="too long")])
    lost = bench.lost(130)
    assert time.monotonic() - began < patiently(5)
    assert (lost.cause, lost.detail) == (LossCause.STOPPED, "too long")
    assert [crumb.message for crumb in lost.breadcrumbs] == [hung]
    assert bench.done(bench.send(131, ["fine"])) == ["fine"]


# Memory


def test_the_memory_watch_ends_a_worker_before_memory_runs_out(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    made = RayEngineScene(ray_cluster, tmp_path, "d", memory_full=0.0001)
    try:
        made.start(1, Dies, "d")
        message = made.send(1, ["hangs"])
        lost = made.lost(1)
        assert lost.cause is LossCause.OUT_OF_MEMORY
        assert "ended before memory ran out" in lost.detail
        assert "requested no memory" in lost.detail
        assert [crumb.message for crumb in lost.breadcrumbs] in ([message], [])
        assert not any(isinstance(event, NodeLeft) for event in made.log)
    finally:
        made.close()


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A cgroup with a limit, or the test is skipped."""
    parent = next((one for one in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")) if one.is_dir()), None)
    if parent is None:
        pytest.skip("there are no cgroups here")
    folder = parent / f"dovetail-test-{os.getpid()}"
    old = parent.name == "memory"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
    except OSError as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"cgroups cannot be made here: {error}")
    try:
        yield folder
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (parent / "cgroup.procs").write_text(pid)
        until(lambda: not (folder / "cgroup.procs").read_text(), "the cgroup is empty")
        folder.rmdir()


@pytest.mark.long
def test_an_oom_kill_is_reported_as_out_of_memory(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    with memory_group(1 << 30) as group, add_node(ray_cluster) as node:
        (group / "cgroup.procs").write_text(str(node.raylet_pid))  # and all processes that it starts from now on
        made = RayEngineScene(ray_cluster, tmp_path, node.name, memory_full=100.0)
        try:
            made.ready(1, Dies, node.name)
            made.ready(2, Dies, node.name)
            message = made.send(1, ["fine", "fills"])
            lost = made.lost(1)
            assert (lost.cause, lost.detail) == (LossCause.OUT_OF_MEMORY, "killed by the kernel: out of memory")
            assert [(crumb.message, crumb.index) for crumb in lost.breadcrumbs] == [(message, 1)]
            made.send(2, ["kill_9"])
            assert made.lost(2).cause is LossCause.SIGNAL
        finally:
            made.close()


# Agents


def agents_of(run: dt.Run) -> dict[str, int]:
    engine: Any = engine_of(run)
    found: RayEngine = engine
    return agent_pids(found)


def counted(run: dt.Run, at: dict[int, Any]) -> list[Any]:
    """The results of a run; `at` maps a number of results to an action."""
    found = []
    for item in run:
        found.append(item)
        if len(found) in at:
            at.pop(len(found))()
    return found


def kill_agent(run: dt.Run) -> None:
    """Kill the agent of one node."""
    there: dict[str, int] = {}

    def known() -> bool:  # the driver may not know yet that the last one died
        there.update({node: pid for node, pid in agents_of(run).items() if is_there(pid)})
        return bool(there)

    until(known, "there is an agent")
    node, pid = max(there.items())
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_there(pid), f"the agent of {node} is dead")


@pytest.mark.parametrize("nodes", [("a", "d"), ("d",)], ids=["one of two", "the only one"])
def test_a_killed_agent_loses_no_item_and_is_replaced(
    nodes: tuple[str, ...], ray_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_only_nodes(ray_cluster, monkeypatch, *nodes)
    kills, items = (5, 5000) if LONG else (1, 1500)
    run = run_of(
        dt.Stage("double", double, fuse=False, workers=2),
        dt.Stage("slow", slowly, batch_size=4, fuse=False, workers=2),
        source=range(items),
    )
    found = counted(run, {(n + 1) * items // (kills + 2): lambda: kill_agent(run) for n in range(kills)})
    assert sorted(found) == [2 * number + 1 for number in range(items)]
    assert run.status == "finished"
    assert run.errors == []


def test_workers_of_a_killed_agent_are_lost_and_can_be_restarted(bench: RayEngineScene) -> None:
    bench.ready(140, Dies, "d")
    bench.ready(141, Dies, "a")
    (pid,) = bench.engine.processes()[140][1]
    hung = bench.send(140, ["hangs"])
    bench.until(lambda: bench.engine.running(140) == (hung,))
    call = bench.engine.call(140, "it", "__str__")
    os.kill(agent_pids(bench.engine)["d"], signal.SIGKILL)
    lost = bench.lost(140)
    assert lost.cause is LossCause.NODE_LOST
    bench.until(lambda: not is_there(pid))
    assert isinstance(call.exception(0), WorkerLostError)
    bench.until(lambda: any(isinstance(event, NodeJoined) and event.node.name == "d" for event in bench.log))
    assert [event.returns for event in bench.log if isinstance(event, NodeLeft)] == [True]
    bench.ready(142, Dies, "d")
    assert bench.done(bench.send(142, ["fine"])) == ["fine"]
    assert bench.done(bench.send(141, ["fine"])) == ["fine"]


# Cleanup


def test_a_reused_agent_leaves_nothing_behind() -> None:
    """The process that cleans up was killed before it had finished, every other time."""
    for _ in range(20 if LONG else 2):
        _nothing_is_left_behind()


def test_a_cancel_ends_hung_and_starting_workers(tmp_path: Path) -> None:
    stages = [
        dt.Stage("hangs", Once(tmp_path, set(range(100)), Dies().hangs), fuse=False, workers=2),
        dt.Stage("starts", DiesInSetup("hangs"), fuse=False, workers=1),
    ]
    with time_limit():
        run = run_of(*stages, source=range(100))
        until(lambda: list(tmp_path.glob("once-*")), "one hangs")
        began = time.monotonic()
        run.cancel("enough")
        run.wait()
    assert time.monotonic() - began < patiently(10)
    assert run.status == "cancelled"
    assert losses(run) == 0
