"""Ray's actors in a Ray that this process has already: three of them, called once per item.

Three stages on a cluster, written without a library.
"""

from __future__ import annotations

from typing import Any

import ray

STAGES = 3
AHEAD = 1000
"""Items on their way: with one at a time it would be slower still."""


class Same:
    def call(self, items: list[int]) -> list[int]:
        return items


class Actors:
    """The actors request no resources of Ray, so that they fit beside other work."""

    def __init__(self) -> None:
        self._actors = [ray.remote(num_cpus=0)(Same).remote() for _ in range(STAGES)]

    def run(self, items: int) -> int:
        """The sum of all items; results pass from actor to actor unopened."""
        ahead: list[Any] = []
        total = 0
        for number in range(items):
            made: Any = [number]
            for actor in self._actors:
                made = actor.call.remote(made)
            ahead.append(made)
            if len(ahead) == AHEAD or number == items - 1:
                total += sum(map(sum, ray.get(ahead)))
                ahead.clear()
        return total

    def end(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
