from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.pipeline.pipeline import Pipeline
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_function import each
from dovetail.pipeline.units import Unit, fuse_stages, multiplicity, rate_of_unit
from dovetail.resources.resources import Resources


def work(items: list[int]) -> list[int]:
    return items


async def work_async(items: list[int]) -> list[int]:
    return items


class Worker:
    def __call__(self, items: list[int]) -> list[int]:
        return items


def step(name: str, *after: str, **settings: Any) -> Stage:
    return Stage(name, settings.pop("run", work), after=list(after) or None, **settings)


def names(*stages: Stage) -> list[str]:
    return [unit.name for unit in fuse_stages(Pipeline(stages))]


def both(**settings: Any) -> list[str]:
    """The units of two stages with the same settings."""
    return names(step("a", **settings), step("b", **settings))


def later(**settings: Any) -> list[str]:
    """The units of two stages of which only the later has these settings."""
    return names(step("a"), step("b", **settings))


# ---- stages that share workers


def test_neighbours_that_are_alike_share_workers() -> None:
    assert names(step("a"), step("b"), step("c"), step("d")) == ["a+b+c+d"]


@pytest.mark.parametrize(
    "settings",
    [
        {"resources": Resources(cpus=2)},
        {"resources": Resources(memory="1GB")},
        {"batch_size": 2},
        {"env": {"A": "1"}},
        {"runtime_env": {"pip": ["x"]}},
        {"timeout": 5},
        {"setup_timeout": 5},
        {"on_error": "skip"},
        {"slots": 2},
        {"recycle": 10},
        {"recycle": "1h"},
        {"retries": 0},
        {"workers": 2},
        {"workers_per_node": 1},
        {"ranks": 2},
        {"fuse": False},
        {"barrier": True},
        {"run": work_async},
    ],
)
def test_one_difference_keeps_neighbours_apart(settings: dict[str, Any]) -> None:
    assert later(**settings) == ["a", "b"]
    assert names(step("a", **settings), step("b")) == ["a", "b"]
    assert names(step("a"), step("b", **settings), step("c")) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "settings",
    [
        {"resources": Resources(gpus=1)},
        {"resources": Resources(memory="1GB", nvdecs=1)},
        {"env": {"A": "1"}, "runtime_env": {"pip": ["x"]}, "timeout": 5, "slots": 2, "recycle": "1h", "retries": 1},
        {"run": Worker},
        {"run": "m:f"},
        {"run": each(work), "batch_size": 8},
        {"returns": 1, "batch_size": 8},
        {"rate": 5},
    ],
)
def test_the_same_settings_keep_them_together(settings: dict[str, Any]) -> None:
    assert both(**settings) == ["a+b"]


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 2},
        {"workers": (1, 2)},
        {"workers_per_node": 1},
        {"ranks": 2},
        {"fuse": False},
        {"barrier": True},
        {"run": work_async},
        {"run": each(work_async)},
        {"batch_size": 8},
        {"batch_size": 8, "returns": 0.5},
    ],
)
def test_some_settings_keep_even_equals_apart(settings: dict[str, Any]) -> None:
    assert both(**settings) == ["a", "b"]


@pytest.mark.parametrize("run", [Worker, each(Worker), "m:f"])
@pytest.mark.parametrize("needs", [{"gpus": 1}, {"gpu_memory": "1GB"}, {"nvdecs": 1}, {"nvencs": 1}, {"memory": "1GB"}])
def test_what_may_hold_a_model_has_workers_of_its_own(run: Any, needs: dict[str, Any]) -> None:
    resources = Resources(**needs)
    assert both(run=run, resources=resources) == ["a", "b"]
    assert names(step("a", resources=resources), step("b", run=run, resources=resources)) == ["a", "b"]
    assert names(step("a", run=run, resources=resources), step("b", resources=resources)) == ["a", "b"]


def test_settings_that_mean_the_same_are_equal() -> None:
    assert names(step("a", timeout=60, env={}), step("b", timeout="1m")) == ["a+b"]
    assert names(step("a", resources=Resources(memory="0B")), step("b")) == ["a+b"]


def test_no_function_gets_partial_batches_because_of_fusion() -> None:
    whole = {"batch_size": 8, "returns": 1}
    assert names(step("a", **whole), step("b", batch_size=8)) == ["a+b"]
    assert names(step("a", batch_size=8), step("b", **whole)) == ["a", "b"]
    # counts change at b: c still gets whole batches of its own, but would not within a+b
    assert names(step("a", **whole), step("b", batch_size=8), step("c", **whole), step("d", **whole)) == ["a+b", "c+d"]
    assert names(step("a", **whole), step("b", batch_size=8, run=each(work)), step("c", **whole)) == ["a+b", "c"]
    assert names(step("a", returns=3), step("b")) == ["a+b"]


def test_stages_that_branch_or_join_have_workers_of_their_own() -> None:
    assert names(step("a"), step("b", "a"), step("c", "a"), step("d", "b", "c"), step("e")) == ["a", "b", "c", "d+e"]


def test_units_come_with_their_parents_before_them() -> None:
    pipe = Pipeline(
        [step("a"), step("b"), step("x", "b", batch_size=4), step("c", "b"), step("d"), step("e", "x", "d")]
    )
    found = {unit.name: unit.parents for unit in fuse_stages(pipe)}
    assert found == {"a+b": (), "x": ("a+b",), "c+d": ("a+b",), "e": ("x", "c+d")}


def test_a_unit_says_what_its_workers_need() -> None:
    resources = Resources(cpus=2)
    pipe = Pipeline(
        [step("a", resources=resources), step("b", resources=resources), step("c", workers=(2, 4), ranks=2)]
    )
    assert fuse_stages(pipe) == (
        Unit("a+b", ("a", "b"), resources.shape(), "auto", None, 1, (), barrier=False),
        Unit("c", ("c",), Resources().shape(2), (2, 4), None, 1, ("a+b",), barrier=False),
    )
    (barrier,) = fuse_stages(Pipeline([step("d", barrier=True, workers_per_node=2, batch_size=4)]))
    assert (barrier.barrier, barrier.workers_per_node, barrier.batch_size) == (True, 2, 4)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    stages = []
    for number in range(draw(st.integers(1, 8))):
        parents = draw(st.lists(st.integers(0, number - 1), unique=True, max_size=2)) if number else []
        settings: dict[str, Any] = draw(
            st.fixed_dictionaries(
                {},
                optional={"batch_size": st.sampled_from([1, 8]), "returns": st.sampled_from([0.5, 1, 3])}
                | {"fuse": st.booleans(), "run": st.sampled_from([work, work_async, Worker, each(work)])},
            )
        )
        stages.append(Stage(f"s{number}", settings.pop("run", work), after=[f"s{p}" for p in parents], **settings))
    return Pipeline(draw(st.permutations(stages)))


@given(pipelines())
def test_every_stage_is_in_one_unit_and_units_are_linear(pipe: Pipeline) -> None:
    units = fuse_stages(pipe)
    assert sorted(name for unit in units for name in unit.stages) == sorted(stage.name for stage in pipe)
    before: set[str] = set()
    for unit in units:
        assert set(unit.parents) <= before
        assert len(set(unit.parents)) == len(unit.parents)
        before.add(unit.name)
        assert unit.name == "+".join(unit.stages)
        for earlier, following in pairwise(unit.stages):
            assert pipe.children(earlier) == (following,)
            assert pipe.parents(following) == (earlier,)
            assert pipe.stage(earlier).batch_size == pipe.stage(following).batch_size


# ---- how fast


def test_the_rate_of_a_unit_adds_up_the_seconds_of_its_stages() -> None:
    assert rate_of_unit(["a"], {"a": 4.0}, {}) == 4
    assert rate_of_unit(["a", "b"], {"a": 4.0, "b": 4.0}, {}) == 2
    # an item takes 1/10 s in a, and each of its 5 children 1/50 s in b
    assert rate_of_unit(["a", "b"], {"a": 10.0, "b": 50.0}, {"a": 5.0, "b": 9.0}) == pytest.approx(5)
    # what a drops costs nothing in b; k is 1, 0.5, 1
    rate = rate_of_unit(["a", "b", "c"], {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 0.5, "b": 2.0})
    assert rate == pytest.approx(1 / 2.5)


def test_items_per_source_item_multiply_along_and_add_up_where_paths_meet() -> None:
    pipe = Pipeline([step("a"), step("b", "a"), step("c", "a"), step("d", "b", "c"), step("e")])
    found = multiplicity(pipe, {"a": 2.0, "b": 0.5, "c": 3.0, "d": 10.0})
    assert found == {"a": 1, "b": 2, "c": 2, "d": 7, "e": 70}
    assert multiplicity(pipe, {}) == {"a": 1, "b": 1, "c": 1, "d": 2, "e": 2}
    assert multiplicity(pipe, {"a": 0.0})["e"] == 0


@given(pipelines(), st.data())
def test_a_unit_is_as_fast_as_its_share_of_the_pipeline_says(pipe: Pipeline, data: st.DataObject) -> None:
    positive = st.floats(0.01, 100)
    rates = {stage.name: data.draw(positive) for stage in pipe}
    returns = {stage.name: data.draw(positive) for stage in pipe}
    items = multiplicity(pipe, returns)
    for unit in fuse_stages(pipe):
        seconds = sum(items[name] / rates[name] for name in unit.stages)
        expected = items[unit.stages[0]] / seconds
        assert rate_of_unit(unit.stages, rates, returns) == pytest.approx(expected)
