"""Dispatch: which worker gets which message, prefetching and stealing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from dovetail.control.commands import Cancel, RunBatches, StartWorker
from dovetail.control.events import BatchesDone, BatchesReturned, ItemsArrived, WorkerReady
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import Behaviour, Gives, Lognormal, Slow, Trace
from dovetail.streaming.settings import StreamOptions
from streaming.harness import ManualStream, assert_no_idle_worker, numbers, of_kind, simulate_stages, stage

if TYPE_CHECKING:
    from dovetail.engines.simulated.world import ItemOutcome, Key
    from dovetail.streaming.controller import StreamController

STEADY = StreamOptions(replan=False, follow_plan=True)


def test_later_stages_are_dispatched_first() -> None:
    """If both stages can send in a step, the later stage sends first."""
    manual = ManualStream.of([stage("a", workers=2), stage("b", workers=1)])
    manual.begin()
    sent = of_kind(manual.items(9), RunBatches)
    mine = [message for message in sent if message.hosted == "a"]
    commands = manual.done(mine[0], out=1)
    assert [message.hosted for message in of_kind(commands, RunBatches)] == ["b", "a"]


def test_a_message_goes_to_a_free_worker_on_the_node_of_its_data() -> None:
    manual = ManualStream.of([stage("a", workers=1), stage("b", workers_per_node=1)], cluster="3x(4cpu, 16GB)")
    manual.begin()
    node_of = {worker.id: worker.node for worker in manual.stream.state.workers.values()}
    seen = Counter[bool]()
    message = of_kind(manual.items(6), RunBatches)[0]
    for node in ("node-2", "node-1", "node-0"):
        known = sorted(set(node_of.values()))
        commands = manual.done(message, out=1, node=known[int(node[-1])])
        sent = {command.hosted: command for command in of_kind(commands, RunBatches)}
        seen[node_of[sent["b"].worker] == known[int(node[-1])]] += 1
        message = sent["a"]
    assert seen == {True: 3}


def test_a_free_worker_on_another_node_is_preferred_to_a_busy_one_on_the_node_of_the_data() -> None:
    manual = ManualStream.of([stage("b", workers_per_node=1, slots=2)], cluster="2x(4cpu, 16GB)")
    manual.begin()
    node_of = {worker.id: worker.node for worker in manual.stream.state.workers.values()}
    here = min(node_of.values())
    commands = manual.step(ItemsArrived(0, [manual.segment(1, here), manual.segment(1, here)]))
    assert sorted(node_of[message.worker] for message in of_kind(commands, RunBatches)) == sorted(node_of.values())


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("batch", [1, 4])
def test_no_worker_idles_while_a_batch_waits_for_it(slots: int, batch: int) -> None:
    rig = simulate_stages(
        [stage("a", slots=slots), stage("b", batch_size=batch, slots=slots), stage("c")],
        {
            "a": Behaviour(0.05, spread=Lognormal(1.0), item=lambda key, _: Gives(key[0] % 4)),
            "b": Behaviour(0.2, spread=Lognormal(1.0)),
            "c": Behaviour(0.02, spread=Lognormal(1.0)),
        },
        400,
        after_step=assert_no_idle_worker,
    )
    assert rig.data.delivered["c"] == sum(number % 4 for number in range(400))


def test_a_worker_has_one_long_message_per_slot() -> None:
    most = 0

    def look(stream: StreamController) -> None:
        nonlocal most
        for worker in stream.state.workers.values():
            most = max(most, len(worker.messages))

    rig = simulate_stages([stage("a", slots=3, workers=2)], {"a": Behaviour(1.0)}, 120, options=STEADY, after_step=look)
    assert most == 3
    assert rig.seconds == pytest.approx(120 / 6, rel=0.1)


def test_a_message_is_sent_in_advance_when_transport_takes_time() -> None:
    """5 ms of work and 1 ms of transport, which prefetching hides."""
    inward = simulate_stages([stage("a", workers=1)], {"a": Behaviour(0.005)}, 1000, options=STEADY)
    assert inward.stream.state.units[0].pool.max_messages == 2
    long = simulate_stages([stage("a", workers=1)], {"a": Behaviour(0.5)}, 20, options=STEADY)
    assert long.stream.state.units[0].pool.max_messages == 1


def test_nothing_is_sent_in_advance_to_workers_with_a_timeout() -> None:
    """Otherwise the wait behind another message would count against the timeout."""
    rig = simulate_stages([stage("a", workers=1, timeout="1s")], {"a": Behaviour(0.005)}, 500, options=STEADY)
    assert rig.stream.state.units[0].pool.max_messages == 1
    assert rig.run_state is RunState.FINISHED


def slow_ones(key: Key, _attempt: int) -> ItemOutcome:
    return Slow(60.0) if key[0] in (991, 993) else Gives()


@pytest.mark.parametrize("seed", range(3))
def test_stealing_shortens_the_tail_and_every_stolen_message_runs_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the last items take 60 times as long: messages that wait behind them move to other workers."""
    arguments = ([stage("a", workers=6)], {"a": Behaviour(0.05, item=slow_ones, spread=Lognormal(0.3))}, 1000)
    world = {"seed": seed}
    with_it = simulate_stages(*arguments, options=STEADY, world=world)
    stolen = with_it.all(Cancel)
    assert stolen
    assert with_it.out("a") == numbers(1000)
    runs = Counter(key for message in with_it.messages("a") for key in part_keys(message.parts))
    returned = Counter(
        key
        for _, event in with_it.events(BatchesReturned)
        for message in with_it.messages("a")
        if message.message == event.message
        for key in part_keys(message.parts)
    )
    assert runs - returned == numbers(1000)
    monkeypatch.setattr("dovetail.streaming.dispatch._steal_prefetched", lambda *_: None)
    without = simulate_stages(*arguments, options=STEADY, world=world)
    assert without.out("a") == numbers(1000)
    assert with_it.seconds <= without.seconds + 1e-6


def loaded_stream(workers: int) -> tuple[ManualStream, list[RunBatches]]:
    """A stream whose workers each have a running and a prefetched message, at the end of input."""
    manual = ManualStream.of([stage("a", workers=workers)])
    manual.begin()
    unit = manual.stream.state.units[0]
    unit.pool.set_max_messages(2)
    unit.max_queued_items = 1000
    sent = of_kind(manual.items(2 * workers, ends=True), RunBatches)
    assert Counter(message.worker for message in sent) == dict.fromkeys(unit.workers, 2)
    return manual, sent


def done_event(message: RunBatches) -> BatchesDone:
    return BatchesDone(message.worker, message.message, [], 1.0)


def test_all_idle_workers_steal_in_the_same_step() -> None:
    manual, sent = loaded_stream(4)
    of = {number: [m for m in sent if m.worker == number] for number in {m.worker for m in sent}}
    first, second, third, fourth = of.values()
    commands = manual.step(*map(done_event, first), *map(done_event, second))
    taken = of_kind(commands, Cancel)
    while taken and (more := manual.step(*[BatchesReturned(c.worker, c.message) for c in taken])):
        commands += more
        taken = of_kind(more, Cancel)
    again = [message.worker for message in of_kind(commands, RunBatches)]
    assert sorted(again) == sorted([first[0].worker, second[0].worker])
    assert {c.message for c in of_kind(commands, Cancel)} == {third[1].message, fourth[1].message}


def test_a_message_that_cannot_be_cancelled_does_not_block_stealing_from_other_workers() -> None:
    manual, sent = loaded_stream(3)
    of = {number: [m for m in sent if m.worker == number] for number in {m.worker for m in sent}}
    first, second, third = of.values()
    commands = manual.step(*map(done_event, first))
    refused = of_kind(commands, Cancel)
    assert len(refused) == 1
    other = third if refused[0].worker == second[0].worker else second
    then = manual.step(done_event(other[0]))
    unit = manual.stream.state.units[0]
    assert len(unit.pool.by_load[0]) >= 1
    assert not of_kind(then, Cancel), "the only other one has begun its last message"


def test_nothing_is_stolen_before_the_end_of_input() -> None:
    manual = ManualStream.of([stage("a", workers=2)])
    manual.begin()
    unit = manual.stream.state.units[0]
    unit.pool.set_max_messages(2)
    unit.max_queued_items = 1000
    sent = of_kind(manual.items(4), RunBatches)
    mine = [message for message in sent if message.worker == sent[0].worker]
    assert not of_kind(manual.step(*map(done_event, mine)), Cancel)


def test_a_ready_worker_gets_queued_items_in_the_same_step() -> None:
    manual = ManualStream.of([stage("a", workers=2)])
    starts = of_kind(manual.step(), StartWorker)
    manual.items(4)
    assert [m.worker for m in of_kind(manual.step(WorkerReady(starts[1].worker, 1.0)), RunBatches)] == [
        starts[1].worker
    ]


def test_uneven_calls_keep_all_workers_busy_to_the_end() -> None:
    rig = simulate_stages(
        [stage("a", workers=4)],
        {"a": Behaviour(0.2, spread=Trace((0.2, 0.2, 0.2, 0.2, 4.2)))},
        400,
        options=STEADY,
        after_step=assert_no_idle_worker,
    )
    assert rig.seconds < 1.15 * 400 * 0.2 / 4 + 1
