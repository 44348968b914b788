"""Runs in the peers' environment: the functions of `backfill.py` with Ray Data on this machine, from Lance to Parquet.

    python backfill_ray_data.py FEW LARGE SLEPT REPEAT

`upper` is a loop over the values of a batch; `upper_by_row` is Ray Data's own `map`.
"""

import ctypes
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = sys.path[0]  # of its workers
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data

from peers.backfill_peer import Fill, measured, slow

CPUS = 2
PR_SET_CHILD_SUBREAPER = 36


def upper(table: pa.Table) -> pa.Table:
    return pa.table({"u": [text.upper() for text in table["text"].to_pylist()]})


def upper_by_row(row: dict[str, str]) -> dict[str, str]:
    return {"u": row["text"].upper()}


def arrow(table: pa.Table) -> pa.Table:
    return pa.table({"u": pc.utf8_upper(table["text"])})


def sleep(table: pa.Table) -> pa.Table:
    return pa.table({"u": [slow(text) for text in table["text"].to_pylist()]})


def by_batch(function: Callable[[Any], Any]) -> Fill:
    def fill(table: str, folder: str) -> None:
        read = ray.data.read_lance(table, columns=["text"])
        read.map_batches(function, batch_format="pyarrow").write_parquet(folder)

    return fill


def by_row(table: str, folder: str) -> None:
    ray.data.read_lance(table, columns=["text"]).map(upper_by_row).write_parquet(folder)


def main() -> dict[str, Any]:
    # a Ray of its own in a folder of its own, whatever else runs on this machine
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    how = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init("local", num_cpus=CPUS, _temp_dir=folder, **how)
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    fills = {"upper": by_batch(upper), "upper_by_row": by_row, "arrow": by_batch(arrow), "sleep": by_batch(sleep)}
    few, large, slept, repeat = sys.argv[1:]
    try:
        return measured(fills, few, large, slept, repeat)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def end() -> None:
    """End all descendants, including processes that Ray leaves behind: orphans become children of this process."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)


ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
try:
    result = main()
finally:
    end()
print(json.dumps(result), flush=True)
