"""Ids of jobs: 20 characters that sort by the time at which they were made."""

from __future__ import annotations

import os
import threading
import time

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32, in lower case: no letters that look like digits."""
TIME_DIGITS = 9
COUNTER_DIGITS = 4
RANDOM_DIGITS = 7
_COUNTER_LIMIT = 32**COUNTER_DIGITS
_PAIRS = tuple(first + second for first in _DIGITS for second in _DIGITS)
"""All numbers of two digits: half the steps per id."""


def _base32(number: int, digits: int) -> str:
    pairs = []
    for _ in range(0, digits, 2):
        pairs.append(_PAIRS[number & 1023])
        number >>= 10
    return "".join(pairs[::-1])[-digits:]


class JobIds:
    """Generator of ids that increase within this process, even if the clock is set back, and differ between
    processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest = 0
        self._process = 0
        self._random = ""

    def new(self) -> str:
        with self._lock:
            if self._process != os.getpid():  # a fork must not repeat the ids of its parent
                self._process = os.getpid()
                self._random = _base32(int.from_bytes(os.urandom(RANDOM_DIGITS)), RANDOM_DIGITS)
            now = time.time_ns() // 1_000_000 * _COUNTER_LIMIT
            self._latest = latest = max(now, self._latest + 1)
            return _base32(latest, TIME_DIGITS + COUNTER_DIGITS) + self._random


new_job_id = JobIds().new


def time_ms_of(job_id: str) -> int:
    """When an id was made, in milliseconds of Unix time."""
    found = 0
    for letter in job_id[:TIME_DIGITS]:
        found = 32 * found + _DIGITS.index(letter)
    return found
