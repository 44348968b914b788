"""Resume of an interrupted run from its commit log."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.control.commands import Pull, RunBatches
from dovetail.control.events import CancelRun
from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import Behaviour, Gives, Lognormal, PostEvent, Raises, ScriptedEvent
from dovetail.streaming.settings import StreamOptions
from streaming.harness import SimulatedRun, numbers, simulate_stages, stage
from streaming.random_runs import random_case, run
from waiting import LONG

if TYPE_CHECKING:
    from collections.abc import Sequence

    import dovetail as dt
    from dovetail.control.commands import Deliver
    from dovetail.engines.simulated.world import Key

ITEMS = 70
LINE = [stage("a", batch_size=2), stage("b", batch_size=3)]
DIAMOND = [stage("a"), stage("b", after=["a"]), stage("c", after=["a"], batch_size=4), stage("d", after=["b", "c"])]
BARRIER = [stage("a"), stage("all", barrier=True), stage("b", batch_size=3)]
ALSO_SOURCE = [stage("a"), stage("all", barrier=True), stage("b", after=["all"]), stage("own", after=[])]
SHAPES: dict[str, tuple[list[dt.Stage], str]] = {
    "a line": (LINE, "streaming"),
    "one at a time": (LINE, "sequential"),
    "a diamond": (DIAMOND, "streaming"),
    "a diamond, one at a time": (DIAMOND, "sequential"),
    "a barrier": (BARRIER, "streaming"),
    "a barrier and the source": (ALSO_SOURCE, "sequential"),
}
UNEVEN = Behaviour(0.2, spread=Lognormal(1.0), item=lambda key, _: Gives(key[0] % 3))


def run_once(shape: str, *, resume: Sequence[Deliver] = (), **more: Any) -> SimulatedRun:
    stages, mode = SHAPES[shape]
    names = [each.name for each in stages]
    return simulate_stages(
        stages,
        dict.fromkeys(names, Behaviour(0.2, spread=Lognormal(1.0))) | {"a": UNEVEN},
        ITEMS,
        mode=mode,
        resume=resume,
        options=StreamOptions(target_epoch_batches=2, target_epoch_s=0.05),
        source={"segment_items": 4},
        **more,
    )


def out_of(log: Sequence[Deliver]) -> Counter[tuple[str, Key]]:
    return Counter(
        (leaf, key)
        for deliver in log
        for leaf, segments in deliver.outputs.items()
        for key in part_keys((segment, 0, segment.items) for segment in segments)
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prefix_of_the_commit_log_can_be_completed(shape: str) -> None:
    whole = run_once(shape)
    everything = out_of(whole.data.log)
    entries = len(whole.data.log)
    assert entries >= 5
    for upto in {*range(0, entries, 1 if LONG else 3), entries}:
        rest = run_once(shape, resume=whole.data.log[:upto])
        assert rest.run_state is RunState.FINISHED
        assert out_of(whole.data.log[:upto]) + out_of(rest.data.log) == everything


@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_may_be_interrupted_and_resumed_several_times(shape: str) -> None:
    everything = out_of(run_once(shape).data.log)
    random = Random(shape)
    log: list[Deliver] = []
    for _ in range(6):
        rig = run_once(shape, resume=log, script=(ScriptedEvent(random.uniform(1.0, 6.0), PostEvent(CancelRun())),))
        log += rig.data.log
    log += run_once(shape, resume=log).data.log
    assert out_of(log) == everything


def test_a_complete_log_leaves_nothing_to_do() -> None:
    for shape in SHAPES:
        rest = run_once(shape, resume=run_once(shape).data.log)
        assert not rest.all(RunBatches)
        assert not rest.data.log


def test_finished_items_are_not_read_again() -> None:
    whole = run_once("a line")
    kept = whole.data.log[::2]
    rest = run_once("a line", resume=kept)
    done = {number for deliver in kept for first, last in deliver.ranges for number in range(first, last)}
    asked = {number for pull in rest.all(Pull) for number in range(pull.first, min(pull.first + pull.items, ITEMS))}
    assert done
    assert asked == set(range(ITEMS)) - done


def test_a_barrier_that_was_delivered_is_not_called_again() -> None:
    whole = run_once("a barrier")
    upto = next(index for index, deliver in enumerate(whole.data.log) if deliver.wave == 1) + 1
    assert run_once("a barrier", resume=whole.data.log[:upto]).messages("all") == []
    before = run_once("a barrier", resume=whole.data.log[: upto - 1]).messages("all")
    assert [message.items for message in before] == [message.items for message in whole.messages("all")]


def test_counters_continue_after_a_resume() -> None:
    bad = Behaviour(0.1, item=lambda key, _: Raises() if key[0] % 10 == 0 else Gives())
    arguments: Any = ([stage("a", on_error="skip", retries=1)], {"a": bad}, 100)
    options = StreamOptions(target_epoch_batches=2, target_epoch_s=0.05)
    whole = simulate_stages(*arguments, options=options, source={"segment_items": 4})
    rest = simulate_stages(*arguments, options=options, source={"segment_items": 4}, resume=whole.data.log[:3])
    view = rest.stream.view(0.0)
    assert (view.read, view.finished, view.delivered, view.failed) == (100, 100, 90, 10)


def test_a_source_that_has_grown_is_read_to_its_new_end() -> None:
    first = simulate_stages([stage("a")], {}, 30)
    more = simulate_stages([stage("a")], {}, 50, resume=first.data.log)
    assert first.out("a") + more.out("a") == numbers(50)


def test_ordered_output_resumes_in_order() -> None:
    options = StreamOptions(ordered=True, target_epoch_batches=1, target_epoch_s=0.01)
    behaviours = {"a": Behaviour(0.2, spread=Lognormal(1.5))}
    whole = simulate_stages([stage("a")], behaviours, 60, options=options, source={"segment_items": 3})
    rest = simulate_stages(
        [stage("a")], behaviours, 60, options=options, source={"segment_items": 3}, resume=whole.data.log[:4]
    )
    firsts = [deliver.first for deliver in rest.data.log]
    assert firsts == sorted(firsts)
    assert firsts[0] == whole.data.log[3].last


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(0, 10**9), st.randoms(use_true_random=False))
def test_any_epochs_of_any_run_may_be_missing_from_its_log(seed: int, random: Random) -> None:
    """Any subset, not only a prefix: epochs of a wave finish in any order."""
    case = random_case(seed, failures=False)
    first = run(case)
    last_wave = max((deliver.wave for deliver in first.data.log), default=0)
    kept = [deliver for deliver in first.data.log if deliver.wave < last_wave or random.random() < 0.5]
    rest = run(case, resume=kept)
    assert rest.run_state is RunState.FINISHED
    assert out_of(kept) + rest.out() == first.out()
