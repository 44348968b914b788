"""The jobs of `job_queue_costs.py`, as an application of its workers."""

from __future__ import annotations

import time

import dovetail as dt
from job_worker import send_stamp

HOLD_S = 600.0


@dt.job
def noop() -> None:
    pass


@dt.job
def stamp(sent: float) -> None:
    send_stamp(sent)


@dt.job
def hold() -> None:
    """Says that it has begun, and does not end."""
    send_stamp(time.monotonic())
    time.sleep(HOLD_S)
