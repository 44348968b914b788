"""How does a stage's function get all items of a message, call by call?

The hot loops: per call they store the crumb's index, call, and look at the type of what came back. What changed in
number is written down (`Change`), so that keys cost nothing where nothing changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dovetail.engines.returns import as_list, several

if TYPE_CHECKING:
    from dovetail.engines.keys import Change
    from dovetail.engines.worker import Place

Failed = Callable[[int, int, BaseException], None]
"""Told of items [start, stop) whose call raised; if it returns, the loop goes on without them."""
Given = tuple[list[Any], "list[Change]"]


class Step:
    """A stage inside of a worker: its function made, its size known."""

    __slots__ = ("barrier", "batch_size", "each", "fn", "name", "single")

    def __init__(
        self, name: str, fn: Callable[..., Any], *, each: bool = False, batch_size: int = 1, barrier: bool = False
    ) -> None:
        self.name = name
        self.fn = fn
        self.each = each
        self.batch_size = batch_size
        self.barrier = barrier
        self.single: set[type] = set()
        """Types of results that are one item each."""


def run_step(step: Step, items: list[Any], size: int, crumb: Place, failed: Failed) -> Given:
    """What the step makes of all items, in calls of `size`."""
    if step.each:
        return _each(step, items, crumb, failed)
    return _by_one(step, items, crumb, failed) if size == 1 else _by_batch(step, items, size, crumb, failed)


def _each(step: Step, items: list[Any], crumb: Place, failed: Failed) -> Given:
    out: list[Any] = []
    changes: list[Change] = []
    add, fn, single = out.append, step.fn, step.single
    for index, item in enumerate(items):
        crumb[1] = index
        try:
            result = fn(item)
            if type(result) not in single:
                if result is None:
                    changes.append((index, index + 1, 0))
                    continue
                given = several(result, single, step.name)
                if given is not None:
                    out += given
                    changes.append((index, index + 1, len(given)))
                    continue
        except BaseException as error:  # the user's: SystemExit too is only a failed call
            failed(index, index + 1, error)
            changes.append((index, index + 1, 0))
            continue
        add(result)
    return out, changes


def _by_one(step: Step, items: list[Any], crumb: Place, failed: Failed) -> Given:
    out: list[Any] = []
    changes: list[Change] = []
    add, fn = out.append, step.fn
    for index, item in enumerate(items):
        crumb[1] = index
        try:
            result = fn([item])
            if type(result) is not list:
                result = as_list(result, step.name)
        except BaseException as error:  # the user's
            failed(index, index + 1, error)
            changes.append((index, index + 1, 0))
            continue
        if len(result) == 1:
            add(result[0])
        else:
            out += result
            changes.append((index, index + 1, len(result)))
    return out, changes


def _by_batch(step: Step, items: list[Any], size: int, crumb: Place, failed: Failed) -> Given:
    out: list[Any] = []
    changes: list[Change] = []
    fn = step.fn
    for start in range(0, len(items), size):
        crumb[1] = start
        batch = items[start : start + size]
        stop = start + len(batch)  # before the call: the list is the function's own, and it may empty it
        try:
            result = fn(batch)
            if type(result) is not list:
                result = as_list(result, step.name)
        except BaseException as error:  # the user's
            failed(start, stop, error)
            changes.append((start, stop, 0))
            continue
        out += result
        if len(result) != stop - start:
            changes.append((start, stop, len(result)))
    return out, changes
