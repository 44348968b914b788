"""Usage of a worker: counted once, with its children, also after they have ended."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.machine.processes import (
    PAGE_BYTES,
    ProcessStat,
    SessionProcess,
    SessionSampler,
    parse_io,
    parse_private,
    parse_stat,
    parse_statm,
    unclaimed_totals,
    uss_bytes,
    uss_is_due,
)
from machine.sessions import session
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dovetail.machine.processes import SessionUsage

MB = 1 << 20
SLACK_S = 0.15
"""An interpreter's start, and clock ticks."""


def sample_sessions(sessions: Iterable[int]) -> dict[int, SessionUsage]:
    """A single sample without a limit of its cost."""
    return SessionSampler(uss_budget_s=float("inf")).sample(sessions)


# ---- CPU


def test_the_cpu_time_of_a_process_is_counted() -> None:
    with session("burn(0.4); say(); wait()") as worker:
        worker.hear()
        used = sample_sessions([worker.pid])[worker.pid].cpu_s
        assert 0.35 <= used <= 0.4 + SLACK_S


def test_a_child_is_counted_once_while_it_lives_and_once_when_it_was_waited_for() -> None:
    code = """
pid = os.fork()
if not pid:
    burn(0.4); say(); wait(); os._exit(0)
os.waitpid(pid, 0); say("reaped"); time.sleep(1000)
"""
    with session(code) as worker:
        sampler = SessionSampler()
        worker.hear()
        alive = sampler.sample([worker.pid])[worker.pid]
        worker.tell()
        worker.hear()
        after = sampler.sample([worker.pid])[worker.pid]
        assert (alive.processes, after.processes) == (2, 1)
        assert 0.35 <= alive.cpu_s <= after.cpu_s <= 0.4 + SLACK_S


def test_a_child_that_came_and_went_between_two_samples_is_counted() -> None:
    with session("wait(); subprocess.run([sys.executable, '-c', 'sum(range(10_000_000))']); say(); wait()") as worker:
        sampler = SessionSampler()
        before = sampler.sample([worker.pid])[worker.pid]
        worker.tell()
        worker.hear()
        assert sampler.sample([worker.pid])[worker.pid].cpu_s > before.cpu_s + 0.02


def test_usage_of_a_child_without_a_waiting_parent_is_counted() -> None:
    code = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
pid = os.fork()
if not pid:
    burn(0.3); say(); wait(); os._exit(0)
time.sleep(1000)
"""
    with session(code) as worker:
        sampler = SessionSampler()
        worker.hear()
        alive = sampler.sample([worker.pid])[worker.pid]
        worker.tell()
        until(lambda: sampler.sample([worker.pid])[worker.pid].processes == 1)
        assert 0.25 <= alive.cpu_s <= sampler.sample([worker.pid])[worker.pid].cpu_s <= 0.3 + SLACK_S


def test_an_orphan_still_belongs_to_its_session() -> None:
    code = """
if not os.fork():
    if os.fork():
        burn(0.2); os._exit(0)
    burn(0.2); say(os.getppid()); wait(); burn(0.2); say(); time.sleep(1000)
os.wait(); time.sleep(1000)
"""
    with session(code) as worker:
        sampler = SessionSampler()
        worker.hear()
        until(lambda: sampler.sample([worker.pid])[worker.pid].processes == 2)
        worker.tell()
        worker.hear()
        assert 0.5 <= sampler.sample([worker.pid])[worker.pid].cpu_s <= 0.6 + SLACK_S


def test_of_a_session_that_ended_the_totals_stay_and_the_memory_is_given_back() -> None:
    sampler = SessionSampler()
    with session("burn(0.2); say(); wait()") as worker:
        worker.hear()
        last = sampler.sample([worker.pid])[worker.pid]
    gone = sampler.sample([worker.pid])[worker.pid]
    assert gone == replace(last, uss_bytes=0, rss_bytes=0, pids=())
    assert sampler.sample([]) == {}
    assert sampler.sample([worker.pid])[worker.pid].cpu_s == 0


def test_a_process_that_has_ended_and_was_not_waited_for_has_no_memory() -> None:
    sampler = SessionSampler()
    with session("say(); wait()") as worker:
        worker.hear()
        assert sampler.sample([worker.pid])[worker.pid].uss_bytes > MB
        worker.tell()
        until(lambda: sampler.sample([worker.pid])[worker.pid].rss_bytes == 0)
        zombie = sampler.sample([worker.pid])[worker.pid]
        assert (zombie.processes, zombie.uss_bytes) == (1, 0)


def test_sessions_are_distinguished_and_contain_no_other_process() -> None:
    with session("burn(0.3); say(); wait()") as busy, session("say(); wait()") as idle:
        busy.hear()
        idle.hear()
        found = sample_sessions([busy.pid, idle.pid])
        assert found.keys() == {busy.pid, idle.pid}
        assert found[busy.pid].cpu_s > found[idle.pid].cpu_s + 0.2
        assert found[busy.pid].pids == (busy.pid,)
        assert sample_sessions([]) == {}


@given(st.data())
def test_whatever_comes_and_goes_a_total_never_shrinks_and_never_exceeds_what_was_used(data: st.DataObject) -> None:
    """A made-up process tree: everyone burns, forks, and is waited for by its parent, by init or by no process."""
    tree: dict[int, list[int]] = {1: [0, 0, 0]}  # pid -> parent, own, reaped
    kept = spent = last = 0
    before: dict[int, SessionProcess] = {}
    fresh = 2
    for _ in range(data.draw(st.integers(1, 8))):
        for _ in range(data.draw(st.integers(0, 6))):
            pid = data.draw(st.sampled_from(sorted(tree)))
            what = data.draw(st.sampled_from(["burn", "fork", "end"]))
            if what == "burn":
                tree[pid][1] += 3
                spent += 3
            elif what == "fork":
                tree[fresh], fresh = [pid, 0, 0], fresh + 1
            elif pid != 1:
                parent, own, reaped = tree.pop(pid)
                for other in tree.values():
                    other[0] = 0 if other[0] == pid else other[0]
                if parent in tree and data.draw(st.booleans()):
                    tree[parent][2] += own + reaped
        now = {
            pid: SessionProcess(ProcessStat(parent, 1, own, reaped, pid, 1))
            for pid, (parent, own, reaped) in tree.items()
        }
        kept += unclaimed_totals(before, now)[0]
        before = now
        total = kept + sum(member.total[0] for member in now.values())
        assert last <= total <= spent
        last = total


# ---- memory


def test_memory_is_seen_when_it_grows_not_only_at_its_turn() -> None:
    with session("say(); wait(); data = b'x' * (100 << 20); say(); wait()") as worker:
        times = iter([0.0, 4.0])
        sampler = SessionSampler(clock=lambda: next(times))
        worker.hear()
        before = sampler.sample([worker.pid])[worker.pid]
        worker.tell()
        worker.hear()
        after = sampler.sample([worker.pid])[worker.pid]
        # pages of libraries are private or shared as other processes come and go
        assert 90 * MB <= after.uss_bytes - before.uss_bytes <= 110 * MB
        assert after.uss_bytes <= after.rss_bytes + MB


def test_what_a_fork_shares_with_its_parent_is_not_its_own() -> None:
    code = """
data = b'x' * (64 << 20)
pid = os.fork()
say("both"); wait() if pid else time.sleep(1000)
time.sleep(1000)
"""
    with session(code) as worker:
        worker.hear()
        worker.hear()
        found = sample_sessions([worker.pid])[worker.pid]
        assert found.processes == 2
        assert found.uss_bytes < 64 * MB < 128 * MB < found.rss_bytes


def seen(rss: int, at: float, cost: float = 0.0, then: int = 1000) -> SessionProcess:
    return SessionProcess(ProcessStat(1, 1, 0, 0, 1, rss), uss_rss_bytes=then, uss_at=at, uss_cost_s=cost)


def test_the_uss_is_read_now_and_then_or_when_it_grew_but_never_so_often_that_it_costs_much() -> None:
    assert uss_is_due(SessionProcess(ProcessStat(1, 1, 0, 0, 1, 1000)), 0.0)
    assert not uss_is_due(seen(1050, at=0.0), 4.9)
    assert uss_is_due(seen(1050, at=0.0), 5.0)
    assert uss_is_due(seen(1200, at=0.0), 0.1)
    assert not uss_is_due(seen(1050, at=0.0, cost=0.1), 49.0)
    assert uss_is_due(seen(1050, at=0.0, cost=0.1), 50.0)
    assert not uss_is_due(seen(1200, at=0.0, cost=0.1), 4.9)
    assert uss_is_due(seen(1200, at=0.0, cost=0.1), 5.0)


def test_the_uss_of_many_is_read_in_turns() -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(session("say(); wait()")) for _ in range(3)]
        for worker in workers:
            worker.hear()
        pids = [worker.pid for worker in workers]
        sampler = SessionSampler(clock=lambda: 0.0, uss_budget_s=0.0)
        known = [sum(use.uss_bytes > 0 for use in sampler.sample(pids).values()) for _ in range(4)]
        assert known == [1, 2, 3, 3]
        assert all(use.uss_bytes > 0 for use in sample_sessions(pids).values())


def test_private_memory_is_estimated_where_the_kernel_does_not_report_it(tmp_path: Path) -> None:
    (tmp_path / "statm").write_text("9000 500 200 5 0 123 0\n")
    assert uss_bytes(str(tmp_path)) == 300 * PAGE_BYTES
    (tmp_path / "smaps_rollup").write_text(
        "0-1 ---p 00000000 00:00 0 [rollup]\nRss: 900 kB\nPrivate_Clean:  4 kB\nPrivate_Dirty: 8 kB\n"
    )
    assert uss_bytes(str(tmp_path)) == 12 * 1024
    assert uss_bytes(str(tmp_path / "gone")) == 0


# ---- disks


def test_bytes_written_to_a_disk_are_counted_and_those_of_a_child_once(tmp_path: Path) -> None:
    code = f"""
def write(name):
    with open({str(tmp_path)!r} + "/" + name, "wb") as file:
        file.write(os.urandom(4 << 20)); file.flush(); os.fsync(file.fileno())
write("a")
pid = os.fork()
if not pid:
    write("b"); say(); wait(); os._exit(0)
os.waitpid(pid, 0); say(); time.sleep(1000)
"""
    with session(code) as worker:
        sampler = SessionSampler()
        worker.hear()
        alive = sampler.sample([worker.pid])[worker.pid]
        if not alive.write_bytes:
            pytest.skip("what is written here is not counted: no disk behind it")
        worker.tell()
        worker.hear()
        after = sampler.sample([worker.pid])[worker.pid]
        assert 8 * MB <= alive.write_bytes <= after.write_bytes <= 9 * MB


# ---- what the kernel says


def test_a_process_may_call_itself_anything() -> None:
    fields = "S 7 42 42 0 -1 4194560 1 2 3 4 50 6 7 8 20 0 1 0 98765 1000 25 18446744073709551615"
    expected = ProcessStat(
        parent=7, session=42, own_ticks=56, reaped_ticks=15, start_ticks=98765, rss_bytes=25 * PAGE_BYTES
    )
    for name in ("python", "a b", ") S 1 1 (", "x\ny"):
        assert parse_stat(f"42 ({name}) {fields}".encode()) == expected
    assert parse_stat(b"") is None
    assert parse_stat(b"42 (cut) S 7") is None


def test_what_is_missing_is_nothing() -> None:
    assert parse_private(b"") is None
    assert parse_private(b"Rss: 4 kB\n") is None
    assert parse_statm(b"") == 0
    assert parse_io(b"") == (0, 0)
    assert parse_io(b"rchar: 5\nread_bytes: 7\nwrite_bytes: 9\ncancelled_write_bytes: 1\n") == (7, 9)


def test_processes_of_other_users_are_ignored() -> None:
    first = sample_sessions([os.getsid(1)])[os.getsid(1)]
    assert first.cpu_s >= 0


def test_twenty_workers_cost_next_to_nothing() -> None:
    """Far above what is measured on a quiet machine (0.8 ms), so that only a mistake fails it."""
    with ExitStack() as stack:
        workers = [stack.enter_context(session("say(); wait()")) for _ in range(20)]
        for worker in workers:
            worker.hear()
        sampler, best = SessionSampler(), 1.0
        for _ in range(10):
            began = time.thread_time()
            assert len(sampler.sample([worker.pid for worker in workers])) == 20
            best = min(best, time.thread_time() - began)
        assert best < 0.01
