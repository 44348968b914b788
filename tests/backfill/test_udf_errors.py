"""Functions that cannot be used as a UDF, each with a fix that works."""

from __future__ import annotations

import io
import sys
from collections.abc import Coroutine  # noqa: TC003 - looked up by the UDF
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dovetail.backfill.udf import load_udf, udf
from dovetail.backfill.value_conversion import ValueConverter
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])


def counting(text: str) -> list[int]:  # type: ignore[misc]
    yield 1


def counting_unannotated(text):  # type: ignore[no-untyped-def]
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


def later(text: str) -> Coroutine[Any, Any, int]:
    async def found() -> int:
        return 1

    return found()


def named(**text: str) -> str:
    return ""


def nothing() -> str:
    return ""


class SetUpWithDefault(SetUp):
    def setup(self, worker: Any, model: str = "small") -> None: ...  # type: ignore[override]


def converted(value: Any, kind: Any) -> tuple[Any, str]:
    """Stored value (beside a NULL), and the error message if it cannot be stored."""
    (array,), wrong = ValueConverter([kind], [""]).values([None, value])
    return array.to_pylist()[1], "".join(f"{type(error).__name__}: {error}" for error in wrong.values())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("fn", "expected_message", "fix"),
    [
        (counting, "counting: is a generator function", "def counting(...) -> str: return ..."),
        (counting_unannotated, "is a generator", "instead of yield"),
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
def test_a_function_that_cannot_be_called_for_rows_is_one_problem(fn: Any, expected_message: str, fix: str) -> None:
    (problem,) = udf(fn).check(SCHEMA, ["out"])
    assert problem.code == "DT441"
    assert expected_message in problem.message
    assert fix in problem.fix_texts[0]


def test_a_setup_may_take_the_worker_and_have_defaults() -> None:
    assert udf(SetUpWithDefault).check(SCHEMA, ["out"]) == []


def test_the_fix_for_keyword_parameters_works() -> None:
    (problem,) = udf(named, input_columns=["n", "text"]).check(SCHEMA, ["out"])
    assert problem.fix_texts[0].startswith("def named(n: str, text: str) -> str")


def test_a_coroutine_that_is_not_awaited_is_reported() -> None:
    async def found() -> int:
        return 1

    value, why = converted(found(), pa.int64())
    assert (value, why) == (None, "TypeError: returned a coroutine, which is never awaited: write async def")
    with pytest.raises(TypeError, match="never awaited"):
        ValueConverter([pa.int64()], [""]).arrays(found(), 1)


@pytest.mark.parametrize("wrong", [None, 5, "functions:words"])
def test_an_object_that_is_not_a_function_is_rejected(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="is not a function or a class"):
        udf(wrong)


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
def test_the_path_of_a_file_gets_the_reference_of_its_module(reference: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_udf(reference)
    assert caught.value.problems[0].fix_texts == (f'udf="{fix}"',)


def test_the_reference_of_a_file_path_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_udf(f"{tmp_path}/functions.py:words")
    assert caught.value.problems[0].fix_texts == ('udf="functions:words"',)


def test_a_module_that_exits_is_reported(here: Path) -> None:
    (here / "exiting_module.py").write_text("import sys\nsys.exit(4)\n")
    with pytest.raises(ConfigError, match="cannot import its module: SystemExit: 4"):
        load_udf("exiting_module:f")


def test_the_output_of_an_imported_module_goes_to_stderr(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "printing_module.py").write_text("print('hello')\ndef f(id: int) -> int:\n    return id\n")
    data = io.StringIO()
    with redirect_stdout(data):
        assert load_udf("printing_module:f")(3) == 3
    assert data.getvalue() == ""
    assert capsys.readouterr().err == "hello\n"
