"""Functions of `backfill.py`; Dovetail and pylance call the same ones, pylance the bare `fn` of each."""

from __future__ import annotations

import time

import pyarrow as pa
import pyarrow.compute as pc

import dovetail as dt

SLEEP_S = 0.001


@dt.udf
def upper(text: str) -> str:
    return text.upper()


@dt.udf(data_type=pa.string())
def arrow(text: pa.Array) -> pa.Array:
    return pc.utf8_upper(text)


@dt.udf
def sleep(text: str) -> str:
    """Nothing but waiting, as for an answer from elsewhere."""
    time.sleep(SLEEP_S)
    return text.upper()
