"""Functions of backfill tests that wait at a row or fail at rows, and backfills that run beside the test."""

# ruff: noqa: A002 - parameters are called like columns, and one is `id`

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dovetail as dt
from backfill_aids import HALF
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path


BAD = 5


def gated_function(folder: Path, at: int, times: int = 2) -> Any:
    """Waits at a row until there is a file `go`, and says so."""

    def function(id: int) -> int:
        while id >= at and not (folder / "go").exists():
            (folder / "waits").touch()
            time.sleep(0.005)
        return times * id

    return dt.udf(function, version=f"gated {times}")


def brittle_function(folder: Path, times: int = 2) -> Any:
    """A row fails while there is a file `bad`."""

    def function(id: int) -> int:
        if id == BAD and (folder / "bad").exists():
            raise ValueError("bad")
        return times * id

    return dt.udf(function, version=f"times {times}")


def failing_function(folder: Path, version: str = "1") -> Any:
    """Function that fails for the rows whose numbers are names of files in the folder."""

    def function(id: int) -> int:
        if (folder / str(id)).exists():
            raise ValueError(f"row {id}")
        return 2 * id

    return dt.udf(function, version=version)


@contextmanager
def run_beside(folder: Path, table: dt.Table, *args: Any, call: str = "backfill", **how: Any) -> Iterator[Future[Any]]:
    """A call that waits at its gate; what it waits for is there when this ends."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(getattr(table, call), *args, **{"cluster": HALF, **how})
        try:
            until(lambda: (folder / "waits").exists() or future.done(), "it waits")
            assert not future.done(), future.result()
            yield future
        finally:
            (folder / "go").touch()
