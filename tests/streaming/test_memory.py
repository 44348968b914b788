"""Out of memory: are batches made smaller, and workers larger, and does the run say so?"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

import pytest

import dovetail as dt
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import Behaviour, Gives, OutOfMemory
from dovetail.streaming.settings import StreamOptions
from streaming.rigs import Rig, go, numbers, stage

if TYPE_CHECKING:
    from dovetail.engines.simulated.world import ItemOutcome, Key

GB = 1 << 30
How = Literal["death", "raise"]
BOTH: list[How] = ["death", "raise"]


def one_gb(**settings: object) -> dt.Stage:
    return stage("a", resources=dt.Resources(cpus=1, memory="1GB"), **settings)


def memory_of_workers(rig: Rig) -> list[int]:
    return [start.seats[0].memory_bytes for _, start in rig.starts("a")]


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize(("batch", "fits", "ends"), [(16, 5, 4), (16, 8, 8), (7, 1, 1), (16, 16, 16)])
def test_halves_pass_and_are_the_limit_from_then_on(how: How, batch: int, fits: int, ends: int) -> None:
    rig = go([stage("a", batch_size=batch)], {"a": Behaviour(0.1, memory_items=fits, oom=how)}, 400)
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.out("a") == numbers(400)
    assert rig.stream.state.units[0].batch_size == ends
    assert not rig.data.aside
    told = rig.notes("out of memory with")
    assert bool(told) == (fits < batch)
    if told:
        assert told[-1].data["batch_size"] == ends
    late = rig.messages("a")[-5:]
    assert all(message.batch_size <= ends for message in late)


@pytest.mark.parametrize("how", BOTH)
def test_halves_are_no_charge(how: How) -> None:
    """Four halvings with two tries: nobody is set aside for them."""
    rig = go(
        [stage("a", batch_size=16, retries=2, on_error="skip")], {"a": Behaviour(0.1, memory_items=1, oom=how)}, 64
    )
    assert rig.out("a") == numbers(64)


def large_one(key: Key, _attempt: int) -> ItemOutcome:
    return OutOfMemory() if key == (5,) else Gives()


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("replan", [True, False])
def test_a_single_item_gets_a_worker_of_the_measured_size_and_is_then_set_aside(how: How, replan: bool) -> None:
    rig = go(
        [one_gb(on_error="skip")],
        {"a": Behaviour(0.5, item=large_one, oom=how, peak_bytes=4 * GB)},
        60,
        options=StreamOptions(replan=replan),
        limit_s=500,
    )
    assert rig.run_state is RunState.FINISHED
    assert rig.aside() == Counter([(5,)])
    assert rig.out("a") == numbers(60) - rig.aside()
    tried_by = [
        next(s.seats[0].memory_bytes for _, s in rig.starts("a") if s.worker == message.worker)
        for message in rig.messages("a")
        if (5,) in part_keys(message.parts)
    ]
    assert tried_by[0] == GB
    assert tried_by[-1] == 5 * GB, "what was measured, and a quarter more"
    assert rig.notes("a single item ran out of memory with 1GB; retrying it with 5GB")


def test_more_memory_that_helps_stays() -> None:
    """The item fits when its worker has more: so do all others from then on."""

    def first_times(key: Key, attempt: int) -> ItemOutcome:
        return OutOfMemory() if key == (5,) and attempt < 3 else Gives()

    rig = go([one_gb()], {"a": Behaviour(0.5, item=first_times, peak_bytes=4 * GB)}, 60)
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.out("a") == numbers(60)
    assert rig.stream.state.units[0].shape.memory_bytes == 5 * GB


def test_more_memory_that_does_not_help_is_given_back() -> None:
    rig = go([one_gb(on_error="skip")], {"a": Behaviour(0.5, item=large_one, peak_bytes=4 * GB)}, 60)
    assert rig.stream.state.units[0].shape.memory_bytes == GB
    assert rig.notes("more memory did not help")


@pytest.mark.parametrize("how", BOTH)
def test_a_worker_is_not_made_larger_than_any_node(how: How) -> None:
    rig = go(
        [one_gb(on_error="skip")],
        {"a": Behaviour(0.5, item=large_one, oom=how, peak_bytes=60 * GB)},
        60,
        limit_s=500,
    )
    assert rig.run_state is RunState.FINISHED
    assert set(memory_of_workers(rig)) == {GB}
    assert rig.aside() == Counter([(5,)])


def test_without_a_measure_twice_what_was_asked_for_is_tried() -> None:
    rig = go([one_gb(on_error="skip")], {"a": Behaviour(0.5, item=large_one, oom="raise")}, 60, limit_s=500)
    assert rig.aside() == Counter([(5,)])
    assert 2 * GB in memory_of_workers(rig)


def test_the_others_go_on_while_one_waits_for_a_larger_worker() -> None:
    """A node that is full: the larger worker needs room that others must first give."""
    rig = go(
        [one_gb(on_error="skip")],
        {"a": Behaviour(0.5, item=large_one, peak_bytes=6 * GB)},
        100,
        cluster="1x(8cpu, 8GB)",
        limit_s=500,
    )
    assert rig.run_state is RunState.FINISHED
    assert rig.out("a") == numbers(100) - Counter([(5,)])


def test_on_error_fail_names_memory() -> None:
    rig = go([one_gb()], {"a": Behaviour(0.5, item=large_one)}, 60)
    assert rig.run_state is RunState.FAILED
    assert "out of memory" in rig.error
