"""Signature of a UDF: the columns it takes, the form of its arguments (values, arrays, batch) and its return
annotation."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from dovetail.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

UdfKind = Literal["scalar", "arrays", "batch"]
BAD_SIGNATURE = "DT441"
NO_ANNOTATION = inspect.Parameter.empty
"""No annotation."""
AWAITABLES = (Awaitable, Coroutine)
POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class UnresolvedAnnotation:
    """A string annotation with an unresolvable name."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Signature:
    kind: UdfKind
    is_async: bool
    inputs: tuple[str, ...]
    annotations: tuple[Any, ...]
    """Annotations of the inputs; NO_ANNOTATION for an input without one."""
    returns: Any
    problems: tuple[Problem, ...]
    uncallable: bool = False
    """It cannot be called for rows at all: further problems are not reported."""


def read_signature(fn: Callable[..., Any] | type, name: str, input_columns: Sequence[str] | None) -> Signature:
    """Inspect a function; never raises, every obstacle is a problem."""
    called = call_target(fn)
    problems = _check_callable(fn, called, name)
    hopeless = bool(problems)
    parameters = _parameters(fn, called, name, problems)
    hints = _read_hints(called)
    returns = _awaited_annotation(hints.get("return", NO_ANNOTATION), called, name, problems)
    annotated = [(one, hints.get(one.name, NO_ANNOTATION)) for one in parameters]
    kind = _detect_kind([hint for _, hint in annotated], returns)
    taken = _column_parameters(annotated, kind, name, input_columns, problems)
    if input_columns is not None:
        inputs = tuple(input_columns)
    else:
        inputs = () if kind == "batch" else tuple(one.name for one, _ in taken)
    hints_of_inputs = tuple(hint for _, hint in taken)
    problems += _check_annotations(annotated, kind, name)
    return Signature(kind, _is_async(called), inputs, hints_of_inputs, returns, tuple(problems), hopeless)


def _check_callable(fn: object, called: Callable[..., Any], name: str) -> list[Problem]:
    """Problems of objects whose call does not return the value of a row."""
    if isinstance(fn, type) and not any("__call__" in vars(kind) for kind in fn.__mro__):
        fix = "def __call__(self, text: str) -> str: ..."
        return [Problem(BAD_SIGNATURE, f"{name}: the class has no method __call__", fixes=(fix,))]
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in _function_and_method(called)):
        message = f"{name}: is a generator function, but a call must return the value of a row"
        written = "__call__(self, ...)" if isinstance(fn, type) else f"{_example_name(name)}(...)"
        fixes = (f"def {written} -> str: return ..., instead of yield", "-> list[str] for several values")
        return [Problem(BAD_SIGNATURE, message, fixes=fixes)]
    return []


def _awaited_annotation(returns: Any, called: Callable[..., Any], name: str, problems: list[Problem]) -> Any:
    """The result type of a plain function annotated to return an awaitable, with the problem that it is not async."""
    if typing.get_origin(strip_optional(returns)) not in AWAITABLES or _is_async(called):
        return returns
    message = f"{name}: returns {_annotation_name(strip_optional(returns))}, which is never awaited: use async def"
    problems.append(Problem(BAD_SIGNATURE, message, fixes=(f"async def {_example_name(name)}(...), that awaits it",)))
    return typing.get_args(strip_optional(returns))[-1]


def call_target(fn: Callable[..., Any] | type) -> Callable[..., Any]:
    """The function that is called for rows: `__call__` of classes and objects."""
    if isinstance(fn, type):
        return typing.cast("Callable[..., Any]", getattr(fn, "__call__", fn))  # noqa: B004 - of its objects
    return fn


def _is_async(called: Callable[..., Any]) -> bool:
    return any(inspect.iscoroutinefunction(one) for one in _function_and_method(called))


def _function_and_method(called: Callable[..., Any]) -> tuple[Any, Any]:
    """The function itself, or the method of an object."""
    inner = called.func if isinstance(called, functools.partial) else called
    return inner, getattr(inner, "__call__", None)  # noqa: B004


def _parameters(fn: object, called: Callable[..., Any], name: str, problems: list[Problem]) -> list[inspect.Parameter]:
    if problems:
        return []
    try:
        found = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        fix = f"def {_example_name(name)}(text: str) -> str: return ..., a function of your own that calls it"
        problems.append(Problem(BAD_SIGNATURE, f"{name}: its signature is not available", fixes=(fix,)))
        return []
    if isinstance(fn, type) and not isinstance(inspect.getattr_static(fn, "__call__", None), staticmethod):
        found = found[1:]
    if isinstance(fn, type):
        problems += [*_check_init(fn, name), *_check_setup(fn, name)]
    return found


def _check_init(kind: type, name: str) -> list[Problem]:
    """Problem of a class whose __init__ needs arguments: workers create the object without any."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return []
    needed = _required_names(parameters)
    if not needed:
        return []
    message = f"{name}: its __init__ needs {', '.join(needed)}, but workers create the object without arguments"
    return [Problem(BAD_SIGNATURE, message, fixes=(f"give {needed[0]} a default, or load it in setup(self, worker)",))]


def _check_setup(kind: type, name: str) -> list[Problem]:
    """Problem of a setup that needs more arguments than the worker."""
    setup = inspect.getattr_static(kind, "setup", None)
    if setup is None or not callable(getattr(kind, "setup", None)):
        return []
    try:
        parameters = list(inspect.signature(kind.setup).parameters.values())  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return []
    needed = _required_names(parameters if isinstance(setup, staticmethod | classmethod) else parameters[1:])
    by_keyword = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name in needed]
    if len(needed) < 2 and not by_keyword:
        return []
    message = f"{name}: its setup needs {', '.join(needed)}, but it is called with the worker only"
    fix = "def setup(self, worker) or def setup(self); give other parameters a default"
    return [Problem(BAD_SIGNATURE, message, fixes=(fix,))]


def _required_names(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [
        one.name
        for one in parameters
        if one.default is NO_ANNOTATION and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]


def _column_parameters(
    annotated: list[tuple[inspect.Parameter, Any]],
    kind: UdfKind,
    name: str,
    input_columns: Sequence[str] | None,
    problems: list[Problem],
) -> list[tuple[inspect.Parameter, Any]]:
    """Parameters that receive columns. Parameters with a default keep it, unless input_columns= names a column for
    them."""
    by_place = [pair for pair in annotated if pair[0].kind in POSITIONAL_KINDS]
    needed = [pair for pair in by_place if pair[0].default is NO_ANNOTATION]
    rest = [pair for pair in annotated if pair[0].kind is inspect.Parameter.VAR_POSITIONAL]
    for one, _ in annotated:
        if one.kind is inspect.Parameter.KEYWORD_ONLY and one.default is NO_ANNOTATION:
            message = f"{name}: {one.name} is keyword-only, but columns are passed by position"
            problems.append(
                Problem(BAD_SIGNATURE, message, fixes=(f"remove the * before {one.name}, or give it a default",))
            )
    if problems:
        return needed
    if kind == "batch":
        if len(needed) != 1:
            message = f"{name}: a function of a RecordBatch takes one parameter, this one takes {len(needed)}"
            problems.append(
                Problem(
                    BAD_SIGNATURE, message, fixes=(f"def {_example_name(name)}(batch: pa.RecordBatch) -> pa.Array",)
                )
            )
        return []
    wanted = len(needed) if input_columns is None else len(input_columns)
    if not by_place and not rest:
        problems.append(_no_parameters_problem(annotated, name, input_columns))
    elif not wanted:
        message = f"{name}: every parameter has a default, so it reads no column"
        fixes = (f"def {_example_name(name)}(text: str) -> str, where text is a column", 'input_columns=["text"]')
        problems.append(Problem(BAD_SIGNATURE, message, fixes=fixes))
    elif not rest and not len(needed) <= wanted <= len(by_place):
        takes = f"{len(needed)} to {len(by_place)}" if len(by_place) > len(needed) else f"{len(needed)}"
        message = f"{name}: input_columns= has {wanted} names, the function takes {takes}"
        names = [one.name for one, _ in needed or by_place[:1]]
        problems.append(Problem(BAD_SIGNATURE, message, fixes=(f"input_columns={names!r}",)))
    places = by_place[:wanted] if input_columns is not None else needed
    return places + rest * (wanted - len(places))


def _no_parameters_problem(
    annotated: list[tuple[inspect.Parameter, Any]], name: str, input_columns: Sequence[str] | None
) -> Problem:
    named = [one.name for one, _ in annotated if one.kind is inspect.Parameter.VAR_KEYWORD]
    why = f"**{named[0]} gets none: columns are passed by position" if named else "it has no parameter"
    columns = [column for column in input_columns or named if column.isidentifier()] or ["text"]
    fix = (
        f"def {_example_name(name)}({', '.join(f'{column}: str' for column in columns)}) -> str, of "
        "columns of the table"
    )
    return Problem(BAD_SIGNATURE, f"{name}: reads no column: {why}", fixes=(fix,))


def _example_name(name: str) -> str:
    return name if name.isidentifier() else "fill"


# --- forms


def is_arrow(annotation: object, *names: str) -> bool:
    """Whether it is one of these pyarrow classes or a subclass; does not import pyarrow."""
    if not isinstance(annotation, type):
        return False
    return any(base.__name__ in names and base.__module__.partition(".")[0] == "pyarrow" for base in annotation.__mro__)


def is_array(annotation: object) -> bool:
    return is_arrow(strip_optional(annotation), "Array", "ChunkedArray")


def strip_optional(annotation: Any) -> Any:
    """The annotation without Annotated and `| None`."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
            continue
        inner = [one for one in _union_arguments(annotation) if one is not type(None)]
        if len(inner) == 1 and inner[0] is not annotation:
            annotation = inner[0]
            continue
        return annotation


def _union_arguments(annotation: Any) -> tuple[Any, ...]:
    import types

    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else ()


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Members of a union; otherwise the annotation itself."""
    return _union_arguments(annotation) or (annotation,)


def _detect_kind(hints: list[Any], returns: Any) -> UdfKind:
    if any(is_arrow(strip_optional(hint), "RecordBatch", "Table") for hint in hints):
        return "batch"
    arrays = any(is_array(hint) for hint in hints)
    has_no_annotation = bool(hints) and all(hint is NO_ANNOTATION for hint in hints)
    return "arrays" if arrays or (has_no_annotation and is_array(returns)) else "scalar"


def _check_annotations(annotated: list[tuple[inspect.Parameter, Any]], kind: UdfKind, name: str) -> list[Problem]:
    problems = []
    for one, hint in annotated:
        plain = strip_optional(hint)
        prefix = f"{name}: {one.name} is annotated with {_annotation_name(plain)}"
        if isinstance(plain, UnresolvedAnnotation):
            message = f"{prefix}, which cannot be resolved: {plain.reason}"
            problems.append(
                Problem(BAD_SIGNATURE, message, fixes=("import it at the top of the module, not under an if",))
            )
        elif is_arrow(plain, "Table"):
            problems.append(
                Problem(
                    BAD_SIGNATURE, f"{prefix}, but rows are passed as batches", fixes=(f"{one.name}: pa.RecordBatch",)
                )
            )
        elif getattr(plain, "__name__", "") in ("ndarray", "Series"):
            message = f"{prefix}, but columns are passed as Arrow arrays or as values"
            fix = f"{one.name}: pa.Array, and {one.name}.to_numpy(zero_copy_only=False) in the function"
            problems.append(Problem(BAD_SIGNATURE, message, fixes=(fix,)))
        elif kind == "arrays" and one.default is NO_ANNOTATION and hint is not NO_ANNOTATION and not is_array(hint):
            message = f"{prefix}, but other parameters are arrays: a call gets arrays for all columns or values for all"
            problems.append(Problem(BAD_SIGNATURE, message, fixes=(f"{one.name}: pa.Array",)))
    return problems


def _annotation_name(annotation: object) -> str:
    if isinstance(annotation, UnresolvedAnnotation):
        return repr(annotation.text)
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


# --- string annotations


def _read_hints(called: Callable[..., Any]) -> dict[str, Any]:
    inner: Any = called.func if isinstance(called, functools.partial) else called
    if not hasattr(inner, "__code__") and not hasattr(inner, "__func__"):
        inner = getattr(inner, "__call__", inner)  # noqa: B004 - an object's own method
    annotations = getattr(inner, "__annotations__", None)
    if not isinstance(annotations, dict):
        return {}
    unwrapped = inspect.unwrap(inner)
    names = dict(getattr(unwrapped, "__globals__", {}))
    function = getattr(unwrapped, "__func__", unwrapped)
    names |= dict(getattr(function, "__globals__", {}))
    for free, cell in (
        zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        if hasattr(function, "__code__")
        else ()
    ):
        try:
            names[free] = cell.cell_contents
        except ValueError:  # bound later
            continue
    return {name: resolve_annotation(value, names) for name, value in annotations.items()}


def resolve_annotation(annotation: Any, names: dict[str, Any]) -> Any:
    """Evaluate a string annotation with these names and the usual aliases of Arrow and numpy, which are often imported
    for type checkers only."""
    reason = ""
    for extra in (False, True):
        try:
            holder = SimpleNamespace(__annotations__={"it": annotation})
            found = typing.get_type_hints(
                holder, names | (_common_names(names) if extra else {}), {}, include_extras=True
            )
        except Exception as error:
            reason = f"{error}"
        else:
            return found["it"]
    return UnresolvedAnnotation(str(annotation), reason)


def _common_names(names: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        import numpy
        import pyarrow

        found = {"pa": pyarrow, "pyarrow": pyarrow, "np": numpy, "numpy": numpy}
    except ImportError:
        pass
    import datetime
    import decimal

    found |= {
        "datetime": datetime,
        "Any": Any,
        "typing": typing,
        "NamedTuple": typing.NamedTuple,
        "Decimal": decimal.Decimal,
    }
    return {name: value for name, value in found.items() if name not in names}
