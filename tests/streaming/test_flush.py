"""When does a batch go that is not full, and how soon do results leave?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dovetail.control.commands import Deliver, RunBatches
from dovetail.control.events import Drain, ItemsArrived
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import Behaviour, PostEvent, ScriptedEvent
from dovetail.streaming.settings import StreamOptions
from streaming.rigs import Hand, Rig, go, numbers, of_kind, stage

if TYPE_CHECKING:
    from dovetail.engines.simulated.world import Key

SERVING = StreamOptions(serving=True, eager=True, target_epoch_s=5.0, max_wait_s=0.2, replan=False, follow_plan=True)


def latencies(rig: Rig, leaf: str) -> dict[Key, float]:
    """Seconds from an item's arrival to when its result left."""
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


def serve(options: StreamOptions, *, rate: float = 4.0, until: float = 60.0) -> Rig:
    return go(
        [stage("a", workers=1), stage("b", batch_size=10, workers=1)],
        {"a": Behaviour(0.01), "b": Behaviour(0.01)},
        None,
        options=options,
        source={"rate": rate},
        script=(ScriptedEvent(until, PostEvent(Drain())),),
        limit_s=1000,
    )


def test_an_endless_source_is_served_within_the_longest_wait_and_drained() -> None:
    """Four items a second and batches of ten: nobody waits 2.5 s for a full one."""
    rig = serve(SERVING)
    assert rig.run_state is RunState.FINISHED
    found = latencies(rig, "b")
    assert len(found) > 200
    assert max(found.values()) < 0.2 + 0.2, "the longest wait, and the work"
    assert sorted(found) == sorted(numbers(len(found))), "whatever was read came out"


def test_without_a_longest_wait_an_epoch_that_grows_old_is_closed() -> None:
    rig = serve(StreamOptions(serving=True, target_epoch_s=1.0, replan=False, follow_plan=True))
    found = latencies(rig, "b")
    assert 0.5 < max(found.values()) < 1.0 + 1.0
    assert len(found) > 200


def test_batches_are_still_filled_when_enough_comes() -> None:
    """Waiting is bounded, but 400 items per second fill a batch of ten in 25 ms."""
    rig = serve(SERVING, rate=400.0, until=20.0)
    sizes = [message.items % 10 for message in rig.messages("b")]
    assert sizes.count(0) > 0.9 * len(sizes)
    assert max(latencies(rig, "b").values()) < 0.5


def test_the_wait_is_counted_from_when_an_item_came_and_not_from_the_last() -> None:
    hand = Hand.of([stage("a", batch_size=10, workers=1)], options=StreamOptions(replan=False, max_wait_s=1.0))
    hand.begin()
    assert not of_kind(hand.items(3), RunBatches)
    assert hand.stream.wake_at() == 1.0
    assert not of_kind(hand.step(ItemsArrived(3, [hand.segment(2)]), after=0.9), RunBatches)
    assert [m.items for m in of_kind(hand.step(after=0.1), RunBatches)] == [5]


def test_what_came_after_a_late_batch_waits_its_own_time() -> None:
    hand = Hand.of([stage("a", batch_size=10, workers=1, slots=4)], options=StreamOptions(replan=False, max_wait_s=1.0))
    hand.begin()
    hand.items(3)
    sent = of_kind(hand.step(after=1.0), RunBatches)
    assert [message.items for message in sent] == [3]
    assert not of_kind(hand.step(ItemsArrived(3, [hand.segment(2)]), after=0.5), RunBatches)
    assert hand.stream.wake_at() == 2.5
    assert not of_kind(hand.step(after=0.9), RunBatches)
    assert [message.items for message in of_kind(hand.step(after=0.1), RunBatches)] == [2]


def test_a_barrier_is_never_hurried() -> None:
    rig = go(
        [stage("a"), stage("all", barrier=True)],
        {"a": Behaviour(0.5), "all": Behaviour(0.01)},
        40,
        options=StreamOptions(max_wait_s=0.1),
    )
    assert [message.items for message in rig.messages("all")] == [40]


def test_eager_results_leave_before_their_epoch_ends_and_exactly_once() -> None:
    rig = go(
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


def test_results_that_are_not_eager_leave_with_their_epoch() -> None:
    rig = go([stage("a")], {"a": Behaviour(0.1)}, 50, options=StreamOptions(target_epoch_batches=50))
    for deliver in rig.all(Deliver):
        assert sum(segment.items for segment in deliver.outputs["a"]) == deliver.last - deliver.first


@pytest.mark.parametrize("items", [1, 9, 10, 11])
def test_the_end_of_the_source_flushes_every_stage(items: int) -> None:
    rig = go([stage("a", batch_size=10), stage("b", batch_size=4), stage("c", batch_size=7)], {}, items)
    assert rig.out("c") == numbers(items)


def test_a_drain_finishes_what_is_in_hand_and_says_so() -> None:
    rig = go(
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
    rest = go([stage("a"), stage("b", batch_size=10)], {}, 1000, resume=rig.data.log)
    assert out + rest.out("b") == numbers(1000)
