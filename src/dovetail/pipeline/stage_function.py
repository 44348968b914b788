"""The function or class of a stage. Workers import this module, so it imports little."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Each:
    """A function, or a class of workers, that is called with one item instead of a list of items."""

    fn: Callable[..., Any]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.fn(*arguments, **named)


def each(fn: Callable[..., Any]) -> Each:
    """Call a function once per item: it returns one item, None to drop it, or an iterator. Also a decorator."""
    return fn if isinstance(fn, Each) else Each(fn)


def _inner(run: object) -> object:
    return run.fn if isinstance(run, Each) else run


def function_name(run: object) -> str:
    """The name of a function, of a class, or of an object's class; of "package.module:name", the last part."""
    inner = _inner(run)
    if isinstance(inner, str):
        return inner.rpartition(":")[2].rpartition(".")[2]
    if isinstance(inner, partial):
        return function_name(inner.func)
    return str(getattr(inner, "__name__", type(inner).__name__))


def is_class(run: object) -> bool:
    """Whether workers are objects of a class, set up once; False for a string, which is not imported here."""
    inner = _inner(run)
    return isinstance(inner, type) and not (isinstance(run, Each) and converts_items(inner))


def has_callable_objects(kind: type) -> bool:
    return any("__call__" in vars(base) for base in kind.__mro__)


def converts_items(kind: type) -> bool:
    """Whether a class with `dt.each` is called with each item, as `int` is: its objects cannot be called, and it takes
    one argument, which no class of workers does."""
    if has_callable_objects(kind) or kind.__module__ == "builtins":
        return not has_callable_objects(kind)
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [one for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    return len(required) == 1 and required[0].kind in (required[0].POSITIONAL_ONLY, required[0].POSITIONAL_OR_KEYWORD)


def is_async(run: object) -> bool:
    """Whether calls are awaited; False for a string, which is not imported here."""
    inner = _inner(run)
    called = (inner, getattr(inner, "__call__", None))  # noqa: B004 - an object's own method, not whether it has one
    return any(inspect.iscoroutinefunction(item) or inspect.isasyncgenfunction(item) for item in called)
