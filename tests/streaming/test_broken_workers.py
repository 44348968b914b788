"""Broken workers: detection by streaks of failures, trials on other workers, and replacement."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.message_execution import part_keys
from dovetail.engines.simulated.world import Behaviour, Gives, Kills, Raises
from dovetail.streaming.broken_worker_rule import is_suspicious
from dovetail.streaming.health import MAX_BROKEN_BACKOFF_S, MAX_BROKEN_IN_A_ROW
from dovetail.streaming.settings import StreamOptions
from streaming.harness import SimulatedRun, numbers, simulate_stages, stage

if TYPE_CHECKING:
    from collections.abc import Container

    from dovetail.engines.simulated.world import ItemOutcome, Key

STEADY = StreamOptions(replan=False, follow_plan=True)


def calls_of(rig: SimulatedRun, key: Key) -> int:
    """Calls that contained this item."""
    return sum(key in part_keys(message.parts) for message in rig.messages("a"))


def simulate(
    behaviour: Behaviour, items: int, workers: int, options: StreamOptions = STEADY, **settings: Any
) -> SimulatedRun:
    return simulate_stages(
        [stage("a", workers=workers, **({"on_error": "skip", "retries": 0} | settings))],
        {"a": behaviour},
        items,
        options=options,
        cluster="1x(8cpu, 64GB)",
    )


def run(behaviour: Behaviour, items: int, workers: int, **settings: Any) -> SimulatedRun:
    rig = simulate(behaviour, items, workers, **settings)
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.out("a") + rig.failed() == numbers(items), "every item comes out or fails, once"
    return rig


def replacements(rig: SimulatedRun, workers: int) -> int:
    """Workers that were started beyond the first ones."""
    return len(rig.starts("a")) - workers


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("poison", [0, 1, 17, 200, 390, 398, 399])
def test_an_item_that_leaves_its_worker_raising_costs_only_itself(poison: int, workers: int, retries: int) -> None:
    rig = run(Behaviour(0.1, poison=frozenset([(poison,)])), 400, workers, retries=retries)
    assert len(rig.failed()) <= 2, "one good item at most, at the very end of the input"
    assert (poison,) in rig.failed()
    if poison < 398:
        assert rig.failed() == Counter([(poison,)])
        assert calls_of(rig, (poison,)) <= 3
    assert replacements(rig, workers) <= 2


@pytest.mark.parametrize("retries", [0, 1, 3])
@pytest.mark.parametrize(("poison", "workers"), [((0, 19), 2), ((0, 19, 38), 2), ((38, 57, 76), 4)])
def test_workers_that_break_one_after_the_other_cost_no_good_item(
    poison: tuple[int, ...], workers: int, retries: int
) -> None:
    """The items of one broken worker are tried on another that is broken just then, or that they break."""
    keys = frozenset((number,) for number in poison)
    rig = run(Behaviour(0.5, poison=keys), 200, workers, retries=retries)
    assert rig.failed() == Counter(keys)
    assert replacements(rig, workers) <= 2 * len(keys)
    assert max(calls_of(rig, key) for key in keys) <= 3


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize(
    ("poison", "workers"),
    [((10, 11, 12), 1), ((0, 1, 2, 3), 1), ((10, 12, 14, 16), 1), (tuple(range(10, 20)), 2), (tuple(range(10, 20)), 4)],
)
def test_neighbours_that_break_their_workers_cost_no_good_item(
    poison: tuple[int, ...], workers: int, retries: int
) -> None:
    """New workers fail, too, but the last one of them is broken as well, and does not stay."""
    keys = frozenset((number,) for number in poison)
    rig = run(Behaviour(0.1, poison=keys), 200, workers, retries=retries)
    assert rig.failed() == Counter(keys)
    assert replacements(rig, workers) <= 3 * len(keys)


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("count", [10, 20])
def test_many_neighbours_that_break_the_only_workers_cost_no_good_item(count: int, workers: int, retries: int) -> None:
    """When new workers fail, too, a worker with many failures is replaced, and its latest item is tried first."""
    keys = frozenset((number,) for number in range(10, 10 + count))
    rig = run(Behaviour(0.1, poison=keys), 400, workers, retries=retries)
    assert rig.failed() == Counter(keys)
    assert replacements(rig, workers) <= 4 * count


@settings(max_examples=settings().max_examples // 4)
@given(st.integers(0, 200), st.integers(4, 20), st.sampled_from([1, 2, 4]), st.sampled_from([0, 1, 3]))
def test_many_neighbours_that_break_their_workers_cost_few_good_items(
    first: int, count: int, workers: int, retries: int
) -> None:
    keys = frozenset((number,) for number in range(first, first + count))
    rig = run(Behaviour(0.1, poison=keys), 400, workers, retries=retries)
    assert set(rig.failed()) >= keys
    assert rig.failed().total() <= 2 * count
    assert replacements(rig, workers) <= 5 * count


@settings(max_examples=settings().max_examples // 4)
@given(st.integers(0, 2**32))
def test_a_run_ends_whatever_breaks_its_workers(seed: int) -> None:
    """It ends even if slots, batches and ordinary bad rows make the cause of a broken worker unclear."""
    dice = Random(seed)
    items, workers = dice.choice([60, 200]), dice.choice([1, 2, 4])
    starts = [dice.randrange(items) for _ in range(dice.randrange(1, 4))]
    broken = {number for start in starts for number in range(start, min(items, start + dice.randrange(1, 30)))}
    share = dice.choice([0.0, 0.1])
    bad = {number for number in range(items) if dice.random() < share} - broken
    behaviour = Behaviour(
        dice.choice([0.001, 0.1]),
        poison=frozenset((number,) for number in broken),
        item=lambda key, _: Raises() if key[0] in bad else Gives(),
    )
    settings = {"retries": dice.choice([0, 1, 3]), "batch_size": dice.choice([1, 4]), "slots": dice.choice([1, 3])}
    run(behaviour, items, workers, **settings)


def test_ordinary_bad_rows_cost_no_restart_and_one_call_each() -> None:
    bad = {(number,) for number in Random(19).sample(range(10_000), 1000)}
    calls: Counter[Key] = Counter()

    def item(key: Key, _: int) -> ItemOutcome:
        calls[key] += 1
        return Raises() if key in bad else Gives()

    rig = run(Behaviour(0.001, item=item), 10_000, 1)
    assert rig.failed() == Counter(bad)
    assert set(calls.values()) == {1}
    assert replacements(rig, 1) == 0


@pytest.mark.parametrize("workers", [1, 4])
def test_the_cost_is_bounded_where_all_rows_are_bad(workers: int) -> None:
    calls: Counter[Key] = Counter()

    def item(key: Key, _: int) -> ItemOutcome:
        calls[key] += 1
        return Raises()

    rig = run(Behaviour(0.01, item=item), 3000, workers)
    assert rig.failed() == numbers(3000)
    assert replacements(rig, workers) <= 10, "it grows with the logarithm of the number of rows"
    assert calls.total() <= 3000 + 1000


def test_an_exception_that_means_a_broken_process_replaces_the_worker_at_once() -> None:
    bad = (50,)
    rig = run(
        Behaviour(
            0.1,
            item=lambda key, _: Raises("AcceleratorError: CUDA error", worker_broken=True) if key == bad else Gives(),
        ),
        200,
        2,
    )
    assert rig.failed() == Counter([bad])
    assert calls_of(rig, bad) == 2
    assert replacements(rig, 2) == 2
    assert len(rig.notes("its process is broken: AcceleratorError: CUDA error")) == 2


def break_process_at(bad: Container[int]) -> Behaviour:
    """These items raise an exception that means a broken process, in any worker."""

    def item(key: Key, _: int) -> ItemOutcome:
        return Raises("AcceleratorError: CUDA error", worker_broken=True) if key[0] in bad else Gives()

    return Behaviour(0.1, item=item)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_run_fails_if_workers_break_whatever_they_are_called_with(workers: int) -> None:
    """Before, 599 workers were replaced for 300 items."""
    rig = simulate(break_process_at(range(300)), 300, workers)
    assert rig.run_state is RunState.FAILED
    count = MAX_BROKEN_IN_A_ROW + 2 * workers + 1
    wanted = f"a: {count} workers in succession were broken, and no call passed; the last: AcceleratorError: CUDA error"
    assert rig.error == wanted
    assert replacements(rig, workers) <= count
    times = [when for when, _ in rig.starts("a")][-2 * workers :]
    assert all(later - before > MAX_BROKEN_BACKOFF_S for before, later in pairwise(times[::workers]))


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("bad", [range(0, 3000, 50), range(10, 20)])
def test_a_call_that_passes_shows_that_workers_are_not_broken_for_good(bad: range, workers: int) -> None:
    rig = run(break_process_at(bad), 3000, workers)
    assert rig.failed() == Counter((number,) for number in bad)
    assert replacements(rig, workers) <= 2 * len(bad)


def test_a_service_does_not_fail_because_of_requests_that_break_its_workers() -> None:
    options = replace(STEADY, serving=True)
    rig = simulate(break_process_at(range(10, 50)), 200, 1, options)
    assert rig.run_state is RunState.FINISHED, rig.error
    assert rig.out("a").total() == 160


@settings(max_examples=settings().max_examples // 2)
@given(
    st.frozensets(st.integers(0, 9), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([1, 1, 4]),
    st.sampled_from([1, 3]),
    st.sampled_from([0.001, 0.5]),
)
def test_poison_items_and_nothing_else_fail_at_any_place(
    poison: frozenset[int], workers: int, retries: int, batch_size: int, slots: int, seconds: float
) -> None:
    """The last items are good, so that a broken worker shows. Each of several such items can also fail once in a worker
    that another one broke, and then be retried like any failed item."""
    keys = frozenset((19 * number,) for number in poison)
    behaviour = Behaviour(seconds, poison=keys)
    rig = run(behaviour, 200, workers, retries=retries, batch_size=batch_size, slots=slots)
    assert set(rig.failed()) >= keys
    if batch_size == slots == 1:
        assert rig.failed() == Counter(keys)
        more = int(len(keys) > 1)
        assert replacements(rig, workers) <= 2 * len(keys) + more
        assert max(calls_of(rig, key) for key in keys) <= (max(3, 1 + retries) + 1 if more else 3)


@given(st.integers(2, 10**6), st.integers(0, 10**6), st.integers(0, 50))
def test_a_streak_is_less_suspicious_the_more_calls_fail_anyway(calls: int, failed: int, cleared: int) -> None:
    failed = min(failed, calls)
    lengths = [n for n in range(200) if is_suspicious(n, failed, calls, calls, cleared)]
    assert not lengths or lengths == list(range(lengths[0], 200)), "a longer streak is never less suspicious"
    assert all(n >= max(2, 2 * cleared) for n in lengths)
    rarer = [n for n in range(200) if is_suspicious(n, failed // 2, calls, calls, cleared)]
    assert set(lengths) <= set(rarer), "the rarer failures are, the sooner a streak is suspicious"


def test_neighbours_in_a_batch_are_not_charged_with_the_failures_of_others() -> None:
    """One death of a good item that runs alone, after its neighbour's exceptions."""
    for retries in (1, 2, 3):
        alone: Counter[Key] = Counter()

        def item(key: Key, attempt: int, alone: Counter[Key] = alone, retries: int = retries) -> ItemOutcome:
            if key == (1,):
                return Raises()
            alone[key] += 1
            return Kills() if key == (0,) and attempt == max(2, retries) else Gives()

        rig = run(Behaviour(0.1, item=item), 2, 1, retries=retries, batch_size=2)
        assert rig.failed() == Counter([(1,)]), retries
        assert rig.stream.state.all_units[0].workers_lost == 1
