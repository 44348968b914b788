"""Measured throughput: the window, outliers, and how certain a rate is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.streaming.throughput import MIN_MESSAGES, OUTLIER_FACTOR, WINDOW_MESSAGES, ThroughputEstimator


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 10), st.integers(0, 90)), min_size=1, max_size=400))
def test_the_window_contains_the_last_messages(messages: list[tuple[int, float, int]]) -> None:
    speeds = ThroughputEstimator(None, None)
    for message in messages:
        speeds.add(*message)
    last = messages[-WINDOW_MESSAGES:]
    assert speeds.messages == len(messages)
    assert speeds.returns == sum(out for _, _, out in last) / sum(items for items, _, _ in last)
    seconds = sum(s for _, s, _ in last) / sum(items for items, _, _ in last)
    assert speeds.seconds_per_item == pytest.approx(seconds, abs=1e-9)


def test_the_configured_rate_is_used_until_enough_is_measured() -> None:
    speeds = ThroughputEstimator(5.0, 2.0)
    assert speeds.rate()[0] == 5.0
    assert speeds.returns == 2.0
    for _ in range(MIN_MESSAGES):
        speeds.add(10, 1.0, 10)
    assert speeds.rate()[0] == pytest.approx(10.0)
    assert speeds.returns == 1.0


def test_one_hanging_call_does_not_lower_the_rate() -> None:
    speeds = ThroughputEstimator(None, None)
    for _ in range(99):
        speeds.add(1, 1.0, 1)
    speeds.add(1, 100_000.0, 1)
    rate, _ = speeds.rate()
    assert rate == pytest.approx(1 / ((99 + OUTLIER_FACTOR) / 100))


def test_a_slow_down_is_detected_before_the_first_slow_message_ends() -> None:
    speeds = ThroughputEstimator(None, None)
    for _ in range(100):
        speeds.add(1, 1.0, 1)
    quick, _ = speeds.rate([(1, 0.5)] * 10)
    slow, _ = speeds.rate([(1, 10.0)] * 10)
    assert quick == pytest.approx(1.0)
    assert slow is not None
    assert slow < 0.2


def test_uniform_messages_give_a_certain_rate_and_varying_ones_do_not() -> None:
    alike, unlike = ThroughputEstimator(None, None), ThroughputEstimator(None, None)
    for number in range(20):
        alike.add(1, 1.0, 1)
        unlike.add(1, 15.0 if number % 7 == 0 else 0.1, 1)
    assert alike.rate()[1] == 1.0
    assert unlike.rate()[1] < 0.5


def test_no_rate_is_known_before_it_is_configured_or_measured() -> None:
    speeds = ThroughputEstimator(None, None)
    rate, _ = speeds.rate()
    found: tuple[Any, ...] = (rate, speeds.seconds_per_item, speeds.returns, speeds.is_measured)
    assert found == (None, None, 1.0, False)


def test_a_slow_unit_is_detected_before_its_messages_end() -> None:
    """The ages of running messages show a tenfold slowdown before the first slow message ends."""
    speeds = ThroughputEstimator(None, None)
    for _ in range(100):
        speeds.add(1, 1.0, 1)
    assert speeds.rate([(1, 0.5)] * 10)[0] == pytest.approx(1.0)
    slow, sure = speeds.rate([(1, 6.0)] * 10)
    assert slow is not None
    assert slow < 0.25
    assert sure <= 0.5
