"""Usage of the whole machine, from the kernel."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dovetail.machine.host_usage import HostMeter, HostUsage, parse_busy, parse_meminfo

if TYPE_CHECKING:
    from pathlib import Path


def test_busy_is_what_is_neither_idle_nor_waiting_nor_taken_away() -> None:
    hertz = os.sysconf("SC_CLK_TCK")
    assert parse_busy("cpu  100 20 30 4000 500 6 7 800 9 0\ncpu0 1 1 1\n") == pytest.approx(163 / hertz)
    for nothing in ("", "cpu0 1 2 3", "cpu 1 2"):
        assert parse_busy(nothing) is None


def test_memory_in_use_is_what_cannot_be_had() -> None:
    assert parse_meminfo("MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 40 kB\n") == (60 * 1024, 100 * 1024)
    assert parse_meminfo("MemTotal: 100 kB\n") == (None, 100 * 1024)
    assert parse_meminfo("") == (None, None)


def test_the_busy_cpus_are_those_between_two_readings(tmp_path: Path) -> None:
    times = iter([10.0, 12.0, 13.0])
    meter, hertz = HostMeter(tmp_path, lambda: next(times)), os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(f"cpu {5 * hertz} 0 0 0 0 0 0 0\n")
    assert meter.read().cpus is None
    (tmp_path / "stat").write_text(f"cpu {8 * hertz} 0 0 0 0 0 0 0\n")
    assert meter.read().cpus == pytest.approx(1.5)
    (tmp_path / "stat").unlink()
    assert meter.read() == HostUsage(None, os.cpu_count() or 1, None, None)


def test_this_machine_is_read() -> None:
    found = HostMeter().read()
    assert found.memory_bytes is not None
    assert found.memory_used_bytes is not None
    assert 0 < found.memory_used_bytes < found.memory_bytes
