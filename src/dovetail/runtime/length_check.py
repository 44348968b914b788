"""Length check for batches of requests: a stage must return as many results as it received items.

A list of another length cannot be assigned to requests. It is an error, and the items are retried one by one, where
the assignment is clear.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.engines.object_loader import import_object
from dovetail.engines.stage_calls import results_iterator
from dovetail.engines.unit_executor import call_setup
from dovetail.pipeline.stage_function import Each, is_async

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.pipeline.stage_code import StageCode


def with_length_check(stage: StageCode) -> StageCode:
    """The stage with a check that a batch returns as many results as it has items."""
    if stage.batch_size == 1:
        return stage
    run: Any = stage.run
    with suppress(Exception):  # workers report the error
        while isinstance(run, str):
            run = import_object(run, f"stage {stage.name!r}: run=")
    if isinstance(run, str | Each):
        return stage
    return replace(stage, run=(LengthCheckedAsync if is_async(run) else LengthChecked)(run, stage.name))


class LengthChecked:
    """A function of lists, or a worker class, with the length check."""

    def __init__(self, fn: Callable[..., Any], stage: str) -> None:
        self.fn = fn
        self.stage = stage
        self._target: Any = None

    def setup(self, worker: Any) -> Any:
        self._target = self.fn() if isinstance(self.fn, type) else self.fn
        setup = getattr(self._target, "setup", None)
        return call_setup(setup, worker) if callable(setup) else None

    def teardown(self) -> Any:
        teardown = getattr(self._target, "teardown", None)
        return teardown() if callable(teardown) else None

    def __call__(self, items: list[Any]) -> list[Any]:
        count = len(items)  # before the call, which may change the list
        return self._checked(self._target(items), count)

    def _checked(self, given: Any, count: int) -> list[Any]:
        results = given if type(given) is list else list(results_iterator(given, self.stage))
        if len(results) != count and count > 1:
            raise ValueError(
                f"stage {self.stage!r} returned {len(results)} results for {count} requests, which cannot be assigned; "
                "use dt.each or batch_size=1 for a stage that drops or multiplies items"
            )
        return results


class LengthCheckedAsync(LengthChecked):
    async def __call__(self, items: list[Any]) -> list[Any]:  # type: ignore[override]
        count = len(items)
        given = self._target(items)
        given = [one async for one in given] if inspect.isasyncgen(given) else await given
        return self._checked(given, count)
