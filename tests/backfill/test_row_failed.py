"""RowFailed and the error records on disk."""

# ruff: noqa: A002 - parameters are called like columns, and one is `id`

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
import fill_functions as fns
from backfill_aids import HALF, create_table, rows_from
from backfill_scenes import failing_function
from dovetail.backfill.failed_rows import RowFailed, make_row_failed, read_error_files, to_json_line
from dovetail.backfill.store import TableStore
from dovetail.backfill.task import FailedRow
from dovetail.errors import Call, RunError

if TYPE_CHECKING:
    from pathlib import Path


class TwoParameters(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class WithALock(Exception):
    def __init__(self) -> None:
        super().__init__("held")
        self.lock = threading.Lock()
        self.tries = 3


def two_parameters(id: int) -> int:
    raise TwoParameters(429, "slowly")


def with_a_lock(id: int) -> int:
    raise WithALock


lance = pytest.importorskip("lance")


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A folder that says which rows fail: 7 and 13."""
    folder = tmp_path / "bad"
    folder.mkdir()
    for row in (7, 13):
        (folder / str(row)).touch()
    return folder


class Odd(Exception):
    def __init__(self, one: int, *, other: int) -> None:
        super().__init__(one)
        self.one, self.other = one, other

    def __reduce__(self) -> tuple[object, ...]:
        return odd, (self.one, self.other)

    def __str__(self) -> str:
        return f"odd: {self.one} and {self.other}"


def odd(one: int, other: int) -> Odd:
    return Odd(one, other=other)


def raised(original: BaseException) -> RowFailed:
    failed = FailedRow(3, 27, type(original).__name__, str(original), "", pickle.dumps(original))
    return make_row_failed(failed, Call("table.backfill", ("n",), {"on_error": "skip"}))


def test_the_fix_of_a_failed_row_names_a_function_that_cannot_be_imported(tmp_path: Path) -> None:
    def of_a_script(id: int) -> int:
        return 1 // (id - 3)

    table = dt.table(create_table(tmp_path, 20, 20))
    with pytest.raises(ZeroDivisionError) as caught:
        table.backfill("n", of_a_script, cluster=HALF)
    assert 'table.backfill("n", of_a_script, on_error="skip")' in str(caught.value)
    with pytest.raises(ValueError, match="multiple of ten") as known:
        table.backfill("m", fns.every_tenth_fails, cluster=HALF)
    assert 'table.backfill("m", on_error="skip")' in str(known.value)


@pytest.mark.parametrize(
    ("function", "kind", "has"),
    [(two_parameters, TwoParameters, {"code": 429}), (with_a_lock, WithALock, {"tries": 3})],
)
def test_exceptions_that_cannot_be_unpickled_keep_their_type(
    tmp_path: Path, function: Any, kind: type[Exception], has: dict[str, Any]
) -> None:
    uri = create_table(tmp_path, 10, 10)
    with pytest.raises(kind) as error:
        dt.table(uri).backfill("n", dt.udf(function), cluster=HALF)
    assert error.value.row == 0  # type: ignore[attr-defined]
    assert vars(error.value).items() >= has.items()
    assert "DT435" in str(error.value)


def test_the_fix_of_a_failed_row_has_the_arguments_of_the_call(tmp_path: Path, bad: Path) -> None:
    uri, udf = create_table(tmp_path, 40, 20), failing_function(bad)
    lance.write_dataset(rows_from(40, 60), uri, mode="append")
    with pytest.raises(ValueError, match="row 7") as error:
        dt.table(uri).backfill("n", udf, cluster=HALF, where="id < 10", fragments=[0, 1])
    assert 'table.backfill("n", function, where="id < 10", fragments=[0, 1], on_error="skip")' in str(error.value)


@pytest.mark.parametrize(
    "original",
    [
        ValueError("no"),
        KeyError("key"),
        ZeroDivisionError(),
        FileNotFoundError(2, "No such file", "/there"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        Odd(1, other=2),
        ExceptionGroup("some", [ValueError("one")]),
        TimeoutError(),
        RecursionError("deep"),
    ],
)
def test_the_error_has_the_type_of_the_exception_and_the_address_of_the_row(original: Exception) -> None:
    error = raised(original)
    assert isinstance(error, RunError)
    assert isinstance(error, type(original)) or isinstance(original, ExceptionGroup)
    assert str(error).startswith(f"error[DT435] column 'n', row {3 << 32 | 27} (fragment 3, offset 27)")
    assert type(original).__name__ in str(error)
    assert (error.row, error.fragment, error.offset) == (3 << 32 | 27, 3, 27)
    assert error.error_type == type(original).__name__
    assert type(error.__cause__) is type(original)


def test_the_error_has_the_attributes_of_the_exception() -> None:
    error = raised(FileNotFoundError(2, "No such file", "/there"))
    assert isinstance(error, OSError)
    assert (error.errno, error.filename) == (2, "/there")
    strange = raised(Odd(1, other=2))
    assert isinstance(strange, Odd)
    assert (strange.one, strange.other) == (1, 2)


@pytest.mark.parametrize("original", [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), StopIteration("x")])
def test_an_exception_with_a_meaning_to_python_is_only_the_cause(original: BaseException) -> None:
    error = raised(original)
    assert type(error) is RowFailed
    assert type(error.__cause__) is type(original)


def test_an_exception_that_cannot_be_unpickled_is_named() -> None:
    error = make_row_failed(FailedRow(3, 27, "Strange", "no", "", b"not a pickle"), Call("table.backfill", ("n",)))
    assert type(error) is RowFailed
    assert "Strange: no" in str(error)


def test_the_error_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(raised(KeyError("key"))))
    assert "KeyError" in str(again)


def test_error_records_are_read_and_truncated_lines_ignored(tmp_path: Path) -> None:
    store = TableStore(str(tmp_path))
    rows = [FailedRow(3, at, "ValueError", "line\none  ü \udc80", "trace") for at in (5, 9)]
    store.put("e/3-a.5.10.jsonl", "".join(map(to_json_line, rows)).encode() + b'{"fragment": 3, "off')
    store.put("e/3-a.9.10.jsonl", to_json_line(FailedRow(3, 9, "KeyError", "again")).encode())
    found = read_error_files(store, "e", "n")
    stored_errors = {row.offset: (row.error, row.message) for file in found.values() for row in file}
    assert stored_errors == {5: ("ValueError", "line\none  ü \udc80"), 9: ("KeyError", "again")}
    assert sum(map(len, found.values())) == 2
