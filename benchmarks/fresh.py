"""CPU, time and memory of a fresh process from start to exit, with all of its children."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tally import Tally

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SAMPLE_S = 0.1
TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Spent:
    """By one process and all below it that were waited for, or with a tally, all."""

    cpu_s: float
    wall_s: float
    peak_mb: float
    """The most that all of them had at once, what several share counted once; 0: not asked for."""
    said: Any
    """The JSON that it printed last."""
    tally: Tally | None = None


def spend(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    memory: bool = False,
    everybody: bool = False,
) -> Spent:
    """Runs a fresh Python to its end. One after another only: CPU is that of all children since. `everybody`: also what
    nobody waited for, as of Ray's servers, but to a few hundredths of a second."""
    before, began = _children_s(), time.perf_counter()
    with tempfile.TemporaryFile("w+") as talk:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=talk, text=True, env=environment
        )
        watch = _Watch(process.pid) if memory else None
        tally = Tally(process.pid) if everybody else None
        printed, _ = process.communicate(timeout=TIMEOUT_S)
        wall_s = time.perf_counter() - began
        peak_mb = watch.stop() if watch is not None else 0.0
        if tally is not None:
            tally.stop()
        if process.returncode:
            talk.seek(0)
            sys.exit(f"{' '.join(arguments)} ended with {process.returncode}:\n{talk.read()}")
    cpu_s = _children_s() - before if tally is None else tally.total_s
    return Spent(cpu_s, wall_s, peak_mb, json.loads(printed.splitlines()[-1]), tally)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Watch:
    """Samples the memory of a process and of all below it from a thread of the process that measures."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._most_mb = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        self._over.set()
        self._thread.join()
        return self._most_mb

    def _look(self) -> None:
        while not self._over.wait(SAMPLE_S):
            with suppress(psutil.Error):
                process = psutil.Process(self._pid)
                pids = [self._pid, *(child.pid for child in process.children(recursive=True))]
                self._most_mb = max(self._most_mb, sum(map(_held_mb, pids)))


def _held_mb(pid: int) -> float:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    return 0.0
