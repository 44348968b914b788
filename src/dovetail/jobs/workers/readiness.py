"""Readiness of a worker, from its status. Pure.

Fields of `Worker.get_status` that this module reads:

    state            "starting", "running", "draining" or "ended"
    last_exchange_s  seconds since the store last answered the worker; None: never. A worker asks the store at least
                     once per third of its lease, also if it has no free slot.
    store_available  False: the last exchange failed
    lease_s          length of its leases
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.jobs.job import DEFAULT_LEASE_MS
from dovetail.text_format import format_duration

if TYPE_CHECKING:
    from collections.abc import Mapping


def readiness_problem(status: Mapping[str, Any]) -> str | None:
    """Why a worker takes no jobs now; None if it does."""
    state = str(status.get("state", "running"))
    if state != "running":
        return f"the worker is {state}"
    if not status.get("store_available", True):
        return "the store of jobs cannot be reached"
    asked_s = status.get("last_exchange_s")
    if asked_s is None:
        return "the worker has not reached the store yet"
    if asked_s > float(status.get("lease_s", DEFAULT_LEASE_MS / 1000)):
        return f"the worker has not asked for jobs for {format_duration(asked_s)}, longer than its lease"
    return None
