"""Bad input of `submit`, `submit_many`, lists, purges and `dt.Queue`: all problems at once, with fixes that work."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from dovetail.jobs.submit_options import FUNCTION_OPTIONS, JOB_OPTIONS, SUBMIT_OPTIONS
from jobs import queue_functions
from jobs.queue_functions import add, scale, train, undeclared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dovetail.documents.fields import Field

HUGE = "x" * 10_000_000


def short(value: object) -> str:
    """The id of a parameter: the same in every process."""
    return ascii(getattr(value, "__name__", value))[:40]


@pytest.fixture(scope="module")
def queue() -> Iterator[dt.Queue]:
    with dt.Queue("memory:") as queue:
        yield queue


def refused(act: Callable[[], object]) -> dt.ConfigError:
    with pytest.raises(dt.ConfigError) as caught:
        act()
    for problem in caught.value.problems:
        assert problem.fixes, problem
        assert len(problem.render()) < 2_000
    return caught.value


# --- options

WRONG: dict[str, list[Any]] = {
    "resources": [5, "1gpu", {"cpu": 1}, {"cpus": -1}, {"gpus": 1.5}, {"memory": 4}],
    "queue": ["", "a b", "a\nb", 5, HUGE, "-x"],
    "priority": ["urgent", 1.5, True, 10**7, -(10**30)],
    "timeout": [0, -1, "soon", "10y", 10**30, float("nan"), float("inf"), True],
    "retries": [
        -1,
        101,
        1.5,
        "many",
        True,
        {"eror": 1},
        {"error": -1},
        {"error": 10**9},
        {"backoff": "soon"},
        dt.Retries(-1),
        dt.Retries(backoff_ms=-5),
    ],
    "key": ["", 5, "a\nb", HUGE],
    "after": ["not an id", 5, [5], ["0123abc"] * 2 + [None], [f"{number}" for number in range(1001)]],
    "if_dependency_fails": ["ignore", True],
    "at": ["tomorrow", 1e30, -1, True, float("nan"), 1_900_000_000_000, [1], HUGE],
    "delay": [-1, "later", 10**30, float("nan"), True],
    "cron": ["* * *", 5, "61 * * * *", "0 0 30 2 *", HUGE],
    "timezone": ["Europe/Berlni", 5, HUGE],
    "isolation": ["container", True],
    "preemptible": ["yes", 1, 0],
    "ranks": [0, -1, 1.5, 1001, "many", True],
    "preemption_grace": [0, -1, "soon", 10**30, True],
}


def test_every_option_is_tested() -> None:
    assert sorted(WRONG) == sorted(SUBMIT_OPTIONS.names)
    of_jobs = tuple(name for name in JOB_OPTIONS.names if name not in FUNCTION_OPTIONS)
    assert SUBMIT_OPTIONS.names[: len(of_jobs)] == of_jobs


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values], ids=str
)
def test_a_wrong_option_is_refused_by_its_name(queue: dt.Queue, name: str, value: Any) -> None:
    options = {"cron": "@daily"} if name == "timezone" else {}
    error = refused(lambda: queue.submit(add, 1, **{**options, name: value}))
    assert {problem.message.startswith(name) for problem in error.problems} == {True}
    assert set(error.codes) == {"DT610" if name in ("cron", "timezone") else "DT602"}
    assert len(queue.list()) == 0


@pytest.mark.parametrize("field", SUBMIT_OPTIONS.fields, ids=lambda field: field.name)
def test_the_example_of_every_option_is_valid(field: Field) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert field.type.accepts(field.type.example)
    validator = jsonschema.Draft202012Validator(field.schema())
    assert validator.is_valid(field.type.example)
    if field.name != "after":
        assert not any(validator.is_valid(value) for value in WRONG[field.name] if value is True)


def test_all_problems_are_reported_at_once(queue: dt.Queue) -> None:
    options: dict[str, Any] = {"priority": "hihg", "timeout": "soon", "cron": "* * *", "after": ["0"], "kwargs": [1]}
    error = refused(lambda: queue.submit("os:system", {1}, **options))
    assert sorted(error.codes) == ["DT602", "DT602", "DT602", "DT602", "DT603", "DT605", "DT610"]
    text = str(error)
    for part in ('priority="high"', "kwargs=[1]", "args[0]", "after and cron exclude each other", "os:system"):
        assert part in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"at": 2e9, "delay": 5}, "at and delay exclude each other"),
        ({"timezone": "UTC"}, "requires cron"),
        ({"cron": "@daily", "delay": 5}, "delay and cron exclude each other"),
        ({"cron": "@daily", "if_dependency_fails": "block"}, "if_dependency_fails and cron exclude each other"),
    ],
)
def test_options_that_exclude_each_other(queue: dt.Queue, options: dict[str, Any], message: str) -> None:
    assert message in str(refused(lambda: queue.submit(add, 1, **options)))


def test_none_is_an_option_that_is_not_given(queue: dt.Queue) -> None:
    names = [name for name in SUBMIT_OPTIONS.names if name != "timeout"]
    job = queue.submit(train, {}, **dict.fromkeys(names))
    assert (job.record().spec.queue, job.record().spec.timeout_ms) == ("gpu", 3_600_000)
    assert "ambiguous" in str(refused(lambda: queue.submit(train, {}, timeout=None)))
    job.cancel()
    queue.purge(state="cancelled")


# --- functions and arguments


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("os:system", "os:system is not declared as a job"),
        ("jobs.queue_functions:undeclared", "is not declared as a job"),
        ("jobs.queue_functions:trian", "did you mean 'train'?"),
        ("pkg.module.name", 'submit "pkg.module:name"'),
        ("no_such_file.py:train", "there is no file no_such_file.py"),
        ("", "is not a reference to a function"),
        ("a:b:c", "is not a reference to a function"),
        ("a:b.c", "is not a reference to a function"),
        ("/x/\n.py:a", "is not a reference to a function"),
        (HUGE, "is not a reference to a function"),
        (undeclared, "write @dt.job above def undeclared"),
        (lambda: 1, "a lambda has no name"),
        (print, "is written in C"),
        (queue_functions.Model().fit, "is a method"),
        (None, "None is not a function"),
    ],
    ids=short,
)
def test_a_function_that_no_worker_would_run_is_refused(queue: dt.Queue, function: Any, message: str) -> None:
    error = refused(lambda: queue.submit(function))
    assert error.codes == ("DT603",)
    assert message in str(error)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "missing a required argument: 'a'"),
        ((), {}, "fix  a=VALUE"),
        ((1, 2, 3), {}, "too many positional arguments"),
        ((1,), {"a": 2}, "multiple values for argument 'a'"),
        ((1,), {"c": 2}, "unexpected keyword argument 'c'"),
        ((1,), {"priorty": "high"}, "fix  priority='high'"),
        ((1,), {"kwargs": {"b": 1}, "b": 2}, "'b' is given twice"),
    ],
)
def test_arguments_are_checked_against_the_signature(
    queue: dt.Queue, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    error = refused(lambda: queue.submit(add, *args, **kwargs))
    assert (error.codes, message in str(error)) == (("DT604",), True)


def test_all_missing_arguments_are_named(queue: dt.Queue) -> None:
    error = str(refused(lambda: queue.submit(scale)))
    assert "missing required arguments: 'value', 'factor'\n" in error
    assert "fix  value=VALUE\n  fix  factor=VALUE" in error


def test_an_unknown_function_takes_any_arguments(queue: dt.Queue) -> None:
    job = queue.submit("not_installed.here:f", 1, anything={"x": [1]})
    assert job.record().spec.payload == b'[[1],{"anything":{"x":[1]}}]'
    job.cancel()
    queue.purge(state="cancelled")


@pytest.mark.parametrize(
    ("items", "options", "message"),
    [
        (5, {}, "needs a list of items"),
        ("text", {}, "needs a list of items"),
        ({"a": 1}, {}, "needs a list of items"),
        ([(1, 2, 3)], {}, "too many positional arguments"),
        ([{1}], {}, "args[0] is of type set"),
        ([1], {"key": "x"}, "keys=[...]"),
        ([1], {"cron": "@daily"}, "has no cron"),
        ([1], {"kwargs": 5}, "kwargs=5 is not a mapping"),
        ([1], {"priority": "hihg", "timeout": "soon"}, "timeout='soon'"),
        ([1], {"priorty": "high"}, "unexpected keyword argument 'priorty'"),
    ],
)
def test_wrong_items_are_refused(queue: dt.Queue, items: Any, options: dict[str, Any], message: str) -> None:
    assert message in str(refused(lambda: queue.submit_many(add, items, **options)))
    assert len(queue.list()) == 0


# --- lists, purges, the queue itself


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda queue: queue.list(state="ded"), "did you mean 'dead'?"),
        (lambda queue: queue.list(state=5), "state=5 is not a state"),
        (lambda queue: queue.list(limit=0), "limit=0 is not a whole number from 1 to 10000"),
        (lambda queue: queue.list(limit=True), "limit=True"),
        (lambda queue: queue.list(before="no id"), "before='no id' is not the id of a job"),
        (lambda queue: queue.list(queue=5), "queue=5"),
        (lambda queue: queue.list(schedule=5), "schedule=5"),
        (lambda queue: queue.list(function="pkg.name"), 'submit "pkg:name"'),
        (lambda queue: queue.purge(), "needs at least one of its arguments"),
        (lambda queue: queue.purge(older_than="old"), "older_than='old'"),
        (lambda queue: queue.purge(older_than=-5), "older_than=-5"),
        (lambda queue: queue.purge(keep_bytes=5), "keep_bytes=5 has no unit"),
        (lambda queue: queue.pause("a b"), "queue='a b'"),
    ],
)
def test_wrong_filters_are_refused(queue: dt.Queue, act: Callable[[dt.Queue], object], message: str) -> None:
    assert message in str(refused(lambda: act(queue)))


def test_all_wrong_options_of_a_queue_are_reported() -> None:
    error = refused(
        lambda: dt.Queue(
            "sqlit:///jobs.db",
            allow_pickle=1,  # type: ignore[arg-type]
            files=5,  # type: ignore[arg-type]
            result_ttl="long",
            result_bytes="5",
            queue="a b",
            if_no_worker="no",
        )
    )
    for name in (
        "sqlite:///jobs.db",
        "allow_pickle=1",
        "files=5",
        "result_ttl='long'",
        "result_bytes='5'",
        "queue='a b'",
    ):
        assert name in str(error)


# --- any input at all

anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=5),
    st.lists(st.integers() | st.text(max_size=5), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


@given(st.dictionaries(st.sampled_from(SUBMIT_OPTIONS.names), anything, max_size=4), anything)
def test_any_options_are_accepted_or_refused_with_fixes(options: dict[str, Any], argument: object) -> None:
    with dt.Queue("memory:") as queue:
        found: Any = None
        problems: Iterable[dt.Problem] = ()
        try:
            found = queue.submit(add, argument, **options)
        except dt.ConfigError as error:
            problems = error.problems
        assert (found is None) == bool(problems)
        for problem in problems:
            assert problem.fixes
            assert re.fullmatch("DT6(0[245]|1[01])", problem.code)


@given(anything | st.text())
def test_any_function_is_accepted_or_refused_with_fixes(function: Any) -> None:
    with dt.Queue("memory:") as queue, pytest.raises(dt.ConfigError):
        queue.submit(function)
