"""Backoff of retries: how long a failed job waits before it runs again. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.jobs.job import Retries


MAX_DOUBLINGS = 40


def backoff_ms(retries: Retries, failures: int, jitter: float) -> int:
    """Delay after this many attempts with the same outcome: exponential, with full jitter (0 <= jitter < 1)."""
    longest = min(retries.max_backoff_ms, retries.backoff_ms * 2 ** min(failures - 1, MAX_DOUBLINGS))
    return int(jitter * longest)
