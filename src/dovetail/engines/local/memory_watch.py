"""Memory watch of a machine: chooses the worker to end before memory runs out, when the kernel may kill any process.

On a node of Ray, its own memory monitor would kill the agent at 95 percent, and with it every worker of the node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.machine.host_usage import MemoryMeter
from dovetail.machine.processes import private_bytes
from dovetail.resources.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dovetail.machine.host_usage import MemoryUsage

FULL_SHARE = 0.93
"""Share of memory in use on a node of Ray; below Ray's threshold by as much as workers may allocate between two
checks."""
LOCAL_FULL_SHARE = 0.97
"""The same on a machine without Ray, where only the kernel kills processes."""
SLACK_SHARE = 0.01
"""Share of memory: a worker that exceeds its request by less is not chosen."""
VICTIM_EXIT_S = 5.0
"""Wait after a worker was chosen, for its memory to be released."""


def choose_victim(
    used: int,
    limit: int,
    workers: Mapping[int, int],
    asked: Mapping[int, int],
    full: float = FULL_SHARE,
    *,
    only_excess: bool = False,
) -> tuple[int, str] | None:
    """The worker to end, and the reason: the worker that exceeds its request by most, else (not with `only_excess`) the
    largest. None: enough memory is free, or there is no such worker. `workers`: bytes used by each. `asked`: requested
    bytes, if specified."""
    if used <= full * limit or not workers:
        return None
    over = {worker: size - asked.get(worker, 0) for worker, size in workers.items()}
    to_blame = [worker for worker in workers if over[worker] > SLACK_SHARE * limit]
    if only_excess and not to_blame:
        return None
    found = max(to_blame or workers, key=lambda worker: (over[worker] if to_blame else workers[worker], worker))
    wanted = f"requested {format_size(asked[found])}" if asked.get(found) else "requested no memory"
    largest = "" if to_blame else "; no worker exceeded its request, and this was the largest"
    return found, (
        f"ended before memory ran out: {format_size(used)} of {format_size(limit)} were used ({used / limit:.0%}); "
        f"it used {format_size(workers[found])} and {wanted}{largest}"
    )


class MemoryWatch:
    """Periodic check. Workers are measured only when memory is short."""

    def __init__(
        self,
        use: Callable[[], MemoryUsage | None] | None = None,
        sizes: Callable[[Iterable[int]], dict[int, int]] = private_bytes,
        full: float = FULL_SHARE,
        *,
        only_excess: bool = False,
    ) -> None:
        """`only_excess`: end no worker that keeps to its request, because other programs may use the memory."""
        self._read_usage = use or MemoryMeter().read
        self._sizes = sizes
        self._full = full
        self._only_excess = only_excess
        self._victim: tuple[int, float] | None = None

    def check(
        self, now: float, processes: Mapping[int, tuple[str, tuple[int, ...]]], asked: Mapping[int, int]
    ) -> tuple[int, str] | None:
        """`processes`: see `LocalEngine.processes`. A chosen worker gets time to exit."""
        use = self._read_usage()
        if use is None or use.used_bytes <= self._full * use.limit_bytes or self._victim_is_exiting(now, processes):
            return None
        found = self._sizes(pid for _, pids in processes.values() for pid in pids)
        workers = {worker: sum(found.get(pid, 0) for pid in pids) for worker, (_, pids) in processes.items() if pids}
        chosen = choose_victim(*use, workers, asked, self._full, only_excess=self._only_excess)
        if chosen is not None:
            self._victim = chosen[0], now + VICTIM_EXIT_S
        return chosen

    def _victim_is_exiting(self, now: float, processes: Mapping[int, object]) -> bool:
        """Whether a chosen worker is still exiting."""
        return self._victim is not None and self._victim[0] in processes and now < self._victim[1]
