"""How does a stage whose calls are awaited get the items of a message?

One call after another; of a `dt.each` the items of one batch at once. Whoever cancels the task, or closes it, ends the
message; a user's code that raises CancelledError by itself has only failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.engines.keys import slice_of
from dovetail.engines.returns import as_list, several
from dovetail.engines.worker import RUNNING, Call

if TYPE_CHECKING:
    from dovetail.engines.keys import Change, Keys
    from dovetail.engines.loops import Failed, Given, Step
    from dovetail.engines.worker import Place

Came = tuple[list[Any], bool] | BaseException
"""What a call gave, and whether that is row by row what went in; or what it raised."""


async def run_step_async(step: Step, keys: Keys, items: list[Any], size: int, crumb: Place, failed: Failed) -> Given:
    """What the step makes of all items, in calls of `size`; of a `dt.each` so many calls at once."""
    out: list[Any] = []
    changes: list[Change] = []
    for start in range(0, len(items), size):
        crumb[1] = start
        batch = items[start : start + size]
        count = 1 if step.each else len(batch)
        if step.each and len(batch) > 1:
            calls = await _at_once(step, slice_of(keys, start, start + size), batch)
        else:
            calls = [await _called(step, batch[0] if step.each else batch)]
        for number, came in enumerate(calls):
            first = start + number * count
            if isinstance(came, BaseException):
                failed(first, first + count, came)
            given, same = ([], False) if isinstance(came, BaseException) else came
            out += given
            if not same:
                changes.append((first, first + count, len(given)))
    return out, changes


async def _at_once(step: Step, keys: Keys, items: list[Any]) -> list[Came]:
    import asyncio  # not every worker needs it

    async def one(index: int) -> Came:
        RUNNING.set(Call([0, index], keys))  # gather gives each a task, and so a context, of its own
        return await _called(step, items[index])

    return await asyncio.gather(*[one(index) for index in range(len(items))])


async def _called(step: Step, argument: Any) -> Came:
    count = 1 if step.each else len(argument)
    try:
        result = await _awaited(step.fn(argument))
        if step.each:
            given = [] if result is None else several(result, step.single, step.name)
            return ([result], True) if given is None else (given, False)
        given = as_list(result, step.name)
        return given, len(given) == count
    except GeneratorExit:
        raise  # somebody closes the slot: nothing can be awaited any more
    except BaseException as error:  # the user's; inside a task SystemExit would end the whole loop
        if _is_cancelled(error):
            raise
        return error


async def _awaited(made: Any) -> Any:
    if hasattr(made, "__await__"):
        made = await made
    return iter([item async for item in made]) if hasattr(made, "__anext__") else made


def _is_cancelled(error: BaseException) -> bool:
    import asyncio

    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
