"""Backpressure: bounded queues and bytes, without deadlocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.world import Behaviour, Gives, LoseNode, ScriptedEvent, Slow
from dovetail.streaming.settings import StreamOptions
from streaming.harness import UNTRACKED, assert_no_idle_worker, numbers, simulate_stages, stage
from waiting import LONG

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.engines.simulated.world import Key
    from dovetail.streaming.controller import StreamController
    from dovetail.streaming.state import UnitState

STEADY = StreamOptions(replan=False, follow_plan=True)


class Most:
    """Maximum of the items queued in front of a unit, relative to the limit."""

    def __init__(self, unit: str, of: Callable[[UnitState], float]) -> None:
        self.unit, self.of, self.most = unit, of, 0.0

    def __call__(self, stream: StreamController) -> None:
        self.most = max(self.most, self.of(stream.state.units_by_name[self.unit]))


@pytest.mark.parametrize("batch", [1, 5])
def test_a_slow_last_stage_keeps_queues_bounded_by_items(batch: int) -> None:
    """The bound is the queue limit and one more message per slot of the parents."""

    caps = [0]

    def over(unit: UnitState) -> float:
        caps[0] = max(caps[0], unit.max_queued_items)  # it falls when the parents are finished
        return (
            unit.queue.items - caps[0] - 4 * 2 * 20
        )  # four workers, one running and one prefetched message, 20 items each

    most = Most("slow", over)
    rig = simulate_stages(
        [stage("fast", workers=4), stage("slow", workers=1, batch_size=batch)],
        {"fast": Behaviour(0.001), "slow": Behaviour(0.2)},
        1500,
        options=STEADY,
        after_step=most,
    )
    assert rig.out("slow") == numbers(1500)
    assert most.most <= 0
    assert caps[0] < 500


def test_the_source_is_not_read_far_ahead_of_a_slow_stage() -> None:
    read = Most("slow", lambda unit: unit.queue.items)
    ahead = 0

    def look(stream: StreamController) -> None:
        nonlocal ahead
        ahead = max(ahead, stream.state.items_read - stream.state.units_by_name["slow"].items_taken)
        read(stream)

    simulate_stages([stage("slow", workers=1)], {"slow": Behaviour(0.2)}, 1000, options=STEADY, after_step=look)
    assert ahead <= 20, "a slow worker needs a few items in front of it, not a thousand"
    assert read.most >= 1


def test_queues_are_bounded_by_bytes() -> None:
    """100 bytes per item and 2,000 bytes for two queues: ten items wait, and the output of one message per worker."""
    most = Most("slow", lambda unit: unit.queue.bytes)
    rig = simulate_stages(
        [stage("fast", workers=4), stage("slow", workers=1)],
        {"fast": Behaviour(0.2, bytes_out=100), "slow": Behaviour(0.5)},
        300,
        options=StreamOptions(replan=False, follow_plan=True, byte_budget=2000, queued_messages_per_slot=1000.0),
        after_step=most,
    )
    assert rig.out("slow") == numbers(300)
    assert 1000 <= most.most <= 1000 + 4 * 100


def test_a_batch_larger_than_the_byte_budget_is_processed() -> None:
    rig = simulate_stages(
        [stage("a", workers=3), stage("b", batch_size=50)],
        {"a": Behaviour(0.01, bytes_out=1 << 30), "b": Behaviour(0.01)},
        430,
        options=StreamOptions(byte_budget=1 << 30, target_epoch_batches=2),
    )
    assert rig.out("b") == numbers(430)


@given(
    budget=st.sampled_from([1, 150, 10_000]),
    factor=st.sampled_from([0.1, 1.0]),
    batches=st.tuples(*[st.sampled_from([1, 3, 40])] * 4),
    epoch_batches=st.sampled_from([1, 3]),
)
def test_tiny_budgets_never_deadlock_a_diamond(
    budget: int, factor: float, batches: tuple[int, ...], epoch_batches: int
) -> None:
    a, b, c, d = batches
    rig = simulate_stages(
        [
            stage("a", batch_size=a),
            stage("b", batch_size=b, after=["a"]),
            stage("c", batch_size=c, after=["a"]),
            stage("d", batch_size=d, after=["b", "c"]),
        ],
        {
            "a": Behaviour(0.01, bytes_out=100),
            "b": Behaviour(0.01, bytes_out=100),
            "c": Behaviour(0.05, bytes_out=100, item=lambda key, _: Gives(key[0] % 3)),
            "d": Behaviour(0.01),
        },
        90,
        options=StreamOptions(
            byte_budget=budget, queued_messages_per_slot=factor, target_epoch_batches=epoch_batches, target_epoch_s=0.01
        ),
        after_step=assert_no_idle_worker,
        limit_s=2000,
    )
    assert rig.run_state is RunState.FINISHED
    assert rig.data.delivered["d"] == 90 + sum(number % 3 for number in range(90))


def test_a_parent_that_waits_for_space_is_woken_when_the_other_parent_returned_nothing() -> None:
    """A budget of one byte: a parent sends when no output is expected, and here the expected output was empty."""
    rig = simulate_stages(
        [stage("s"), stage("b", after=["s"]), stage("c", after=["s"]), stage("d", after=["b", "c"], batch_size=50)],
        {
            "s": Behaviour(0.1, bytes_out=100),
            "b": Behaviour(0.01, bytes_out=100),
            "c": Behaviour(3.0, bytes_out=100, item=lambda *_: Gives(0)),
            "d": Behaviour(0.1),
        },
        300,
        options=StreamOptions(byte_budget=1, target_epoch_batches=3),
        after_step=assert_no_idle_worker,
    )
    assert rig.out("d") == numbers(300)


def test_an_item_that_becomes_a_thousand_does_not_flood_the_next_stage() -> None:
    most = Most("b", lambda unit: unit.queue.items - unit.max_queued_items)
    rig = simulate_stages(
        [stage("a", workers=2), stage("b", workers=2, batch_size=8)],
        {"a": Behaviour(0.01, item=lambda *_: Gives(1000)), "b": Behaviour(0.001)},
        40,
        options=STEADY,
        after_step=most,
    )
    assert rig.data.delivered["b"] == 40_000
    # two workers, one running and one prefetched message of two items each, and the messages before the first output
    assert most.most <= 4 * 2 * 2 * 1000


@pytest.mark.parametrize("batch", [1, 7])
def test_a_stage_that_drops_everything_lets_the_run_end(batch: int) -> None:
    rig = simulate_stages(
        [stage("a"), stage("b", batch_size=batch), stage("c", batch_size=3)],
        {"b": Behaviour(0.01, item=lambda *_: Gives(0))},
        200,
        options=StreamOptions(byte_budget=1),
    )
    assert rig.run_state is RunState.FINISHED
    assert rig.data.delivered == {}
    assert not rig.messages("c")
    assert sum(deliver.last - deliver.first for deliver in rig.data.log) == 200


def test_an_entry_that_waits_for_seats_does_not_stop_the_source_for_the_others() -> None:
    """Two stages read the source; after the loss only one fits at a time."""
    cluster = dt.Cluster.of("1x(8cpu, 64GB) + 1x(2cpu, 64GB)")
    big = max(cluster.nodes, key=lambda node: node.cpu_milli).name
    rig = simulate_stages(
        [stage("x", cpus=2), stage("y", cpus=2, after=[])],
        {"x": Behaviour(0.5), "y": Behaviour(0.5)},
        200,
        cluster=cluster,
        script=(ScriptedEvent(7.0, LoseNode(big)),),
        limit_s=3000,
    )
    assert rig.run_state is RunState.FINISHED
    assert rig.notes("waits until the units before it are finished")
    assert rig.out("x") == rig.out("y") == numbers(200)


def test_the_bytes_of_an_epoch_are_bounded() -> None:
    most = [0]

    def look(stream: StreamController) -> None:
        most[0] = max(most[0], stream.state.held_bytes)

    budget = 1 << 30
    rig = simulate_stages(
        [stage("filter", rate=50.0, returns=0.01), stage("b", batch_size=64, rate=10.0)],
        {"filter": Behaviour(0.02, returns=0.01), "b": Behaviour(0.1)},
        20_000,
        options=StreamOptions(byte_budget=budget),
        source={"item_bytes": 5_000_000},
        after_step=look,
        world=UNTRACKED,
    )
    assert rig.run_state is RunState.FINISHED
    assert most[0] < 12 * budget


def test_output_of_a_fan_out_of_a_thousand_is_bounded_in_bytes() -> None:
    most = [0]

    def look(stream: StreamController) -> None:
        most[0] = max(most[0], stream.state.units_by_name["b"].queue.bytes)

    budget = 1 << 30
    simulate_stages(
        [stage("a", rate=1.0, returns=1000.0), stage("b", rate=500.0)],
        {"a": Behaviour(1.0, returns=1000.0, bytes_out=1_000_000), "b": Behaviour(0.002)},
        200,
        cluster="4x(16cpu, 64GB)",
        options=StreamOptions(byte_budget=budget),
        after_step=look,
        world=UNTRACKED,
    )
    assert most[0] < 40 * budget  # the first round is sent before its output size is known


def test_ordered_output_that_waits_for_a_slow_epoch_is_bounded_in_bytes() -> None:
    def item(key: Key, attempt: int) -> Any:
        return Slow(3000.0) if key == (5,) else Gives(1)

    most = [0]

    def look(stream: StreamController) -> None:
        most[0] = max(most[0], stream.state.held_bytes)

    budget = 1 << 28
    rig = simulate_stages(
        [stage("a", rate=5.0)],
        {"a": Behaviour(0.2, bytes_out=1_000_000, item=item)},
        4000,
        options=StreamOptions(ordered=True, byte_budget=budget),
        after_step=look,
    )
    assert rig.out("a") == numbers(4000)
    assert most[0] < 3 * budget


@pytest.mark.parametrize("options", [StreamOptions(byte_budget=1000), StreamOptions(ordered=True, max_open_epochs=2)])
def test_a_unit_without_seats_and_a_full_byte_budget_do_not_deadlock(options: StreamOptions) -> None:
    rig = simulate_stages(
        [stage("a", rate=2.0, cpus=4), stage("b", rate=2.0, cpus=4)],
        {"a": Behaviour(0.5, bytes_out=100), "b": Behaviour(0.5)},
        200,
        cluster="2x(4cpu, 16GB)",
        options=options,
        script=(ScriptedEvent(10.0, LoseNode("node-0")),),
        source={"item_bytes": 100},
    )
    assert rig.run_state is RunState.FINISHED
    assert rig.out("b") == numbers(200)


def test_a_fan_out_does_not_starve_the_next_unit() -> None:
    items = 3000 if LONG else 1000
    rig = simulate_stages(
        [stage("a", rate=4.0), stage("b", rate=2.0, returns=50.0), stage("c", rate=100.0)],
        {"a": Behaviour(0.25), "b": Behaviour(0.5, returns=50.0), "c": Behaviour(0.01)},
        items,
        cluster="1x(16cpu, 64GB)",
        world=UNTRACKED,
    )
    assert rig.stream.plan.rate is not None
    assert items / rig.seconds > 0.8 * rig.stream.plan.rate
