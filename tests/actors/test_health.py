"""Health checks: what the worker answers, when the monitor reports it, and what the controller makes of it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, cast

import pytest

import dovetail as dt
from actors.test_system_controller import UNKNOWN_METHODS, ControllerScene, role
from dovetail.actors.health_check import HealthChecked, HealthLimits
from dovetail.actors.heartbeat_monitor import HEARTBEAT_S, LATE_HEARTBEATS, HeartbeatMonitor
from dovetail.actors.hosted_actor import CallRecord, HealthCheck
from dovetail.actors.instance_directory import RoleMethods
from dovetail.actors.system_controller import SystemPhase
from dovetail.control.commands import Note, StopWorker
from dovetail.control.events import Drain, LossCause
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from dovetail.runtime.sites import RunEngine

PROBLEM = "health: OSError: too hot"


def failed(rig: ControllerScene, name: str = "a", problem: str = PROBLEM, *, counts: bool = True) -> list[Any]:
    return rig.step(HealthChecked(rig.worker(name), (name, 0), problem, counts))


def states(rig: ControllerScene, instance: str) -> list[tuple[str, str]]:
    """(state, reason) of an instance in the journal."""
    data = [note.data for note in rig.notes if note.kind == "state" and note.data["instance"] == instance]
    return [(str(one["state"]), str(one["reason"])) for one in data]


# --- the controller


def test_consecutive_failures_make_an_instance_degraded_and_then_restart_it() -> None:
    rig = ControllerScene(role("a", health=dt.Health(failure_threshold=3)), role("b"))
    rig.launch()
    worker = rig.worker("a")
    assert failed(rig) == [Note("state", f"a[0] is degraded: {PROBLEM}", rig.notes[-1].data)]
    assert (rig.state("a").value, rig.reason("a"), rig.system_state) == ("degraded", PROBLEM, "degraded")
    assert failed(rig) == []
    (stop,) = failed(rig)
    assert stop == StopWorker(
        worker, drain=False, reason=f"not healthy: {PROBLEM}; 3 health checks in succession failed"
    )
    assert failed(rig) == []  # it is being killed
    rig.lose(worker, LossCause.STOPPED, "")
    assert "a[0] died: not healthy" in next(note.text for note in rig.notes if note.kind == "restart")
    rig.pass_time(1.0)
    rig.ready()
    assert (rig.state("a").value, rig.state("b").value, rig.system_state) == ("ready", "ready", "ready")
    assert [state for state, _ in states(rig, "a[0]")] == [
        "starting",
        "ready",
        "degraded",
        "starting",
        "starting",
        "ready",
    ]
    assert "too hot" in states(rig, "a[0]")[3][1]


def test_a_check_that_succeeds_ends_the_series() -> None:
    rig = ControllerScene(role("a", health=dt.Health(failure_threshold=2)))
    rig.launch()
    for _ in range(5):
        failed(rig)
        assert rig.system_state == "degraded"
        failed(rig, problem="")
        assert rig.system_state == "ready"
    assert not rig.stopping
    assert states(rig, "a[0]")[-2:] == [("degraded", PROBLEM), ("ready", "")]


def test_an_instance_without_health_that_does_not_answer_is_degraded_and_not_restarted() -> None:
    rig = ControllerScene(role("a", health=dt.Health(failure_threshold=1)))
    rig.launch()
    for _ in range(5):
        failed(rig, problem="has not answered for 6 s", counts=False)
    assert rig.reason("a") == "has not answered for 6 s"
    assert not rig.stopping


@pytest.mark.parametrize(("policy", "phase"), [("never", SystemPhase.RUNNING), ("fail", SystemPhase.STOPPING)])
def test_the_restart_policy_decides_what_follows(policy: str, phase: SystemPhase) -> None:
    rig = ControllerScene(role("a", restart=policy, health=dt.Health(failure_threshold=1)), role("b"))
    rig.launch()
    worker = rig.worker("a")
    failed(rig)
    rig.lose(worker, LossCause.STOPPED, "")
    assert "too hot" in rig.reason("a")
    assert (rig.state("a").value, rig.controller.phase) == ("dead", phase)
    assert ("too hot" in rig.controller.error) == (policy == "fail")


def test_the_outcome_of_an_earlier_incarnation_is_ignored() -> None:
    rig = ControllerScene(role("a", health=dt.Health(failure_threshold=1)))
    rig.launch()
    first = rig.worker("a")
    rig.lose(first)
    rig.pass_time(1.0)
    rig.ready()
    assert rig.step(HealthChecked(first, ("a", 0), PROBLEM)) == []
    assert rig.system_state == "ready"


def test_one_of_two_roles_in_a_process_is_named() -> None:
    rig = ControllerScene(role("a", together="g", health=dt.Health(failure_threshold=1)), role("b", together="g"))
    rig.launch()
    (note, stop) = failed(rig)
    assert (rig.state("a").value, rig.state("b").value) == ("degraded", "ready")
    assert note.data["instance"] == "a[0]"
    assert stop.reason.startswith("a[0] is not healthy: ")


def test_limits_are_checked() -> None:
    with pytest.raises(dt.ConfigError, match=r"(?s)failure_threshold=0.*dt.Health\(failure_threshold=1\)"):
        dt.ActorSystem([role("a", health=dt.Health(failure_threshold=0))])
    with pytest.raises(dt.ConfigError, match=r"a dt.Health"):
        dt.ActorSystem([role("a", health="5s")])


# --- the monitor


class ScriptedSystem:
    """A controller with one instance and an engine whose answers are given by the test."""

    def __init__(self, limits: HealthLimits, methods: RoleMethods = UNKNOWN_METHODS) -> None:
        self.rig = ControllerScene(role("a"), methods=methods)
        self.rig.launch()
        self.time = 0.0
        self.asked: list[tuple[bool, Future[Any]]] = []
        self.posted: list[HealthChecked] = []
        self.monitor = HeartbeatMonitor(self.rig.controller, cast("RunEngine", self), {"a": limits})

    def now(self) -> float:
        return self.time

    def post(self, event: HealthChecked) -> None:
        self.posted.append(event)

    def call(self, _worker: int, _hosted: str, _method: str, check: bool, _timeout_s: float) -> Future[Any]:
        future: Future[Any] = Future()
        self.asked.append((check, future))
        return future

    def beat(self, answer: dict[str, Any] | None = None) -> None:
        self.monitor.on_step(self.time, [], [])
        if answer is not None:
            self.asked[-1][1].set_result(answer)
        self.time += HEARTBEAT_S


def test_a_check_is_begun_once_per_period_and_reported_once() -> None:
    system = ScriptedSystem(HealthLimits(10.0, 1.0, 3))
    for _ in range(10):
        system.beat({"health": PROBLEM})
    assert [check for check, _ in system.asked] == [True, False, False, False, False] * 2
    assert system.posted == [HealthChecked(1, ("a", 0), PROBLEM)] * 2


def test_a_slow_check_is_reported_with_a_later_heartbeat_and_success_only_after_a_failure() -> None:
    system = ScriptedSystem(HealthLimits(4.0, 3.0, 3))
    system.beat({"health": None})
    assert system.posted == []
    system.beat({"health": "late"})
    system.beat({"health": ""})
    system.beat({"health": ""})
    system.beat({"health": ""})
    assert [one.problem for one in system.posted] == ["late", ""]


def test_an_instance_with_health_that_is_silent_fails_a_check_in_every_period() -> None:
    system = ScriptedSystem(HealthLimits(4.0, 1.0, 3))
    system.beat({"health": ""})
    for _ in range(9):
        system.beat()
    assert len(system.asked) == 2
    assert next(one.problem for one in system.posted) == "has not answered for 6 s"
    assert all(one.counts for one in system.posted)
    assert 3 <= len(system.posted) <= 4


def test_an_instance_whose_class_has_health_fails_checks_also_if_it_has_never_answered() -> None:
    system = ScriptedSystem(HealthLimits(4.0, 1.0, 3), RoleMethods(frozenset({"health", "play"})))
    for _ in range(10):
        system.beat()
    assert len(system.asked) == 1
    assert [one.problem for one in system.posted] == [
        f"has not answered for {second} s" for second in (2, 6, 10, 14, 18)
    ]
    assert all(one.counts for one in system.posted)


def test_an_instance_without_health_that_is_silent_is_reported_once_and_when_it_answers_again() -> None:
    system = ScriptedSystem(HealthLimits(4.0, 1.0, 3))
    system.beat({"calls": 0})
    for _ in range(3 * LATE_HEARTBEATS):
        system.beat()
    assert [(one.problem, one.counts) for one in system.posted] == [("has not answered for 8 s", False)]
    system.asked[-1][1].set_result({"calls": 1})
    assert [(one.problem, one.counts) for one in system.posted[1:]] == [("", False)]


def test_calls_of_all_incarnations_are_added_up() -> None:
    system = ScriptedSystem(HealthLimits(4.0, 1.0, 3))
    system.beat({"calls": 7, "failed": 1, "busy_s": 0.5})
    assert system.monitor.totals("a") == (7, 1, 0.5)
    rig = system.rig
    system.beat()  # its answer is on its way when the instance is lost
    late = system.asked[-1][1]
    rig.lose(rig.worker("a"))
    rig.now = system.time = 100.0
    rig.step()
    rig.ready()
    system.beat({"calls": 2, "failed": 0, "busy_s": 0.25})
    assert system.monitor.totals("a") == (9, 1, 0.75)
    late.set_result({"calls": 8, "failed": 1, "busy_s": 0.5})
    system.beat({"calls": 2, "failed": 0, "busy_s": 0.25})
    assert system.monitor.totals("a") == (10, 1, 0.75)


def test_a_draining_instance_is_asked_again_and_not_reported() -> None:
    system = ScriptedSystem(HealthLimits(4.0, 1.0, 3))
    system.beat({"calls": 1, "health": ""})
    commands = system.rig.step(Drain("stopped"))
    system.monitor.on_step(system.time, [], commands)
    system.monitor.on_step(system.time, [], commands)
    assert len(system.asked) == 2
    system.asked[-1][1].set_result({"calls": 3, "health": PROBLEM})
    assert system.monitor.totals("a").calls == 3
    assert system.posted == []


def test_figures_that_are_requested_are_those_of_now() -> None:
    system = ScriptedSystem(HealthLimits(4.0, 1.0, 3))
    system.beat({"calls": 1})
    request = system.monitor.request_figures()
    system.time = 0.1  # long before the next heartbeat
    waiting = Thread(target=request.wait, args=(PATIENCE_S,))
    waiting.start()
    system.monitor.on_step(system.time, [], [])
    assert waiting.is_alive()
    system.asked[-1][1].set_result({"calls": 2})
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert system.monitor.totals("a").calls == 2


# --- the worker


def test_a_busy_instance_executes_at_least_one_call() -> None:
    record = CallRecord()
    first, second = record.begin("a"), record.begin("b")
    record.end(first)
    began = time.monotonic()
    busy_s = record.snapshot()["busy_s"]
    while time.monotonic() - began < 0.02:
        pass
    assert record.snapshot()["busy_s"] >= busy_s + 0.02
    record.end(second)
    idle = record.snapshot()["busy_s"]
    assert record.snapshot()["busy_s"] == idle


def test_a_check_that_hangs_is_late_after_its_timeout_and_blocks_nothing() -> None:
    gate = Event()
    check = HealthCheck(lambda: gate.wait(PATIENCE_S), lambda value: value)
    assert check.problem(60.0) is None
    assert check.problem(0.0) == "health() has not returned for 0 s"
    gate.set()
    until(lambda: check.is_finished)
    assert check.problem(60.0) == ""


@pytest.mark.parametrize(
    ("answer", "expected"), [(None, ""), (True, ""), ("well", ""), (False, "health() returned False")]
)
def test_only_false_and_exceptions_are_failures(answer: object, expected: str) -> None:
    check = HealthCheck(lambda: answer, lambda value: value)
    until(lambda: check.is_finished)
    assert check.problem(1.0) == expected
