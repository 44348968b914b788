"""Which fragments of a round have come to their end, and what is to be asked for beside the rest of a range?"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.backfill.job import Done, Task

TRIES = 3
"""Of a range that cannot be read or written."""


class Settling:
    """Told of every task that came back."""

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        self._fragments: dict[str, int] = {}
        self._left: Counter[str] = Counter()
        """Rows of each fragment that nobody has done."""
        self._settled: set[str] = set()
        """Fragments that have their file, or need none."""
        self._broken: Counter[str] = Counter()
        for task in tasks:
            self._fragments[task.key] = task.fragment
            self._left[task.key] += task.stop - task.start

    def saw(self, done: Done) -> list[Task] | None:
        """More tasks; None: its fragment is settled already, and what it brings is not needed. One file for each
        fragment: of two workers that saw it complete the first one's, and if none did, one is asked."""
        task = done.task
        if task.key in self._settled:
            return None
        self._left[task.key] += sum(stop - start for start, stop in done.missing) - (done.reached - task.start)
        more = [replace(task, start=start, stop=stop) for start, stop in done.missing]
        if done.file or done.untouched or done.gone:
            self._settled.add(task.key)
        elif done.failed is None and not self._left[task.key] and (done.broken or task.start < task.stop):
            more.append(replace(task, start=task.rows, stop=task.rows))
        return more

    def is_hopeless(self, done: Done) -> bool:
        """What hindered its worker hindered others before it, and none got any further."""
        key = done.task.key
        if done.broken:
            self._broken[key] += 1
        elif done.reached > done.task.start:
            self._broken.pop(key, None)
        return self._broken[key] >= TRIES

    def unsettled(self) -> set[int]:
        return {fragment for key, fragment in self._fragments.items() if key not in self._settled}
