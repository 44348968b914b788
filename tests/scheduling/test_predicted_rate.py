"""Predicted rate: limits by workers, by CPU time and by the source."""

from __future__ import annotations

import pytest

import dovetail as dt
from dovetail.scheduling.plan_report import rates_in_other_modes, rates_with_one_more
from dovetail.scheduling.stage_rates import Profile
from stage_functions import same


def pipeline(*cpus: float) -> dt.Pipeline:
    names = "abcdef"[: len(cpus)]
    stages = [dt.Stage(name, same, dt.Resources(cpus=of), fuse=False) for name, of in zip(names, cpus, strict=True)]
    return dt.Pipeline(stages)


def test_stages_that_use_more_cpus_than_they_request_are_limited_by_cpu_time() -> None:
    profiles = {"a": Profile(rate=100.0, cpu_s=0.01)}
    plan = dt.plan(pipeline(0.25), "1x(2cpu)", profiles=profiles)
    assert plan.workers == {"a": 8}
    assert plan.rate == pytest.approx(200.0), "8 workers at 100/s would need 8 CPUs, and there are 2"
    assert plan.bottleneck == "a"
    assert "CPU time: at most 200 items/s, 10 ms per item" in plan.explain()
    assert all(rate <= 100.0 * cpus for (_, rate), cpus in zip(rates_with_one_more(plan), (4, 3), strict=True))


def test_the_cpu_time_of_all_stages_counts_with_the_items_that_reach_them() -> None:
    profiles = {"a": Profile(rate=1000.0, returns=0.5, cpu_s=0.001), "b": Profile(rate=1000.0, cpu_s=0.006)}
    plan = dt.plan(pipeline(0.1, 0.1), "1x(2cpu)", profiles=profiles)
    assert plan.rate == pytest.approx(2 / (0.001 + 0.5 * 0.006))
    assert plan.bottleneck == "b"


def test_a_slow_source_limits_the_rate() -> None:
    profiles = {"a": Profile(rate=100.0, source_rate=30.0)}
    plan = dt.plan(pipeline(1), "1x(2cpu)", profiles=profiles)
    assert (plan.rate, plan.bottleneck) == (30.0, "source")
    assert "bottleneck: source" in plan.explain()
    assert {rate for _, rate in rates_with_one_more(plan)} == {30.0}
    assert dt.Plan.from_json(plan.to_json()) == plan


def test_waves_are_limited_one_by_one() -> None:
    profiles = {"a": Profile(rate=100.0, cpu_s=0.02, source_rate=50.0), "b": Profile(rate=100.0)}
    plan = dt.plan(pipeline(1, 1), "1x(1cpu)", mode="sequential", profiles=profiles)
    assert plan.rate == pytest.approx(1 / (1 / 50 + 1 / 100))
    assert dict(rates_in_other_modes(plan))["waves"] == pytest.approx(plan.rate)


def test_without_such_measurements_the_slowest_stage_limits_the_rate() -> None:
    plan = dt.plan(pipeline(1, 1), "1x(4cpu)", profiles={"a": Profile(rate=100.0), "b": Profile(rate=50.0)})
    assert (plan.rate, plan.bottleneck, plan.source_rate) == (100.0, "b", None)
    assert "CPU time" not in plan.explain()
