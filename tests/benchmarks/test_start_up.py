"""CPU time of starting Dovetail, as a multiple of starting Python."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

REPEATS = 9


def cpu_seconds(*arguments: str) -> float:
    """User and system time of a command; the minimum, because other work on the machine only adds to it."""
    times = []
    for _ in range(REPEATS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


@pytest.mark.bar
def test_importing_dovetail_costs_at_most_five_bare_interpreters() -> None:
    assert cpu_seconds("-c", "import dovetail") <= 5 * cpu_seconds("-c", "pass")


@pytest.mark.bar
def test_the_help_costs_at_most_twelve_bare_interpreters() -> None:
    assert cpu_seconds("-m", "dovetail", "--help") <= 12 * cpu_seconds("-c", "pass")
