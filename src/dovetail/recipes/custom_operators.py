"""Custom operators: `package.module:name` and the files of `custom_operator_paths`.

A subclass of `Mapper`, `Filter`, `Deduplicator`, `Selector` or `Grouper` is an operator like the built-in ones. Any
other class, and any function, gets a row and returns a row, None (drop the row), True or False (keep or drop it), or an
iterator or list of rows. The parameters in the recipe are its arguments.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.engines.unit_executor import call_setup
from dovetail.errors import Problem
from dovetail.pipeline.code_hash import code_hash
from dovetail.pipeline.stage_function import is_async
from dovetail.recipes.operators.base import Mapper, Operator, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dovetail.engines.worker_context import Worker

IGNORED_MODULES = ("base", "setup", "conftest")


class CallableOperator(Mapper):
    """A function, or a class that is not based on Operator."""

    def __init__(self, target: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.target = target
        self.arguments = dict(arguments)
        self._call: Callable[..., Any] | None = None

    def setup(self, worker: Worker) -> None:
        inner = getattr(self._made(), "setup", None)
        if callable(inner):
            call_setup(inner, worker)

    def teardown(self) -> None:
        inner = getattr(self._call, "teardown", None)
        if callable(inner):
            inner()

    def columns(self) -> tuple[str, ...]:
        return ()

    def code_key(self) -> str:
        return f"{code_hash(self.target)} {super().code_key()}"

    def _made(self) -> Callable[..., Any]:
        if self._call is None:
            self._call = self.target(**self.arguments) if isinstance(self.target, type) else self.target
        return self._call

    def __call__(self, row: Row) -> Any:
        call = self._call or self._made()
        given = call(row) if isinstance(self.target, type) else call(row, **self.arguments)
        if given is True:
            return row
        if given is False:
            return None
        return iter(given) if type(given) is list else given


def _shadowing_module(module: str, folder: Path) -> str:
    """The file of a loaded module, if a module of the same name beside the recipe is another file."""
    beside = folder / module.replace(".", "/")
    own = [path for path in (beside.with_suffix(".py"), beside / "__init__.py") if path.is_file()]
    loaded = getattr(sys.modules.get(module), "__file__", None)
    return str(loaded) if own and loaded and Path(loaded).resolve() != own[0].resolve() else ""


def import_target(text: str, folder: Path) -> tuple[type[Operator] | Callable[..., Any] | None, Problem | None]:
    """Import "package.module:name"; returns the object or a problem."""
    from dovetail.engines.object_loader import import_object as found
    from dovetail.errors import DovetailError

    try:
        target = found(text)
    except DovetailError as error:
        problem = error.problems[0]
        return None, Problem(
            "DT417", problem.message, problem.evidence, ("package.module:name of a function or class",)
        )
    except (Exception, SystemExit) as error:
        message = f"the module of {text!r} cannot be imported: {type(error).__name__}: {error}"
        return None, Problem(
            "DT417", message, _last_traceback_lines(error), (f"python -c 'import {text.partition(':')[0]}'",)
        )
    elsewhere = _shadowing_module(text.partition(":")[0], folder)
    if elsewhere:
        message = f"{text!r}: another module of that name is loaded, {elsewhere}, not the one beside the recipe"
        return None, Problem("DT417", message, fixes=("give one of the two another name",))
    return target, None


def make_operator(target: type[Operator] | Callable[..., Any], arguments: Mapping[str, Any]) -> Operator:
    """Create the operator. Raises what its `__init__` raises, and TypeError if the arguments do not match."""
    if isinstance(target, type) and issubclass(target, Operator):
        return target(**arguments)
    if not callable(target):
        raise TypeError(f"a {type(target).__name__} is not a function or class")
    if isinstance(target, type) and not any("__call__" in vars(base) for base in target.__mro__):
        raise TypeError("the class has no __call__ method")
    if is_async(target):
        raise TypeError("async functions are not supported in recipes")
    signature = signature_of(target)
    if signature is not None:
        signature.bind(*(() if isinstance(target, type) else ({},)), **arguments)
    return CallableOperator(target, arguments)


def signature_of(target: Callable[..., Any]) -> inspect.Signature | None:
    """The signature; None if it is unknown, as of some functions in C."""
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def load_custom_operators(paths: Sequence[str], folder: Path) -> tuple[dict[str, Any], list[tuple[int, Problem]]]:
    """Operator name -> class or function of all files; and problems with the index of their path."""
    operators: dict[str, Any] = {}
    problems: list[tuple[int, Problem]] = []
    for number, text in enumerate(paths):
        path = (folder / text).resolve()
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        files = [file for file in files if not file.stem.startswith("_") and file.stem not in IGNORED_MODULES]
        if not path.exists() or not files:
            what = "no such file or folder" if not path.exists() else "no Python file in"
            problems.append(
                (
                    number,
                    Problem("DT417", f"{what}: {path}", fixes=("name a Python file, or a folder of Python files",)),
                )
            )
        for file in files if path.exists() else ():
            try:
                operators |= dict(_operators_in_file(file))
            except (Exception, SystemExit) as error:
                message = f"{file} cannot be imported: {type(error).__name__}: {error}"
                problems.append((number, Problem("DT417", message, _last_traceback_lines(error), (f"python {file}",))))
    return operators, problems


def _operators_in_file(file: Path) -> Iterator[tuple[str, Any]]:
    """Import by name from the file's folder, so that workers can do the same."""
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.import_module(file.stem)
    origin = getattr(module, "__file__", None)
    if origin is None or Path(origin).resolve() != file:
        raise ImportError(f"another module is called {file.stem!r}: {origin}; rename the file")
    for name, value in vars(module).items():
        here = getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
        if here and isinstance(value, type):
            yield _snake_case(name), value
        elif here and inspect.isfunction(value):
            yield name, value


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _last_traceback_lines(error: BaseException) -> tuple[str, ...]:
    import traceback

    lines = [line for text in traceback.format_exception(error) for line in text.rstrip().splitlines()]
    return tuple(lines[-3:])
