"""What does somebody meet who uses `dt.udf` for the first time? Mistakes, each told with a fix that works."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import io
import math
import sys
from collections.abc import Coroutine  # noqa: TC003 - looked up by the UDF
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from dovetail.backfill.arguments import parse_arguments, validate_arguments
from dovetail.backfill.udf import load_udf, udf
from dovetail.backfill.udf_caller import UdfCaller
from dovetail.backfill.value_conversion import ValueConverter
from dovetail.backfill.worker_stage import plan_workers
from dovetail.errors import ConfigError, InfeasibleError
from dovetail.pipeline.error_policy import ErrorPolicy, Retry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
STRUCT = pa.struct([("a", pa.int32()), ("b", pa.string())])


class Pair(NamedTuple):
    a: int
    b: str


class Swapped(NamedTuple):
    b: str
    a: int


@dataclasses.dataclass
class Made:
    a: int
    b: str


def converted(value: Any, kind: Any) -> tuple[Any, str]:
    """What is stored of it beside a value that is NULL, and why it is not."""
    (array,), wrong = ValueConverter([kind], [""]).values([None, value])
    return array.to_pylist()[1], "".join(f"{type(error).__name__}: {error}" for error in wrong.values())


# --- values that would be others in the table


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (0.5, pa.int64(), "ValueError: returned 0.5, a float, which does not fit int64"),
        (np.float64(1.9), pa.int32(), "ValueError: returned np.float64(1.9), a float64, which does not fit int32"),
        (np.array(1.9), pa.int32(), "does not fit int32"),
        (decimal.Decimal("1.5"), pa.int8(), "a Decimal, which does not fit int8"),
        (1.9, pa.timestamp("us"), "does not fit timestamp[us]"),
        (1.9, pa.dictionary(pa.int8(), pa.int32()), "a float, which does not fit"),
        (math.nan, pa.int64(), "ValueError: returned nan of type float, which does not fit int64"),
        ([1.9], pa.list_(pa.int32()), "ValueError: returned [1.9]: 1.9, a float, does not fit int32"),
        ([1, 2.5], pa.list_(pa.int32()), "2.5, a float, does not fit int32"),
        (np.array([1.9, 2]), pa.list_(pa.int32()), "does not fit int32"),
        ([[1], [1.5]], pa.list_(pa.list_(pa.int8())), "1.5, a float, does not fit int8"),
        ({"a": 1.9}, STRUCT, "ValueError: returned {'a': 1.9}: 1.9, a float, does not fit int32"),
        (Pair(1.9, "x"), STRUCT, "1.9, a float, does not fit int32"),  # type: ignore[arg-type]
        ([{"a": 1.9}], pa.list_(STRUCT), "1.9, a float, does not fit int32"),
        ({"k": 1.9}, pa.map_(pa.string(), pa.int32()), "1.9, a float, does not fit int32"),
    ],
)
def test_a_number_that_is_not_whole_is_no_value_of_a_whole_type(value: Any, kind: Any, said: str) -> None:
    found, why = converted(value, kind)
    assert found is None
    assert said in why


@pytest.mark.parametrize(
    ("value", "kind", "stored"),
    [
        (2.0, pa.int64(), 2),
        (np.float32(3), pa.int8(), 3),
        (np.int64(5), pa.int64(), 5),
        ([1, 2.0, None], pa.list_(pa.int32()), [1, 2, None]),
        (np.array([1.0, 2.0]), pa.list_(pa.int32()), [1, 2]),
        (np.array([1, 2]), pa.list_(pa.int32()), [1, 2]),
        (np.array([1.5, 2]), pa.list_(pa.float32()), [1.5, 2]),
        (1.5, pa.float32(), 1.5),
        ({"a": 2.0}, STRUCT, {"a": 2, "b": None}),
        ((1, "x"), STRUCT, {"a": 1, "b": "x"}),
        (Pair(1, "x"), STRUCT, {"a": 1, "b": "x"}),
        (Swapped("x", 1), STRUCT, {"a": 1, "b": "x"}),
        (Made(1, "x"), STRUCT, {"a": 1, "b": "x"}),
        (datetime.date(2026, 1, 2), pa.date32(), datetime.date(2026, 1, 2)),
        ({"k": 1}, pa.map_(pa.string(), pa.int32()), [("k", 1)]),
    ],
)
def test_what_is_the_same_afterwards_is_stored(value: Any, kind: Any, stored: Any) -> None:
    assert converted(value, kind) == (stored, "")


def test_functions_of_arrays_that_give_lists_do_not_lose_anything_either() -> None:
    converter = ValueConverter([pa.int64()], [""])
    assert converter.arrays([1, 2.0], 2)[0].to_pylist() == [1, 2]
    with pytest.raises(ValueError, match=r"returned 1.9, a float, which does not fit int64"):
        converter.arrays([1, 1.9], 2)


def test_records_of_different_forms_stand_beside_each_other() -> None:
    rows = [{"a": 1}, (2, "x"), Made(3, "y"), {"a": 1.5}]
    (array,), wrong = ValueConverter([STRUCT], [""]).values(rows)
    assert [row and row["a"] for row in array.to_pylist()] == [1, 2, 3, None]
    assert [*wrong] == [3]


@pytest.mark.parametrize("value", [{"a": 1, "bb": "x"}, {"bb": "x"}])
def test_a_field_that_a_struct_does_not_have_is_told(value: Any) -> None:
    found, why = converted(value, STRUCT)
    assert found is None
    assert "ValueError" in why
    assert "unknown field 'bb' in struct<a: int32, b: string> (did you mean 'b'?)" in why


def test_a_column_that_a_function_does_not_give_is_told() -> None:
    converter = ValueConverter([pa.int64(), pa.string()], ["count", "word"])
    arrays, wrong = converter.values([{"count": 1, "wrod": "x"}, {"count": 2}, Pair(3, "y"), (4.5, "z")])
    assert [array.to_pylist() for array in arrays] == [[None, 2, 3, None], [None, None, "y", None]]
    assert "unknown field 'wrod' among count, word (did you mean 'word'?)" in str(wrong[0])
    assert str(wrong[3]) == "returned 4.5, a float, for count, which does not fit int64"
    for batch in ({"count": [1], "wrod": ["x"]}, pa.record_batch({"count": [1], "wrod": ["x"]})):
        with pytest.raises(ValueError, match="did you mean 'word'"):
            converter.arrays(batch, 1)
    by_place = converter.arrays(pa.record_batch({"x": [1], "y": ["z"]}), 1)
    assert [array.to_pylist() for array in by_place] == [[1], ["z"]]


class Fragile(int):
    def __ne__(self, other: object) -> bool:
        raise AssertionError("a value was looked at")


def test_whole_numbers_are_looked_at_by_their_types_alone() -> None:
    rows: list[Any] = [Fragile(n) for n in range(5)]
    for values, kind in ((rows, pa.int64()), ([rows], pa.list_(pa.int64())), ([{"a": rows[3]}], STRUCT)):
        (array,), wrong = ValueConverter([kind], [""]).values(values)
        assert (len(array), wrong) == (len(values), {})


def halves(n: int) -> int:
    return n / 2  # type: ignore[return-value]


def halves_of_arrays(n: pa.Array) -> list[int]:
    return [value.as_py() / 2 for value in n]


@pytest.mark.parametrize("fn", [halves, halves_of_arrays])
def test_a_value_that_does_not_fit_is_told_without_frames_of_ours(fn: Any) -> None:
    made = udf(fn)
    caller = UdfCaller(made, [pa.int64()], ErrorPolicy("skip"))
    found = caller.run(pa.record_batch({"n": range(4)}), math.inf, lambda _: None)
    caller.teardown()
    assert found.arrays[0].to_pylist() == [0, None, 1, None]
    for failure in found.failures:
        assert failure.traceback.strip() == f"ValueError: {failure.message}"


# --- functions that give no value of a row


def counting(text: str) -> list[int]:  # type: ignore[misc]
    yield 1


def counting_unsaid(text):  # type: ignore[no-untyped-def]
    yield 1


async def counting_async(text: str) -> Iterator[int]:  # type: ignore[misc]
    yield 1


class Counting:
    def __call__(self, text: str) -> Iterator[int]:
        yield 1


class Uncalled:
    def method(self, text: str) -> int:
        return 1


class SetUp:
    def setup(self, model: str, device: str) -> None: ...

    def __call__(self, text: str) -> int:
        return 1


class SetUpByKeyword(SetUp):
    def setup(self, *, model: str) -> None: ...  # type: ignore[override]


class SetUpWithDefault(SetUp):
    def setup(self, worker: Any, model: str = "small") -> None: ...  # type: ignore[override]


def later(text: str) -> Coroutine[Any, Any, int]:
    async def found() -> int:
        return 1

    return found()


def named(**text: str) -> str:
    return ""


def nothing() -> str:
    return ""


@pytest.mark.parametrize(
    ("fn", "said", "fix"),
    [
        (counting, "counting: is a generator function", "def counting(...) -> str: return ..."),
        (counting_unsaid, "is a generator", "instead of yield"),
        (counting_async, "is a generator", "instead of yield"),
        (Counting, "is a generator", "def __call__(self, ...) -> str: return ..."),
        (Uncalled, "the class has no method __call__", "def __call__(self, text: str) -> str"),
        (SetUp, "its setup needs model, device, but it is called with the worker only", "def setup(self, worker)"),
        (SetUpByKeyword, "its setup needs model", "def setup(self, worker)"),
        (later, "which is never awaited", "async def later(...)"),
        (named, "**text gets none: columns are passed by position", "def named(text: str) -> str"),
        (nothing, "reads no column: it has no parameter", "def nothing(text: str) -> str"),
    ],
)
def test_a_function_that_cannot_be_called_for_rows_is_one_problem(fn: Any, said: str, fix: str) -> None:
    (problem,) = udf(fn).check(SCHEMA, ["out"])
    assert problem.code == "DT441"
    assert said in problem.message
    assert fix in problem.fix_texts[0]


def test_a_setup_may_take_the_worker_and_have_defaults() -> None:
    assert udf(SetUpWithDefault).check(SCHEMA, ["out"]) == []


def test_what_to_write_for_keywords_is_not_a_circle() -> None:
    (problem,) = udf(named, input_columns=["n", "text"]).check(SCHEMA, ["out"])
    assert problem.fix_texts[0].startswith("def named(n: str, text: str) -> str")


def test_a_coroutine_that_nobody_awaits_is_told() -> None:
    async def found() -> int:
        return 1

    value, why = converted(found(), pa.int64())
    assert (value, why) == (None, "TypeError: returned a coroutine, which is never awaited: write async def")
    with pytest.raises(TypeError, match="never awaited"):
        ValueConverter([pa.int64()], [""]).arrays(found(), 1)


@pytest.mark.parametrize("wrong", [None, 5, "functions:words"])
def test_what_is_no_function_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="is not a function or a class"):
        udf(wrong)


# --- by name


@pytest.mark.parametrize(
    ("reference", "fix"),
    [
        ("./functions.py:words", "functions:words"),
        ("functions.py:words", "functions:words"),
        ("sub/functions.py:words", "sub.functions:words"),
        ("functions.py", "functions:name"),
        ("package.functions.words", "package.functions:words"),
        ("functions", "package.module:name"),
        ("", "package.module:name"),
        ("my functions:words", "package.module:name"),
    ],
)
def test_a_file_is_not_a_module_and_that_is_told_with_the_module(reference: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_udf(reference)
    assert caught.value.problems[0].fix_texts == (f'udf="{fix}"',)


def test_the_path_of_a_file_leads_to_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_udf(f"{tmp_path}/functions.py:words")
    assert caught.value.problems[0].fix_texts == ('udf="functions:words"',)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_module_that_exits_is_told(here: Path) -> None:
    (here / "exiting_module.py").write_text("import sys\nsys.exit(4)\n")
    with pytest.raises(ConfigError, match="cannot import its module: SystemExit: 4"):
        load_udf("exiting_module:f")


def test_what_a_module_prints_does_not_come_among_the_data(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "printing_module.py").write_text("print('hello')\ndef f(id: int) -> int:\n    return id\n")
    data = io.StringIO()
    with redirect_stdout(data):
        assert load_udf("printing_module:f")(3) == 3
    assert data.getvalue() == ""
    assert capsys.readouterr().err == "hello\n"


# --- what is asked for


def test_a_retry_knows_its_parameters() -> None:
    with pytest.raises(ConfigError, match=r"Retry\(\) has no option time=3 \(did you mean 'times'\?\)"):
        Retry(time=3)


def messages(given: dict[str, Any]) -> list[str]:
    return [problem.message for problem in validate_arguments(given)[1]]


def test_what_is_wrong_is_named_as_it_was_written() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arguments({"concurrency": 0, "num_frags": 0, "intra_applier_concurrency": 0})
    texts = [problem.message for problem in caught.value.problems]
    assert [text.partition("=")[0] for text in texts] == ["concurrency", "intra_applier_concurrency", "num_frags"]
    assert caught.value.problems[0].fix_texts == ('concurrency="auto"', "concurrency=(1, 4)")


@pytest.mark.parametrize("first", ["concurrency", "workers"])
def test_two_spellings_that_differ_are_told_with_both(first: str) -> None:
    second = "workers" if first == "concurrency" else "concurrency"
    assert messages({first: 2, second: 3}) == [f"{first} and {second} are the same argument with different values"]
    assert parse_arguments({first: 2, second: 2}).workers == 2


@pytest.mark.parametrize(
    ("given", "found"),
    [(0, 0), (5, 5), (0.5, 0.5), ("1%", 0.01), ("0%", 0.0), ("100%", 1.0), (" 50 % ", 0.5)],
)
def test_errors_may_be_counted_or_be_a_share(given: Any, found: float) -> None:
    budget = parse_arguments({"max_errors": given}).max_errors
    assert (budget, type(budget)) == (found, type(found))


@pytest.mark.parametrize("wrong", [False, True, -1, 1.0, 1.5, "101%", "-1%", "nan%", "%", "5", math.nan])
def test_other_limits_of_errors_are_refused(wrong: Any) -> None:
    assert len(messages({"max_errors": wrong})) == 1


def test_there_is_one_limit_of_slots() -> None:
    assert parse_arguments({"slots": 10_000}).slots == udf(halves, slots=10_000).slots == 10_000
    assert messages({"slots": 10_001}) == ["slots=10001 is not a whole number from 1 to 10,000"]
    with pytest.raises(ConfigError, match="from 1 to 10,000"):
        udf(halves, slots=10_001)


@pytest.mark.parametrize(
    ("options", "cluster", "said", "fix"),
    [
        ({"cpus": 3}, "1x(2cpu, 4GB)", "2 CPUs in all, 3 needed", "@dt.udf(cpus=2)"),
        ({"memory": "9GB"}, "1x(2cpu, 4GB)", "4GB memory in all, 9GB needed", '@dt.udf(memory="4GB")'),
        ({"gpus": 1}, "1x(2cpu, 4GB)", "no GPU", "add a node like 1x(1cpu, 1xL40S)"),
        ({"gpus": 3}, "2x(2cpu, 4GB, 2xA100)", "2 GPUs in all, 3 needed", "@dt.udf(gpus=2)"),
        ({"gpu_memory": "99GB"}, "1x(2cpu, 1xL4)", "24GB a card, 99GB needed", '@dt.udf(gpu_memory="24GB")'),
        ({"memory": "1GB"}, "1x(2cpu)", "its memory is not given", "@dt.udf(memory=None)"),
    ],
)
def test_a_function_that_fits_on_no_node_is_refused_with_a_parameter_that_fits(
    options: Any, cluster: str, said: str, fix: str
) -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_workers(udf(halves, **options), parse_arguments({"cluster": cluster}))
    (problem,) = caught.value.problems
    assert problem.message.startswith("stage 'halves' (")
    assert said in problem.evidence[0]
    assert problem.fix_texts[0] == fix
    if fix.startswith("@dt.udf("):
        fixed = eval(fix.removeprefix("@dt."), {"udf": lambda **given: udf(halves, **{**options, **given})})
        plan_workers(fixed, parse_arguments({"cluster": cluster}))
