"""Runs in the peers' environment: the functions of `backfill.py` with Daft on this machine, from Lance to Parquet.

    python backfill_daft.py FEW LARGE SLEPT REPEAT

`upper` is the fastest of the forms that were tried, a loop over the values of a batch; `upper_by_row` is Daft's own
function of one row, which takes several times as long.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import daft  # type: ignore[import-not-found]
import pyarrow.compute as pc

from peers.backfill_peer import Fill, measured, slow


def upper(text: daft.Series) -> daft.Series:
    return daft.Series.from_pylist([one.upper() for one in text.to_pylist()])


def upper_by_row(text: str) -> str:
    return text.upper()


def arrow(text: daft.Series) -> daft.Series:
    return daft.Series.from_arrow(pc.utf8_upper(text.to_arrow()))


def filled(function: Callable[[Any], Any]) -> Fill:
    def fill(table: str, folder: str) -> None:
        frame = daft.read_lance(table)
        frame.select(function(frame["text"]).alias("u")).write_parquet(folder)

    return fill


def main() -> None:
    daft.set_runner_native()
    batched = daft.func.batch(return_dtype=daft.DataType.string())
    functions = {"upper": batched(upper), "upper_by_row": daft.func(upper_by_row)}
    functions |= {"arrow": batched(arrow), "sleep": daft.func(slow)}
    fills = {kind: filled(function) for kind, function in functions.items()}
    few, large, slept, repeat = sys.argv[1:]
    print(json.dumps(measured(fills, few, large, slept, repeat)), flush=True)


if __name__ == "__main__":
    main()
