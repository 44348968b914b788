"""The controller of actor systems, with events and times made by the tests."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dovetail as dt
from dovetail.actors.claim_plan import planned_processes, to_claim_plan
from dovetail.actors.instance_directory import InstanceState, RoleMethods
from dovetail.actors.system_controller import ActorController, SystemDefinition, SystemPhase
from dovetail.control.commands import HostedObject, Note, StartWorker, StopWorker
from dovetail.control.events import (
    CancelRun,
    CapacityReserved,
    Drain,
    LossCause,
    NodeJoined,
    NodeLeft,
    PinWorkers,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.control.lifecycle import RunState
from dovetail.resources.cluster import Cluster
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from dovetail.actors.health_check import HealthChecked
    from dovetail.control.commands import Command
    from dovetail.control.events import Event

ONE = dt.Resources(cpus=1)
UNKNOWN_METHODS = RoleMethods(None)


class ControllerScene:
    """A controller, and the engine as far as the controller sees it: which workers are alive."""

    def __init__(
        self,
        *roles: dt.Role,
        cluster: str = "2x(4cpu, 8GB)",
        deadline_s: float = 60.0,
        methods: RoleMethods = UNKNOWN_METHODS,
        **more: Any,
    ) -> None:
        system = dt.ActorSystem(roles, **more)
        names = {role.name: role for role in system.roles}
        definition = SystemDefinition(
            system.name,
            system.roles,
            system.bundles,
            system.pools,
            {name: HostedObject(name, slots=role.slots or 1) for name, role in names.items()},
            dict.fromkeys(names, methods),
        )
        plan = to_claim_plan(system.plan(cluster), system.bundles)
        processes = planned_processes(plan, system.bundles)
        self.controller = ActorController(definition, processes, Cluster.of(cluster), deadline_s=deadline_s)
        self.now = 0.0
        self.alive: dict[int, StartWorker] = {}
        self.stopping: dict[int, bool] = {}
        self.notes: list[Note] = []
        self.step()

    def step(self, *events: Event | HealthChecked) -> list[Command]:
        commands = self.controller.step(self.now, events)
        for command in commands:
            if isinstance(command, StartWorker):
                assert command.worker not in self.alive
                self.alive[command.worker] = command
            elif isinstance(command, StopWorker):
                assert command.worker in self.alive
                self.stopping[command.worker] = command.drain
            elif isinstance(command, Note):
                self.notes.append(command)
        return commands

    def worker(self, role: str, index: int = 0) -> int:
        worker = self.controller.directory.roles[role].instances[index].worker
        assert worker is not None
        return worker

    def ready(self, *workers: int) -> list[Command]:
        return self.step(*(WorkerReady(worker) for worker in workers or self.alive))

    def launch(self) -> None:
        while self.controller.phase is SystemPhase.LAUNCHING:
            self.ready()

    def lose(self, worker: int, cause: LossCause = LossCause.SIGNAL, detail: str = "signal 9") -> list[Command]:
        del self.alive[worker]
        return self.step(WorkerLost(worker, cause, detail))

    def end_stopping(self) -> None:
        events: list[Event] = []
        for worker, drain in self.stopping.items():
            if self.alive.pop(worker, None) is not None:
                events.append(WorkerStopped(worker) if drain else WorkerLost(worker, LossCause.STOPPED))
        self.stopping = {}
        self.step(*events)

    def state(self, role: str, index: int = 0) -> InstanceState:
        return self.controller.directory.roles[role].instances[index].state

    @property
    def system_state(self) -> str:
        return self.controller.state.value

    def reason(self, role: str, index: int = 0) -> str:
        return self.controller.directory.roles[role].instances[index].reason

    def pass_time(self, seconds: float) -> list[Command]:
        self.now += seconds
        return self.step()


def role(name: str, **more: Any) -> dt.Role:
    return dt.Role(name, "package.module:Name", **({"resources": ONE} | more))


def started(commands: list[Command]) -> list[str]:
    return [one.name for command in commands if isinstance(command, StartWorker) for one in command.hosted]


def test_roles_start_in_the_order_of_after_and_in_parallel_within_a_level() -> None:
    rig = ControllerScene(role("c", after=["b"]), role("a", workers=2), role("b", after=["a"]), role("d"))
    assert sorted(start.hosted[0].name for start in rig.alive.values()) == ["a", "a", "d"]
    assert started(rig.ready(rig.worker("a", 0))) == []
    assert started(rig.ready(rig.worker("a", 1))) == []
    assert started(rig.ready(rig.worker("d"))) == ["b"]
    assert started(rig.ready(rig.worker("b"))) == ["c"]
    assert rig.system_state == "starting"
    rig.ready(rig.worker("c"))
    assert rig.system_state == "ready"


def test_workers_know_their_instances_and_all_that_start_with_them() -> None:
    rig = ControllerScene(role("a", workers=2), role("b", together="g"), role("c", together="g"))
    contexts = {number: pickle.loads(start.context) for number, start in rig.alive.items()}
    assert contexts[rig.worker("a", 1)].instances == {"a": ("a", 1)}
    assert contexts[rig.worker("b")].instances == {"b": ("b", 0), "c": ("c", 0)}
    assert rig.worker("b") == rig.worker("c")
    directory = contexts[rig.worker("a", 0)].directory
    assert [one.worker for one in directory.roles["a"].instances] == [rig.worker("a", 0), rig.worker("a", 1)]


def test_a_setup_that_fails_ends_the_launch_and_leaves_nothing() -> None:
    rig = ControllerScene(role("a"), role("b"))
    rig.ready(rig.worker("a"))
    rig.lose(rig.worker("b"), LossCause.SETUP_FAILED, "ValueError: no model\nTraceback")
    assert rig.stopping == {rig.worker("a"): False}
    rig.end_stopping()
    assert rig.controller.done
    assert rig.controller.run_state is RunState.FAILED
    assert "b[0] did not start: setup failed: ValueError: no model" in rig.controller.error


def test_a_launch_that_is_not_ready_at_its_deadline_fails_and_names_the_late_roles() -> None:
    rig = ControllerScene(role("a"), role("b"), deadline_s=10.0)
    rig.ready(rig.worker("a"))
    assert rig.controller.wake_at() == 10.0
    rig.pass_time(10.0)
    rig.end_stopping()
    assert rig.controller.done
    assert rig.controller.error == "not ready within 10 s: b[0]: starting"


def test_a_dead_instance_is_restarted_with_a_new_incarnation_and_a_wait_that_doubles() -> None:
    rules = dt.Restart(limit=3, window="100s", backoff="1s")
    rig = ControllerScene(role("a", restart=rules), role("b"))
    rig.launch()
    for number, wait_s in enumerate([1.0, 2.0, 4.0], start=1):
        rig.lose(rig.worker("a"))
        assert rig.system_state == "degraded"
        assert rig.state("a") is InstanceState.STARTING
        assert rig.controller.wake_at() == rig.now + wait_s
        assert rig.pass_time(wait_s / 2) == []
        assert started(rig.pass_time(wait_s / 2)) == ["a"]
        assert rig.controller.directory.roles["a"].instances[0].incarnation == number + 1
        rig.ready()
        assert rig.system_state == "ready"
    rig.lose(rig.worker("a"))
    assert rig.state("a") is InstanceState.DEAD
    assert rig.reason("a") == "signal: signal 9; not restarted again after 3 restarts within 100 s"
    assert rig.controller.wake_at() is None
    assert rig.state("b") is InstanceState.READY


def test_restarts_outside_of_the_window_do_not_count() -> None:
    rig = ControllerScene(role("a", restart=dt.Restart(limit=1, window="10s", backoff="1s")))
    rig.launch()
    for _ in range(5):
        rig.lose(rig.worker("a"))
        rig.pass_time(1.0)
        rig.ready()
        rig.pass_time(10.0)
    assert rig.state("a") is InstanceState.READY


def test_an_instance_that_is_never_restarted_stays_dead() -> None:
    rig = ControllerScene(role("a", workers=2, restart="never"))
    rig.launch()
    rig.lose(rig.worker("a", 1))
    assert rig.state("a", 1) is InstanceState.DEAD
    assert rig.state("a", 0) is InstanceState.READY
    assert rig.controller.state is InstanceState.DEGRADED
    assert rig.controller.wake_at() is None


def test_out_of_memory_is_named_as_the_cause_of_a_death() -> None:
    rig = ControllerScene(role("a", restart="never"))
    rig.launch()
    rig.lose(rig.worker("a"), LossCause.OUT_OF_MEMORY, "it used 9GB of the 8GB that it requested")
    reason = rig.controller.directory.roles["a"].instances[0].reason
    assert reason == "out of memory: it used 9GB of the 8GB that it requested; restart is 'never'"
    assert any(reason.split(";")[0] in note.text for note in rig.notes)


def test_a_restarted_gang_has_the_same_rendezvous_seed_and_no_other_gang_has_it() -> None:
    rig = ControllerScene(role("a", ranks=2, workers=2, restart=dt.Restart(backoff="1s")), role("b"))
    rig.launch()
    seeds = [rig.alive[rig.worker("a", index)].rendezvous_seed for index in (0, 1)]
    assert 0 not in seeds
    assert seeds[0] != seeds[1]
    assert rig.alive[rig.worker("b")].rendezvous_seed == 0
    rig.lose(rig.worker("a"))
    rig.pass_time(1.0)
    assert rig.alive[rig.worker("a")].rendezvous_seed == seeds[0]


def test_the_death_of_an_instance_may_fail_the_system() -> None:
    rig = ControllerScene(role("a", restart="fail"), role("b"))
    rig.launch()
    rig.lose(rig.worker("a"))
    assert rig.stopping == {rig.worker("b"): False}
    rig.end_stopping()
    assert rig.controller.run_state is RunState.FAILED
    assert rig.controller.error == "a[0] died: signal: signal 9"


def test_roles_in_one_process_have_the_strictest_rules_of_their_roles() -> None:
    rig = ControllerScene(role("a", together="g"), role("b", together="g", restart="never"))
    rig.launch()
    rig.lose(rig.worker("a"))
    assert (rig.state("a"), rig.state("b")) == (InstanceState.DEAD, InstanceState.DEAD)


def test_a_gang_restarts_on_all_of_its_seats() -> None:
    rig = ControllerScene(role("a", ranks=3))
    rig.launch()
    seats = rig.alive[rig.worker("a")].seats
    assert len(seats) == 3
    rig.lose(rig.worker("a"))
    rig.pass_time(1.0)
    assert rig.alive[rig.worker("a")].seats == seats


def test_a_stop_drains_level_by_level_from_the_last() -> None:
    rig = ControllerScene(role("a"), role("b", after=["a"]))
    rig.launch()
    rig.step(Drain("stopped"))
    assert rig.stopping == {rig.worker("b"): True}
    assert rig.state("a") is InstanceState.READY  # the teardown of b may call it
    rig.end_stopping()
    assert rig.stopping == {rig.worker("a"): True}
    rig.end_stopping()
    assert rig.controller.done
    assert rig.controller.run_state is RunState.FINISHED


def test_a_stop_at_once_kills_everything_also_what_is_draining() -> None:
    rig = ControllerScene(role("a"), role("b", after=["a"]))
    rig.launch()
    rig.step(Drain("stopped"))
    rig.step(CancelRun("not drained in time"))
    assert set(rig.stopping.values()) == {False}
    rig.end_stopping()
    assert rig.controller.done
    assert rig.controller.run_state is RunState.FINISHED


def test_nothing_is_restarted_after_a_stop() -> None:
    rig = ControllerScene(role("a", workers=2))
    rig.launch()
    rig.lose(rig.worker("a", 0))
    rig.step(Drain("stopped"))
    rig.lose(rig.worker("a", 1))
    assert rig.controller.done


def test_a_role_is_scaled_up_and_down_through_the_placement() -> None:
    rig = ControllerScene(role("a", workers=(1, 8), scale=dt.Scale(1)), role("b", workers=2))
    rig.launch()
    rig.step(PinWorkers("a", 4))
    assert rig.controller.counts() == {"a": 4, "b": 2}
    assert [one.state.value for one in rig.controller.directory.roles["a"].instances] == ["ready"] + ["starting"] * 3
    rig.ready()
    rig.step(PinWorkers("a", 2))
    assert len(rig.stopping) == 2
    rig.end_stopping()
    assert len(rig.controller.directory.roles["a"].instances) == 2
    texts = [note.text for note in rig.notes if note.kind == "scale"]
    assert texts == ["a: 1 -> 4 instances", "a: 4 -> 2 instances"]


def test_a_role_is_scaled_as_far_as_there_is_room() -> None:
    rig = ControllerScene(role("a", workers=(1, 8), scale=dt.Scale(1)), role("b", workers=2), cluster="1x(5cpu)")
    rig.launch()
    free = rig.controller.counts()
    rig.step(PinWorkers("a", 8))
    reached = rig.controller.counts()["a"]
    assert free["a"] < reached < 8
    assert "no room for" in rig.notes[-1].text
    assert rig.notes[-1].data["to"] == reached


def test_a_count_outside_of_the_limits_is_refused() -> None:
    rig = ControllerScene(role("a", workers=(2, 4), scale=dt.Scale(1)))
    rig.launch()
    assert "2 to 4" in rig.controller.scale_problem("a", 5)
    assert rig.controller.scale_problem("a", 3) == ""
    rig.step(PinWorkers("a", 5))
    assert rig.controller.counts()["a"] == 2


def test_the_instances_of_a_lost_node_are_restarted_on_another() -> None:
    rig = ControllerScene(role("a", workers=2, spread=True), cluster="2x(4cpu)")
    rig.launch()
    node = rig.alive[rig.worker("a", 0)].seats[0].node
    other = rig.alive[rig.worker("a", 1)].seats[0].node
    assert node != other
    rig.lose(rig.worker("a", 0), LossCause.NODE_LOST, "")
    rig.step(NodeLeft(node))
    rig.pass_time(1.0)
    assert rig.alive[rig.worker("a", 0)].seats[0].node == other
    assert f"a[0] moves to {other}" in [note.text for note in rig.notes]


def test_without_room_an_instance_waits_until_a_node_joins() -> None:
    rig = ControllerScene(role("a", workers=2, spread="strict"), cluster="2x(4cpu)")
    rig.launch()
    node = rig.alive[rig.worker("a", 0)].seats[0].node
    rig.lose(rig.worker("a", 0), LossCause.NODE_LOST, "")
    rig.step(NodeLeft(node))
    assert started(rig.pass_time(1.0)) == []
    assert "no node has room" in rig.reason("a", 0)
    rig.step(NodeJoined(Cluster.of("3x(4cpu)").nodes[2]))
    rig.pass_time(1.0)
    assert rig.alive[rig.worker("a", 0)].seats[0].node == "node-2"


def test_a_node_whose_agent_is_lost_is_avoided_if_there_is_another() -> None:
    rig = ControllerScene(role("a"), cluster="2x(4cpu)")
    rig.launch()
    node = rig.alive[rig.worker("a")].seats[0].node
    rig.lose(rig.worker("a"), LossCause.NODE_LOST, "")
    rig.step(NodeLeft(node, returns=True))
    rig.pass_time(1.0)
    assert rig.alive[rig.worker("a")].seats[0].node != node


def test_a_node_whose_agent_returns_keeps_its_instances_if_there_is_no_other() -> None:
    rig = ControllerScene(role("a"), cluster="1x(4cpu)")
    rig.launch()
    seats = rig.alive[rig.worker("a")].seats
    rig.lose(rig.worker("a"), LossCause.NODE_LOST, "")
    rig.step(NodeLeft(seats[0].node, returns=True))
    rig.pass_time(1.0)
    assert rig.alive[rig.worker("a")].seats == seats


def test_capacity_that_another_run_gets_is_released_down_to_the_minimum() -> None:
    rig = ControllerScene(role("a", workers=(1, 3)), cluster="1x(4cpu)")
    rig.launch()
    assert rig.controller.counts() == {"a": 3}
    rig.step(CapacityReserved((Seat("node-0", 4000),)))
    rig.end_stopping()
    assert rig.controller.counts() == {"a": 1}


def test_a_removed_index_is_used_again() -> None:
    rig = ControllerScene(role("a", workers=(1, 4), scale=dt.Scale(1)))
    rig.launch()
    rig.step(PinWorkers("a", 3))
    rig.ready()
    rig.step(PinWorkers("a", 1))
    rig.step(PinWorkers("a", 2))  # while two are draining
    rig.ready()
    rig.end_stopping()
    indices = [index for process in rig.controller.processes for _, index in process.instances]
    assert len(indices) == len(set(indices)) == 2
    live = [one for one in rig.controller.directory.roles["a"].instances if one.hosted]
    assert len(live) == 2


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ready", "lose", "oom", "time", "scale", "node", "join", "reserve", "stopped"]),
        st.integers(0, 9),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.sampled_from(["always", "never", "fail"]), st.booleans())
def test_any_sequence_of_events_keeps_the_books_and_can_be_stopped(
    events: list[tuple[str, int]], policy: Any, drain: bool
) -> None:
    rules = dt.Restart(policy, limit=3, window="20s", backoff="1s")
    rig = ControllerScene(
        role("a", workers=(1, 5), scale=dt.Scale(1), restart=rules, slots=2),
        role("b", together="g", after=["a"]),
        role("c", together="g", workers=2),
        role("d", ranks=2, spread=True),
        cluster="3x(4cpu)",
    )
    for what, number in events:
        happen(rig, what, number)
        check_books(rig)
        if rig.controller.done:
            return
    rig.step(Drain("end") if drain else CancelRun("end"))
    for _ in range(5):
        rig.end_stopping()
    assert rig.controller.done
    assert not rig.alive


def happen(rig: ControllerScene, what: str, number: int) -> None:
    workers = sorted(rig.alive)
    chosen = workers[number % len(workers)] if workers else None
    if what == "ready" and chosen is not None:
        rig.ready(chosen)
    elif what in ("lose", "oom") and chosen is not None:
        rig.stopping.pop(chosen, None)
        rig.lose(chosen, LossCause.OUT_OF_MEMORY if what == "oom" else LossCause.SIGNAL)
    elif what == "time":
        rig.pass_time(float(number))
    elif what == "scale":
        rig.step(PinWorkers("a", number))
    elif what == "node":
        node = f"node-{number % 3}"
        for worker, start in list(rig.alive.items()):
            if any(seat.node == node for seat in start.seats):
                rig.stopping.pop(worker, None)
                rig.lose(worker, LossCause.NODE_LOST, "")
        rig.step(NodeLeft(node))
    elif what == "join":
        rig.step(NodeJoined(Cluster.of("3x(4cpu)").nodes[number % 3]))
    elif what == "reserve":
        rig.step(CapacityReserved((Seat("node-0", 500 * number),)))
    elif what == "stopped":
        rig.end_stopping()


def check_books(rig: ControllerScene) -> None:
    """No seat is used twice, every live worker belongs to one process, and indices are unique."""
    used: dict[str, int] = {}
    for start in rig.alive.values():
        for seat in start.seats:
            used[seat.node] = used.get(seat.node, 0) + seat.cpu_milli
    assert all(amount <= 4000 for amount in used.values()), used
    hosted = [process.worker for process in rig.controller.processes if process.worker is not None]
    assert sorted(hosted) == sorted(rig.alive)
    instances = [one for process in rig.controller.processes for one in process.instances]
    assert len(instances) == len(set(instances))


@pytest.mark.parametrize("count", [1, 3])
def test_several_instances_of_a_role_in_one_process_have_names_of_their_own(count: int) -> None:
    rig = ControllerScene(role("a", together="g"), role("b", workers=count, together="g"))
    (start,) = rig.alive.values()
    names = [hosted.name for hosted in start.hosted]
    assert len(names) == len(set(names)) == 1 + count
    context = pickle.loads(start.context)
    assert [context.instances[name] for name in names] == [("a", 0), *(("b", index) for index in range(count))]
