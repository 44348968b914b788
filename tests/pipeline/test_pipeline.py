from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ConfigError, PipelineError, Problem
from dovetail.pipeline.pipeline import Pipeline
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_function import each
from dovetail.resources.resources import Resources


def step(name: str, *after: str, first: bool = False, **settings: Any) -> Stage:
    """A stage after these; after the one before it if there are none, unless it is `first`."""
    return Stage(name, "m:f", after=list(after) if after or first else None, **settings)


def problems(stages: Any, name: Any = "pipeline") -> tuple[Problem, ...]:
    with pytest.raises(PipelineError) as caught:
        Pipeline(stages, name)
    assert all(problem.fix_texts for problem in caught.value.problems)
    return caught.value.problems


def codes(stages: Any) -> list[str]:
    return [problem.code for problem in problems(stages)]


# ---- the graph


def test_stages_follow_each_other_unless_they_say_otherwise() -> None:
    pipe = Pipeline([step("a"), step("b"), step("c")])
    assert [stage.name for stage in pipe.order] == ["a", "b", "c"]
    assert [pipe.parents(name) for name in "abc"] == [(), ("a",), ("b",)]
    assert [pipe.children(name) for name in "abc"] == [("b",), ("c",), ()]
    assert (pipe.sources(), pipe.leaves()) == (("a",), ("c",))


def test_a_diamond_has_two_parents_and_two_children() -> None:
    pipe = Pipeline([step("a"), step("b", "a"), step("c", "a"), step("d", "c", "b"), step("e", first=True)])
    assert pipe.children("a") == ("b", "c")
    assert pipe.parents("d") == ("c", "b")
    assert (pipe.sources(), pipe.leaves()) == (("a", "e"), ("d", "e"))


def test_the_order_puts_parents_first_and_is_otherwise_as_given() -> None:
    pipe = Pipeline([step("z", "m"), step("b", first=True), step("m", first=True), step("y")])
    assert [stage.name for stage in pipe.order] == ["b", "m", "z", "y"]
    assert [stage.name for stage in pipe.stages] == ["z", "b", "m", "y"]


@st.composite
def graphs(draw: st.DrawFn) -> list[Stage]:
    """A DAG in a shuffled list."""
    count = draw(st.integers(1, 8))
    stages = []
    for number in range(count):
        parents = draw(st.lists(st.integers(0, number - 1), unique=True, max_size=3)) if number else []
        stages.append(Stage(f"s{number}", "m:f", after=[f"s{parent}" for parent in parents]))
    return draw(st.permutations(stages))


@given(graphs())
def test_every_graph_without_cycles_is_ordered(stages: list[Stage]) -> None:
    pipe = Pipeline(stages)
    position = {stage.name: number for number, stage in enumerate(pipe.order)}
    assert sorted(position) == sorted(stage.name for stage in stages)
    for stage in stages:
        assert all(position[parent] < position[stage.name] for parent in pipe.parents(stage.name))
        assert all(stage.name in pipe.parents(child) for child in pipe.children(stage.name))
    given_order = {stage.name: number for number, stage in enumerate(stages)}
    done: set[str] = set()
    for stage in pipe.order:
        ready = [s.name for s in stages if s.name not in done and set(pipe.parents(s.name)) <= done]
        assert stage.name == min(ready, key=given_order.__getitem__)
        done.add(stage.name)


def test_an_unknown_stage_is_an_error_that_names_the_one_that_was_meant() -> None:
    pipe = Pipeline([step("caption")])
    for ask in (pipe.stage, pipe.parents, pipe.children):
        with pytest.raises(PipelineError, match="did you mean 'caption'"):
            ask("captoin")
    assert pipe.stage("caption").name == "caption"


# ---- a pipeline is a value


def test_a_pipeline_is_a_value() -> None:
    pipe = Pipeline(iter([step("a", env={"A": "1"}), step("b")]), "video")
    same = Pipeline([step("a", env={"A": "1"}), step("b")], "video")
    assert pipe == same
    assert hash(pipe) == hash(same)
    assert pipe != Pipeline(same, "audio")
    assert pipe != Pipeline([step("a"), step("b")], "video")
    assert [stage.name for stage in pipe] == ["a", "b"]
    assert len(pipe) == 2
    assert pickle.loads(pickle.dumps(pipe)) == pipe
    assert copy.deepcopy(pipe).order == pipe.order
    with pytest.raises(FrozenInstanceError):
        pipe.name = "x"  # type: ignore[misc]


# ---- what is wrong


@pytest.mark.parametrize("stages", [[], (), iter([])])
def test_no_stages_is_an_error(stages: Any) -> None:
    assert codes(stages) == ["DT030"]


@pytest.mark.parametrize("stages", [None, 5, "read", {"name": "a"}, step("a"), b"x"])
def test_what_is_no_list_of_stages_is_an_error(stages: Any) -> None:
    assert codes(stages) == ["DT030"]


@pytest.mark.parametrize("entry", ["read", None, 5, {"name": "a", "run": "m:f"}])
def test_what_is_no_stage_is_an_error_with_its_number(entry: Any) -> None:
    (problem,) = problems([step("a"), entry, step("b")])
    assert problem.code == "DT034"
    assert problem.message.startswith("stage 2: ")


@pytest.mark.parametrize("name", ["", "a b", 5, None, "x" * 101])
def test_a_bad_name_of_the_pipeline_is_an_error(name: Any) -> None:
    (problem,) = problems([step("a")], name)
    assert problem.message.startswith("pipeline: name=")


def test_two_stages_of_one_name_are_an_error_with_both_numbers() -> None:
    first, second = problems([step("a"), step("b"), step("a"), step("a"), step("a_2")])
    assert (first.code, first.message) == ("DT031", "stages 1 and 3 are both called 'a'")
    assert first.fix_texts == ('name="a_3"',)
    assert (second.message, second.fix_texts) == ("stages 1 and 4 are both called 'a'", ('name="a_4"',))


def test_an_unknown_parent_is_an_error_that_names_the_one_that_was_meant() -> None:
    (problem,) = problems([step("read"), step("decode", "reed"), step("write", "decode")])
    assert problem.code == "DT032"
    assert "'reed', which is no stage (did you mean 'read'?)" in problem.message
    assert problem.evidence == ("stages: read, decode, write",)
    assert problem.fix_texts == ('after=["read"]',)


def test_an_unknown_parent_like_no_other_gets_a_way_out() -> None:
    (first, second) = problems([step("read", "xxxx"), step("decode", "yyyy")])
    assert first.fix_texts == ("after=[]  # for a source",)
    assert second.fix_texts == (
        "omit after  # the stage then follows stage 1",
        "after=[]  # for a source",
    )


def test_a_stage_after_itself_is_an_error() -> None:
    (problem,) = problems([step("a"), step("b", "a", "b")])
    assert (problem.code, problem.fix_texts) == ("DT033", ('after=["a"]',))
    assert problem.message.endswith("b -> b")


def test_a_parent_named_twice_is_an_error() -> None:
    (problem,) = problems([step("a"), step("b", "a", "a")])
    assert (problem.code, problem.fix_texts) == ("DT034", ('after=["a"]',))


def test_a_cycle_is_named_in_order_and_its_fix_breaks_it() -> None:
    stages = [step("x"), step("a", "x", "c"), step("b"), step("c"), step("d")]
    (problem,) = problems(stages)
    assert problem.code == "DT033"
    assert problem.message.endswith(": a -> b -> c -> a")
    assert problem.fix_texts == ('after=["x"]',)
    stages[1] = step("a", "x")
    assert len(Pipeline(stages)) == 5


def test_all_cycles_are_reported_at_once() -> None:
    found = problems([step("a", "b"), step("b", "a"), step("c", "d", "b"), step("d", "c"), step("e")])
    assert [problem.message.rpartition(": ")[2] for problem in found] == ["a -> b -> a", "c -> d -> c"]


@given(graphs(), st.data())
def test_a_graph_with_an_edge_back_has_exactly_the_cycles_it_has(stages: list[Stage], data: st.DataObject) -> None:
    pipe = Pipeline(stages)
    chosen = data.draw(st.sampled_from(stages))
    below, waiting = set(), list(pipe.children(chosen.name))
    while waiting:
        name = waiting.pop()
        below.add(name)
        waiting += pipe.children(name)
    if not below:
        return
    back = data.draw(st.sampled_from(sorted(below)))
    closed = [
        Stage(stage.name, "m:f", after=[*(stage.after or []), *([back] if stage is chosen else [])]) for stage in stages
    ]
    (problem,) = problems(closed)
    ring = problem.message.rpartition(": ")[2].split(" -> ")
    assert ring[0] == ring[-1]
    assert len(set(ring)) == len(ring) - 1
    after = {stage.name: tuple(stage.after or ()) for stage in closed}
    assert all(parent in after[child] for parent, child in pairwise(ring))
    assert chosen.name in ring


def test_a_long_cycle_is_no_trouble() -> None:
    stages = [step("s0", "s1999"), *(step(f"s{number}") for number in range(1, 2000))]
    assert codes(stages) == ["DT033"]


def test_everything_wrong_is_reported_at_once() -> None:
    found = problems(
        [
            step("a", batch_size=0, rate=-1),
            step("b", "nobody"),
            step("b", ranks=0),
            "c",
            step("", retries=-1),
            step("d", "e"),
            step("e", "d"),
        ],
        "",
    )
    assert sorted(problem.code for problem in found) == ["DT031", "DT032", "DT033", *["DT034"] * 7]
    messages = [problem.message for problem in found]
    assert any(message.startswith("stage 'a': batch_size=0 ") for message in messages)
    assert any(message.startswith("stage 5: retries=-1 ") for message in messages)


junk = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.sampled_from(["a", "b", "c", 1])))


@given(st.lists(st.one_of(st.builds(Stage, st.sampled_from(["a", "b", "", None]), junk, after=junk), junk)), junk)
def test_anything_at_all_is_a_pipeline_or_a_pipeline_error(stages: list[Any], name: Any) -> None:
    made: Pipeline | PipelineError
    try:
        made = Pipeline(stages, name)
    except PipelineError as error:
        made = error
    if isinstance(made, Pipeline):
        assert len(made) == len(stages)
    else:
        assert made.exit_code == 2
        assert all(problem.message and problem.fix_texts for problem in made.problems)


def test_a_pipeline_error_is_a_config_error() -> None:
    assert issubclass(PipelineError, ConfigError)


# ---- as plain data


def test_a_pipeline_of_texts_comes_back_from_its_data() -> None:
    pipe = Pipeline(
        [
            step("a", resources=Resources(gpus=0.25, gpu_memory="4GB", labels={"pool": "x"}), workers=(1, 4)),
            step("b", "a", first=True, env={"A": "1"}, timeout="5m", runtime_env={"pip": ["x"]}, recycle=10),
            step("c", first=True, fuse=False, on_error="skip", rate=2.5),
        ],
        "video",
    )
    data = pipe.to_dict()
    assert Pipeline.from_dict(data) == pipe
    assert data["stages"][0] == {
        "name": "a",
        "run": "m:f",
        "resources": {"gpus": 0.25, "gpu_memory": "4GB", "labels": {"pool": "x"}},
        "workers": [1, 4],
    }
    assert data["stages"][2]["after"] == []


def test_functions_are_written_by_the_name_they_are_imported_by() -> None:
    data = Pipeline([Stage("a", copy.deepcopy), Stage("b", functools.partial)]).to_dict()
    assert [entry["run"] for entry in data["stages"]] == ["copy:deepcopy", "functools:partial"]


def test_all_functions_that_a_file_cannot_name_are_errors() -> None:
    def local(items: list[int]) -> list[int]:
        return items

    pipe = Pipeline([Stage("a", local), Stage("b", lambda items: items), Stage("c", each(copy.copy)), step("d")])
    with pytest.raises(PipelineError) as caught:
        pipe.to_dict()
    assert caught.value.codes == ("DT035",) * 3
    assert "@dt.each" in caught.value.problems[2].fix_texts[0]


# --- functions in place of stages


def clean(rows: list[Any]) -> list[Any]:
    return rows


class Score:
    def __call__(self, rows: list[Any]) -> list[Any]:
        return rows


def test_functions_and_classes_are_stages_with_their_names() -> None:
    short = Pipeline(
        [clean, each(clean), Score, functools.partial(clean), "steps:Load.rows", lambda rows: rows, step("last")]
    )
    assert [stage.name for stage in short] == ["clean", "clean_2", "Score", "clean_3", "rows", "lambda", "last"]
    assert Pipeline([clean, Score]) == Pipeline([Stage("clean", clean), Stage("Score", Score)])


def test_a_function_never_takes_the_name_of_a_stage() -> None:
    assert [stage.name for stage in Pipeline([clean, Stage("clean", Score), clean])] == ["clean_2", "clean", "clean_3"]


def test_the_repr_of_a_pipeline_is_one_line() -> None:
    assert repr(Pipeline([clean, Score], name="p")) == "<Pipeline p: clean, Score>"
    many = Pipeline([clean] * 20)
    assert repr(many).endswith("clean_7, clean_8 and 12 more>")


def test_a_notebook_shows_the_stages_and_escapes_texts() -> None:
    run = cast("Any", Score())
    run.__name__ = "<script>"
    shown = Pipeline([clean, Stage("b", run, batch_size=8)])._repr_html_()
    assert "<tr><td>clean</td><td>the source</td><td>clean</td><td>1 CPU</td><td>1</td><td>auto</td></tr>" in shown
    assert "<td>b</td><td>clean</td><td>&lt;script&gt;</td><td>1 CPU</td><td>8</td>" in shown
