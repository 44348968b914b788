"""Limits and weights of queues (fair share): which queue is next, and which has enough running jobs. Pure.

The queue with the fewest running jobs per weight is next. Queues without a weight are one queue, with weight 1.
`redis_functions/shares.lua` mirrors it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.jobs.store import PLAIN_QUEUE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dovetail.jobs.store import QueueSettings


UNWEIGHTED = ""
"""Group of the queues without a weight."""


class QueueShares:
    """Running jobs of queues during one claim, against their limits and weights."""

    def __init__(
        self, queues: Iterable[str], settings: Mapping[str, QueueSettings], leased_jobs: Callable[[str], int]
    ) -> None:
        """`queues`: names of the queues that the claim serves."""
        queues = list(queues)
        given = {queue: settings.get(queue, PLAIN_QUEUE) for queue in queues}
        self._has_weights = any(one.weight is not None for one in given.values())
        self._limits = {queue: one.max_running for queue, one in given.items() if one.max_running is not None}
        self._running = {queue: leased_jobs(queue) for queue in (queues if self._has_weights else self._limits)}
        self._weights = {queue: one.weight for queue, one in given.items() if one.weight is not None}
        self._running_by_group: dict[str, int] = {}
        for queue, running in self._running.items():
            group = self.group_of(queue)
            self._running_by_group[group] = self._running_by_group.get(group, 0) + running

    def group_of(self, queue: str) -> str:
        """Queues of one group are served in the order of their jobs."""
        return queue if queue in self._weights else UNWEIGHTED

    def is_full(self, queue: str) -> bool:
        return queue in self._limits and self._running[queue] >= self._limits[queue]

    def next_group(self, groups: Mapping[str, Sequence[tuple[tuple[int, str], int]]]) -> str:
        """The group to serve: group -> its first jobs, as a heap of (order, ...)."""
        if len(groups) == 1:
            return next(iter(groups))
        return min(groups, key=lambda group: (self._use(group), groups[group][0]))

    def count(self, queue: str) -> None:
        """A job of the queue is claimed."""
        if queue in self._running:
            self._running[queue] += 1
            self._running_by_group[self.group_of(queue)] += 1

    def _use(self, group: str) -> float:
        return self._running_by_group.get(group, 0) / self._weights.get(group, 1)
