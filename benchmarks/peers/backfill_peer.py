"""Runs in the peers' environment: what `backfill_daft.py` and `backfill_ray_data.py` have in common.

Each function runs over the table of a few rows first, which is not counted, and then so often over its own. What was
written is compared after the clock has stopped. What it takes to start, with the first run, is said apart.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lance
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

SLEEP_S = 0.001
KINDS = ("upper", "upper_by_row", "arrow", "sleep")
Fill = Callable[[str, str], object]
"""Reads this table and writes a column `u`, and nothing else, as Parquet into this folder."""


def slow(text: str) -> str:
    time.sleep(SLEEP_S)
    return text.upper()


def measured(fills: Mapping[str, Fill], few: str, large: str, slept: str, repeat: str) -> dict[str, Any]:
    """Seconds of each run."""
    found: dict[str, Any] = {"writes": "Parquet"}
    for kind in KINDS:
        once(fills[kind], few)
        found.setdefault("start_s", time.time() - psutil.Process().create_time())
        table = slept if kind == "sleep" else large
        found[kind] = [once(fills[kind], table) for _ in range(int(repeat))]
    return found


def once(fill: Fill, table: str) -> float:
    """From reading to the last byte written."""
    folder = tempfile.mkdtemp()
    try:
        began = time.perf_counter()
        fill(table, folder)
        seconds = time.perf_counter() - began
        check(table, folder)
    finally:
        shutil.rmtree(folder)
    return seconds


def check(table: str, folder: str) -> None:
    """All values are there, in whichever order; no two rows have the same."""
    wanted = pc.utf8_upper(lance.dataset(table).to_table(columns=["text"])["text"])
    parts = [pq.read_table(path).column("u").cast(pa.string()) for path in Path(folder).rglob("*.parquet")]
    wrote = pa.chunked_array([chunk for part in parts for chunk in part.chunks], pa.string())
    assert len(wrote) == len(wanted), f"{len(wrote)} of {len(wanted)} rows were written"
    assert pc.all(pc.is_in(wanted, value_set=wrote)).as_py(), "other values were written"
