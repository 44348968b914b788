"""Helper process of `backfill.py` with its imports done: pylance's own way, and a reader.

    python backfill_beside.py

A request is a line of JSON: `fill` adds a column with `batch_udf`, in this one process, and tells seconds; `watch`
polls the table until somebody has committed values of a column, and tells when it saw them, by the machine's clock.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa

import backfill_functions as functions

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S = 0.005


def batched(function: str) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """As one writes it for pylance: a scalar function is called row by row."""
    call: Any = getattr(functions, function).fn

    def rows(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch([pa.array([call(text) for text in batch["text"].to_pylist()], pa.string())], ["u"])

    def arrays(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch([call(batch["text"])], ["u"])

    return arrays if function == "arrow" else rows


def fill(uri: str, function: str) -> dict[str, float]:
    table = lance.dataset(uri)
    udf = lance.batch_udf(output_schema=pa.schema([("u", pa.string())]))(batched(function))
    began, cpu_s = time.perf_counter(), time.process_time()
    table.add_columns(udf, read_columns=["text"])
    return {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_s}


def watch(uri: str, column: str) -> dict[str, float]:
    """Looks into every new version, and only there."""
    version = lance.dataset(uri).version
    say({"watching": version})
    while True:
        table = lance.dataset(uri)
        if table.version != version:
            version = table.version
            rows = table.count_rows(f"{column} IS NOT NULL")
            if rows:
                return {"seen": time.monotonic(), "rows": rows}
        time.sleep(POLL_S)


def say(answer: dict[str, float]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    requests: dict[str, Callable[..., dict[str, float]]] = {"fill": fill, "watch": watch}
    say({"ready": 1})
    for line in sys.stdin:
        asked = json.loads(line)
        say(requests[asked.pop("do")](**asked))


if __name__ == "__main__":
    main()
