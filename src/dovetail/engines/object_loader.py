"""Resolution of "package.module:name" and of classes to the object that a stage calls."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from dovetail.errors import PipelineError, Problem, did_you_mean
from dovetail.pipeline.stage_function import Each, converts_items

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def load_object(
    work: Any, stage: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[Any, bool]:
    """The object, and whether it takes single items. Imports texts, and instantiates classes with these arguments; a
    class such as `dt.each(int)` is called with single items itself."""
    each = False
    while isinstance(work, str | Each):
        if isinstance(work, Each):
            work, each = work.fn, True
        else:
            work = import_object(work, f"stage {stage!r}: run=")
    is_instantiated = isinstance(work, type) and not (each and converts_items(work))
    return (work(*args, **(kwargs or {})) if is_instantiated else work), each


def bound_call(target: Any) -> Callable[..., Any]:
    """The callable: calling the bound method of an object is faster than calling the object."""
    call = inspect.getattr_static(type(target), "__call__", None)
    found: Callable[..., Any] = MethodType(call, target) if isinstance(call, FunctionType) else target
    return found


def import_object(text: str, label: str = "") -> Any:
    """Import the object that "package.module:name" names; `label` precedes this name in messages."""
    module_name, _, path = text.partition(":")
    if not module_name or not path:
        raise _load_error(f"{label}{text!r} is not the module and name of a function or class", "package.module:name")
    found: Any = _import_module(module_name, text, label)
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            near = did_you_mean(name, dir(found))
            owner = getattr(found, "__name__", module_name)
            raise _load_error(f"{label}{text!r}: {owner} has no {name!r}{near}", f"from {module_name}") from None
    if not callable(found) and not isinstance(found, str):
        raise _load_error(
            f"{label}{text!r} is of type {type(found).__name__}, not a function or class", f"in {module_name}"
        )
    return found


def _import_module(name: str, text: str, label: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != name and not name.startswith(f"{missing}."):
            raise  # the module exists; one of its own imports is missing
    parent, _, last = missing.rpartition(".")
    near = did_you_mean(last, _modules_in(parent))
    where = f"in {parent}" if parent else f"searched: {', '.join(sys.path[:4]) or 'nothing'}"
    raise _load_error(f"{label}{text!r}: there is no module {missing!r}{near}", where)


def _modules_in(package: str) -> list[str]:
    import pkgutil  # late: only needed for the error message

    path = getattr(sys.modules.get(package), "__path__", None) if package else None
    if package and path is None:
        return []
    return [module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_")]


def _load_error(message: str, evidence: str) -> PipelineError:
    return PipelineError(Problem("DT034", message, (evidence,)))
