"""Helpers of backfill tests: tables, records of computed rows, and backfills in a process of their own."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa

import dovetail as dt
from dovetail.engines.local.forkserver_client import BOOTSTRAP_CODE
from fill_functions import LOG
from runtime.aids import Script
from waiting import until
from warm_process import SINGLE_THREADED

if TYPE_CHECKING:
    from collections.abc import Iterable

CLUSTER = "2cpu, 4GB"
"""A fixed cluster, so that no test depends on the machine."""
HALF = "1cpu, 1GB"
"""One worker, which goes from row to row."""
OTHER = "2cpu, 3GB"
"""Another cluster, for a backfill that runs at the same time: runs on one cluster share it."""
HERE = Path(__file__).parent
JOB = """
import sys, time
sys.path[:0] = {paths!r}
import dovetail as dt
import fill_functions
from dovetail.engines.local import engine, forkserver_client
if {threads}:
    from in_process import InProcessEngine
    engine.LocalEngine = InProcessEngine
else:
    forkserver_client.BOOTSTRAP_CODE = {bootstrap!r}
table = dt.table({uri!r})
print("begins", flush=True)
print(table.{call})
print("ended", flush=True)
"""


WARM_BOOTSTRAP_CODE = "import warnings; warnings.simplefilter('ignore'); import lance; " + BOOTSTRAP_CODE
"""Of a fork server that has imported Lance, for tests that start many workers: the import takes 0.8 CPU-seconds. It can
be forked as long as it has one thread (`warm_process.SINGLE_THREADED`), otherwise each worker is a new interpreter.
Lance warns at each fork."""


@dataclass(frozen=True)
class Bucket:
    """A bucket of an S3 server on this machine."""

    uri: str
    storage: dict[str, str]


def create_table(folder: Path, rows: int, each: int, name: str = "t", **settings: Any) -> str:
    """A table of `id` and `text`, of fragments of `each` rows."""
    uri = str(folder / f"{name}.lance")
    lance.write_dataset(rows_from(0, rows), uri, max_rows_per_file=each, **settings)
    return uri


def rows_from(start: int, stop: int) -> pa.Table:
    return pa.table(
        {"id": pa.array(range(start, stop), pa.int64()), "text": [f"row {at}" for at in range(start, stop)]}
    )


def column(uri: str, name: str) -> list[Any]:
    values: list[Any] = lance.dataset(uri).to_table(columns=[name])[name].to_pylist()
    return values


def by_id(uri: str, name: str) -> dict[int, Any]:
    rows = lance.dataset(uri).to_table(columns=["id", name])
    return dict(zip(rows["id"].to_pylist(), rows[name].to_pylist(), strict=True))


def twice(rows: Iterable[int], missing: Iterable[int] = ()) -> dict[int, int | None]:
    """Expected results of `doubled` and similar functions."""
    nulls = set(missing)
    return {row: None if row in nulls else 2 * row for row in rows}


@dataclass(frozen=True, slots=True)
class Call:
    row: int
    pid: int
    began: float
    ended: float


class Calls:
    """Rows that functions computed; see `fill_functions.record_row`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Call]:
        """Complete lines: the last line of a file may be incomplete while it is written."""
        found = []
        for path in self.folder.glob("*.calls"):
            whole = path.read_text().rpartition("\n")[0]
            for line in whole.splitlines():
                row, began, ended = line.split()
                found.append(Call(int(row), int(path.stem), float(began), float(ended)))
        return found

    def count(self) -> int:
        """Number of computed rows; cheaper than `all`."""
        return sum(path.read_bytes().count(b"\n") for path in self.folder.glob("*.calls"))

    def rows(self) -> Counter[int]:
        return Counter(call.row for call in self.all())

    def forget(self) -> None:
        for path in self.folder.glob("*.calls"):
            path.unlink()

    def is_held(self) -> bool:
        """Whether a function waits in the middle of a table for `go`."""
        return (self.folder / "held").exists()

    def go(self) -> None:
        (self.folder / "go").touch()


def driver(folder: Path, uri: str, call: str, calls: Calls, *, processes: bool = False) -> Script:
    """A backfill in a process of its own, whose workers are threads of it unless they are to be `processes`."""
    text = JOB.format(paths=[str(HERE)], uri=uri, call=call, threads=not processes, bootstrap=WARM_BOOTSTRAP_CODE)
    environment: dict[str, Any] = {LOG: str(calls.folder), "LANCE_LOG": "error", **SINGLE_THREADED}
    return Script(folder, text, warm=True, **environment)


def left_over(uri: str) -> list[str]:
    """Parts and marks beside a table."""
    while True:
        try:
            return [str(path) for path in Path(uri).glob("_dovetail/*/parts/**/*") if path.is_file()]
        except FileNotFoundError:  # removed meanwhile
            continue


def compact(uri: str, **how: Any) -> None:
    """Compact the table; retried after a conflicting commit of the backfill."""

    def is_done() -> bool:
        try:
            lance.dataset(uri).optimize.compact_files(**how)
        except OSError as error:
            if "conflict" not in str(error):
                raise
            return False
        return True

    until(is_done, "it is compacted")


def history(uri: str, name: str | None = None) -> list[str]:
    return [record.status for record in dt.table(uri).history(name)]


def children() -> set[int]:
    """Child processes of this process."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                status = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(status[1]) == os.getpid() and status[0] != "Z":
                found.add(int(entry.name))
    return found
