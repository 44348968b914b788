"""Ordered output: the order of deliveries, and bounds on what waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dovetail.control.commands import Deliver
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.world import (
    Behaviour,
    Gives,
    Kills,
    KillWorker,
    Lognormal,
    LoseNode,
    ScriptedEvent,
    Slow,
)
from dovetail.streaming.settings import StreamOptions
from streaming.harness import SimulatedRun, numbers, simulate_stages, stage

if TYPE_CHECKING:
    from dovetail.engines.simulated.world import ItemOutcome, Key
    from dovetail.streaming.controller import StreamController

SHORT_EPOCHS = StreamOptions(ordered=True, target_epoch_batches=1, target_epoch_s=0.001)
SOURCE = {"segment_items": 3}


def in_order(rig: SimulatedRun) -> None:
    firsts = [deliver.first for deliver in rig.all(Deliver)]
    assert firsts == sorted(firsts)
    reached = 0
    for deliver in rig.all(Deliver):
        assert deliver.first == reached, "and without a gap"
        reached = deliver.last


@given(sigma=st.sampled_from([0.0, 1.0, 2.0]), seed=st.integers(0, 999), batch=st.sampled_from([1, 4]))
def test_epochs_are_delivered_in_order_whatever_the_spread(sigma: float, seed: int, batch: int) -> None:
    rig = simulate_stages(
        [stage("a"), stage("b", batch_size=batch)],
        {"a": Behaviour(0.1, spread=Lognormal(sigma)), "b": Behaviour(0.05, spread=Lognormal(sigma))},
        300,
        options=SHORT_EPOCHS,
        source=SOURCE,
        world={"seed": seed},
    )
    assert rig.out("b") == numbers(300)
    assume(len(rig.all(Deliver)) >= 5)  # a wrong first estimate of the rate leads to few, long epochs
    in_order(rig)


def test_without_the_option_epochs_are_delivered_as_they_finish() -> None:
    rig = simulate_stages(
        [stage("a")],
        {"a": Behaviour(0.1, spread=Lognormal(2.0))},
        120,
        options=StreamOptions(target_epoch_batches=1, target_epoch_s=0.001),
        source=SOURCE,
    )
    firsts = [deliver.first for deliver in rig.all(Deliver)]
    assert firsts != sorted(firsts)


def first_takes_long(key: Key, attempt: int) -> ItemOutcome:
    return Slow(2000.0) if key == (0,) else Gives()


class MostOpen:
    def __init__(self) -> None:
        self.epochs = self.items = 0

    def __call__(self, stream: StreamController) -> None:
        state = stream.state
        held = stream.epoch_tracker.undelivered.values()
        self.epochs = max(self.epochs, len(state.epochs) + len(held))
        self.items = max(self.items, sum(epoch.last - epoch.first for epoch in held))


@pytest.mark.parametrize("limit", [1, 6])
def test_a_slow_epoch_does_not_make_the_run_hold_all_others(limit: int) -> None:
    most = MostOpen()
    rig = simulate_stages(
        [stage("a", workers=4)],
        {"a": Behaviour(0.05, item=first_takes_long)},
        2000,
        options=StreamOptions(
            ordered=True,
            max_open_epochs=limit,
            target_epoch_batches=1,
            target_epoch_s=0.001,
            replan=False,
            follow_plan=True,
        ),
        source=SOURCE,
        after_step=most,
    )
    assert rig.run_state is RunState.FINISHED
    in_order(rig)
    assert most.epochs <= limit + 8, "what one pull brings may be opened at once"
    assert most.items < 100


def test_open_epochs_are_bounded_in_later_waves() -> None:
    most = MostOpen()
    rig = simulate_stages(
        [stage("before"), stage("a", workers=4)],
        {"before": Behaviour(0.001), "a": Behaviour(0.05, item=first_takes_long)},
        1000,
        mode="sequential",
        options=StreamOptions(ordered=True, max_open_epochs=6, target_epoch_batches=1, target_epoch_s=0.001),
        source=SOURCE,
        after_step=most,
    )
    assert rig.stream.waves == 2
    assert rig.out("a") == numbers(1000)
    assert most.epochs <= 6 + 8


@given(seed=st.integers(0, 9999))
def test_deaths_and_lost_nodes_do_not_change_the_order(seed: int) -> None:
    def item(key: Key, attempt: int) -> ItemOutcome:
        return Kills() if (key[0] * 7 + seed) % 31 == 0 and attempt == 1 else Gives()

    rig = simulate_stages(
        # random deaths may hit the same item three times, which is not tested here
        [stage("a", retries=20), stage("b", batch_size=3, retries=20)],
        {
            "a": Behaviour(0.2, spread=Lognormal(0.5), item=item, deaths_per_hour=60),
            "b": Behaviour(0.2, deaths_per_hour=60, bytes_out=10),
        },
        150,
        cluster="3x(4cpu, 16GB)",
        options=SHORT_EPOCHS,
        source=SOURCE,
        script=(
            ScriptedEvent(2.0 + seed % 5, LoseNode("node-1")),
            ScriptedEvent(3.0, KillWorker("b")),
            ScriptedEvent(5.5, LoseNode("node-0")),
        ),
        world={"seed": seed},
    )
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.out("b") == numbers(150)
    in_order(rig)
