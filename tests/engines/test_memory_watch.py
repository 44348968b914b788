"""Memory watch: which worker is ended when the memory of a node runs out, and which memory counts."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.control.commands import HostedObject, StartWorker
from dovetail.control.events import LossCause, WorkerLost, WorkerReady
from dovetail.engines.local.engine import LocalEngine
from dovetail.engines.local.exit_cause import OomKillCounter, describe_exit, oom_counters
from dovetail.engines.local.memory_watch import VICTIM_EXIT_S, MemoryWatch, choose_victim
from dovetail.engines.payload_memory import total_memory_bytes
from dovetail.machine.cgroups import physical_bytes
from dovetail.machine.host_usage import MemoryMeter, MemoryUsage
from dovetail.resources.seat import Seat
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.time_limit

GB = 1 << 30
MB = 1 << 20
FULL = MemoryUsage(94 * GB, 100 * GB)


# Choice of the worker


def test_no_worker_is_ended_while_memory_is_free() -> None:
    assert choose_victim(93 * GB, 100 * GB, {1: 90 * GB}, {}) is None
    assert choose_victim(99 * GB, 100 * GB, {}, {}) is None


def test_the_worker_that_exceeds_its_request_by_most_is_ended() -> None:
    found = choose_victim(94 * GB, 100 * GB, {1: 60 * GB, 2: 20 * GB, 3: 12 * GB}, {1: 64 * GB, 2: 8 * GB, 3: 2 * GB})
    assert found == (
        2,
        "ended before memory ran out: 94GB of 100GB were used (94%); it used 20GB and requested 8GB",
    )


def test_a_worker_without_a_request_exceeds_it_by_all_its_memory() -> None:
    found = choose_victim(94 * GB, 100 * GB, {1: 60 * GB, 2: 30 * GB}, {1: 55 * GB, 2: 0})
    assert found is not None
    assert found[0] == 2
    assert found[1].endswith("it used 30GB and requested no memory")


def test_the_largest_worker_is_ended_if_none_exceeds_its_request() -> None:
    found = choose_victim(94 * GB, 100 * GB, {1: 40 * GB, 2: 50 * GB}, {1: 40 * GB, 2: 64 * GB})
    assert found is not None
    assert found[0] == 2
    assert "no worker exceeded its request" in found[1]


def test_small_workers_without_a_request_are_not_ended_before_a_large_one() -> None:
    workers = {1: 90 * GB} | dict.fromkeys(range(2, 20), 50 * MB)
    found = choose_victim(94 * GB, 100 * GB, workers, {1: 92 * GB})
    assert found is not None
    assert found[0] == 1


def test_outside_of_ray_no_worker_that_keeps_to_its_request_is_ended() -> None:
    """Other programs use the memory."""
    assert choose_victim(94 * GB, 100 * GB, {1: 40 * GB, 2: MB}, {1: 40 * GB}, only_excess=True) is None
    found = choose_victim(94 * GB, 100 * GB, {1: 40 * GB, 2: 2 * GB}, {1: 40 * GB}, only_excess=True)
    assert found is not None
    assert found[0] == 2


# Interval


def test_the_next_worker_is_ended_only_after_the_last_one_had_time_to_exit() -> None:
    sizes = {11: 50 * GB, 22: 40 * GB, 23: 2 * GB}
    watch = MemoryWatch(lambda: FULL, lambda pids: {pid: sizes[pid] for pid in pids})
    processes: dict[int, tuple[str, tuple[int, ...]]] = {1: ("a", (11,)), 2: ("b", (22, 23)), 3: ("c", ())}
    assert (watch.check(0.0, processes, {}) or (0,))[0] == 1
    assert watch.check(VICTIM_EXIT_S - 0.1, processes, {}) is None
    assert (watch.check(VICTIM_EXIT_S + 0.1, processes, {}) or (0,))[0] == 1, "it may be asked for again"
    del processes[1]
    found = watch.check(VICTIM_EXIT_S + 0.2, processes, {})
    assert found is not None
    assert found[0] == 2
    assert "it used 42GB" in found[1], "all processes of a worker count"


def test_workers_are_not_measured_while_memory_is_free() -> None:
    watch = MemoryWatch(lambda: MemoryUsage(50, 100), lambda _: pytest.fail("too early"))
    assert watch.check(0.0, {1: ("a", (11,))}, {}) is None
    assert MemoryWatch(lambda: None).check(0.0, {1: ("a", (11,))}, {}) is None


class Fills:
    def __init__(self, size: int) -> None:
        self._size = size

    def setup(self, worker: Any) -> None:
        self.held = b"x" * self._size

    def __call__(self, items: list[int]) -> list[int]:
        return items


def test_the_worker_that_exceeds_its_request_is_ended_before_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On this machine too, not only on nodes of Ray."""
    use = [MemoryUsage(50 * MB, 200 * MB)]
    monkeypatch.setattr(MemoryMeter, "read", lambda _: use[0])
    engine = LocalEngine()
    events: list[Any] = []
    try:
        for worker, size in ((1, MB), (2, 300 * MB), (3, MB)):
            hosted = HostedObject("it", (dt.Stage("it", Fills(size)),))
            engine.submit([StartWorker(worker, (Seat("node-0", 100, 64 * MB),), (hosted,))])

        def events_of(kind: type[Any]) -> list[Any]:
            events.extend(engine.poll(0.01))
            return [event for event in events if isinstance(event, kind)]

        until(lambda: len(events_of(WorkerReady)) == 3, "all are ready")
        use[0] = MemoryUsage(199 * MB, 200 * MB)
        until(lambda: events_of(WorkerLost), "it is lost")
        (lost,) = events_of(WorkerLost)
        assert (lost.worker, lost.cause) == (2, LossCause.OUT_OF_MEMORY)
        assert "and requested 64MB" in lost.detail
        assert lost.peak_bytes > 300 * MB
        assert len(events_of(WorkerLost)) == 1, "workers within their requests continue"
    finally:
        engine.close()


# Memory in use


def a_machine(root: Path, used: int, files: dict[str, str]) -> MemoryMeter:
    total = physical_bytes() >> 10
    proc = {"proc/meminfo": f"MemTotal: {total} kB\nMemAvailable: {total - (used >> 10)} kB\n"}
    for name, text in (proc | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return MemoryMeter(root)


def test_without_a_cgroup_limit_the_memory_of_the_machine_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}
    assert a_machine(tmp_path, 64 * MB, files).read() == MemoryUsage(64 * MB, physical_bytes() >> 10 << 10)


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_fuller_than_the_machine_counts_without_its_reclaimable_memory(tmp_path: Path, version: int) -> None:
    if version == 2:
        folder = "sys/fs/cgroup/pod/one"
        files = {"proc/self/cgroup": "0::/pod/one\n", f"{folder}/memory.max": f"{1000 * MB}\n"}
        files |= {
            f"{folder}/memory.current": f"{950 * MB}\n",
            f"{folder}/memory.stat": f"inactive_file {20 * MB}\nactive_file {10 * MB}\n",
        }
    else:
        folder = "sys/fs/cgroup/memory/pod/one"
        files = {"proc/self/cgroup": "4:memory:/pod/one\n", f"{folder}/memory.limit_in_bytes": f"{1000 * MB}\n"}
        files |= {f"{folder}/memory.usage_in_bytes": f"{950 * MB}\n"}
        files |= {
            f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {20 * MB}\ntotal_active_file {10 * MB}\n"
        }
    assert a_machine(tmp_path, 64 * MB, files).read() == MemoryUsage(920 * MB, 1000 * MB)


def test_payloads_may_use_a_part_of_the_memory_of_the_cgroup(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/memory.max": f"{64 * MB}\n"}
    a_machine(tmp_path, 64 * MB, files)
    assert total_memory_bytes(tmp_path) == 64 * MB


def test_a_machine_with_unknown_memory_is_not_full(tmp_path: Path) -> None:
    assert MemoryMeter(tmp_path).read() is None


def test_the_memory_use_of_this_machine_is_plausible() -> None:
    use = MemoryMeter().read()
    assert use is not None
    assert 0 < use.used_bytes <= use.limit_bytes


# Kills by the kernel


@pytest.mark.parametrize("version", [1, 2])
def test_an_oom_kill_counted_in_our_cgroup_is_recognised(tmp_path: Path, version: int) -> None:
    """In cgroup version 1 the parent cgroups do not count it; here they never change, as on the machine of an agent."""
    group, name, line = (
        ("memory/ours", "memory.oom_control", "4:memory:/ours\n")
        if version == 1
        else ("ours", "memory.events", "0::/ours\n")
    )
    own = tmp_path / "sys/fs/cgroup" / group / name
    around = own.parent.parent / name
    for file in (own, around, tmp_path / "proc/vmstat", tmp_path / "proc/self/cgroup"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("oom_kill 7\n")
    (tmp_path / "proc/self/cgroup").write_text(line)
    watch = OomKillCounter(oom_counters(tmp_path))
    assert describe_exit(signal.SIGKILL, watch)[0] is LossCause.SIGNAL
    own.write_text("low 0\noom_kill 8\n")
    assert describe_exit(signal.SIGSEGV, watch)[0] is LossCause.SIGNAL
    assert describe_exit(signal.SIGKILL, watch)[0] is LossCause.OUT_OF_MEMORY
    assert describe_exit(signal.SIGKILL, watch)[0] is LossCause.SIGNAL, "one death for each that is counted"


def test_without_cgroups_the_kills_of_the_machine_are_counted(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("oom_kill 1\n")
    watch = OomKillCounter(oom_counters(tmp_path))
    (tmp_path / "proc/vmstat").write_text("oom_kill 2\n")
    assert watch.take_kill()
