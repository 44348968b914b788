"""Nodes that join, leave or fail: exactly-once delivery and the use of the remaining nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from dovetail.control.commands import Note, RunBatches, StartWorker, StopWorker
from dovetail.control.events import (
    BatchesReturned,
    LossCause,
    NodeJoined,
    NodeLeft,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.world import Behaviour, Gives, JoinNode, LoseNode, Raises, ScriptedEvent
from dovetail.streaming.settings import StreamOptions
from streaming.harness import ManualStream, assert_no_idle_worker, numbers, of_kind, simulate_stages, stage

if TYPE_CHECKING:
    from dovetail.engines.simulated.world import Key
    from dovetail.streaming.controller import StreamController

FOUR = dt.Cluster.of("4x(4cpu, 16GB)")
NAMES = [node.name for node in FOUR.nodes]


@given(
    times=st.lists(st.floats(0.0, 25.0), min_size=1, max_size=3),
    batch=st.sampled_from([1, 5]),
    short=st.booleans(),
    seed=st.integers(0, 999),
)
def test_lost_payloads_neither_lose_nor_duplicate_items(times: list[float], batch: int, short: bool, seed: int) -> None:
    rig = simulate_stages(
        [stage("a"), stage("b", batch_size=batch), stage("c", batch_size=2)],
        {
            "a": Behaviour(0.2, bytes_out=9),
            "b": Behaviour(0.01 if short else 0.4, bytes_out=9, item=lambda key, _: Gives(key[0] % 3)),
            "c": Behaviour(0.2),
        },
        150,
        cluster=FOUR,
        options=StreamOptions(target_epoch_batches=2, target_epoch_s=0.1 if short else 2.0),
        script=tuple(ScriptedEvent(time, LoseNode(name)) for time, name in zip(times, NAMES, strict=False)),
        world={"seed": seed},
    )
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.data.delivered["c"] == sum(number % 3 for number in range(150)) == len(rig.out("c"))


def test_epochs_with_lost_results_restart_with_a_note() -> None:
    rig = simulate_stages(
        [stage("a"), stage("b", batch_size=50)],
        {"a": Behaviour(0.1, bytes_out=9), "b": Behaviour(0.1)},
        400,
        cluster=FOUR,
        script=(ScriptedEvent(6.0, LoseNode(NAMES[0])), ScriptedEvent(9.0, LoseNode(NAMES[1]))),
    )
    assert rig.notes("source items restart: some of their results were lost")
    assert rig.notes(f"node {NAMES[0]} left (lost)")
    assert rig.out("b") == numbers(400)


def test_resource_use_follows_the_current_nodes() -> None:
    seen: dict[tuple[int, int], float] = {}

    def look(stream: StreamController) -> None:
        used, total = stream.view(stream.state.now).use["CPUs"]
        held = sum(seat.cpu_milli for worker in stream.state.workers.values() for seat in worker.seats)
        there = {node.name for node in stream.fleet.cluster.nodes}
        lost = [seat for worker in stream.state.workers.values() for seat in worker.seats if seat.node not in there]
        assert used == held - sum(seat.cpu_milli for seat in lost)
        seen.setdefault((total, len(there)), stream.state.now)

    script = (ScriptedEvent(5.0, LoseNode(NAMES[2])), ScriptedEvent(12.0, JoinNode(dt.Node("new", 8000, 16 << 30))))
    simulate_stages([stage("a")], {"a": Behaviour(1.0)}, 200, cluster=FOUR, script=script, after_step=look)
    assert list(seen) == [(16_000, 4), (12_000, 3), (20_000, 4)]


def test_the_loss_of_the_last_node_fails_the_run_with_its_name() -> None:
    rig = simulate_stages(
        [stage("a")],
        {"a": Behaviour(1.0)},
        500,
        cluster="2x(4cpu, 16GB)",
        script=(ScriptedEvent(4.0, LoseNode("node-0")), ScriptedEvent(8.0, LoseNode("node-1"))),
    )
    assert rig.run_state is RunState.FAILED
    assert rig.error == "the last node, 'node-1', is gone"


@pytest.mark.parametrize("replan", [True, False])
def test_a_loss_after_which_no_worker_fits_fails_the_run_at_once(replan: bool) -> None:
    cluster = dt.Cluster.of("1x(8cpu, 64GB) + 1x(4cpu, 64GB)")
    big = max(cluster.nodes, key=lambda node: node.cpu_milli).name
    rig = simulate_stages(
        [stage("a", cpus=8)],
        {"a": Behaviour(1.0)},
        50,
        cluster=cluster,
        options=StreamOptions(replan=replan),
        script=(ScriptedEvent(5.2, LoseNode(big)),),
    )
    assert rig.run_state is RunState.FAILED
    assert rig.error.startswith("no node can seat a worker of a")
    assert rig.seconds == pytest.approx(5.2, abs=0.1)


def test_a_node_that_joins_is_used() -> None:
    another = dt.Cluster.of("9x(8cpu, 64GB)").nodes[8]
    rig = simulate_stages(
        [stage("a")],
        {"a": Behaviour(1.0)},
        400,
        cluster="1x(4cpu, 16GB)",
        script=(ScriptedEvent(12.0, JoinNode(another)),),
    )
    there = [start for now, start in rig.starts("a") if start.seats[0].node == another.name]
    assert len(there) == 8
    assert rig.notes(f"node {another.name} joined")
    assert rig.seconds < 12 + 400 / 12 + 20


def test_units_that_no_longer_fit_together_run_one_after_another() -> None:
    """Two stages with one GPU each, and one GPU after the loss."""
    cluster = dt.Cluster.of("2x(8cpu, 64GB, 1xL40S:48GB)")
    card = dt.Resources(cpus=1, gpus=1)
    rig = simulate_stages(
        [stage("a", resources=card), stage("b", resources=card, batch_size=5)],
        {"a": Behaviour(0.5), "b": Behaviour(0.5)},
        200,
        cluster=cluster,
        script=(ScriptedEvent(20.0, LoseNode("node-1")),),
        after_step=assert_no_idle_worker,
    )
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.notes("b waits until the units before it are finished")
    assert rig.out("b") == numbers(200)
    last_of_a = max(now for now, m in rig.timed(RunBatches) if m.hosted == "a")
    late = [now for now, m in rig.timed(RunBatches) if m.hosted == "b" and now > 25]
    assert late
    assert min(late) > last_of_a


def test_units_run_together_again_when_a_node_rejoins() -> None:
    cluster = dt.Cluster.of("2x(8cpu, 64GB, 1xL40S:48GB)")
    card = dt.Resources(cpus=1, gpus=1)
    rig = simulate_stages(
        [stage("a", resources=card), stage("b", resources=card)],
        {"a": Behaviour(0.5), "b": Behaviour(0.5)},
        300,
        cluster=cluster,
        script=(ScriptedEvent(20.0, LoseNode("node-1")), ScriptedEvent(50.0, JoinNode(cluster.nodes[1]))),
    )
    assert rig.out("b") == numbers(300)
    last_of_a = max(now for now, m in rig.timed(RunBatches) if m.hosted == "a")
    assert any(55 < now < last_of_a for now, m in rig.timed(RunBatches) if m.hosted == "b")


def two_nodes() -> tuple[ManualStream, RunBatches, str]:
    """A message at a worker on one node, with its input on the other node."""
    manual = ManualStream.of([stage("a", workers=1), stage("b", workers=1)], cluster="2x(1cpu, 16GB)")
    manual.begin()
    (sent,) = of_kind(manual.items(1, ends=True), RunBatches)
    state = manual.stream.state
    there = state.workers[sent.worker].node
    (message,) = of_kind(manual.done(sent, node=there), RunBatches)
    assert state.workers[message.worker].node != there
    return manual, message, there


def test_a_returned_message_with_lost_input_restarts_its_epoch() -> None:
    manual, message, there = two_nodes()
    manual.step(NodeLeft(there))
    manual.step(BatchesReturned(message.worker, message.message))
    assert [epoch.first for epoch in manual.stream.state.epochs.values()] == [0]
    assert manual.stream.state.units_by_name["a"].queue.items == 1
    assert not manual.stream.state.units_by_name["b"].queue.items


@pytest.mark.parametrize("dies", [False, True])
def test_lost_payloads_stay_lost_when_their_node_rejoins(dies: bool) -> None:
    """The new node has the same name and is empty: sending the message again would return it without end."""
    manual, message, there = two_nodes()
    node = next(node for node in manual.stream.fleet.cluster.nodes if node.name == there)
    manual.step(NodeLeft(there), NodeJoined(node))
    if dies:
        manual.step(WorkerLost(message.worker, LossCause.SIGNAL))
    else:
        manual.step(BatchesReturned(message.worker, message.message))
    state = manual.stream.state
    assert state.units_by_name["b"].queue.items == 0
    assert not state.units_by_name["b"].suspects
    assert state.units_by_name["a"].queue.items + state.units_by_name["a"].items_in_flight == 1


def test_a_running_message_does_not_need_its_input_any_more() -> None:
    manual, message, there = two_nodes()
    manual.step(NodeLeft(there))
    manual.done(message)
    assert not manual.stream.state.epochs


def test_a_worker_lost_with_its_node_is_neither_suspect_nor_idle_death() -> None:
    manual, message, _ = two_nodes()
    here = manual.stream.state.workers[message.worker].node
    manual.step(WorkerLost(message.worker, LossCause.NODE_LOST), NodeLeft(here))
    unit = manual.stream.state.units_by_name["b"]
    assert (unit.idle_deaths, len(unit.suspects), unit.retries) == (0, 0, 0)


def test_no_worker_is_started_on_a_lost_node() -> None:
    left: set[str] = set()

    def look(stream: StreamController) -> None:
        there = {node.name for node in stream.fleet.cluster.nodes}
        left.update(set(NAMES) - there)
        for worker in stream.state.workers.values():
            assert worker.node in there or worker.state.value != "starting"

    rig = simulate_stages(
        [stage("a", recycle=4), stage("b")],
        {"a": Behaviour(0.5, setup_s=2.0, setup_failures=0.05), "b": Behaviour(0.3)},
        300,
        cluster=FOUR,
        script=tuple(ScriptedEvent(5.0 + 4 * number, LoseNode(name)) for number, name in enumerate(NAMES[:3])),
        after_step=look,
        options=StreamOptions(max_setup_failure_share=0.9),
    )
    assert rig.run_state is RunState.FINISHED, rig.error
    assert len(left) == 3
    lost_at = {name: 5.0 + 4 * number for number, name in enumerate(NAMES[:3])}
    late = [s for now, s in rig.timed(StartWorker) if now > lost_at.get(s.seats[0].node, 1e9) + 0.01]
    assert not late


def report_workers_lost_with(manual: ManualStream, bad: str) -> int:
    """Report the workers of a node as lost with it, one by one; returns the number of starts on that node meanwhile."""
    starts = of_kind(manual.step(), StartWorker)
    manual.step(*[WorkerReady(start.worker, 1.0) for start in starts], after=1.0)
    there = 0
    lost = [start.worker for start in starts if start.seats[0].node == bad]
    for worker in lost:
        commands = manual.step(WorkerLost(worker, LossCause.NODE_LOST, "gone"), after=0.01)
        there += sum(start.seats[0].node == bad for start in of_kind(commands, StartWorker))
    return there


def test_no_worker_is_started_on_a_node_that_its_workers_report_lost() -> None:
    manual = ManualStream.of([stage("a", rate=1.0)], cluster="4x(16cpu, 64GB)")
    assert report_workers_lost_with(manual, "node-1") == 0
    assert manual.stream.replanner.replans <= 2


def setup_fails_on(manual: ManualStream, bad: str, seconds: int) -> None:
    """Answer every start for this long: failed on the bad node, ready elsewhere."""
    waiting = of_kind(manual.step(), StartWorker)
    for _ in range(seconds):
        events = [
            WorkerLost(start.worker, LossCause.SETUP_FAILED, "RuntimeError: no card")
            if start.seats[0].node == bad
            else WorkerReady(start.worker, 1.0)
            for start in waiting
        ]
        waiting = of_kind(manual.step(*events, after=1.0), StartWorker)


def test_one_bad_node_does_not_fail_the_run() -> None:
    manual = ManualStream.of([stage("a", rate=1.0, resources=dt.Resources(cpus=4))], cluster="10x(4cpu, 64GB)")
    setup_fails_on(manual, "node-3", 2000)
    assert manual.stream.state.run_state is RunState.RUNNING, manual.stream.state.error
    assert len(manual.stream.state.workers) >= 9
    assert [note for note in of_kind(manual.commands, Note) if "times in a row on node node-3" in note.text]


def test_epochs_that_restart_after_a_node_loss_are_smaller() -> None:
    rig = simulate_stages(
        [stage("a", rate=2.0), stage("b", batch_size=4, rate=2.0)],
        {"a": Behaviour(0.5, bytes_out=9), "b": Behaviour(0.7)},
        600,
        cluster="4x(4cpu, 16GB)",
        script=(ScriptedEvent(20.0, LoseNode("node-0")), ScriptedEvent(24.0, LoseNode("node-1"))),
    )
    assert rig.out("b") == numbers(600)
    sizes = [deliver.last - deliver.first for deliver in rig.data.log]
    assert min(sizes) < max(sizes) / 2


def test_a_failed_call_with_lost_input_restarts_its_epoch() -> None:
    def item(key: Key, attempt: int) -> Any:
        return Raises("OSError: only once") if key == (3,) and attempt == 1 else Gives(1)

    node = dt.Node("node-0", 4000, 16 << 30)
    rig = simulate_stages(
        [stage("a", workers=2), stage("b", batch_size=8, workers=2, on_error="skip")],
        {"a": Behaviour(0.2, bytes_out=9), "b": Behaviour(2.0, item=item)},
        100,
        cluster="2x(4cpu, 16GB)",
        script=(ScriptedEvent(12.0, LoseNode("node-0")), ScriptedEvent(12.5, JoinNode(node))),
    )
    assert rig.out("b") == numbers(100)


def test_a_false_report_of_a_lost_node_expires() -> None:
    manual = ManualStream.of([stage("a", workers=8)], cluster="1x(16cpu, 64GB)", options=StreamOptions())
    starts = of_kind(manual.step(), StartWorker)
    manual.step(*[WorkerReady(start.worker, 1.0) for start in starts], after=1.0)
    manual.step(WorkerLost(starts[0].worker, LossCause.NODE_LOST, "maybe"), after=1.0)
    for _ in range(30):
        commands = manual.step(after=5.0)
        manual.step(*[WorkerReady(start.worker, 1.0) for start in of_kind(commands, StartWorker)])
        manual.step(*[WorkerStopped(stop.worker) for stop in of_kind(commands, StopWorker)])
    assert manual.stream.state.run_state is RunState.RUNNING
    assert len(manual.stream.state.workers) == 8


@pytest.mark.parametrize("lost_at_s", [4.0, 6.0])
def test_partial_batches_are_sent_when_all_epochs_restart_after_the_end_of_the_input(lost_at_s: float) -> None:
    rig = simulate_stages(
        [stage("a", batch_size=16, workers=(1, 4)), stage("b", batch_size=16, workers=(1, 4))],
        {"a": Behaviour(0.5), "b": Behaviour(0.5)},
        7,
        cluster="2x(8cpu, 64GB)",
        options=StreamOptions(target_epoch_batches=1, target_epoch_s=0.01),
        script=(ScriptedEvent(lost_at_s, LoseNode("node-0")),),
        limit_s=3000.0,
    )
    assert rig.out("b") == numbers(7)
