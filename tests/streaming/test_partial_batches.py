"""Partial batches: when they are flushed, and when results are delivered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dovetail.control.commands import Deliver, RunBatches
from dovetail.control.events import Drain, ItemsArrived
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import Behaviour, PostEvent, ScriptedEvent
from dovetail.streaming.settings import StreamOptions
from streaming.harness import ManualStream, SimulatedRun, numbers, of_kind, simulate_stages, stage

if TYPE_CHECKING:
    from dovetail.engines.simulated.world import Key

SERVING = StreamOptions(serving=True, eager=True, target_epoch_s=5.0, max_wait_s=0.2, replan=False, follow_plan=True)


def latencies(rig: SimulatedRun, leaf: str) -> dict[Key, float]:
    """Seconds from the arrival of an item to the delivery of its result."""
    came = {
        key: now
        for now, event in rig.events(ItemsArrived)
        for key in part_keys((segment, 0, segment.items) for segment in event.segments)
    }
    found = {}
    for now, deliver in rig.timed(Deliver):
        for key in part_keys((segment, 0, segment.items) for segment in deliver.outputs.get(leaf, [])):
            found[key] = now - came[key]
    return found


def serve(options: StreamOptions, *, rate: float = 4.0, until: float = 60.0) -> SimulatedRun:
    return simulate_stages(
        [stage("a", workers=1), stage("b", batch_size=10, workers=1)],
        {"a": Behaviour(0.01), "b": Behaviour(0.01)},
        None,
        options=options,
        source={"rate": rate},
        script=(ScriptedEvent(until, PostEvent(Drain())),),
        limit_s=1000,
    )


def test_an_endless_source_is_served_within_max_wait_and_drained() -> None:
    """Four items a second and batches of ten: no item waits 2.5 s for a full batch."""
    rig = serve(SERVING)
    assert rig.run_state is RunState.FINISHED
    found = latencies(rig, "b")
    assert len(found) > 200
    assert max(found.values()) < 0.2 + 0.2, "the longest wait, and the work"
    assert sorted(found) == sorted(numbers(len(found))), "whatever was read came out"


def test_without_max_wait_an_old_epoch_is_closed() -> None:
    rig = serve(StreamOptions(serving=True, target_epoch_s=1.0, replan=False, follow_plan=True))
    found = latencies(rig, "b")
    assert 0.5 < max(found.values()) < 1.0 + 1.0
    assert len(found) > 200


def test_batches_are_full_when_enough_items_arrive() -> None:
    """Waiting is bounded, but 400 items per second fill a batch of ten in 25 ms."""
    rig = serve(SERVING, rate=400.0, until=20.0)
    sizes = [message.items % 10 for message in rig.messages("b")]
    assert sizes.count(0) > 0.9 * len(sizes)
    assert max(latencies(rig, "b").values()) < 0.5


def test_max_wait_counts_from_the_first_item_of_a_batch() -> None:
    manual = ManualStream.of(
        [stage("a", batch_size=10, workers=1)], options=StreamOptions(replan=False, max_wait_s=1.0)
    )
    manual.begin()
    assert not of_kind(manual.items(3), RunBatches)
    assert manual.stream.wake_at() == 1.0
    assert not of_kind(manual.step(ItemsArrived(3, [manual.segment(2)]), after=0.9), RunBatches)
    assert [m.items for m in of_kind(manual.step(after=0.1), RunBatches)] == [5]


def test_items_after_a_flushed_batch_wait_for_their_own_max_wait() -> None:
    manual = ManualStream.of(
        [stage("a", batch_size=10, workers=1, slots=4)], options=StreamOptions(replan=False, max_wait_s=1.0)
    )
    manual.begin()
    manual.items(3)
    sent = of_kind(manual.step(after=1.0), RunBatches)
    assert [message.items for message in sent] == [3]
    assert not of_kind(manual.step(ItemsArrived(3, [manual.segment(2)]), after=0.5), RunBatches)
    assert manual.stream.wake_at() == 2.5
    assert not of_kind(manual.step(after=0.9), RunBatches)
    assert [message.items for message in of_kind(manual.step(after=0.1), RunBatches)] == [2]


def test_a_barrier_is_never_flushed() -> None:
    rig = simulate_stages(
        [stage("a"), stage("all", barrier=True)],
        {"a": Behaviour(0.5), "all": Behaviour(0.01)},
        40,
        options=StreamOptions(max_wait_s=0.1),
    )
    assert [message.items for message in rig.messages("all")] == [40]


def test_eager_results_are_delivered_before_their_epoch_ends_and_exactly_once() -> None:
    rig = simulate_stages(
        [stage("a", workers=1)],
        {"a": Behaviour(0.1)},
        50,
        options=StreamOptions(eager=True, target_epoch_batches=50, replan=False, follow_plan=True),
    )
    found = latencies(rig, "a")
    assert rig.out("a") == numbers(50)
    assert min(found.values()) < 0.2
    whole = [deliver for deliver in rig.all(Deliver) if deliver.last > deliver.first]
    assert all(not deliver.outputs for deliver in whole), "what left early does not leave again"
    assert sum(deliver.last - deliver.first for deliver in whole) == 50


def test_other_results_are_delivered_with_their_epoch() -> None:
    rig = simulate_stages([stage("a")], {"a": Behaviour(0.1)}, 50, options=StreamOptions(target_epoch_batches=50))
    for deliver in rig.all(Deliver):
        assert sum(segment.items for segment in deliver.outputs["a"]) == deliver.last - deliver.first


@pytest.mark.parametrize("items", [1, 9, 10, 11])
def test_the_end_of_the_source_flushes_every_stage(items: int) -> None:
    rig = simulate_stages([stage("a", batch_size=10), stage("b", batch_size=4), stage("c", batch_size=7)], {}, items)
    assert rig.out("c") == numbers(items)


def test_a_drain_finishes_the_work_in_flight_with_a_note() -> None:
    rig = simulate_stages(
        [stage("a", workers=1), stage("b", batch_size=10, workers=1)],
        {"a": Behaviour(0.1), "b": Behaviour(0.1)},
        1000,
        script=(ScriptedEvent(20.0, PostEvent(Drain("Ctrl-C"))),),
    )
    assert rig.run_state is RunState.DRAINED
    assert rig.notes("draining (Ctrl-C)")
    out = rig.out("b")
    assert 50 < len(out) < 1000
    assert out == numbers(len(out)), "all that was read, and nothing else"
    rest = simulate_stages([stage("a"), stage("b", batch_size=10)], {}, 1000, resume=rig.data.log)
    assert out + rest.out("b") == numbers(1000)
