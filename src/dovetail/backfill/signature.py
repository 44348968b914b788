"""What does a function say of itself: which columns it takes, in which form, and what it gives?"""

from __future__ import annotations

import functools
import inspect
import typing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from dovetail.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Kind = Literal["scalar", "arrays", "batch"]
SIGNATURE = "DT441"
NOTHING = inspect.Parameter.empty
"""No annotation."""
BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Unresolved:
    """An annotation that is a text, of which a name cannot be found."""

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Signature:
    kind: Kind
    is_async: bool
    inputs: tuple[str, ...]
    annotations: tuple[Any, ...]
    """Of the inputs; NOTHING where there is none."""
    returns: Any
    problems: tuple[Problem, ...]


def signature_of(fn: Callable[..., Any] | type, name: str, input_columns: Sequence[str] | None) -> Signature:
    """Never raises: what cannot be told is a problem."""
    called = called_of(fn)
    problems: list[Problem] = []
    parameters = _parameters(fn, called, name, problems)
    hints = _hints(called)
    returns = hints.get("return", NOTHING)
    annotated = [(one, hints.get(one.name, NOTHING)) for one in parameters]
    kind = _kind([hint for _, hint in annotated], returns)
    taken = _taken(annotated, kind, name, input_columns, problems)
    if input_columns is not None:
        inputs = tuple(input_columns)
    else:
        inputs = () if kind == "batch" else tuple(one.name for one, _ in taken)
    hints_of_inputs = tuple(hint for _, hint in taken)
    problems += _mixed(annotated, kind, name)
    return Signature(kind, _awaited(called), inputs, hints_of_inputs, returns, tuple(problems))


def called_of(fn: Callable[..., Any] | type) -> Callable[..., Any]:
    """What is called for rows: of classes and objects their `__call__`."""
    if isinstance(fn, type):
        return typing.cast("Callable[..., Any]", getattr(fn, "__call__", fn))  # noqa: B004 - of its objects
    return fn


def _awaited(called: Callable[..., Any]) -> bool:
    inner = called.func if isinstance(called, functools.partial) else called
    both = (inner, getattr(inner, "__call__", None))  # noqa: B004 - an object's own method
    return any(inspect.iscoroutinefunction(one) for one in both)


def _parameters(fn: object, called: Callable[..., Any], name: str, problems: list[Problem]) -> list[inspect.Parameter]:
    if isinstance(fn, type) and not any("__call__" in vars(kind) for kind in fn.__mro__):
        fix = "def __call__(self, text: str) -> str: ..."
        problems.append(Problem(SIGNATURE, f"{name}: the class has no method __call__", fixes=(fix,)))
        return []
    try:
        found = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        fix = f"def {_word(name)}(text: str) -> str: return ..., a function of your own that calls it"
        problems.append(Problem(SIGNATURE, f"{name}: Python cannot tell its parameters", fixes=(fix,)))
        return []
    if isinstance(fn, type) and not isinstance(inspect.getattr_static(fn, "__call__", None), staticmethod):
        found = found[1:]
    if isinstance(fn, type):
        problems += _unmade(fn, name)
    return found


def _unmade(kind: type, name: str) -> list[Problem]:
    """The workers make the object, and have nothing to give."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return []
    needed = [
        one.name
        for one in parameters
        if one.default is NOTHING and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if not needed:
        return []
    message = f"{name}: its __init__ needs {', '.join(needed)}, and workers make the object without arguments"
    return [Problem(SIGNATURE, message, fixes=(f"give {needed[0]} a default, or load it in setup(self, worker)",))]


def _taken(
    annotated: list[tuple[inspect.Parameter, Any]],
    kind: Kind,
    name: str,
    input_columns: Sequence[str] | None,
    problems: list[Problem],
) -> list[tuple[inspect.Parameter, Any]]:
    """The parameters that columns go to. Those with a default keep it, unless input_columns= has a name for them."""
    by_place = [pair for pair in annotated if pair[0].kind in BY_PLACE]
    needed = [pair for pair in by_place if pair[0].default is NOTHING]
    rest = [pair for pair in annotated if pair[0].kind is inspect.Parameter.VAR_POSITIONAL]
    for one, _ in annotated:
        if one.kind is inspect.Parameter.KEYWORD_ONLY and one.default is NOTHING:
            message = f"{name}: {one.name} is given by keyword only, and columns are given by their place"
            problems.append(
                Problem(SIGNATURE, message, fixes=(f"remove the * before {one.name}, or give it a default",))
            )
    if problems:
        return needed
    if kind == "batch":
        if len(needed) != 1:
            message = f"{name}: a function of a RecordBatch has one parameter, this one has {len(needed)}"
            problems.append(
                Problem(SIGNATURE, message, fixes=(f"def {_word(name)}(batch: pa.RecordBatch) -> pa.Array",))
            )
        return []
    wanted = len(needed) if input_columns is None else len(input_columns)
    if not wanted:
        message = f"{name}: no parameter without a default, so that it reads no column"
        fixes = (f"def {_word(name)}(text: str) -> str, where text is a column", 'or input_columns=["text"]')
        problems.append(Problem(SIGNATURE, message, fixes=fixes))
    elif not rest and not len(needed) <= wanted <= len(by_place):
        takes = f"{len(needed)} to {len(by_place)}" if len(by_place) > len(needed) else f"{len(needed)}"
        message = f"{name}: input_columns= has {wanted} names, the function takes {takes}"
        names = [one.name for one, _ in needed]
        problems.append(Problem(SIGNATURE, message, fixes=(f"input_columns={names!r}",)))
    places = by_place[:wanted] if input_columns is not None else needed
    return places + rest * (wanted - len(places))


def _word(name: str) -> str:
    return name if name.isidentifier() else "fill"


# --- forms


def is_arrow(annotation: object, *names: str) -> bool:
    """Whether it is one of these classes of pyarrow or derives from it; pyarrow is not imported for that."""
    if not isinstance(annotation, type):
        return False
    return any(base.__name__ in names and base.__module__.partition(".")[0] == "pyarrow" for base in annotation.__mro__)


def is_array(annotation: object) -> bool:
    return is_arrow(bare(annotation), "Array", "ChunkedArray")


def bare(annotation: Any) -> Any:
    """Without Annotated and without `| None`."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
            continue
        inner = [one for one in _members(annotation) if one is not type(None)]
        if len(inner) == 1 and inner[0] is not annotation:
            annotation = inner[0]
            continue
        return annotation


def _members(annotation: Any) -> tuple[Any, ...]:
    import types

    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else ()


def members(annotation: Any) -> tuple[Any, ...]:
    """Of `A | B` both; else itself."""
    return _members(annotation) or (annotation,)


def _kind(hints: list[Any], returns: Any) -> Kind:
    if any(is_arrow(bare(hint), "RecordBatch", "Table") for hint in hints):
        return "batch"
    arrays = any(is_array(hint) for hint in hints)
    unsaid = bool(hints) and all(hint is NOTHING for hint in hints)
    return "arrays" if arrays or (unsaid and is_array(returns)) else "scalar"


def _mixed(annotated: list[tuple[inspect.Parameter, Any]], kind: Kind, name: str) -> list[Problem]:
    problems = []
    for one, hint in annotated:
        plain = bare(hint)
        said = f"{name}: {one.name} is annotated with {_shown(plain)}"
        if isinstance(plain, Unresolved):
            message = f"{said}, of which a name cannot be found: {plain.reason}"
            problems.append(Problem(SIGNATURE, message, fixes=("import it at the top of the module, not under an if",)))
        elif is_arrow(plain, "Table"):
            problems.append(
                Problem(SIGNATURE, f"{said}, and rows come as batches", fixes=(f"{one.name}: pa.RecordBatch",))
            )
        elif getattr(plain, "__name__", "") in ("ndarray", "Series"):
            message = f"{said}, and columns come as Arrow arrays or as values"
            fix = f"{one.name}: pa.Array, and {one.name}.to_numpy(zero_copy_only=False) in the function"
            problems.append(Problem(SIGNATURE, message, fixes=(fix,)))
        elif kind == "arrays" and one.default is NOTHING and hint is not NOTHING and not is_array(hint):
            message = f"{said}, and others are arrays: a call gets arrays of all columns, or values of all"
            problems.append(Problem(SIGNATURE, message, fixes=(f"{one.name}: pa.Array",)))
    return problems


def _shown(annotation: object) -> str:
    if isinstance(annotation, Unresolved):
        return repr(annotation.text)
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


# --- annotations that are texts


def _hints(called: Callable[..., Any]) -> dict[str, Any]:
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
    return {name: resolved(value, names) for name, value in annotations.items()}


def resolved(annotation: Any, names: dict[str, Any]) -> Any:
    """As a type, by these names, and by those that Arrow and numpy usually have: many import them for checkers only."""
    reason = ""
    for extra in (False, True):
        try:
            holder = SimpleNamespace(__annotations__={"it": annotation})
            found = typing.get_type_hints(holder, names | (_usual(names) if extra else {}), {}, include_extras=True)
        except Exception as error:
            reason = f"{error}"
        else:
            return found["it"]
    return Unresolved(str(annotation), reason)


def _usual(names: dict[str, Any]) -> dict[str, Any]:
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
