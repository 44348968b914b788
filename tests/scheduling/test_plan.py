"""A plan is plain data: JSON both ways, bound to its cluster, and garbage is refused politely."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import dovetail as dt
from scheduling.pipelines import any_clusters, pipeline, pipelines, stage

MODES = ("auto", "streaming", "sequential", "waves")
SPEC = "2x(8cpu, 32GB, 2xL40S:48GB)"


@cache
def plan() -> dt.Plan:
    made = pipeline(
        stage("read", rate=4, returns=2),
        stage("caption", cpus=1, gpus=0.5, rate=2, workers=(1, 3)),
        stage("train", cpus=1, gpus=1, ranks=2, rate=9),
    )
    return dt.plan(made, SPEC)


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(pipelines(), any_clusters(), st.sampled_from(MODES))
def test_a_plan_comes_back_from_its_json(made: dt.Pipeline, cluster: dt.Cluster, mode: str) -> None:
    try:
        before = dt.plan(made, cluster, mode)
    except dt.InfeasibleError:
        assume(False)
        raise
    after = dt.Plan.from_json(before.to_json())
    assert after.to_dict() == before.to_dict()
    assert after == before
    assert after.explain() == before.explain()


def test_the_json_has_what_other_tools_need() -> None:
    data = json.loads(plan().to_json())
    assert data["version"] == 2
    assert data["workers"] == {"read": 4, "caption": 3, "train": 1} | {"read": data["workers"]["read"]}
    assert data["waves"] == [["read", "caption", "train"]]
    assert data["rate"] <= data["bound"]
    assert {unit["name"]: unit["rate_source"] for unit in data["units"]} == dict.fromkeys(data["workers"], "given")
    assert data["notes"][0] == data["reason"]
    assert len(data["seats"]["train"]) == 2 * data["workers"]["train"]


def test_a_plan_may_be_used_on_the_cluster_it_was_made_for() -> None:
    plan().require_cluster(dt.Cluster.parse(SPEC))


@pytest.mark.parametrize(
    ("spec", "difference"),
    [
        ("3x(8cpu, 32GB, 2xL40S:48GB)", "new: node-2 (8cpu, 32GB, 2xL40S"),
        ("1x(8cpu, 32GB, 2xL40S:48GB)", "gone: node-1"),
        ("1x(8cpu, 32GB, 2xL40S:48GB) + 1x(4cpu, 32GB, 2xL40S:48GB)", "changed: node-1 (8cpu"),
        ("2x(8cpu, keep 1cpu, 32GB, 2xL40S:48GB)", "keep 1cpu"),
        ("2x(8cpu, 32GB, 2xL40S:48GB){pool=red}", "pool=red"),
    ],
)
def test_a_plan_is_refused_on_another_cluster_with_the_difference(spec: str, difference: str) -> None:
    with pytest.raises(dt.ConfigError) as caught:
        plan().require_cluster(dt.Cluster.parse(spec))
    assert caught.value.codes == ("DT037",)
    assert any(difference in line for line in caught.value.problems[0].evidence)


def test_many_differences_are_cut_short() -> None:
    with pytest.raises(dt.ConfigError) as caught:
        plan().require_cluster(dt.Cluster.parse("40x(8cpu, 32GB, 2xL40S:48GB)"))
    assert caught.value.problems[0].evidence[-1] == "and 26 more"


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", "1", '"plan"', "{", '{"version": 2}', "[" * 100_000])
def test_what_is_not_a_plan_is_refused_with_what_would_make_one(text: str) -> None:
    with pytest.raises(dt.ConfigError) as caught:
        dt.Plan.from_json(text)
    assert caught.value.codes == ("DT038",)
    assert "dovetail plan" in caught.value.problems[0].fix_texts[0]


@given(st.data())
def test_damaged_text_is_a_plan_or_a_dovetail_error(data: st.DataObject) -> None:
    text = plan().to_json()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 20)))
    put = data.draw(st.sampled_from(("", "null", "-1", "[]", "{}", '"', "}", "1e999", "NaN", "\0", "9" * 5000)))
    try:
        found = dt.Plan.from_json(text[:start] + put + text[end:])
    except dt.DovetailError:
        return
    assert isinstance(found, dt.Plan)


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, inner in items for path in paths(inner, (*here, key)))]


GARBAGE: tuple[Any, ...] = (None, True, -1, 0, 1.5, 10**30, float("nan"), "x", "", [], [None], {}, {"x": 1}, [[]])


def damaged(path: tuple[Any, ...], value: Any) -> str:
    data = copy.deepcopy(plan().to_dict())
    if not path:
        return json.dumps(value)
    holder: Any = data
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return json.dumps(data)


@settings(max_examples=max(60, settings().max_examples))
@given(st.sampled_from(paths(plan().to_dict())), st.sampled_from(GARBAGE))
def test_a_wrong_value_anywhere_is_a_dovetail_error_or_a_plan_with_a_report(path: tuple[Any, ...], value: Any) -> None:
    try:
        found = dt.Plan.from_json(damaged(path, value))
        assert found.explain()
        for name in found.workers:
            assert found.explain(name)
    except dt.DovetailError:
        return


def test_a_notebook_shows_a_table_and_escapes_names() -> None:
    shown = plan()._repr_html_()
    assert "<table>" in shown
    assert shown.count("<tr>") == 4
    assert "<td>caption</td><td>3</td>" in shown


def test_the_repr_of_a_plan_is_one_line() -> None:
    shown = repr(plan())
    assert shown.startswith("<Plan ")
    assert "caption 3 workers" in shown
    assert re.search(r"; [\d.]+k?/s predicted, limited by \w+>$", shown)
    assert repr(replace(plan(), rate=None, bound=None, bottleneck=None)).endswith("; rate unknown>")
    units = plan().units * 3
    assert f"{sum(unit.workers for unit in units)} workers of {len(units)} stages" in repr(replace(plan(), units=units))
