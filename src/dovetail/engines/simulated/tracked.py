"""What becomes of every single item of a message? For tests of exactness; a counted run does not ask."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

from dovetail.control.events import Cause, Failure
from dovetail.engines.simulated.world import Gives, Hangs, Key, Kills, OutOfMemory, Raises, Slow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dovetail.control.commands import RunBatches
    from dovetail.control.segments import Part
    from dovetail.engines.simulated.workers import Hosting
    from dovetail.engines.simulated.world import Outcome

Attempts = Counter[tuple[str, Key]]


def keys_of(parts: Iterable[Part]) -> list[Key]:
    return [key for segment, start, stop in parts for key in cast("list[Key]", segment.ref)[start:stop]]


class Tracked:
    """A message in the hands of a worker, call by call."""

    __slots__ = ("_attempts", "_batch_size", "_call", "_end", "_hosting", "_keys", "failures", "index", "out")

    def __init__(self, command: RunBatches, hosting: Hosting, attempts: Attempts) -> None:
        self._keys = keys_of(command.parts)
        assert len(self._keys) == command.items, (
            f"message {command.message} says {command.items} items, has {self._keys}"
        )
        self._batch_size = command.batch_size
        self._hosting = hosting
        self._attempts = attempts
        self.index = 0
        self.out: list[Key] = []
        self.failures: list[Failure] = []
        self._call: list[Key] = []
        self._end: Outcome | None = None

    @property
    def more(self) -> bool:
        return self.index < len(self._keys)

    def begin_call(self) -> tuple[float, Kills | Hangs | None]:
        """Its seconds, and what it does to the worker."""
        keys = self._keys[self.index : self.index + self._batch_size]
        unit = self._hosting.unit
        behaviour = unit.behaviour
        weight = 0.0
        self._call, self._end = [], None
        for key in keys:
            outcome = self._fate(key, len(keys))
            match outcome:
                case Gives(n):
                    self._call += [key] if n == 1 else [(*key, child) for child in range(n)]
                case Slow(factor):
                    weight += factor - 1
                    self._call.append(key)
                case _:
                    self._end = outcome
                    break
        time = behaviour.seconds_per_batch + (len(keys) + weight) * behaviour.seconds_per_item
        if isinstance(self._end, OutOfMemory) and behaviour.oom == "death":
            self._end = Kills(Cause.OUT_OF_MEMORY, 9)
        seconds = time * unit.factor(1) * self._hosting.slower * unit.slowed
        return seconds, self._end if isinstance(self._end, Kills | Hangs) else None

    def end_call(self) -> None:
        start, stop = self.index, min(self.index + self._batch_size, len(self._keys))
        if self._end is None:
            self.out += self._call
        else:
            memory = isinstance(self._end, OutOfMemory)
            error = self._end.text if isinstance(self._end, Raises) else "MemoryError: simulated"
            keys = tuple(self._keys[start:stop])
            self.failures.append(Failure(start, stop, error, out_of_memory=memory, keys=keys))
        self.index = stop

    def _fate(self, key: Key, together: int) -> Outcome:
        unit = self._hosting.unit
        limit = unit.behaviour.memory_items
        if limit is not None and together > limit:
            return OutOfMemory()
        if unit.behaviour.item is None:
            return Gives(unit.share_of(sum(key)))
        self._attempts[unit.name, key] += 1
        return unit.behaviour.item(key, self._attempts[unit.name, key])
