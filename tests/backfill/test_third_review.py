"""What a third review found: errors of recomputed fragments, parts of other values, columns that change their names,
blobs, and exceptions with parameters of their own."""

# ruff: noqa: A002, A006 - parameters are called like columns, and one is `id`

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

pa = pytest.importorskip("pyarrow")
lance = pytest.importorskip("lance")

import dovetail as dt  # noqa: E402
from backfill_aids import HALF, by_id, made, rows_from, twice  # noqa: E402
from dovetail.errors import ConfigError, RunError  # noqa: E402
from waiting import until  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


def failing(folder: Path, version: str = "1") -> Any:
    """At the rows whose numbers are names of files in the folder."""

    def function(id: int) -> int:
        if (folder / str(id)).exists():
            raise ValueError(f"row {id}")
        return 2 * id

    return dt.udf(function, version=version)


def failed(table: dt.Table) -> list[int]:
    return [row.offset for row in table.errors("n")]


# --- recompute=True, fragments=


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A folder that says which rows fail: 7 and 13."""
    folder = tmp_path / "bad"
    folder.mkdir()
    for row in (7, 13):
        (folder / str(row)).touch()
    return folder


def test_of_fragments_that_are_recomputed_the_errors_are_those_of_then(tmp_path: Path, bad: Path) -> None:
    uri, udf = made(tmp_path, 40, 20), failing(bad)
    table = dt.table(uri)
    table.backfill("n", udf, cluster=HALF, on_error="skip")
    assert failed(table) == [7, 13]
    (bad / "7").unlink()
    (bad / "9").touch()
    filled = table.backfill("n", udf, cluster=HALF, on_error="skip", recompute=True, fragments=[0])
    assert filled.errors == 2
    assert by_id(uri, "n") == twice(range(40), missing=(9, 13))
    assert failed(table) == [9, 13]
    (bad / "9").unlink()
    (bad / "13").unlink()
    assert table.retry_errors("n", udf, cluster=HALF).rows == 2
    assert by_id(uri, "n") == twice(range(40))
    assert table.backfill("n", udf, cluster=HALF, on_error="skip", max_errors=0).rows == 0


def test_recomputed_by_a_condition_others_stay_in_the_list(tmp_path: Path, bad: Path) -> None:
    uri, udf = made(tmp_path, 40, 20), failing(bad)
    table = dt.table(uri)
    table.backfill("n", udf, cluster=HALF, on_error="skip")
    table.backfill("n", udf, cluster=HALF, on_error="skip", where="id < 10")
    assert failed(table) == [7, 13]
    (bad / "7").unlink()
    (bad / "9").touch()
    how: dict[str, Any] = {"on_error": "skip", "recompute": True, "fragments": [0], "where": "id < 10"}
    table.backfill("n", udf, cluster=HALF, **how)
    assert by_id(uri, "n") == twice(range(40), missing=(9, 13))
    assert failed(table) == [9, 13]
    (bad / "9").unlink()
    (bad / "13").unlink()
    table.retry_errors("n", udf, cluster=HALF)
    assert by_id(uri, "n") == twice(range(40))
    assert failed(table) == []


def test_an_older_version_that_is_back_has_its_errors_or_is_computed_again(tmp_path: Path, bad: Path) -> None:
    uri, udf = made(tmp_path, 40, 20), failing(bad)
    table = dt.table(uri)
    table.backfill("n", udf, cluster=HALF, on_error="skip")
    before = lance.dataset(uri).version
    for row in (7, 13):
        (bad / str(row)).unlink()
    table.retry_errors("n", udf, cluster=HALF)
    assert table.backfill("n", udf, cluster=HALF).rows == 0
    lance.dataset(uri, version=before).restore()
    assert by_id(uri, "n") == twice(range(40), missing=(7, 13))
    assert table.backfill("n", udf, cluster=HALF).rows == 20
    assert by_id(uri, "n") == twice(range(40))
    assert table.backfill("n", udf, cluster=HALF).rows == 0


# --- what lies in parts


def test_parts_of_a_condition_are_not_put_over_values_that_came_since(tmp_path: Path, bad: Path) -> None:
    uri = made(tmp_path, 40, 40)
    table = dt.table(uri)
    table.add_column("n", failing(bad))
    with pytest.raises(ValueError, match="row 7"):
        table.backfill("n", failing(bad), cluster=HALF, where="n IS NULL")
    table.backfill("n", dt.udf(lambda id: -1, input_columns=["id"], data_type="int64"), cluster=HALF, where="id < 5")
    (bad / "7").unlink()
    (bad / "13").unlink()
    table.backfill("n", failing(bad), cluster=HALF, where="n IS NULL")
    assert by_id(uri, "n") == twice(range(40)) | dict.fromkeys(range(5), -1)


# --- columns that change


@pytest.mark.processes
def test_columns_that_change_names_within_a_file_are_other_input(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": range(20), "a": range(20), "b": range(100, 120)}), uri)
    table = dt.table(uri)
    udf = dt.udf(lambda a: 2 * a, version="1", input_columns=["a"], data_type="int64")
    table.backfill("n", udf, cluster=HALF)
    lance.dataset(uri).alter_columns({"path": "a", "name": "old"})
    lance.dataset(uri).alter_columns({"path": "b", "name": "a"})
    assert table.backfill("n", udf, cluster=HALF).rows == 20
    assert by_id(uri, "n") == {row: 2 * (row + 100) for row in range(20)}


@pytest.mark.parametrize("how", ["dropped", "renamed"])
def test_input_that_goes_meanwhile_is_named(tmp_path: Path, how: str) -> None:
    uri = made(tmp_path, 60, 20)
    gate = tmp_path / "gate"

    def slow(text: str) -> int:
        while text == "row 30" and not gate.exists():
            (tmp_path / "waits").touch()
            time.sleep(0.005)
        return len(text)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(dt.table(uri).backfill, "n", dt.udf(slow), cluster=HALF, commit_every=0)
        until((tmp_path / "waits").exists, "it is in the middle")
        if how == "dropped":
            lance.dataset(uri).drop_columns(["text"])
        else:
            lance.dataset(uri).alter_columns({"path": "text", "name": "words"})
        gate.touch()
        with pytest.raises(RunError, match=r"'text', which slow or where reads, was dropped or renamed") as error:
            running.result()
    assert "computed again" not in str(error.value)


@pytest.mark.processes
def test_a_mended_function_that_reads_more_counts_for_itself(tmp_path: Path) -> None:
    """Else it would not be noticed that what it reads more has changed."""
    uri = made(tmp_path, 20, 10)
    table = dt.table(uri)
    table.backfill("more", dt.udf(lambda id: id, data_type="int64"), cluster=HALF)

    def before(id: int) -> int:
        return 1 // (id - 7) * 0 + id

    def after(id: int, more: int) -> int:
        return id + more

    table.backfill("n", dt.udf(before), cluster=HALF, on_error="skip")
    filled = table.retry_errors("n", dt.udf(after), cluster=HALF)
    assert filled.notes == ["""after also reads 'more': the next table.backfill("n") computes all rows with it"""]
    assert by_id(uri, "n") == {row: row if row != 7 else 14 for row in range(20)}
    table.backfill("n", dt.udf(after), cluster=HALF)
    table.backfill("more", dt.udf(lambda id: 100, data_type="int64"), cluster=HALF)
    assert table.backfill("n", dt.udf(after), cluster=HALF).rows == 20
    assert by_id(uri, "n") == {row: row + 100 for row in range(20)}


# --- blobs


@pytest.mark.parametrize("version", ["2.0", "2.1", "2.2"])
def test_blobs_are_bytes_for_a_function(tmp_path: Path, version: str) -> None:
    uri = str(tmp_path / "t.lance")
    image = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    blobs = pa.array([b"x" * (row + 1) for row in range(20)], pa.large_binary())
    table = pa.table([pa.array(range(20)), blobs], schema=pa.schema([pa.field("id", pa.int64()), image]))
    lance.write_dataset(table, uri, max_rows_per_file=10, data_storage_version=version)
    lance.dataset(uri).delete("id = 12")

    def size(image: bytes) -> int:
        return len(image)

    def new(id: int) -> bytes:
        return b"new" * (id + 1)

    dt.table(uri).backfill("n", dt.udf(size), cluster=HALF)
    assert by_id(uri, "n") == {row: row + 1 for row in range(20) if row != 12}
    if version == "2.2":
        with pytest.raises(ConfigError, match="a blob column"):
            dt.table(uri).backfill("image", dt.udf(new), cluster=HALF)
        return
    dt.table(uri).backfill("image", dt.udf(new), cluster=HALF, where="id < 2")
    read = lance.dataset(uri).take_blobs("image", indices=[0, 1, 2])
    assert [one.readall() for one in read] == [b"new", b"newnew", b"xxx"]


# --- exceptions


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


@pytest.mark.parametrize(
    ("function", "kind", "has"),
    [(two_parameters, TwoParameters, {"code": 429}), (with_a_lock, WithALock, {"tries": 3})],
)
def test_exceptions_that_do_not_unpickle_are_raised_as_what_they_are(
    tmp_path: Path, function: Any, kind: type[Exception], has: dict[str, Any]
) -> None:
    uri = made(tmp_path, 10, 10)
    with pytest.raises(kind) as error:
        dt.table(uri).backfill("n", dt.udf(function), cluster=HALF)
    assert error.value.row == 0  # type: ignore[attr-defined]
    assert vars(error.value).items() >= has.items()
    assert "DT435" in str(error.value)


def test_what_to_paste_after_a_failed_row_says_which_rows_it_was_about(tmp_path: Path, bad: Path) -> None:
    uri, udf = made(tmp_path, 40, 20), failing(bad)
    lance.write_dataset(rows_from(40, 60), uri, mode="append")
    with pytest.raises(ValueError, match="row 7") as error:
        dt.table(uri).backfill("n", udf, cluster=HALF, where="id < 10", fragments=[0, 1])
    assert 'table.backfill("n", function, where="id < 10", fragments=[0, 1], on_error="skip")' in str(error.value)
