"""Contract suite of actor systems that lose processes, restart, scale, stop or do not fit."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Self

import pytest

import dovetail as dt
from actors.actor_classes import Echo, Gate, Mortal, Rank, Unchecked, Unprepared
from actors.contract import ActorSuite
from dovetail.actors import heartbeat_monitor
from runtime.aids import is_there
from waiting import LONG, PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Callable

    Launch = Callable[..., dt.LiveSystem]

SMALL = dt.Resources(cpus=0.05)
ALWAYS = dt.Restart("always", limit=1000, backoff="10ms")
KILLS = 50 if LONG else 2
RESTART_LIMIT_S = 5.0 if LONG else PATIENCE_S
"""Two heartbeats."""


def rows_of(live: dt.LiveSystem, role: str) -> list[dict[str, Any]]:
    """Rows of the status, one per instance."""
    return [row for row in live.status().to_dict()["instances"] if row["role"] == role]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_there(pid), "the process is gone")


def stop(pid: int) -> None:
    """Stop a process, and wait until none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")

    def is_stopped() -> bool:
        states = [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()]
        return set(states) == {"T"}

    until(is_stopped, "all threads are stopped")


class CallLoad:
    """Threads that call the roles `echo` and `other` until the block is left, each call with a deadline. `ends`: the
    system may end before, with all of its roles."""

    DEADLINE_S = 20.0
    THREADS = 4

    def __init__(self, live: dt.LiveSystem, *, ends: bool = False) -> None:
        self._live, self._ends = live, ends
        self.killed: set[int] = set()
        """Processes that are gone: no later call may be answered by them."""
        self.answers = {"echo": 0, "other": 0}
        self.wrong: list[str] = []
        self.longest_s = 0.0
        self._over = Event()
        self._threads = [Thread(target=self._call, args=(number,), daemon=True) for number in range(self.THREADS)]

    def _call(self, number: int) -> None:
        role = "echo" if number % 2 else "other"
        handle = self._live[role].options(deadline=self.DEADLINE_S)
        while not self._over.is_set():
            before = frozenset(self.killed)
            began = time.monotonic()
            try:
                pid = handle.one.pid().result(2 * self.DEADLINE_S)
                self.answers[role] += 1
                if pid in before:
                    self.wrong.append(f"process {pid}, which is gone, has answered")
            except dt.ActorLostError:
                if role == "other" and not self._ends:
                    self.wrong.append("a call to another role was lost")
            except Exception as error:
                self.wrong.append(f"{role}: {error!r}")
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self._over.wait(0.001 if LONG else 0.02)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        until(lambda: all(self.answers.values()), "both roles answer")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def check(self) -> None:
        assert not self.wrong
        assert self.longest_s < self.DEADLINE_S
        assert not any(thread.is_alive() for thread in self._threads)


class FaultContract(ActorSuite):
    """Every engine behaves like this."""

    @pytest.fixture
    def launch(self, request: pytest.FixtureRequest) -> Launch:
        """Launch a system of these roles."""

        def start(*roles: dt.Role, **more: Any) -> dt.LiveSystem:
            return dt.ActorSystem(roles, name="faults").launch(**({"deadline": "120s"} | self.place(request) | more))

        return start

    # Restart

    def test_instances_that_are_killed_under_load_are_restarted(self, launch: Launch) -> None:
        roles = [
            dt.Role("echo", Echo, workers=2, slots=4, restart=ALWAYS, resources=SMALL),
            dt.Role("other", Echo, slots=4, resources=SMALL),
        ]
        with launch(*roles) as live, CallLoad(live) as load:
            other = live.other.one.pid().result(PATIENCE_S)
            for number in range(KILLS):
                first, second = live.echo.all.pid().result(PATIENCE_S)
                kill(first)
                load.killed.add(first)
                took = until(lambda: rows_of(live, "echo")[0]["incarnation"] == number + 2, "it is started again")  # noqa: B023
                took += until(lambda: rows_of(live, "echo")[0]["state"] == "ready", "it is ready again")
                assert live.echo[1].pid().result(PATIENCE_S) == second
                assert took < RESTART_LIMIT_S
            assert live.other.one.pid().result(PATIENCE_S) == other
            assert [row["restarts"] for row in rows_of(live, "echo")] == [KILLS, 0]
        load.check()

    def test_instances_that_are_never_restarted_are_killed_under_load(self, launch: Launch) -> None:
        systems, kills = (5, 10) if LONG else (1, 1)
        never = dt.Role("echo", Echo, workers=kills + 1, slots=4, restart="never", resources=SMALL)
        for _ in range(systems):
            with launch(never, dt.Role("other", Echo, slots=4, resources=SMALL)) as live, CallLoad(live) as load:
                *killed, last = live.echo.all.pid().result(PATIENCE_S)
                for number, pid in enumerate(killed):
                    kill(pid)
                    load.killed.add(pid)
                    until(lambda: rows_of(live, "echo")[number]["state"] == "dead", "it is dead")  # noqa: B023
                assert live.echo.one.pid().result(PATIENCE_S) == last
            load.check()

    def test_gangs_that_are_killed_under_load_restart_whole(self, launch: Launch) -> None:
        gang = dt.Role("gang", Rank, ranks=2, restart=ALWAYS, resources=SMALL)
        quiet = dt.Role("echo", Echo, slots=4, resources=SMALL)
        with launch(gang, quiet, dt.Role("other", Echo, slots=4, resources=SMALL)) as live, CallLoad(live) as load:
            before = live.gang[0].ranks.environment().result(PATIENCE_S)
            for number in range(KILLS if LONG else 1):
                pids = live.gang[0].ranks.pid().result(PATIENCE_S)
                kill(pids[number % 2])
                until(lambda: not any(map(is_there, pids)), "the other rank has ended")  # noqa: B023
                took = until(lambda: rows_of(live, "gang")[0]["incarnation"] == number + 2, "it is started again")  # noqa: B023
                took += until(lambda: rows_of(live, "gang")[0]["state"] == "ready", "it is ready again")
                assert took < RESTART_LIMIT_S
                assert len({*pids, *live.gang[0].ranks.pid().result(PATIENCE_S)}) == 4
            assert live.gang[0].ranks.environment().result(PATIENCE_S) == before
        load.check()

    def test_a_call_to_an_instance_that_dies_fails_with_its_name(self, launch: Launch, tmp_path: Path) -> None:
        with launch(
            dt.Role("gate", Gate, restart=ALWAYS, resources=SMALL), dt.Role("mortal", Mortal, resources=SMALL)
        ) as live:
            with pytest.raises(dt.ActorLostError, match=r"mortal\[0\]"):
                live.mortal.one.die().result(PATIENCE_S)
            assert live.gate.one.health().result(PATIENCE_S) == "well"

    def test_an_instance_that_is_never_restarted_stays_dead(self, launch: Launch) -> None:
        with launch(dt.Role("mortal", Mortal, workers=2, restart="never", resources=SMALL)) as live:
            with pytest.raises(dt.ActorLostError):
                live.mortal[0].die().result(PATIENCE_S)
            until(lambda: rows_of(live, "mortal")[0]["state"] == "dead", "it is dead")
            assert rows_of(live, "mortal")[0]["reason"]
            assert {live.mortal.one.index().result(PATIENCE_S) for _ in range(4)} == {1}
            with pytest.raises(dt.ActorLostError, match=r"mortal\[0\]"):
                live.mortal[0].index().result(PATIENCE_S)

    def test_instances_that_are_killed_under_load_may_fail_the_system(self, launch: Launch) -> None:
        roles = [
            dt.Role("echo", Echo, slots=4, restart="fail", resources=SMALL),
            dt.Role("other", Echo, slots=4, resources=SMALL),
        ]
        for _ in range(KILLS):
            with launch(*roles) as live, CallLoad(live, ends=True) as load:
                pids = [live[role].one.pid().result(PATIENCE_S) for role in ("echo", "other")]
                began = time.monotonic()
                kill(pids[0])
                load.killed.add(pids[0])
                with pytest.raises(dt.RunError, match=r"DT523.*echo\[0\] died"):
                    live.wait(PATIENCE_S)
                until(lambda: not any(map(is_there, pids)), "the other role has ended")  # noqa: B023
                assert time.monotonic() - began < RESTART_LIMIT_S
            load.check()

    def test_restarts_are_limited(self, launch: Launch) -> None:
        limited = dt.Restart("always", limit=1, backoff="10ms")
        with launch(dt.Role("mortal", Mortal, restart=limited, resources=SMALL)) as live:
            for _ in range(2):
                with pytest.raises(dt.ActorLostError):
                    live.mortal.one.die().result(PATIENCE_S)
            until(lambda: rows_of(live, "mortal")[0]["state"] == "dead", "it stays dead")
            assert rows_of(live, "mortal")[0]["restarts"] == 1

    def test_only_idempotent_methods_are_retried(self, launch: Launch, tmp_path: Path) -> None:
        with launch(dt.Role("mortal", Mortal, restart=ALWAYS, resources=SMALL)) as live:
            with pytest.raises(dt.ActorLostError):
                live.mortal.one.die_once(str(tmp_path / "first")).result(PATIENCE_S)
            handle = live.mortal.options(retries=2)
            assert handle.one.die_once_idempotent(str(tmp_path / "second")).result(PATIENCE_S) > 0
            with pytest.raises((ValueError, dt.DovetailError), match="idempotent"):
                handle.one.die_once(str(tmp_path / "third")).result(PATIENCE_S)

    # Late results

    @pytest.mark.long  # on a busy machine, an instance that works may fail two checks of a second
    def test_a_process_that_is_stopped_past_its_health_checks_is_replaced_and_its_results_are_refused(
        self, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(heartbeat_monitor, "HEARTBEAT_S", 0.05)
        health = dt.Health(period="100ms", timeout="1s", failure_threshold=2)
        first, second = tmp_path / "first", tmp_path / "second"
        with launch(dt.Role("gate", Gate, slots=2, health=health, restart=ALWAYS, resources=SMALL)) as live:
            stopped = live.gate[0].pid().result(PATIENCE_S)
            late = live.gate[0].hold(str(first))
            repeated = live.gate.options(retries=1)[0].hold_idempotent(str(second))
            until(lambda: all(Path(f"{path}.begun").exists() for path in (first, second)), "both calls are inside")
            stop(stopped)
            first.touch()  # both methods return as soon as the process is continued
            second.touch()
            until(lambda: rows_of(live, "gate")[0]["incarnation"] > 1, "it is started again")
            with suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
            with pytest.raises(dt.ActorLostError, match=r"gate\[0\]"):
                late.result(PATIENCE_S)
            assert repeated.result(PATIENCE_S) != stopped
            until(lambda: not is_there(stopped), "the stopped process has ended")

    def test_a_result_that_arrives_after_the_deadline_of_its_call_is_refused(
        self, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An instance without health checks is not replaced, so its process sends the result when it is continued."""
        monkeypatch.setattr(heartbeat_monitor, "HEARTBEAT_S", 0.05)
        with launch(dt.Role("echo", Unchecked, resources=SMALL)) as live:
            pid = live.echo.one.pid().result(PATIENCE_S)
            arrived_late = False
            for deadline_s in (1, 4, 16, 60):  # on a busy machine the method may begin too late
                gate = tmp_path / f"{deadline_s}"
                late = live.echo.options(deadline=deadline_s).one.hold(str(gate))
                until(lambda: late.done() or Path(f"{gate}.begun").exists(), "the call is inside")  # noqa: B023
                stop(pid)
                gate.touch()
                until(lambda: rows_of(live, "echo")[0]["state"] == "degraded", "its heartbeats are missed")
                with pytest.raises(dt.CallTimeoutError):
                    late.result(2 * PATIENCE_S)
                os.kill(pid, signal.SIGCONT)
                # one call at a time: the late result is sent before this one, on the same connection
                arrived_late = str(gate) in live.echo.one.recorded().result(PATIENCE_S)
                assert isinstance(late.exception(), dt.CallTimeoutError)
                if arrived_late:
                    break
            assert arrived_late
            assert live.echo.one.pid().result(PATIENCE_S) == pid

    # Scale and stop

    def test_a_role_is_scaled_and_its_calls_follow(self, launch: Launch) -> None:
        with launch(dt.Role("echo", Echo, workers=(1, 3), scale=dt.Scale(1e9), resources=SMALL)) as live:
            assert live.echo.all.index().result(PATIENCE_S) == [0]
            live.scale(echo=3)
            until(lambda: [row["state"] for row in rows_of(live, "echo")] == ["ready"] * 3, "there are three")
            assert live.echo.all.index().result(PATIENCE_S) == [0, 1, 2]
            pids = live.echo.all.pid().result(PATIENCE_S)
            live.scale(echo=1)
            until(lambda: sum(map(is_there, pids)) == 1, "two are stopped")
            assert live.echo.one.echo(1).result(PATIENCE_S) == (1,)

    def test_a_stop_answers_the_calls_that_are_running(self, launch: Launch, tmp_path: Path) -> None:
        import threading

        live = launch(dt.Role("gate", Gate, resources=SMALL))
        held = live.gate.one.hold(str(tmp_path / "held"))
        until((tmp_path / "held.begun").exists, "the call is inside")
        stopping = threading.Thread(target=lambda: live.stop(drain=True, deadline="60s"))
        stopping.start()
        (tmp_path / "held").touch()
        assert held.result(PATIENCE_S) == str(tmp_path / "held")
        stopping.join(PATIENCE_S)
        assert not stopping.is_alive()
        with pytest.raises(dt.DovetailError):
            live.gate.one.health().result(PATIENCE_S)

    def test_leaving_the_block_ends_every_process(self, launch: Launch) -> None:
        with launch(dt.Role("echo", Echo, workers=2, resources=SMALL)) as live:
            pids = live.echo.all.pid().result(PATIENCE_S)
        assert not [pid for pid in pids if is_there(pid)]

    # Launch

    def test_a_system_that_does_not_fit_says_what_is_missing(self, launch: Launch) -> None:
        began = time.monotonic()
        with pytest.raises(dt.InfeasibleError, match="'large'") as raised:
            launch(dt.Role("echo", Echo, resources=SMALL), dt.Role("large", Echo, resources=dt.Resources(cpus=900)))
        assert "900" in str(raised.value)
        if LONG:
            assert time.monotonic() - began < 2

    def test_a_driver_with_thousands_of_variables_launches_a_system(
        self, launch: Launch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(5000):
            monkeypatch.setenv(f"SITE_MODULE_{number}", "/opt/software/module/of/this/site/" + 40 * "x")
        with launch(dt.Role("echo", Echo, workers=2, resources=SMALL)) as live:
            assert live.echo.all.index().result(PATIENCE_S) == [0, 1]

    def test_a_setup_that_fails_ends_the_launch(self, launch: Launch) -> None:
        with pytest.raises(dt.DovetailError, match=r"(?s)unprepared.*no model in this folder"):
            launch(dt.Role("echo", Echo, resources=SMALL), dt.Role("unprepared", Unprepared, resources=SMALL))
