"""CPU of a process and all of its descendants until a given time, including those that no parent waited for.

Ray's servers are never waited for, and a raylet forgets what its workers used: so everybody's own time is looked at
now and then from outside, and what was seen last of those that are gone counts on.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.02
SEEK_S = 0.2
"""Who is not there for so long may not be seen at all."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


class Tally:
    """Looks from a thread until it is stopped; times are those of time.monotonic, in whichever process."""

    def __init__(self, *pids: int) -> None:
        self._roots = pids
        self._spent: dict[tuple[int, str], float] = {}
        """(Process, when it began) -> what it used when last seen."""
        self._there: dict[int, str] = {}
        self._times: list[float] = []
        self._totals: list[float] = []
        self._sought = float("-inf")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    @property
    def total_s(self) -> float:
        return self._totals[-1]

    def between(self, began: float, ended: float) -> float:
        return self._at(ended) - self._at(began)

    def _at(self, moment: float) -> float:
        """Between two looks it went evenly."""
        after = bisect.bisect_left(self._times, moment)
        if after == 0 or after == len(self._times):
            return self._totals[min(after, len(self._times) - 1)]
        (early, late), (low, high) = self._times[after - 1 : after + 1], self._totals[after - 1 : after + 1]
        return low + (high - low) * (moment - early) / (late - early)

    def _run(self) -> None:
        over = False
        while not over:
            over = self._over.wait(LOOK_S)
            now = time.monotonic()
            if over or now - self._sought >= SEEK_S:
                self._sought = now
                self._seek()
            self._look()
            self._times.append(time.monotonic())
            self._totals.append(sum(self._spent.values()))

    def _look(self) -> None:
        for pid, began in list(self._there.items()):
            found = _stat(pid)
            if found is None or found[1] != began:
                del self._there[pid]
            else:
                self._spent[pid, began] = found[2]

    def _seek(self) -> None:
        """Whoever has a parent that is ours: also one that is nobody's child any more, if it was once."""
        every = {
            int(path.name): found for path in PROC.iterdir() if path.name.isdigit() and (found := _stat(path.name))
        }
        below: dict[int, list[int]] = {}
        for pid, (parent, _, _) in every.items():
            below.setdefault(parent, []).append(pid)
        todo = [*self._roots, *self._there]
        seen: set[int] = set()
        while todo:
            pid = todo.pop()
            if pid in every and pid not in seen:
                seen.add(pid)
                self._there.setdefault(pid, every[pid][1])
                todo += below.get(pid, [])


def _stat(pid: int | str) -> tuple[int, str, float] | None:
    """Parent, when it began, and CPU seconds of its own."""
    with suppress(OSError, ValueError):
        words = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return int(words[1]), words[19], (int(words[11]) + int(words[12])) * TICK_S
    return None
