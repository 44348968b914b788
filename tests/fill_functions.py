"""Functions that fill columns in tests, in a module that workers can import; they record the rows that they compute."""

# ruff: noqa: A002 - parameters are called like columns, and one is `id`

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

import dovetail as dt

LOG = "FILL_LOG"
"""A folder: each process writes a line for every row into a file of its own there."""
BAD = 777
"""The row that fails, or kills."""
THREE = (10, 60, 61)
DEADLY = (300, 777, 2500)
HANGS = (150, 777)


def record_row(row: int, began: float | None = None) -> None:
    """Record that a row was computed, and when; the record survives a kill of the process."""
    folder = os.environ.get(LOG)
    if folder:
        now = time.time()
        path = Path(folder) / f"{os.getpid()}.calls"
        number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(number, b"%d %f %f\n" % (row, now if began is None else began, now))
        os.close(number)


def wait_for_go(row: int, hold: int) -> None:
    """Wait from the row `hold` on until the test creates the file `go`."""
    folder = os.environ.get(LOG)
    while row >= hold and folder and not (Path(folder) / "go").exists():
        (Path(folder) / "held").touch()
        time.sleep(0.005)


@dt.udf
def doubled(id: int) -> int:
    record_row(id)
    return 2 * id


@dt.udf
def tripled(id: int) -> int:
    record_row(id)
    return 3 * id


@dt.udf(version="one")
def first_version(id: int) -> int:
    record_row(id)
    return id + 1


@dt.udf(version="two")
def second_version(id: int) -> int:
    record_row(id)
    return id + 2


@dt.udf
def slow(id: int) -> int:
    began = time.time()
    time.sleep(0.002)
    record_row(id, began)
    return 2 * id


@dt.udf
def held(id: int) -> int:
    """Waits in the middle of the table until the test continues it."""
    wait_for_go(id, 1500)
    record_row(id)
    return 2 * id


@dt.udf(cpus=2)
def wide(id: int) -> int:
    return 2 * id


@dt.udf(cpus=64)
def enormous(id: int) -> int:
    return 2 * id


@dt.udf
def brittle(id: int) -> int:
    record_row(id)
    if id == BAD:
        raise ZeroDivisionError("seven hundred and seventy-seven")
    return 2 * id


@dt.udf
def mended(id: int) -> int:
    record_row(id)
    return 2 * id if id != BAD else -1


@dt.udf
def every_tenth_fails(id: int) -> int:
    if id % 10 == 0:
        raise ValueError(f"{id} is a multiple of ten")
    return 2 * id


@dt.udf
def half_none(id: int) -> int | None:
    record_row(id)
    return id if id % 2 else None


@dt.udf
def all_none(id: int) -> int | None:
    record_row(id)
    return None


@dt.udf
def deadly(id: int) -> int:
    """Ends its process at three rows, each time in another way."""
    if id == DEADLY[0]:
        ctypes.string_at(0)
    if id == DEADLY[1]:
        os._exit(3)
    if id == DEADLY[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * id


@dt.udf
def leaves(id: int) -> int:
    if id == BAD:
        os._exit(3)
    return 2 * id


@dt.udf
def arrays_that_die(id: pa.Array) -> pa.Array:
    if BAD in id.to_pylist():
        os._exit(3)
    return pc.multiply(id, 2)


arrays_that_die = dt.udf(arrays_that_die.fn, data_type="int64")


@dt.udf
def slow_three_deaths(id: int) -> int:
    time.sleep(0.0005)
    if id in THREE:
        os._exit(3)
    return 2 * id


@dt.udf
def sudden_death(id: int) -> int:
    """Dies while other rows are being computed."""
    if id == 77:
        os._exit(3)
    time.sleep(0.03)
    return 2 * id


@dt.udf
def dies_at_once(id: int) -> int:
    os._exit(3)


# --- kinds


class Pair(NamedTuple):
    low: int
    high: str


@dt.udf
def pair(id: int) -> Pair:
    return Pair(id, f"high {id}")


@dt.udf
class Adder:
    def __init__(self) -> None:
        self.more = 0

    def setup(self) -> None:
        record_row(-1)
        self.more = 1000

    def __call__(self, id: int) -> int:
        return id + self.more


UNDER_WAY: set[int] = set()


@dt.udf
async def later(id: int) -> int:
    """Writes down how many rows are under way with its own."""
    UNDER_WAY.add(id)
    await asyncio.sleep(0.01)
    record_row(len(UNDER_WAY))
    UNDER_WAY.remove(id)
    return 2 * id


@dt.udf(data_type="int64")
def widths(batch: pa.RecordBatch) -> Any:
    """How many columns it sees, and the id."""
    return pc.add(pc.multiply(batch.column("id"), 100), batch.num_columns)


@dt.udf
def upper(text: str | None) -> str | None:
    return None if text is None else text.upper()


@dt.udf
def floats(id: int) -> list[float]:
    return [float(id)] * (id % 4)


@dt.udf(data_type=pa.list_(pa.float32(), 3))
def vector(id: int) -> Any:
    return [id, id + 1, id + 2]


@dt.udf(data_type=pa.struct([("a", pa.int32()), ("b", pa.string())]))
def record(id: int) -> Any:
    return {"a": id, "b": str(id)}


@dt.udf
def raw(id: int) -> bytes:
    return b"%d" % id


@dt.udf
def moment(id: int) -> datetime:
    return datetime.fromtimestamp(id, UTC)


@dt.udf(input_columns=["some Text"])
def length(value: str) -> int:
    return len(value)


@dt.udf
def size(blob: bytes) -> int:
    """Writes down the most memory that its process ever had, in kilobytes."""
    record_row(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return len(blob)


@dt.udf
def echo(blob: bytes) -> bytes:
    return blob


# --- trouble


@dt.udf
def flaky(id: int) -> int:
    """Fails the first two times, for some rows."""
    if id % 100 == 7:
        marks = Path(os.environ[LOG]) / f"flaky-{id}"
        before = int(marks.read_text()) if marks.exists() else 0
        marks.write_text(str(before + 1))
        if before < 2:
            raise ConnectionError("not now")
    return 2 * id


@dt.udf
def hangs(id: int) -> int:
    """Never returns for two rows; the second one also ignores the exception that is to end it."""
    if id == HANGS[0]:
        time.sleep(1000)
    while id == HANGS[1]:
        try:
            time.sleep(1000)
        except TimeoutError:
            continue
    return 2 * id


class AcceleratorError(RuntimeError):
    """Stands in for torch.AcceleratorError."""


class Breaks:
    """Its object raises from one row on, like a process after a CUDA error."""

    def __init__(self) -> None:
        self.broken = False

    def __call__(self, id: int) -> int:
        self.broken = self.broken or id == BAD
        if self.broken:
            raise AcceleratorError("CUDA error: unspecified launch failure")
        return 2 * id


class AsyncBreaks(Breaks):
    async def __call__(self, id: int) -> int:  # type: ignore[override]
        return super().__call__(id)


BreaksAt, AsyncBreaksAt = dt.udf(Breaks), dt.udf(AsyncBreaks)


class ArraysThatBreak:
    """The same for a function of arrays."""

    def __init__(self) -> None:
        self.broken = False

    def __call__(self, id: pa.Array) -> pa.Array:
        self.broken = self.broken or BAD in id.to_pylist()
        if self.broken:
            raise AcceleratorError("CUDA error: unspecified launch failure")
        return pc.multiply(id, 2)


arrays_that_break = dt.udf(ArraysThatBreak, data_type="int64")


class Fails:
    """Its object raises an ordinary exception from one row on: nothing in it says that the process is broken."""

    def __init__(self) -> None:
        self.broken = False

    def __call__(self, id: int) -> int:
        self.broken = self.broken or id == BAD
        if self.broken:
            raise ValueError("no result")
        return 2 * id


class AsyncFails(Fails):
    async def __call__(self, id: int) -> int:  # type: ignore[override]
        return super().__call__(id)


FailsFrom, AsyncFailsFrom = dt.udf(Fails), dt.udf(AsyncFails)


class ArraysThatFail:
    """The same for a function of arrays."""

    def __init__(self) -> None:
        self.broken = False

    def __call__(self, id: pa.Array) -> pa.Array:
        self.broken = self.broken or BAD in id.to_pylist()
        if self.broken:
            raise ValueError("no result")
        return pc.multiply(id, 2)


arrays_that_fail = dt.udf(ArraysThatFail, data_type="int64", input_columns=["id"])


BREAKING_ROWS = [0, 10, 11, 12, 700]


@dt.udf
class FailsFromMany:
    """Its object fails from any of these rows on. It records its setups."""

    def __init__(self) -> None:
        record_row(-1)
        self.broken = False

    def __call__(self, id: int) -> int:
        self.broken = self.broken or id in BREAKING_ROWS
        if self.broken:
            raise ValueError("no result")
        return 2 * id


OUTAGE = 610
"""From this row on, no worker can compute any row."""


class Outage:
    """Records its setups as row -1."""

    def __init__(self) -> None:
        record_row(-1)

    def __call__(self, id: int) -> int:
        mark = Path(os.environ[LOG]) / "outage"
        if id == OUTAGE:
            mark.touch()
        if id >= OUTAGE or mark.exists():
            raise ConnectionError("no route to host")
        return 2 * id


class AsyncOutage(Outage):
    async def __call__(self, id: int) -> int:  # type: ignore[override]
        return super().__call__(id)


outage, async_outage = dt.udf(Outage), dt.udf(AsyncOutage)


@dt.udf
def fails_and_dies(id: int) -> int:
    """A row that ends its process, among rows that raise."""
    if id == 20:
        os._exit(3)
    if 10 <= id < 20:
        raise ValueError("bad row")
    return 2 * id


BAD_ROWS = [*range(200), *range(400, 700)]


@dt.udf
def worker_of_good_rows(id: int) -> int:
    """The process that computes a row; many rows in succession are bad."""
    if id in BAD_ROWS:
        raise ValueError("bad row")
    return os.getpid()
