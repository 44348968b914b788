"""Batches and messages: their sizes, and the epochs of their items."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.control.commands import Deliver, RunBatches
from dovetail.control.events import BatchesDone
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import Behaviour, Gives
from dovetail.streaming.settings import StreamOptions
from dovetail.streaming.state import MIN_SAME_COUNT_CALLS
from streaming.harness import UNTRACKED, ManualStream, SimulatedRun, numbers, of_kind, simulate_stages, stage

if TYPE_CHECKING:
    from dovetail.engines.simulated.world import Key

STEADY = StreamOptions(replan=False, follow_plan=True)


def sizes_of_calls(messages: list[RunBatches]) -> list[int]:
    return [
        min(message.batch_size, message.items - start)
        for message in messages
        for start in range(0, message.items, message.batch_size)
    ]


@pytest.mark.parametrize("pieces", [(3, 3, 3, 1), (1,) * 10, (10,), (7, 3)])
def test_a_batch_may_span_segments(pieces: tuple[int, ...]) -> None:
    manual = ManualStream.of([stage("a", batch_size=5, workers=1)])
    manual.begin()
    first = of_kind(manual.items(*pieces), RunBatches)
    assert [message.items for message in first] == [5]
    second = of_kind(manual.done(first[0]), RunBatches)
    assert [message.items for message in second] == [5]
    taken = [
        (part[0].id, number) for m in (first[0], second[0]) for part in m.parts for number in range(part[1], part[2])
    ]
    assert len(set(taken)) == len(taken) == 10


def test_a_partial_batch_waits_until_its_epoch_is_closed() -> None:
    manual = ManualStream.of([stage("a", batch_size=5, workers=1)])
    manual.begin()
    assert not of_kind(manual.items(4), RunBatches)
    assert [message.items for message in of_kind(manual.items(0, ends=True), RunBatches)] == [4]


@given(
    batch=st.integers(1, 12),
    items=st.integers(1, 150),
    fan=st.sampled_from([(1,), (0, 1), (0, 1, 2, 3)]),
    epoch_batches=st.integers(1, 4),
)
def test_only_the_last_batch_of_the_input_is_partial(
    batch: int, items: int, fan: tuple[int, ...], epoch_batches: int
) -> None:
    def out(key: Key, _attempt: int) -> Gives:
        return Gives(fan[key[0] % len(fan)])

    rig = simulate_stages(
        [stage("a"), stage("b", batch_size=batch)],
        {"a": Behaviour(0.01, item=out), "b": Behaviour(0.01)},
        items,
        options=StreamOptions(target_epoch_batches=epoch_batches, target_epoch_s=0.01),
        source={"segment_items": 7},
    )
    assert sum(size < batch for size in sizes_of_calls(rig.messages("b"))) <= 1
    assert_delivered_one_by_one(rig)
    assert sum(message.items for message in rig.messages("b")) == sum(fan[n % len(fan)] for n in range(items))


@given(
    batch=st.integers(2, 12),
    items=st.integers(10, 150),
    fan=st.sampled_from([(2, 0), (0, 1, 2), (1, 1, 1, 2, 0), (1,)]),
    epoch_batches=st.integers(1, 4),
    workers=st.integers(1, 3),
)
def test_results_are_delivered_with_the_epoch_of_their_item(
    batch: int, items: int, fan: tuple[int, ...], epoch_batches: int, workers: int
) -> None:
    """A single call that returns as many items as it gets changes nothing, unless all of the first calls do so."""
    rig = simulate_stages(
        [stage("a"), stage("b", batch_size=batch, workers=workers)],
        {
            "a": Behaviour(0.01, item=lambda key, _: Gives(int(key[0] % 7 > 0))),
            "b": Behaviour(0.01, item=lambda key, _: Gives(fan[key[0] % len(fan)])),
        },
        items,
        options=StreamOptions(target_epoch_batches=epoch_batches, target_epoch_s=0.01),
        source={"segment_items": 7},
    )
    if fan != (1,) and seems_to_keep_counts(rig):
        return  # docs/running.md: such a function must return one result per item, in order
    for deliver in rig.all(Deliver):
        segments = deliver.outputs.get("b", [])
        found = {key[0] for key in part_keys((segment, 0, segment.items) for segment in segments)}
        ranges = [(deliver.first, deliver.last), *deliver.also]
        assert found <= {number for first, last in ranges for number in range(first, last)}


def seems_to_keep_counts(rig: SimulatedRun) -> bool:
    """Whether each of the first calls of b returned as many items as it got."""
    sent = {message.message: message for message in rig.messages("b")}
    calls = 0
    for _, event in rig.events(BatchesDone):
        message = sent.get(event.message)
        if message is not None and calls < MIN_SAME_COUNT_CALLS:
            if sum(segment.items for segment in event.segments) != message.items:
                return False
            calls += -(-message.items // message.batch_size)
    return calls >= MIN_SAME_COUNT_CALLS


def assert_delivered_one_by_one(rig: SimulatedRun) -> None:
    """Except for the first calls of b: they could be of a function that returns two results for one item, and none for
    another."""
    calls = 0
    known_at = float("inf")
    for now, event in rig.events(BatchesDone):
        message = next((one for one in rig.messages("b") if one.message == event.message), None)
        calls += -(-message.items // message.batch_size) if message is not None else 0
        if calls >= MIN_SAME_COUNT_CALLS:
            known_at = now
            break
    sent = [(now, message) for now, message in reversed(rig.timed(RunBatches)) if message.hosted == "b"]
    first_sent = {key[0]: now for now, message in sent for key in part_keys(message.parts)}
    for deliver in rig.all(Deliver):
        for first, last in [(deliver.first, deliver.last), *deliver.also] if deliver.also else ():
            times = [first_sent[number] for number in range(first, last) if number in first_sent]
            assert min(times, default=0.0) <= known_at, "an epoch of a function that is known is delivered alone"


DURABLE = StreamOptions(max_epoch_s=1.0)


def most_work_lost(rig: SimulatedRun, unit: str, wave: int, dropped: int = 0) -> float:
    """Largest number of items of a unit that were finished at some moment, and whose epoch was not delivered. Units
    before it have dropped this number of items."""
    done = {event.message: now for now, event in rig.events(BatchesDone)}
    delivered = [0.0] * ITEMS
    for now, deliver in rig.timed(Deliver):
        for first, last in deliver.ranges if deliver.wave == wave else ():
            delivered[first:last] = [now] * (last - first)
    changes = []
    for message in rig.messages(unit):
        for key in part_keys(message.parts):
            changes += [(done[message.message], 1), (delivered[key[0]], -1)]
    assert len(changes) == 2 * (ITEMS - dropped)
    return max(accumulate(change for _, change in sorted(changes)))


ITEMS = 400


@pytest.mark.parametrize(
    ("mode", "first_s", "batch"),
    [("streaming", 0.00001, 1), ("streaming", 0.00001, 4), ("streaming", 0.1, 1), ("waves", 0.00001, 1)],
)
def test_a_kill_costs_two_seconds_of_work_although_no_speed_is_known(mode: str, first_s: float, batch: int) -> None:
    rig = simulate_stages(
        [stage("first", workers=1), stage("slow", batch_size=batch, workers=2)],
        {"first": Behaviour(first_s), "slow": Behaviour(0.5)},
        ITEMS,
        mode=mode,
        options=DURABLE,
    )
    workers, per_second = 2, 2
    assert most_work_lost(rig, "slow", wave=int(mode == "waves")) <= max(2.0 * workers * per_second, workers * batch)


@pytest.mark.parametrize("dropped", [1, 3, 10])
def test_a_kill_costs_two_seconds_of_work_although_the_first_items_are_dropped(dropped: int) -> None:
    """Nothing reaches the slow unit while most of the source is read."""
    first = Behaviour(0.00001, item=lambda key, _: Gives(int(key[0] >= dropped)))
    rig = simulate_stages(
        [stage("first", workers=1), stage("slow", workers=2)],
        {"first": first, "slow": Behaviour(0.5)},
        ITEMS,
        options=DURABLE,
    )
    assert most_work_lost(rig, "slow", 0, dropped) <= 8


def test_a_kill_costs_less_if_no_item_waits_for_those_of_the_next_epoch() -> None:
    """One of 20 items reaches a unit with batches of 8: a full batch takes 160 items, which is 8 s of work."""
    first = Behaviour(0.05, item=lambda key, _: Gives(int(key[0] % 20 == 0)))
    lost = {}
    for end in ("end", "epoch"):
        stages = [stage("first", workers=1), stage("rare", workers=1, batch_size=8, partial_batches=end)]
        rig = simulate_stages(stages, {"first": first, "rare": Behaviour(0.01)}, ITEMS, options=DURABLE)
        lost[end] = most_work_lost(rig, "first", 0)
    assert lost["end"] >= 7 * 20
    assert lost["epoch"] <= 4 * 20


def test_items_that_never_reach_a_unit_do_not_keep_epochs_small() -> None:
    dropped = Behaviour(0.00001, item=lambda key, _: Gives(int(key[0] == 50_000)))
    rig = simulate_stages(
        [stage("filter"), stage("rare")], {"filter": dropped, "rare": Behaviour(0.1)}, 50_001, options=DURABLE
    )
    assert len(rig.all(Deliver)) < 500
    assert rig.out("rare") == Counter([(50_000,)])


@pytest.mark.parametrize("returns", [0.0, 0.001])
def test_a_unit_that_gets_few_items_or_none_does_not_delay_commits(returns: float) -> None:
    rig = simulate_stages(
        [stage("slow", workers=4), stage("rare", batch_size=8)],
        {"slow": Behaviour(1.0, returns=returns), "rare": Behaviour(0.01)},
        4000,
        options=DURABLE,
        world=UNTRACKED,
    )
    times = [now for now, _ in rig.timed(Deliver)]
    assert max(after - before for before, after in pairwise(times)) <= 6.0


def test_many_short_batches_share_a_message_and_the_function_sees_its_batch_size() -> None:
    rig = simulate_stages([stage("a", batch_size=3, workers=1)], {"a": Behaviour(0.0001)}, 6000, options=STEADY)
    messages = rig.messages("a")
    assert all(message.batch_size == 3 for message in messages)
    assert max(message.items for message in messages) >= 12, "0.3 ms per call: several belong into 4 ms"
    assert len(messages) < 6000 / 3 / 3
    assert rig.out("a") == numbers(6000)


def test_a_long_batch_is_a_message_of_its_own() -> None:
    rig = simulate_stages([stage("a", batch_size=3, workers=2)], {"a": Behaviour(0.1)}, 300, options=STEADY)
    assert {message.items for message in rig.messages("a")} == {3}


def test_a_message_has_at_most_1024_items() -> None:
    rig = simulate_stages(
        [stage("a", batch_size=5, workers=1)], {"a": Behaviour(1e-7)}, 40_000, world={"tracked": False}
    )
    largest = max(message.items for message in rig.messages("a"))
    assert largest == 1020, "the most whole batches of 5"
    assert rig.data.delivered["a"] == 40_000


def test_a_batch_of_more_than_1024_items_is_not_split() -> None:
    rig = simulate_stages(
        [stage("a", batch_size=3000, workers=1)], {"a": Behaviour(1e-7)}, 9000, world={"tracked": False}
    )
    assert {message.items for message in rig.messages("a")} == {3000}


def test_queued_items_are_shared_among_the_free_workers() -> None:
    """One message could hold all queued items; four idle workers get a part each."""
    manual = ManualStream.of([stage("a", batch_size=2, workers=4, rate=1e6)])
    manual.begin()
    manual.stream.state.units[0].message_items = 1000
    sent = of_kind(manual.items(20), RunBatches)
    assert [message.items for message in sent] == [6, 6, 4, 4]


def test_output_is_cut_to_the_message_size_of_the_next_stage() -> None:
    rig = simulate_stages(
        [stage("a", workers=1), stage("b", batch_size=7, workers=1)],
        {"a": Behaviour(0.05, item=lambda *_: Gives(20)), "b": Behaviour(0.1)},
        60,
        options=STEADY,
    )
    assert {message.segment_items for message in rig.messages("a")} == {7}
    sizes = {segment.items for message in rig.messages("b") for segment, _, _ in message.parts}
    assert max(sizes) <= 7
    assert all(message.segment_items == 1 << 16 for message in rig.messages("b")), "only what is too large to load"


def test_output_is_cut_to_the_smallest_message_size_of_several_next_stages() -> None:
    rig = simulate_stages(
        [stage("a"), stage("b", batch_size=7, after=["a"]), stage("c", batch_size=3, after=["a"])],
        {name: Behaviour(0.1) for name in "abc"},
        60,
        options=STEADY,
    )
    assert {message.segment_items for message in rig.messages("a")} == {3}


def test_an_empty_source_is_a_run_that_finishes_without_a_message() -> None:
    rig = simulate_stages([stage("a"), stage("b", batch_size=4)], {}, 0)
    assert rig.run_state is RunState.FINISHED
    assert not rig.all(RunBatches)
    assert not rig.all(Deliver)
