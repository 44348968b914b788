"""What did a user's function give back: which items go on?"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from dovetail.errors import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_LISTS = (str, bytes, bytearray, dict)
MANY_TYPES = 1000
HOW = "return a list: [] drops, a list goes on; for one item in, one out use dt.each"
HOW_ASYNC = "its function must itself be `async def`, so that the call is awaited"


def as_list(returned: Any, stage: str) -> list[Any]:
    """What a function of lists gave; a generator runs here."""
    return list(iterator_of(returned, stage))


def iterator_of(returned: Any, stage: str) -> Iterator[Any]:
    """The same, item by item."""
    if isinstance(returned, NO_LISTS):
        raise _wrong(returned, stage)
    try:
        return iter(returned)
    except TypeError:
        raise _wrong(returned, stage) from None


def several(returned: Any, single: set[type], stage: str) -> list[Any] | None:
    """What a `dt.each` function gave, if it was an iterator; None: it is one item, and so are all of its type."""
    kind = type(returned)
    if hasattr(kind, "__next__"):
        return list(returned)
    if _is_late(returned):
        raise _wrong(returned, stage)
    if len(single) >= MANY_TYPES:
        single.clear()  # whoever makes a class per item must not fill the memory
    single.add(kind)
    return None


def _wrong(returned: Any, stage: str) -> TypeError:
    what = "None" if returned is None else f"a {type(returned).__name__} ({shown(returned)})"
    how = HOW_ASYNC if _is_late(returned) else HOW
    if inspect.iscoroutine(returned):
        returned.close()
    return TypeError(f"stage {stage!r} returned {what}; {how}")


def _is_late(returned: Any) -> bool:
    return inspect.iscoroutine(returned) or inspect.isasyncgen(returned)
