"""The report of a plan has its limits, its reasons, and the effect of more resources."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import dovetail as dt
from dovetail.scheduling.plan_report import headline_lines, rates_with_one_more, unit_table
from scheduling.pipelines import pipeline, stage

VIDEO = Path(__file__).parents[2] / "examples" / "video.yaml"
SPEC = "2x(32cpu, 128GB, 2xL40S:48GB)"


def video(spec: str = SPEC) -> dt.Plan:
    return dt.plan(dt.Pipeline.load(VIDEO), spec)


def test_the_report_contains_the_whole_plan() -> None:
    plan = video()
    report = plan.explain()
    assert f"bottleneck: {plan.bottleneck}" in report
    share = re.search(r"([\d.]+) % of the bound", report)
    assert share
    assert plan.rate is not None
    assert plan.bound is not None
    assert float(share[1]) == pytest.approx(100 * plan.rate / plan.bound, abs=0.05)
    assert f"set by {plan.binding}" in report
    for phase in ("manual:", "minimum:", "throughput:", "headroom"):
        assert any(line.strip().startswith(phase) for line in report.splitlines()), phase
    for note in plan.notes:
        assert note in report
    for name in plan.workers:
        assert re.search(rf"^{name}( \*)? +{plan.workers[name]} ", report, re.MULTILINE)


def test_the_report_lists_one_more_node_gpu_and_cpu_with_the_planned_rate() -> None:
    plan = video()
    assert all(f"  {what}  " in re.sub(r" {2,}", "  ", plan.explain()) for what, _ in rates_with_one_more(plan))
    more = dict(rates_with_one_more(plan))
    assert [what.split()[0] for what in more] == ["node", "GPU", "CPU"]
    bigger = dt.plan(dt.Pipeline.load(VIDEO), f"{SPEC} + 1x(32cpu, 128GB, 2xL40S:48GB)", headroom=1).rate
    assert next(iter(more.values())) == pytest.approx(bigger, rel=1e-6)
    assert plan.rate is not None
    assert all(rate >= plan.rate for rate in more.values())


def test_an_addition_without_gain_is_marked() -> None:
    plan = dt.plan(pipeline(stage("a", cpus=4)), "1x(8cpu, 1xgpu:20GB)")
    lines = [line for line in plan.explain().splitlines() if "items/s (" in line]
    assert ["no gain" in line for line in lines] == [False, True, True]
    assert "+100.0 %" in lines[0]


def test_every_kind_of_node_is_offered_once() -> None:
    plan = dt.plan(pipeline(stage("a")), "3x(8cpu) + 2x(16cpu, 1xgpu:20GB)")
    assert [what.split()[0] for what, _ in rates_with_one_more(plan)] == ["node", "CPU", "node", "GPU", "CPU"]


def test_one_more_node_is_shown_with_a_short_size_of_its_memory() -> None:
    plan = dt.plan(pipeline(stage("a", rate=10)), "1x(2cpu, 24684092KB)")
    assert next(what for what, _ in rates_with_one_more(plan)) == "node (2cpu, 23.5GB)"


def test_one_more_of_anything_for_waves_is_never_a_loss() -> None:
    made = pipeline(*(stage(name, cpus=1, gpus=1, workers=2) for name in "abc"))
    plan = dt.plan(made, "1x(8cpu, 2xgpu:20GB)")
    assert len(plan.waves) == 3
    assert plan.rate is not None
    assert all(rate >= plan.rate for _, rate in rates_with_one_more(plan))
    assert "wave 3: throughput" in plan.explain()
    assert unit_table(plan)[0].startswith("wave")


def test_the_report_of_a_stage_has_its_count_its_reason_and_its_seats() -> None:
    plan = video()
    report = plan.explain("caption")
    assert report.startswith(f"caption: {plan.workers['caption']} workers")
    per_node: dict[str, int] = {}
    for seat in plan.seats["caption"]:
        per_node[seat.node] = per_node.get(seat.node, 0) + 1
    for node, count in per_node.items():
        assert re.search(rf"{node}: {count} on cards? ", report)
    assert "3.5 items/s in (given)" in report


@pytest.mark.parametrize(
    ("counted", "why"),
    [
        ({"workers": 2}, "workers=2"),
        ({"workers_per_node": 1}, "workers_per_node=1"),
        ({}, "limits the rate"),
    ],
)
def test_the_reason_for_a_count_names_the_setting(counted: dict[str, int], why: str) -> None:
    made = pipeline(stage("slow", cpus=2, rate=0.1, **counted), stage("fast", rate=50))
    plan = dt.plan(made, "2x(8cpu)")
    assert plan.bottleneck == "slow"
    assert why in plan.explain("slow")
    assert "keep up" in plan.explain("fast")


def test_a_stage_at_its_maximum_does_not_report_scarce_resources() -> None:
    plan = dt.plan(pipeline(stage("slow", rate=1, workers=(1, 2)), stage("fast", rate=9)), "1x(64cpu)")
    assert plan.workers["slow"] == 2
    assert plan.bottleneck == "slow"
    report = plan.explain("slow")
    assert "does not fit" not in report
    assert "are short" not in report


def test_fused_stages_share_one_report() -> None:
    made = pipeline(stage("a", fuse=True), stage("b", fuse=True))
    plan = dt.plan(made, "1x(4cpu)")
    assert plan.explain("a") == plan.explain("b")
    assert "a, b run in the same workers" in plan.explain("b")


def test_an_unknown_stage_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(dt.ConfigError, match="did you mean 'caption'") as caught:
        video().explain("captoin")
    assert caught.value.codes == ("DT032",)
    assert "encode" in caught.value.problems[0].fix_texts[0]


def test_unknown_speeds_are_shown_as_unknown_and_nothing_is_predicted_from_them() -> None:
    plan = dt.plan(pipeline(stage("a", rate=None), stage("b", rate=2)), "1x(4cpu)")
    first, second, *legend = unit_table(plan)[1:]
    assert first.split()[2:4] == ["unknown", "unknown"]
    assert second.split()[2] == "2"
    assert legend == []
    assert headline_lines(plan)[1] == "  rate unknown: no measurement of a"
    report = plan.explain()
    assert "one more" not in report
    assert "other modes" not in report
    assert "speed of one worker is unknown" in plan.explain("a")
    given = dt.plan(pipeline(stage("a", rate=3), stage("b", rate=2)), "1x(4cpu)")
    assert "unknown" not in "\n".join([*unit_table(given), given.explain()])


def test_many_nodes_are_cut_short() -> None:
    plan = dt.plan(pipeline(stage("a")), "30x(2cpu)")
    assert "(30 nodes)" in plan.explain()
    assert "... and 10 more nodes" in plan.explain("a")


def test_the_headline_shows_the_share_of_the_bound() -> None:
    lines = headline_lines(replace(video(), rate=1.0, bound=2.0))
    assert "50.0 % of the bound 2 " in lines[1]
