"""Pickling of user code for workers: by reference where importable, otherwise by value."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, NamedTuple

from dovetail.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.control.commands import HostedObject

MAX_PARTS = 100
MAX_CODE_BYTES = 4 << 20
"""Maximum bytes of code sent to a worker; beyond it, large definitions are left out."""
MAX_DEFINITION_BYTES = 64 << 10
MAX_PICKLED_WORKS = 256
"""Pickled definitions that an engine keeps."""


class PickledWork(NamedTuple):
    """Pickled definition of a hosted object; replaces the definition for an engine on another machine."""

    code: bytes
    """Result of `pickle_work`."""
    env: dict[str, str]
    """Environment variables of its stages."""


class PickledWorks:
    """Pickled definitions of hosted objects, so that all workers of a unit share one. Keeps those that were used last:
    a service or a queue may start any number of objects."""

    def __init__(self, limit: int = MAX_PICKLED_WORKS) -> None:
        self._limit = limit
        self._works: dict[int, tuple[object, PickledWork]] = {}
        """Identity of a definition -> the definition, which keeps the identity, and its pickle."""

    def get(self, hosted: HostedObject) -> PickledWork:
        """Raises ConfigError if the definition cannot be pickled."""
        key = id(hosted.definition)
        found = self._works.pop(key, None) or (hosted.definition, pickle_hosted(hosted))
        self._works[key] = found
        if len(self._works) > self._limit:
            del self._works[next(iter(self._works))]
        return found[1]

    def __len__(self) -> int:
        return len(self._works)


def pickle_hosted(hosted: HostedObject) -> PickledWork:
    """Pickle the definition of a hosted object. Raises ConfigError if it cannot be pickled."""
    if isinstance(hosted.definition, PickledWork):
        return hosted.definition
    return PickledWork(pickle_work(hosted.name, hosted.definition), work_environment(hosted.definition))


def work_environment(work: object) -> dict[str, str]:
    """Environment variables that the stages of a hosted object specify."""
    if isinstance(work, PickledWork):
        return work.env
    found: dict[str, str] = {}
    for stage in work if isinstance(work, tuple) else ():
        runtime_env = getattr(stage, "runtime_env", None)
        if runtime_env:
            from dovetail.engines.runtime_env import environment_variables  # late: few stages have one

            found |= environment_variables(runtime_env)
        found |= getattr(stage, "env", None) or {}
    return found


def pickle_work(name: str, work: object) -> bytes:
    """Pickle the work of a hosted object together with the definitions of the user's script, which items and calls
    refer to by name. One pickle, so that shared objects stay shared in the worker."""
    modules = _unimportable_modules(work)
    main = sys.modules.get("__main__")
    with _pickled_by_value(modules):
        defined = {module.__name__: _definitions(module) for module in (*modules, main) if module is not None}
        try:
            found = _cloudpickle((defined, work))
            if len(found) <= MAX_CODE_BYTES:
                return found
        except Exception:  # noqa: S110 - one of the definitions, or the work itself: that is seen now
            pass
        try:
            return _cloudpickle((_sendable_definitions(defined), work))
        except Exception as error:
            raise _unpicklable_error(name, error) from None


def _unpicklable_error(name: str, error: Exception) -> ConfigError:
    message = f"stage {name!r} cannot be sent to a worker: {type(error).__name__}: {error}"
    fixes = ("open files, locks and connections in the setup(worker) of a class, instead of before the run",)
    return ConfigError(Problem("DT333", message, fixes=fixes))


def _cloudpickle(value: object) -> bytes:
    import cloudpickle

    found: bytes = cloudpickle.dumps(value, 5)
    return found


def _definitions(module: ModuleType) -> dict[str, object]:
    """Classes and functions defined by a module that workers cannot import."""
    found: dict[str, object] = {}
    for name, value in list(vars(module).items()):
        ours = getattr(value, "__module__", None) == module.__name__ and getattr(value, "__qualname__", None) == name
        if ours and isinstance(value, type | FunctionType):
            found[name] = value
    return found


def _sendable_definitions(defined: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    return {
        module: {name: value for name, value in values.items() if _is_sendable(value)}
        for module, values in defined.items()
    }


def _is_sendable(value: object) -> bool:
    """Whether a definition can be pickled and is small: a function brings the globals that it uses, possibly a large
    table."""
    try:
        return len(_cloudpickle(value)) <= MAX_DEFINITION_BYTES
    except Exception:
        return False


def _unimportable_modules(work: object) -> set[ModuleType]:
    """Modules of a unit's functions that a worker cannot import, such as tests that pytest loaded by path."""
    found = set()
    for stage in work if isinstance(work, tuple) else (work,):
        for part in _wrapped_parts(getattr(stage, "run", stage)):
            kind = part if isinstance(part, type) or hasattr(part, "__code__") else type(part)
            module = sys.modules.get(getattr(kind, "__module__", "") or "")
            if module is not None and module.__name__ != "__main__" and not _is_importable(module):
                found.add(module)
    return found


def _wrapped_parts(run: object) -> list[object]:
    """The callables inside a callable: targets of `each`, partials, decorators and methods, and attributes of
    objects."""
    found: list[object] = []
    todo = [run]
    while todo and len(found) < MAX_PARTS:
        part = todo.pop()
        if any(part is other for other in found):
            continue
        found.append(part)
        inner = [getattr(part, name, None) for name in ("fn", "func", "__wrapped__", "__func__", "__self__")]
        inner += [*getattr(part, "args", ()), *(getattr(part, "keywords", None) or {}).values()]
        held = getattr(part, "__dict__", None) if not isinstance(part, type | ModuleType) else None
        inner += list(held.values()) if isinstance(held, dict) else []
        todo += [one for one in inner if callable(one) or hasattr(one, "__dict__")]
    return found


def _is_importable(module: ModuleType) -> bool:
    """Whether importing the module by name would find the same file."""
    file = getattr(module, "__file__", None)
    if file is None:
        return getattr(module, "__spec__", None) is not None
    name, _, rest = module.__name__.partition(".")
    try:
        spec = importlib.machinery.PathFinder.find_spec(name)
        for part in rest.split(".") if rest else ():
            if spec is None or not spec.submodule_search_locations:
                return False
            name = f"{name}.{part}"
            spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
    except (ImportError, ValueError):
        return False
    if spec is None:
        # editable installs and archives have their own finders
        return module.__name__ in sys.modules and _has_other_finder(module.__name__)
    return spec.origin == file or spec.origin is None


def _has_other_finder(name: str) -> bool:
    top = name.partition(".")[0]
    finders = [finder for finder in sys.meta_path if finder is not importlib.machinery.PathFinder]
    return any(getattr(finder, "find_spec", lambda *_: None)(top, None) is not None for finder in finders)


@contextmanager
def _pickled_by_value(modules: set[ModuleType]) -> Iterator[None]:
    import cloudpickle

    known = set(cloudpickle.list_registry_pickle_by_value())
    new = [module for module in modules if module.__name__ not in known]
    for module in new:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in new:
            cloudpickle.unregister_pickle_by_value(module)
