"""Speed of column backfills of a Lance table against pylance itself, and the time to the first visible commit.

    python benchmarks/backfill.py --rows 1000000 --peers --json result.json

Rows of text in 20 fragments; `upper` is called with one row, `arrow` with arrays. Ours: `backfill` on worker processes,
from the call to its return. The yardstick: `add_columns` with a `batch_udf` in one process, with the same functions.
They take turns, each with a fresh copy of the table, both after a small table that is not counted; medians are told.
`first_commit_s`: 100,000 rows in 10 fragments, from the call until a reader in another process sees the first values.
`sleep_*`: a function that waits 1 ms per row, with one worker and with two. Every column is compared row by row.
`--peers` adds Daft and Ray Data in their own environment, warm: they read the same tables and write the column alone.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import backfill_functions as functions
import backfill_tables as tables
import dovetail as dt
import report
from peers.environment import run_in
from process_cost import as_installed
from resource_usage import cpu_s

if TYPE_CHECKING:
    from collections.abc import Sequence

BESIDE = Path(__file__).with_name("backfill_beside.py")
KINDS = ("upper", "arrow")
FRAGMENTS, WATCHED_FRAGMENTS = 20, 10
FEW, WATCHED, SLEPT = 2_000, 100_000, 10_000
"""Rows of the tables beside the large one; fewer if that is small."""
PEER = ["daft[lance]==0.7.26", "daft-lance==0.6.0", "pylance==14.0.2", "ray[data]==2.60.0", "psutil"]
PEERS = {"daft": "Daft", "ray_data": "Ray Data"}
PEER_KINDS = ("upper", "upper_by_row", "arrow", "sleep")


class Beside:
    """A warm process that answers, one request at a time."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, str(BESIDE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()  # waits, and closes the pipes

    def ask(self, **request: str) -> dict[str, float]:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{BESIDE.name} ended with {self._process.wait()}")
        said: dict[str, float] = json.loads(line)
        return said


# --- one of each


def ours(table: Path, kind: str, workers: int, folder: Path) -> dict[str, float]:
    uri = tables.copy(table, folder / "ours.lance")
    opened = dt.table(str(uri))
    opened.add_column("u", getattr(functions, kind))
    used_s, began = cpu_s(), time.perf_counter()
    opened.backfill("u", workers=workers, engine="local", progress=False)
    found = {"wall_s": time.perf_counter() - began, "cpu_s": cpu_s() - used_s}
    tables.check(table, uri, "u")
    return found


def theirs(table: Path, kind: str, beside: Beside, folder: Path) -> dict[str, float]:
    uri = tables.copy(table, folder / "pylance.lance")
    found = beside.ask(do="fill", uri=str(uri), function=kind)
    tables.check(table, uri, "u")
    return found


def first_commit(table: Path, workers: int, beside: Beside, folder: Path) -> dict[str, float]:
    uri = tables.copy(table, folder / "watched.lance")
    opened = dt.table(str(uri))
    opened.add_column("u", functions.upper)
    beside.ask(do="watch", uri=str(uri), column="u")
    began = time.monotonic()
    opened.backfill("u", workers=workers, engine="local", progress=False)
    wall_s = time.monotonic() - began
    tables.check(table, uri, "u")  # before the answer: without any values there would be none
    seen = beside.answer()
    return {"first_commit_s": seen["seen"] - began, "first_commit_rows": seen["rows"], "watched_wall_s": wall_s}


# --- all of them


def speed(rows: int, workers: int, repeat: int, beside: Beside, folder: Path) -> dict[str, float]:
    """Rows per second of both, taking turns; the first runs, which import and compile, are not counted."""
    few, large = folder / "few.lance", folder / "large.lance"
    ours(few, KINDS[0], workers, folder)
    result: dict[str, float] = {}
    for kind in KINDS:
        theirs(few, kind, beside, folder)
        turns = [(ours(large, kind, workers, folder), theirs(large, kind, beside, folder)) for _ in range(repeat)]
        for prefix, spent in zip(("", "pylance_"), zip(*turns, strict=True), strict=True):
            result[f"{prefix}{kind}_rows_s"] = rows / middle(spent, "wall_s")
            result[f"{prefix}{kind}_cpu_s"] = middle(spent, "cpu_s")
        result[f"{kind}_ratio"] = result[f"{kind}_rows_s"] / result[f"pylance_{kind}_rows_s"]
    return result


def sleeping(rows: int, repeat: int, folder: Path) -> dict[str, float]:
    """Two workers against one."""
    turns = [[ours(folder / "slept.lance", "sleep", workers, folder) for workers in (1, 2)] for _ in range(repeat)]
    one, two = (rows / middle(spent, "wall_s") for spent in zip(*turns, strict=True))
    return {"sleep_rows": rows, "sleep_one_rows_s": one, "sleep_two_rows_s": two, "sleep_speedup": two / one}


def watching(workers: int, repeat: int, beside: Beside, folder: Path) -> dict[str, float]:
    turns = [first_commit(folder / "watched_from.lance", workers, beside, folder) for _ in range(repeat)]
    return {key: middle(turns, key) for key in turns[0]}


def middle(found: Sequence[dict[str, float]], key: str) -> float:
    return statistics.median(one[key] for one in found)


def peers(rows: int, slept: int, repeat: int, folder: Path) -> dict[str, Any]:
    """What could be measured of them: rows per second of warm runs, and what start-up took."""
    result: dict[str, Any] = {}
    arguments = [str(folder / f"{name}.lance") for name in ("few", "large", "slept")]
    for name, title in PEERS.items():
        try:
            said = run_in("tables", PEER, f"backfill_{name}.py", [*arguments, str(repeat)])
        except (subprocess.CalledProcessError, json.JSONDecodeError, IndexError) as error:
            lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            print(f"{title} could not be measured: {lines[-1:]}")
            continue
        for kind in PEER_KINDS:
            count = slept if kind == "sleep" else rows
            result[f"peer_{name}_{kind}_rows_s"] = count / statistics.median(said[kind])
        result |= {f"peer_{name}_start_s": said["start_s"], f"peer_{name}_writes": said["writes"]}
    return result


def show(result: dict[str, Any]) -> None:
    report.table(
        [f"{result['rows']} rows", "rows/s", "CPU-s", "pylance's rows/s", "CPU-s", "x pylance"],
        [
            [
                kind,
                *(result[f"{prefix}{kind}_{key}"] for prefix in ("", "pylance_") for key in ("rows_s", "cpu_s")),
                result[f"{kind}_ratio"],
            ]
            for kind in KINDS
        ],
    )
    keys = ("sleep_one_rows_s", "sleep_two_rows_s", "sleep_speedup", "first_commit_s")
    header = ["1 ms per row: rows/s of one worker", "of two", "x one", "s until the first commit is seen"]
    report.table(header, [[result[key] for key in keys]])
    there = [[name, title] for name, title in PEERS.items() if f"peer_{name}_start_s" in result]
    if there:
        header = ["warm", "upper rows/s", "called by row", "arrow rows/s", "1 ms rows/s", "s to start", "Lance to"]
        shown = [*(f"{kind}_rows_s" for kind in PEER_KINDS), "start_s", "writes"]
        report.table(header, [[title, *(result[f"peer_{name}_{key}"] for key in shown)] for name, title in there])


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--rows", type=int, default=1_000_000, help="of the large table")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--repeat", type=int, default=3, help="runs of each kind")
    arguments.add_argument("--peers", action="store_true", help="also measure Daft and Ray Data")
    asked = arguments.parse_args()
    for name in set(os.environ) - set(as_installed()):
        del os.environ[name]
    slept = min(SLEPT, -(-asked.rows // 5))
    with tempfile.TemporaryDirectory() as temporary, Beside() as beside:
        os.environ["DOVETAIL_HOME"] = f"{temporary}/home"
        folder = Path(temporary)
        tables.make(folder / "few.lance", min(FEW, asked.rows), FRAGMENTS)
        tables.make(folder / "large.lance", asked.rows, FRAGMENTS)
        tables.make(folder / "slept.lance", slept, FRAGMENTS)
        tables.make(folder / "watched_from.lance", min(WATCHED, asked.rows), WATCHED_FRAGMENTS)
        result: dict[str, Any] = {"rows": asked.rows, "workers": asked.workers, "repeat": asked.repeat}
        result |= speed(asked.rows, asked.workers, asked.repeat, beside, folder)
        result |= watching(asked.workers, asked.repeat, beside, folder)
        result |= sleeping(slept, asked.repeat, folder)
        if asked.peers:
            result |= peers(asked.rows, slept, asked.repeat, folder)
    show(result)
    report.write(asked.json, result)


if __name__ == "__main__":
    main()
