"""Who must go when the memory of a node runs out? One of the workers, before somebody kills all of them at once.

Ray's own watch would take the agent, and with it every worker of its node, at 95 percent; the kernel takes anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.machine.memory_use import MemoryMeter
from dovetail.machine.usage import own_bytes
from dovetail.resources.sizes import about_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dovetail.machine.memory_use import MemoryUse

FULL = 0.93
"""Of the memory; below the mark of Ray's own watch by as much as workers may take between two looks."""
SLACK = 0.01
"""Of the memory: who uses so little more than it asked for is not to blame."""
PATIENCE_S = 5.0
"""For the memory of one that was chosen to come back, before the next is."""


def victim(
    used: int, limit: int, workers: Mapping[int, int], asked: Mapping[int, int], full: float = FULL
) -> tuple[int, str] | None:
    """The worker to end, and why: the one that is above what it asked for by most, else the largest; None: there is
    memory left, or nobody to end. `workers`: bytes that each uses. `asked`: bytes that each asked for, if it did."""
    if used <= full * limit or not workers:
        return None
    over = {worker: size - asked.get(worker, 0) for worker, size in workers.items()}
    to_blame = [worker for worker in workers if over[worker] > SLACK * limit]
    found = max(to_blame or workers, key=lambda worker: (over[worker] if to_blame else workers[worker], worker))
    wanted = f"had asked for {about_size(asked[found])}" if asked.get(found) else "had not said how much it needs"
    largest = "" if to_blame else "; nobody used more than it had asked for, and this was the largest"
    return found, (
        f"ended before memory ran out: {about_size(used)} of {about_size(limit)} were used ({used / limit:.0%}); "
        f"it used {about_size(workers[found])} and {wanted}{largest}"
    )


class MemoryWatch:
    """Looks again and again. Workers are looked at only when memory is short."""

    def __init__(
        self,
        use: Callable[[], MemoryUse | None] | None = None,
        sizes: Callable[[Iterable[int]], dict[int, int]] = own_bytes,
        full: float = FULL,
    ) -> None:
        self._use = use or MemoryMeter().read
        self._sizes = sizes
        self._full = full
        self._chosen: tuple[int, float] | None = None

    def look(
        self, now: float, processes: Mapping[int, tuple[str, tuple[int, ...]]], asked: Mapping[int, int]
    ) -> tuple[int, str] | None:
        """`processes`: see `LocalEngine.processes`. Who was chosen is given time to go."""
        use = self._use()
        if use is None or use.used_bytes <= self._full * use.limit_bytes or self._waits(now, processes):
            return None
        found = self._sizes(pid for _, pids in processes.values() for pid in pids)
        workers = {worker: sum(found.get(pid, 0) for pid in pids) for worker, (_, pids) in processes.items() if pids}
        chosen = victim(*use, workers, asked, self._full)
        if chosen is not None:
            self._chosen = chosen[0], now + PATIENCE_S
        return chosen

    def _waits(self, now: float, processes: Mapping[int, object]) -> bool:
        """Whether one that was chosen is still there, and may be for a while."""
        return self._chosen is not None and self._chosen[0] in processes and now < self._chosen[1]
