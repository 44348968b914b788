"""Scaling decisions: target tracking, limits, cooldown and steadiness, in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.actors.role import Scale
from dovetail.actors.scaling import Scaler

HOUR_S = 3600.0


def simulate(
    scaler: Scaler, signal_of: Callable[[float, int], float], workers: int, seconds: float = HOUR_S
) -> list[tuple[float, int]]:
    """(time, workers) of the start and of every change; the signal is a function of time and workers."""
    changes = [(0.0, workers)]
    now = 0.0
    while now < seconds:
        decision = scaler.decide(now, workers, signal_of(now, workers))
        assert decision.change == decision.workers - workers
        assert f"target {scaler.scale.target:g}" in decision.reason
        if decision.change:
            workers = decision.workers
            changes.append((now, workers))
        now += scaler.interval_s
    return changes


def outstanding(calls: float) -> Callable[[float, int], float]:
    """Measured load of callers with a constant number of open calls."""
    return lambda _now, workers: calls / workers


@pytest.mark.parametrize(("calls", "expected"), [(40, 10), (4, 1), (37, 10), (1000, 64), (0, 1)])
def test_the_target_is_reached_within_three_decisions_and_kept_for_an_hour(calls: float, expected: int) -> None:
    scaler = Scaler(Scale(target=4), (1, 64))
    changes = simulate(scaler, outstanding(calls), workers=1)
    assert changes[-1][1] == expected
    assert changes[-1][0] <= 2 * scaler.interval_s  # the third decision
    assert len(changes) <= 2


def test_workers_are_removed_after_the_cooldown_and_not_before() -> None:
    scaler = Scaler(Scale(target=4, cooldown="60s"), (2, 64))
    changes = simulate(scaler, lambda now, workers: (100 if now < 600 else 10) / workers, workers=2)
    assert [workers for _, workers in changes] == [2, 25, 3]
    assert 660 <= changes[-1][0] <= 675


def test_one_signal_that_is_out_of_line_changes_nothing() -> None:
    scaler = Scaler(Scale(target=4), (1, 64))
    changes = simulate(scaler, lambda now, workers: 400.0 if now in (100, 500) else 16 / workers, workers=4)
    assert changes == [(0.0, 4)]


def test_signals_within_the_tolerance_change_nothing() -> None:
    scaler = Scaler(Scale(target=10, tolerance=0.2), (1, 64))
    assert simulate(scaler, lambda now, _: 8.1 if now % 10 else 11.9, workers=5) == [(0.0, 5)]


def test_a_full_pool_means_fewer_rollouts_and_an_empty_one_more() -> None:
    def fill(full: float) -> Callable[[float, int], float]:
        return lambda _now, _workers: full

    fewer = Scaler(Scale(target=0.9, signal="fill", inverse=True), (2, 64))
    assert [workers for _, workers in simulate(fewer, fill(1.0), workers=32)][-1] == 32  # within the tolerance
    fewer = Scaler(Scale(target=0.5, signal="is_full", inverse=True), (2, 64))
    assert [workers for _, workers in simulate(fewer, fill(1.0), workers=32)] == [32, 16, 8, 4, 2]
    more = Scaler(Scale(target=0.5, signal="is_full", inverse=True), (2, 64))
    assert [workers for _, workers in simulate(more, fill(0.0), workers=2)] == [2, 8, 32, 64]


def test_a_backlog_means_more_workers() -> None:
    scaler = Scaler(Scale(target=100, signal="queue_depth"), (1, 16))
    decisions = [scaler.decide(now, 4, 250.0) for now in (0.0, 5.0)]
    assert [decision.workers for decision in decisions] == [4, 10]
    assert decisions[0].reason == "queue_depth 250, target 100: 4 workers kept, 10 wanted (waits for a second signal)"
    assert decisions[1].reason == "queue_depth 250, target 100: 4 -> 10 workers"


Load = Callable[[float], float]


def pool(per_worker: float, taken: Load, capacity: float, *, is_flag: bool = False) -> Callable[[float, int], float]:
    """Rollouts fill a pool, a trainer empties it. The signal is the filled share, or whether it is full."""
    filled = 0.0

    def fill(now: float, workers: int) -> float:
        nonlocal filled
        filled = min(capacity, max(0.0, filled + (per_worker * workers - taken(now)) * 5.0))
        return filled >= capacity if is_flag else filled / capacity

    return fill


def queue(per_worker: float, arriving: Load) -> Callable[[float, int], float]:
    """The items that wait; the number that arrives varies by 30 %."""
    waiting = 0.0
    random = Random(0)

    def depth(now: float, workers: int) -> float:
        nonlocal waiting
        for _ in range(5):
            arrived = arriving(now) * (1 + 0.3 * random.uniform(-1, 1))
            waiting = max(0.0, waiting + arrived - per_worker * workers)
        return waiting

    return depth


def open_calls(per_worker: float, arriving: Load) -> Callable[[float, int], float]:
    """Outstanding calls per worker if callers do not wait for their answers."""
    waiting = queue(per_worker, arriving)
    return lambda now, workers: (waiting(now, workers) + arriving(now) / per_worker) / workers


def constant(load: float) -> Load:
    return lambda _now: load


FULL = Scale(target=0.5, signal="is_full", inverse=True)
FILL = Scale(target=0.5, signal="fill", inverse=True)
DEPTH = Scale(target=50, signal="queue_depth")


@pytest.mark.parametrize("start", [1, 12])
@pytest.mark.parametrize(
    ("scale", "signal", "load", "per_worker"),
    [
        *((FILL, partial(pool, capacity=capacity), load, 10) for capacity in (200, 5000) for load in (33, 70, 75)),
        *((FULL, partial(pool, capacity=1000, is_flag=True), load, 10) for load in (33, 70, 75)),
        *((DEPTH, queue, load, 4) for load in (6, 30, 31.9)),
        *((Scale(target=4), open_calls, load, 4) for load in (6, 30, 31.9)),
    ],
)
def test_where_no_number_of_workers_keeps_the_signal_at_its_target_the_next_higher_one_is_kept(
    start: int, scale: Scale, signal: Any, load: float, per_worker: float
) -> None:
    """Levels rise with one number of workers and fall with the next one: of an hour with a constant load, the number is
    searched for at most half an hour, and then kept."""
    changes = simulate(Scaler(scale, (1, 16)), signal(per_worker, constant(load)), start)
    assert changes[-1][0] < HOUR_S / 2
    assert load / per_worker <= changes[-1][1] <= load / per_worker + 2


@pytest.mark.parametrize(
    ("scale", "signal", "per_worker"),
    [(FILL, partial(pool, capacity=1000), 10), (DEPTH, queue, 4), (Scale(target=4), open_calls, 4)],
)
def test_after_a_search_the_number_follows_a_higher_load_at_once_and_a_lower_one_within_two_hours(
    scale: Scale, signal: Any, per_worker: float
) -> None:
    def load(now: float) -> float:
        return per_worker * (7.5 if now < HOUR_S else 15.5 if now < 2 * HOUR_S else 3.5)

    changes = simulate(Scaler(scale, (1, 32)), signal(per_worker, load), 1, 4 * HOUR_S)
    assert any(workers >= 16 and at < HOUR_S + 300 for at, workers in changes if at >= HOUR_S)
    assert [workers for at, workers in changes if at < 2 * HOUR_S][-1] <= 28
    assert 4 <= changes[-1][1] <= 6


def test_gangs_and_bundles_are_added_and_removed_whole() -> None:
    scaler = Scaler(Scale(target=1), (2, 10), step=2)
    assert [workers for _, workers in simulate(scaler, outstanding(5), workers=2)] == [2, 6]
    assert [workers for _, workers in simulate(Scaler(Scale(target=1), (2, 10), step=2), outstanding(3), 10)] == [10, 4]


def test_a_decision_names_its_limit() -> None:
    full = Scaler(Scale(target=4), (1, 8))
    assert [full.decide(now, 6, 40.0, room=1).reason for now in (0.0, 5.0)][1] == (
        "outstanding 40 per instance, target 4: 6 -> 7 workers (no more fit)"
    )
    assert full.decide(10.0, 7, 40.0, room=0).reason.endswith("7 workers kept, 8 wanted (no more fit)")
    assert full.decide(15.0, 8, 40.0).reason.endswith("8 workers kept (maximum)")
    assert full.decide(20.0, 8, None).reason == "no value of outstanding: 8 workers kept"
    assert full.decide(25.0, 8, float("nan")).change == 0


@given(
    signals=st.lists(st.floats(0, 1e6) | st.none(), min_size=1, max_size=60),
    inverse=st.booleans(),
    step=st.integers(1, 3),
    low=st.integers(1, 4),
    more=st.integers(0, 30),
    room=st.none() | st.integers(0, 5),
)
def test_decisions_respect_limits_steps_room_and_cooldown(
    signals: list[float | None], inverse: bool, step: int, low: int, more: int, room: int | None
) -> None:
    limits = (low * step, (low + more) * step)
    scaler = Scaler(Scale(target=5, inverse=inverse), limits, step)
    workers, changes = limits[0], []
    for number, signal in enumerate(signals):
        now = number * scaler.interval_s
        decision = scaler.decide(now, workers, signal, room)
        assert limits[0] <= decision.workers <= limits[1]
        assert decision.workers % step == 0
        assert decision.reason
        if room is not None:
            assert decision.change <= room
        if decision.change:
            changes.append((now, decision.change))
        workers = decision.workers
    for (before, _), (now, change) in pairwise(changes):
        assert change > 0 or now - before >= scaler.cooldown_s


@given(
    calls=st.floats(0, 500), target=st.floats(0.5, 20), start=st.integers(1, 64), tolerance=st.sampled_from((0.0, 0.2))
)
def test_constant_calls_never_flap(calls: float, target: float, start: int, tolerance: float) -> None:
    scaler = Scaler(Scale(target=target, tolerance=tolerance), (1, 64))
    changes = simulate(scaler, outstanding(calls), start, 900)
    assert len(changes) <= 2
    assert scaler.decide(900, changes[-1][1], calls / changes[-1][1]).change == 0


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.integers(1, 64), st.booleans())
def test_a_higher_signal_never_asks_for_less(one: float, other: float, workers: int, inverse: bool) -> None:
    def wanted(signal: float) -> int:
        scaler = Scaler(Scale(target=5, inverse=inverse, cooldown="5s"), (1, 64))
        return [scaler.decide(now, workers, signal).workers for now in (0.0, 5.0)][1]

    lower, higher = wanted(min(one, other)), wanted(max(one, other))
    assert lower >= higher if inverse else lower <= higher


def test_of_a_signal_that_is_true_or_false_the_share_of_the_time_counts() -> None:
    def flickers(now: float, _workers: int) -> bool:
        return now % 15 > 0  # two of three

    scaler = Scaler(Scale(target=0.6, signal="is_full", inverse=True), (1, 64))
    assert simulate(scaler, flickers, 8) == [(0.0, 8)]
    scaler = Scaler(Scale(target=0.3, signal="is_full", inverse=True), (1, 64))
    assert simulate(scaler, flickers, 8, 60)[-1][1] in (3, 4)
