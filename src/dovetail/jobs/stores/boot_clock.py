"""Monotonic clock of stores on one machine: counts like Unix time, but ignores changes of the system's clock.

It is the time since the boot of the machine plus an offset, which the store keeps together with the id of the boot.
So all processes of the machine agree, also those that start after the system's clock was changed.
"""

from __future__ import annotations

import time

from dovetail.machine.host_usage import machine_id

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_id() -> str:
    """Id of this boot of the machine; "" if the system has none."""
    return machine_id()


def since_boot_ms() -> int:
    """Milliseconds since the boot, time of suspension included."""
    return time.clock_gettime_ns(_CLOCK) // 1_000_000


def unix_ms() -> int:
    return time.time_ns() // 1_000_000


def new_offset_ms(latest_ms: int) -> int:
    """Offset for a boot that has none yet: Unix time, but not before `latest_ms`, the store's time so far."""
    return max(unix_ms(), latest_ms) - since_boot_ms()


class BootClock:
    """The time since the boot plus an offset."""

    def __init__(self, offset_ms: int) -> None:
        self._offset_ms = offset_ms

    def __call__(self) -> int:
        return since_boot_ms() + self._offset_ms
