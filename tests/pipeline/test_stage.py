from __future__ import annotations

import ast
import copy
import functools
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.documents.fields import WrongValue
from dovetail.errors import Problem, short_repr
from dovetail.pipeline.durations import DURATION_LIMIT_S, parse_duration
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_fields import NAME
from dovetail.pipeline.stage_fields import stage_problems as find_problems
from dovetail.pipeline.stage_function import Each, each, is_async, is_class
from dovetail.resources.resources import Resources

NAN, INF = float("nan"), float("inf")


def work(items: list[int]) -> list[int]:
    return items


async def work_async(items: list[int]) -> list[int]:
    return items


async def stream_async(items: list[int]) -> Any:
    yield items


class Worker:
    def __call__(self, items: list[int]) -> list[int]:
        return items


class AsyncWorker:
    async def __call__(self, items: list[int]) -> list[int]:
        return items


class Child(Worker):
    pass


class NotCallable:
    pass


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def stage_problems(checked: Stage) -> list[tuple[str, Problem]]:
    return find_problems(checked, f"stage {short_repr(checked.name)}")


def stage(**changes: Any) -> Stage:
    return Stage(**{"name": "caption", "run": work, **changes})


# ---- values that make sense


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"name": "a.b-C_9"},
        {"name": "x" * 100},
        {"run": "pkg.module:Class.method"},
        {"run": "module:name"},
        {"run": each(work)},
        {"run": Worker},
        {"run": Worker()},
        {"run": Child},
        {"run": each(Worker)},
        {"run": functools.partial(work)},
        {"run": len},
        {"resources": Resources(gpus=1)},
        {"batch_size": 10_000_000},
        {"workers": 1},
        {"workers": (1, 1)},
        {"workers": [2, 4]},
        {"workers_per_node": 2},
        {"slots": 4, "ranks": 8, "retries": 0},
        {"rate": 1e-9},
        {"rate": 10**12},
        {"returns": 0},
        {"on_error": "skip"},
        {"timeout": 0.5, "setup_timeout": "1h30m"},
        {"timeout": 5},
        {"env": {"A": ""}, "runtime_env": {"pip": ["torch"], "deep": {"a": 1}}},
        {"env": MappingProxyType({"A": "1"})},
        {"after": []},
        {"after": ("a", "b")},
        {"fuse": False, "barrier": True},
        {"recycle": 100},
        {"recycle": "1h"},
    ],
)
def test_sensible_values_have_no_problem(changes: dict[str, Any]) -> None:
    assert stage_problems(stage(**changes)) == []


# ---- values that do not

BAD_VALUES: list[tuple[str, list[Any]]] = [
    ("name", ["", "a b", "a/b", "é", "a+b", "a:b", "x" * 101, "-a", "..", "a\n", 5, None, ["a"]]),
    ("run", ["", "work", "pkg.work", "a:b:c", "a:", ":b", "1a:b", "a b:c", None, 5, NotCallable]),
    ("run", [str, each(5), each("a:b"), each(NotCallable)]),  # type: ignore[arg-type]
    ("resources", [None, {"cpus": 1}, 4, Resources]),
    ("batch_size", [0, -1, 1.5, True, "16", None, NAN, INF, 10**7 + 1, 10**5000, [1]]),
    ("workers", [0, -1, True, "many", "4", None, 1.5, (4, 2), (0, 2), (1,), (1, 2, 3)]),
    ("workers", [("a", "b"), (1, None), (True, 2), 10**7, (1, 10**7), {}]),
    ("workers_per_node", [0, 1.5, True, "2", NAN]),
    ("slots", [0, -1, True, 2.5, 10**9]),
    ("rate", [0, -1, NAN, INF, -INF, True, "3", 1e-10, 1e13, 10**400, 1j, [1], Fraction(-1, 3)]),
    ("returns", [-0.1, NAN, INF, True, "1", 1e10]),
    ("ranks", [0, -1, 1.5, True, None, "2", 10**6]),
    ("retries", [-1, 1.5, True, None, "3", 10**6]),
    ("on_error", ["", "skp", "Fail", None, True, ["fail"]]),
    ("timeout", [0, -1, NAN, INF, True, "", "90", "5x", "-5m", "5 m m", "0s", "9" * 200, [5]]),
    ("setup_timeout", ["soon", "400d", 10**400, {}, "inf"]),
    ("env", ["A=1", {"A": 1}, {"": "1"}, {"A=B": "1"}, {1: "1"}, {"A": "\0"}, {"A": None}, []]),
    ("runtime_env", ["pip", ["pip"], {1: 2}]),
    ("after", ["read", 5, {"a"}, [1], ["a", None], {"a": 1}]),
    ("fuse", [1, None, "yes"]),
    ("barrier", [0, None, "no"]),
    ("recycle", [0, -1, True, 1.5, "10", "soon", [], NAN]),
    *[(item.name, [Unprintable()]) for item in fields(Stage)],
]
BAD = [(field, value) for field, values in BAD_VALUES for value in values]


@pytest.mark.parametrize(("field", "value"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_a_bad_value_is_one_problem_of_its_field_that_names_the_stage(field: str, value: Any) -> None:
    found = stage_problems(stage(**{field: value}))
    assert [where for where, _ in found] == [field]
    (_, problem) = found[0]
    assert problem.code == "DT034"
    assert problem.message.startswith("stage " if field == "name" else "stage 'caption': ")
    assert field in problem.message
    assert problem.fix_texts
    assert len(problem.render()) < 500


@pytest.mark.parametrize(("field", "value"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_the_first_fix_works_when_it_is_pasted(field: str, value: Any) -> None:
    ((_, problem),) = stage_problems(stage(**{field: value}))
    fix = problem.fix_texts[0]
    if not fix.startswith(f"{field}="):
        assert fix.startswith("after=[]  # for a source")
        return
    if field == "resources":
        assert fix == "resources=dt.Resources(cpus=1)"
        return
    text = fix.removeprefix(f"{field}=")
    assert stage_problems(stage(**{field: ast.literal_eval(text)})) == []


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("batch_size", "16", "batch_size=16"),
        ("batch_size", 16.0, "batch_size=16"),
        ("batch_size", 10**9, "batch_size=10000000"),
        ("workers", "4", "workers=4"),
        ("workers", (4, 2), "workers=(2, 4)"),
        ("workers", (0, 2), "workers=(1, 2)"),
        ("rate", "3.5", "rate=3.5"),
        ("rate", -2, "rate=1"),
        ("timeout", "90", 'timeout="90s"'),
        ("recycle", "10", "recycle=10"),
        ("on_error", "skp", 'on_error="skip"'),
        ("on_error", "fial", 'on_error="fail"'),
        ("after", "read", 'after=["read"]'),
        ("name", "my stage!", 'name="my_stage"'),
        ("name", 5, 'name="5"'),
        ("run", "pkg.module.work", 'run="pkg.module:work"'),
        ("run", "work.py:work", 'run="work:work"'),
        ("env", {"A": 1, "B": "x"}, 'env={"A": "1", "B": "x"}'),
    ],
)
def test_the_fix_is_what_was_meant(field: str, value: Any, fix: str) -> None:
    ((_, problem),) = stage_problems(stage(**{field: value}))
    assert problem.fix_texts[0] == fix


def test_workers_and_workers_per_node_exclude_each_other() -> None:
    ((field, problem),) = stage_problems(stage(workers=4, workers_per_node=2))
    assert field == "workers"
    assert "workers=4 together with workers_per_node=2" in problem.message


def test_everything_wrong_is_reported_at_once() -> None:
    found = stage_problems(stage(name="", batch_size=0, rate=NAN, on_error="x", ranks=0, fuse=None, timeout="x"))
    assert {field for field, _ in found} == {"name", "batch_size", "rate", "on_error", "ranks", "fuse", "timeout"}


junk = st.one_of(
    *[st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3)],
    *[st.lists(st.integers() | st.text(max_size=2), max_size=3), st.dictionaries(st.integers(), st.text(), max_size=2)],
    st.sampled_from(["auto", "1h", "fail", "a:b", work, Worker, Resources(), object(), 1j, 10**400, Fraction(1, 3)]),
)


@given(st.dictionaries(st.sampled_from([item.name for item in fields(Stage)]), junk))
def test_a_stage_never_raises_and_neither_do_its_checks(values: dict[str, Any]) -> None:
    for field, problem in stage_problems(stage(**values)):
        assert field in values
        assert problem.fix_texts


@given(st.text(max_size=110))
def test_a_suggested_name_is_a_good_name(name: str) -> None:
    for mistake in NAME.check(name):
        assert isinstance(mistake, WrongValue)
        assert NAME.accepts(mistake.instead[0])


# ---- durations


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        *[(90, 90), (0.5, 0.5), ("90s", 90), ("5m", 300), ("1h", 3600), ("1h30m", 5400), ("2d", 172_800)],
        *[("250ms", 0.25), (" 1.5 h ", 5400), ("1h 1s", 3601), (".5s", 0.5), (DURATION_LIMIT_S, DURATION_LIMIT_S)],
    ],
)
def test_durations_are_seconds(written: float | str, seconds: float) -> None:
    assert parse_duration(written) == seconds
    assert stage(timeout=written).timeout_s == seconds
    assert stage(setup_timeout=written).setup_timeout_s == seconds


def test_recycle_is_batches_or_an_age() -> None:
    assert (stage(recycle=10).recycle_batches, stage(recycle=10).recycle_s) == (10, None)
    assert (stage(recycle="1h").recycle_batches, stage(recycle="1h").recycle_s) == (None, 3600)
    assert (stage().recycle_batches, stage().recycle_s, stage().timeout_s) == (None, None, None)


# ---- a stage is a value


def test_a_stage_cannot_be_changed_from_outside() -> None:
    env, after = {"A": "1"}, ["read"]
    made = stage(env=env, after=after)
    env["A"] = "2"
    after.append("more")
    assert (made.env, made.after) == ({"A": "1"}, ("read",))
    with pytest.raises(FrozenInstanceError):
        made.name = "x"  # type: ignore[misc]


def test_stages_are_equal_and_hash_alike_by_value() -> None:
    one, other = stage(env={"A": "1"}, workers=[1, 2]), stage(env={"A": "1"}, workers=(1, 2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != replace(other, retries=1)
    assert pickle.loads(pickle.dumps(one)) == one
    assert copy.deepcopy(one) == one


def test_only_name_run_and_resources_are_positional() -> None:
    assert Stage("a", work, Resources(cpus=2)).resources.cpus == 2
    with pytest.raises(TypeError):
        Stage("a", work, Resources(), 4)  # type: ignore[call-arg]


def test_numbers_of_other_libraries_become_plain() -> None:
    made = stage(rate=Fraction(7, 2))
    assert (made.rate, type(made.rate)) == (3.5, float)


def test_the_shape_has_the_ranks() -> None:
    made = stage(resources=Resources(gpus=1), ranks=4)
    assert made.shape == Resources(gpus=1).shape(4)


# ---- what is run


def test_each_marks_once_and_calls_through() -> None:
    marked = each(len)
    assert isinstance(marked, Each)
    assert marked("abc") == 3
    assert each(marked) is marked
    assert marked == each(len) != each(work)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        *[(work, False), (work_async, True), (stream_async, True), (Worker, False), (AsyncWorker, True)],
        *[(AsyncWorker(), True), (Worker(), False), ("a:b", False), (len, False)],
        *[(functools.partial(work_async, []), True), (functools.partial(work, []), False)],
    ],
)
def test_async_is_seen_in_functions_classes_and_objects(run: Any, expected: bool) -> None:
    assert is_async(run) is expected
    if not isinstance(run, str):
        assert is_async(each(run)) is expected


def test_classes_are_seen_through_each() -> None:
    assert is_class(Worker)
    assert is_class(each(Worker))
    assert not is_class(Worker())
    assert not is_class(work)
    assert not is_class("pkg:Worker")


@pytest.mark.parametrize("kind", [int, str, float, list])
def test_a_builtin_class_is_called_with_each_item(kind: type) -> None:
    assert stage_problems(stage(run=each(kind))) == []
    assert not is_class(each(kind))


def test_a_class_of_workers_that_lacks_call_is_a_mistake_also_with_each() -> None:
    class Model:
        def __init__(self, path: str = "model.pt") -> None: ...

    class Word:
        def __init__(self, text: str, *, lower: bool = True) -> None: ...

    ((_, problem),) = stage_problems(stage(run=each(Model)))
    assert "has no method __call__" in problem.message
    assert stage_problems(stage(run=each(Word))) == []
    assert not is_class(each(Word))
