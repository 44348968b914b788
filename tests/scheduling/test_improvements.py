"""Improvements: requests that can be lowered, more slots, one more node, and what they would gain."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import dovetail as dt
from dovetail.errors import AddNodes, Change
from dovetail.pipeline.option_renderer import OptionRenderer
from dovetail.scheduling.improvements import find_improvements
from dovetail.scheduling.stage_rates import Profile
from stage_functions import same


async def waits(items: list[Any]) -> list[Any]:
    await asyncio.sleep(0)
    return items


def improvements(stages: list[dt.Stage], cluster: str, profiles: dict[str, Profile]) -> list[tuple[str, str, float]]:
    pipeline = dt.Pipeline(stages)
    plan = dt.plan(pipeline, cluster, profiles=profiles)
    renderer = OptionRenderer(plan.cluster)
    return [
        (renderer.fix(one.change), one.reason, one.rate / (plan.rate or 1))
        for one in find_improvements(pipeline, plan, profiles)
    ]


def test_a_stage_that_waits_needs_fewer_cpus() -> None:
    found = improvements([dt.Stage("fetch", same)], "1x(2cpu)", {"fetch": Profile(rate=100, cpu_s=0.0002)})
    assert found[0][0] == "--set stages.fetch.resources.cpus=0.05"
    assert found[0][1] == "a worker of fetch requests 1 CPU and uses 0.02"
    assert found[0][2] == pytest.approx(20), "40 workers instead of 2, which need 0.8 of 2 CPUs"


def test_an_improvement_is_printed_as_python() -> None:
    profiles = {"fetch": Profile(rate=100, cpu_s=0.0002)}
    pipeline = dt.Pipeline([dt.Stage("fetch", same)])
    (change, *_) = dt.find_improvements(pipeline, dt.plan(pipeline, "1x(2cpu)", profiles=profiles), profiles)
    assert str(change).splitlines() == [
        "a worker of fetch requests 1 CPU and uses 0.02",
        "  cpus=0.05 for fetch  # 4000 items/s (+1900 %)",
    ]


def test_the_gain_respects_the_cpu_time_of_all_workers() -> None:
    found = improvements([dt.Stage("mixed", same)], "1x(2cpu)", {"mixed": Profile(rate=100, cpu_s=0.004)})
    assert found[0][0] == "--set stages.mixed.resources.cpus=0.5"
    assert found[0][2] == pytest.approx(2.0)


def test_memory_that_is_not_used_can_hold_more_workers() -> None:
    stage = dt.Stage("big", same, dt.Resources(cpus=1, memory="8GB"))
    found = improvements([stage], "1x(8cpu, 16GB)", {"big": Profile(rate=10, cpu_s=0.1, peak_bytes=1 << 30)})
    assert found[0][0] == "--set stages.big.resources.memory=1.25GB"
    assert found[0][2] == pytest.approx(4)


def test_an_async_stage_that_waits_may_have_more_calls_at_a_time() -> None:
    stage = dt.Stage("api", waits, dt.Resources(cpus=0.05), slots=2)
    found = improvements([stage], "1x(1cpu)", {"api": Profile(rate=10, cpu_s=0.0001)})
    assert found[0][:2] == ("--set stages.api.slots=8", "a worker of api mostly waits, with 2 calls at a time")
    assert found[0][2] == pytest.approx(4)


def test_only_the_two_best_are_offered_and_nodes_only_if_nothing_else_helps() -> None:
    busy = improvements([dt.Stage("busy", same)], "1x(2cpu)", {"busy": Profile(rate=100, cpu_s=0.0099)})
    assert [text for text, _, _ in busy] == ['--cluster "1x(2cpu) + 1x(2cpu)"']
    stages = [dt.Stage(name, same, fuse=False) for name in "abc"]
    profiles = {name: Profile(rate=100, cpu_s=0.0002) for name in "abc"}
    pipeline = dt.Pipeline(stages)
    found = find_improvements(pipeline, dt.plan(pipeline, "1x(4cpu)", profiles=profiles), profiles)
    assert len(found) <= 2
    assert all(isinstance(one.change, Change | AddNodes) for one in found)


def test_nothing_is_offered_without_measurements_or_behind_a_slow_source() -> None:
    pipeline = dt.Pipeline([dt.Stage("fetch", same)])
    assert find_improvements(pipeline, dt.plan(pipeline, "1x(2cpu)"), {}) == []
    assert improvements([dt.Stage("f", same)], "1x(2cpu)", {"f": Profile(rate=9, cpu_s=0.001, source_rate=5)}) == []


@pytest.mark.parametrize("cpus", [0.25, 1, 4])
def test_an_improvement_holds_when_it_is_applied(cpus: float) -> None:
    stage = dt.Stage("fetch", same, dt.Resources(cpus=cpus))
    profiles = {"fetch": Profile(rate=50, cpu_s=0.001)}
    pipeline = dt.Pipeline([stage])
    for one in find_improvements(pipeline, dt.plan(pipeline, "1x(8cpu)", profiles=profiles), profiles):
        if isinstance(one.change, Change):
            changed = dt.Pipeline([dt.Stage("fetch", same, dt.Resources(**one.change.values))])  # type: ignore[arg-type]
            assert dt.plan(changed, "1x(8cpu)", profiles=profiles).rate == pytest.approx(one.rate)


def test_one_more_node_has_a_short_spec_and_no_run_is_offered_one() -> None:
    pipeline = dt.Pipeline([dt.Stage("work", same)])
    profiles = {"work": Profile(rate=50, cpu_s=0.02)}
    plan = dt.plan(pipeline, "1x(2cpu, 24684100KB)", profiles=profiles)
    (one,) = find_improvements(pipeline, plan, profiles)
    assert one.reason == "one more node"
    (fix,) = [line.strip() for line in one.lines(OptionRenderer(plan.cluster))[1:]]
    assert fix.startswith('--cluster "1x(2cpu, 23.5GB) + 1x(2cpu, 23.5GB)"  # 200 items/s')
    assert find_improvements(pipeline, plan, profiles, nodes=False) == []
