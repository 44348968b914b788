"""Contract suite of actor systems that lose processes, restart, scale, stop or do not fit."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from actors.actor_classes import Echo, Gate, Mortal, Rank, Unprepared
from actors.contract import ActorSuite
from runtime.aids import is_there
from waiting import LONG, PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Launch = Callable[..., dt.LiveSystem]

SMALL = dt.Resources(cpus=0.05)
ALWAYS = dt.Restart("always", limit=1000, backoff="10ms")
KILLS = 50 if LONG else 2


def rows_of(live: dt.LiveSystem, role: str) -> list[dict[str, Any]]:
    """Rows of the status, one per instance."""
    return [row for row in live.status().to_dict()["instances"] if row["role"] == role]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_there(pid), "the process is gone")


class FaultContract(ActorSuite):
    """Every engine behaves like this."""

    @pytest.fixture
    def launch(self, request: pytest.FixtureRequest) -> Launch:
        """Launch a system of these roles."""

        def start(*roles: dt.Role, **more: Any) -> dt.LiveSystem:
            return dt.ActorSystem(roles, name="faults").launch(**({"deadline": "120s"} | self.place(request) | more))

        return start

    # Restart

    def test_a_killed_instance_is_restarted_and_the_others_keep_answering(self, launch: Launch) -> None:
        with launch(dt.Role("echo", Echo, workers=2, restart=ALWAYS, resources=SMALL)) as live:
            first, other = live.echo.all.pid().result(PATIENCE_S)
            for number in range(KILLS):
                kill(first)
                assert live.echo[1].pid().result(PATIENCE_S) == other
                until(lambda: rows_of(live, "echo")[0]["incarnation"] == number + 2, "it is restarted", 30)  # noqa: B023
                until(lambda: rows_of(live, "echo")[0]["state"] == "ready", "it is ready", 30)
                before, first = first, live.echo[0].pid().result(PATIENCE_S)
                assert first != before
            assert rows_of(live, "echo")[0]["restarts"] == KILLS
            assert rows_of(live, "echo")[1]["incarnation"] == 1

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

    def test_an_instance_may_fail_the_system(self, launch: Launch) -> None:
        live = launch(
            dt.Role("mortal", Mortal, restart="fail", resources=SMALL), dt.Role("echo", Echo, resources=SMALL)
        )
        with live:
            pid = live.echo.one.pid().result(PATIENCE_S)
            with pytest.raises(dt.ActorLostError):
                live.mortal.one.die().result(PATIENCE_S)
            with pytest.raises(dt.DovetailError, match=r"mortal\[0\]"):
                live.wait(PATIENCE_S)
            until(lambda: not is_there(pid), "the other role has ended")

    def test_restarts_are_limited(self, launch: Launch) -> None:
        limited = dt.Restart("always", limit=1, backoff="10ms")
        with launch(dt.Role("mortal", Mortal, restart=limited, resources=SMALL)) as live:
            for _ in range(2):
                with pytest.raises(dt.ActorLostError):
                    live.mortal.one.die().result(PATIENCE_S)
            until(lambda: rows_of(live, "mortal")[0]["state"] == "dead", "it stays dead")
            assert rows_of(live, "mortal")[0]["restarts"] == 1

    def test_a_gang_restarts_whole(self, launch: Launch) -> None:
        with launch(dt.Role("gang", Rank, ranks=2, restart=ALWAYS, resources=SMALL)) as live:
            before = live.gang[0].ranks.pid().result(PATIENCE_S)
            kill(before[1])
            until(lambda: not is_there(before[0]), "the other rank has ended")
            until(
                lambda: rows_of(live, "gang")[0]["incarnation"] == 2 and rows_of(live, "gang")[0]["state"] == "ready",
                "the gang is restarted",
            )
            after = live.gang[0].ranks.pid().result(PATIENCE_S)
            assert len({*before, *after}) == 4
            assert live.gang[0].ranks.environment().result(PATIENCE_S)[1][:2] == ("1", "2")

    def test_only_idempotent_methods_are_retried(self, launch: Launch, tmp_path: Path) -> None:
        with launch(dt.Role("mortal", Mortal, restart=ALWAYS, resources=SMALL)) as live:
            with pytest.raises(dt.ActorLostError):
                live.mortal.one.die_once(str(tmp_path / "first")).result(PATIENCE_S)
            handle = live.mortal.options(retries=2)
            assert handle.one.die_once_idempotent(str(tmp_path / "second")).result(PATIENCE_S) > 0
            with pytest.raises((ValueError, dt.DovetailError), match="idempotent"):
                handle.one.die_once(str(tmp_path / "third")).result(PATIENCE_S)

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

    def test_a_setup_that_fails_ends_the_launch(self, launch: Launch) -> None:
        with pytest.raises(dt.DovetailError, match=r"(?s)unprepared.*no model in this folder"):
            launch(dt.Role("echo", Echo, resources=SMALL), dt.Role("unprepared", Unprepared, resources=SMALL))
