"""Nodes come and go: is everything still done exactly once, and is what there is used?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from dovetail.control.commands import RunBatches, StartWorker
from dovetail.control.events import BatchesReturned, LossCause, NodeJoined, NodeLeft, WorkerLost
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.world import Behaviour, Gives, JoinNode, LoseNode, ScriptedEvent
from dovetail.streaming.settings import StreamOptions
from streaming.rigs import Hand, go, nobody_idles, numbers, of_kind, stage

if TYPE_CHECKING:
    from dovetail.streaming.controller import StreamController

FOUR = dt.Cluster.of("4x(4cpu, 16GB)")
NAMES = [node.name for node in FOUR.nodes]


@given(
    times=st.lists(st.floats(0.0, 25.0), min_size=1, max_size=3),
    batch=st.sampled_from([1, 5]),
    short=st.booleans(),
    seed=st.integers(0, 999),
)
def test_losing_nodes_with_payloads_loses_and_doubles_nothing(
    times: list[float], batch: int, short: bool, seed: int
) -> None:
    rig = go(
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


def test_epochs_whose_results_were_lost_begin_again_and_the_run_says_so() -> None:
    rig = go(
        [stage("a"), stage("b", batch_size=50)],
        {"a": Behaviour(0.1, bytes_out=9), "b": Behaviour(0.1)},
        400,
        cluster=FOUR,
        script=(ScriptedEvent(6.0, LoseNode(NAMES[0])), ScriptedEvent(9.0, LoseNode(NAMES[1]))),
    )
    assert rig.notes("source items restart: some of their results were lost")
    assert rig.notes(f"node {NAMES[0]} left (lost)")
    assert rig.out("b") == numbers(400)


def test_what_is_in_use_follows_the_nodes_that_are_there() -> None:
    seen: dict[tuple[int, int], float] = {}

    def look(stream: StreamController) -> None:
        used, total = stream.view(stream.state.now).use["CPUs"]
        held = sum(seat.cpu_milli for worker in stream.state.workers.values() for seat in worker.seats)
        there = {node.name for node in stream.fleet.cluster.nodes}
        lost = [seat for worker in stream.state.workers.values() for seat in worker.seats if seat.node not in there]
        assert used == held - sum(seat.cpu_milli for seat in lost)
        seen.setdefault((total, len(there)), stream.state.now)

    script = (ScriptedEvent(5.0, LoseNode(NAMES[2])), ScriptedEvent(12.0, JoinNode(dt.Node("new", 8000, 16 << 30))))
    go([stage("a")], {"a": Behaviour(1.0)}, 200, cluster=FOUR, script=script, after_step=look)
    assert list(seen) == [(16_000, 4), (12_000, 3), (20_000, 4)]


def test_the_loss_of_the_last_node_fails_the_run_with_its_name() -> None:
    rig = go(
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
    rig = go(
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
    rig = go(
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


def test_when_not_all_units_fit_any_more_they_run_one_after_another() -> None:
    """Two GPU stages with a card each, and then there is one card."""
    cluster = dt.Cluster.of("2x(8cpu, 64GB, 1xL40S:48GB)")
    card = dt.Resources(cpus=1, gpus=1)
    rig = go(
        [stage("a", resources=card), stage("b", resources=card, batch_size=5)],
        {"a": Behaviour(0.5), "b": Behaviour(0.5)},
        200,
        cluster=cluster,
        script=(ScriptedEvent(20.0, LoseNode("node-1")),),
        after_step=nobody_idles,
    )
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.notes("b waits until the units before it are finished")
    assert rig.out("b") == numbers(200)
    last_of_a = max(now for now, m in rig.timed(RunBatches) if m.hosted == "a")
    late = [now for now, m in rig.timed(RunBatches) if m.hosted == "b" and now > 25]
    assert late
    assert min(late) > last_of_a


def test_they_run_together_again_when_a_node_comes_back() -> None:
    cluster = dt.Cluster.of("2x(8cpu, 64GB, 1xL40S:48GB)")
    card = dt.Resources(cpus=1, gpus=1)
    rig = go(
        [stage("a", resources=card), stage("b", resources=card)],
        {"a": Behaviour(0.5), "b": Behaviour(0.5)},
        300,
        cluster=cluster,
        script=(ScriptedEvent(20.0, LoseNode("node-1")), ScriptedEvent(50.0, JoinNode(cluster.nodes[1]))),
    )
    assert rig.out("b") == numbers(300)
    last_of_a = max(now for now, m in rig.timed(RunBatches) if m.hosted == "a")
    assert any(55 < now < last_of_a for now, m in rig.timed(RunBatches) if m.hosted == "b")


def two_nodes() -> tuple[Hand, RunBatches, str]:
    """A message for a worker on one node, whose input lies on the other."""
    hand = Hand.of([stage("a", workers=1), stage("b", workers=1)], cluster="2x(1cpu, 16GB)")
    hand.begin()
    (sent,) = of_kind(hand.items(1, ends=True), RunBatches)
    state = hand.stream.state
    there = state.workers[sent.worker].node
    (message,) = of_kind(hand.done(sent, node=there), RunBatches)
    assert state.workers[message.worker].node != there
    return hand, message, there


def test_a_message_that_comes_back_because_its_input_is_lost_begins_its_epoch_again() -> None:
    hand, message, there = two_nodes()
    hand.step(NodeLeft(there))
    hand.step(BatchesReturned(message.worker, message.message))
    assert [epoch.first for epoch in hand.stream.state.epochs.values()] == [0]
    assert hand.stream.state.units_by_name["a"].queue.items == 1
    assert not hand.stream.state.units_by_name["b"].queue.items


@pytest.mark.parametrize("dies", [False, True])
def test_what_was_lost_is_lost_even_if_its_node_is_back(dies: bool) -> None:
    """A node of the same name, and empty: sending the message again would bring it back for ever."""
    hand, message, there = two_nodes()
    node = next(node for node in hand.stream.fleet.cluster.nodes if node.name == there)
    hand.step(NodeLeft(there), NodeJoined(node))
    if dies:
        hand.step(WorkerLost(message.worker, LossCause.SIGNAL))
    else:
        hand.step(BatchesReturned(message.worker, message.message))
    state = hand.stream.state
    assert state.units_by_name["b"].queue.items == 0
    assert not state.units_by_name["b"].suspects
    assert state.units_by_name["a"].queue.items + state.units_by_name["a"].items_in_flight == 1


def test_a_message_that_was_already_running_needs_its_input_no_more() -> None:
    hand, message, there = two_nodes()
    hand.step(NodeLeft(there))
    hand.done(message)
    assert not hand.stream.state.epochs


def test_a_worker_lost_with_its_node_is_no_suspect_and_no_crash() -> None:
    hand, message, _ = two_nodes()
    here = hand.stream.state.workers[message.worker].node
    hand.step(WorkerLost(message.worker, LossCause.NODE_LOST), NodeLeft(here))
    unit = hand.stream.state.units_by_name["b"]
    assert (unit.idle_deaths, len(unit.suspects), unit.retries) == (0, 0, 0)


def test_nothing_is_started_on_a_node_that_is_gone() -> None:
    left: set[str] = set()

    def look(stream: StreamController) -> None:
        there = {node.name for node in stream.fleet.cluster.nodes}
        left.update(set(NAMES) - there)
        for worker in stream.state.workers.values():
            assert worker.node in there or worker.state.value != "starting"

    rig = go(
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
