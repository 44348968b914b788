"""Is a row that failed told as what it was, and read back as it was written?"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest

from dovetail.backfill.failed_rows import RowFailed, make_row_failed, read_error_files, to_json_line
from dovetail.backfill.store import Store
from dovetail.backfill.task import FailedRow
from dovetail.errors import Call, RunError

if TYPE_CHECKING:
    from pathlib import Path


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
def test_it_is_of_its_own_type_and_of_ours_and_says_where(original: Exception) -> None:
    error = raised(original)
    assert isinstance(error, RunError)
    assert isinstance(error, type(original)) or isinstance(original, ExceptionGroup)
    assert str(error).startswith(f"error[DT435] column 'n', row {3 << 32 | 27} (fragment 3, offset 27)")
    assert type(original).__name__ in str(error)
    assert (error.row, error.fragment, error.offset) == (3 << 32 | 27, 3, 27)
    assert error.error_type == type(original).__name__
    assert type(error.__cause__) is type(original)


def test_what_the_original_knows_is_known() -> None:
    error = raised(FileNotFoundError(2, "No such file", "/there"))
    assert isinstance(error, OSError)
    assert (error.errno, error.filename) == (2, "/there")
    strange = raised(Odd(1, other=2))
    assert isinstance(strange, Odd)
    assert (strange.one, strange.other) == (1, 2)


@pytest.mark.parametrize("original", [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), StopIteration("x")])
def test_what_means_something_to_python_is_only_the_cause(original: BaseException) -> None:
    error = raised(original)
    assert type(error) is RowFailed
    assert type(error.__cause__) is type(original)


def test_one_that_cannot_be_brought_back_is_told_by_name() -> None:
    error = make_row_failed(FailedRow(3, 27, "Strange", "no", "", b"not a pickle"), Call("table.backfill", ("n",)))
    assert type(error) is RowFailed
    assert "Strange: no" in str(error)


def test_it_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(raised(KeyError("key"))))
    assert "KeyError" in str(again)


def test_lines_are_read_back_and_torn_ones_are_none(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    rows = [FailedRow(3, at, "ValueError", "line\none  ü \udc80", "trace") for at in (5, 9)]
    store.put("e/3-a.5.10.jsonl", "".join(map(to_json_line, rows)).encode() + b'{"fragment": 3, "off')
    store.put("e/3-a.9.10.jsonl", to_json_line(FailedRow(3, 9, "KeyError", "again")).encode())
    found = read_error_files(store, "e", "n")
    told = {row.offset: (row.error, row.message) for file in found.values() for row in file}
    assert told == {5: ("ValueError", "line\none  ü \udc80"), 9: ("KeyError", "again")}
    assert sum(map(len, found.values())) == 2
