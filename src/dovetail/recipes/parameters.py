"""Is what a recipe says to an operator what that operator understands?

Everything that is wrong is told, each with a line that is right. What every operator accepts for its workers (num_proc,
memory, ...) is looked at elsewhere, because it depends on what the machine has.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dovetail.errors import Problem, did_you_mean
from dovetail.recipes.catalogue import REQUIRED, Known, Parameter
from dovetail.recipes.keys import OLD_NAMES, OURS
from dovetail.recipes.kinds import Kind, as_number, kinds_of, spoken, whole, written
from dovetail.resources.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dovetail.recipes.operators.base import Operator

SCHEDULED = frozenset(
    {
        *("num_proc", "num_cpus", "num_gpus", "memory", "batch_size", "accelerator", "runtime_env"),
        *("ray_execution_mode", *OLD_NAMES, *OURS),
    }
)
"""What is said about workers, not about rows: not looked at here, unless an operator has one of that name itself."""
_RATIO = re.compile(r"\d{1,9}(?:\.\d{1,9})?(?:[/:]\d{1,9})?")
_FLAGS = {"true": True, "false": False, "yes": True, "no": False}
_SHOWN = 60


def problems_of(known: Known, given: Mapping[str, Any]) -> Iterator[tuple[str, Problem]]:
    """Parameter, and what is wrong with it."""
    accepted = known.accepted
    for name, value in given.items():
        if name in SCHEDULED and name not in known.parameters:
            continue
        parameter = accepted.get(name)
        problem = _unknown(known, str(name)) if parameter is None else _wrong(known, parameter, value)
        if problem is not None:
            yield str(name), problem
    for name, parameter in known.parameters.items():
        if parameter.default is REQUIRED and name not in given:
            yield name, _missing(known, parameter)
    yield from _crossed(known, given)


def fitted(known: Known, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, with numbers of the type that is wanted; for what has no problems."""
    accepted = known.accepted
    found = dict(given)
    for name, value in given.items():
        kinds = kinds_of(accepted[name].kind) if name in accepted and name not in SCHEDULED else ()
        if any(kind.name in ("int", "ints") for kind in kinds) and not any(kind.name == "float" for kind in kinds):
            found[name] = whole(value)
    return found


def own_problems(cls: type[Operator], given: Mapping[str, Any]) -> Problem | None:
    """What the operator itself says to its parameters, all together; `given` has those of its `__init__` only.

    Whoever tells it says first which operator that is.
    """
    try:
        cls(**given)
    except (ValueError, TypeError, re.error) as error:
        said = str(error) or type(error).__name__
        fixes = ("adapter: data_juicer",) if "adapter: data_juicer" in said else _without(cls, given)
        return Problem("DT415", f"does not take these parameters: {said}", (f"given: {_shown(given)}",), fixes)
    return None


def _without(cls: type[Operator], given: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters of which one may be left out, and then it can be made: it was tried."""
    fixes = []
    for name in given:
        try:
            cls(**{other: value for other, value in given.items() if other != name})
        except (ValueError, TypeError, re.error):
            continue
        default = inspect.signature(cls).parameters.get(name)
        is_known = default is not None and default.default is not inspect.Parameter.empty
        fixes.append(f"leave {name} out" + (f": it is {_shown(default.default)} then" if default and is_known else ""))
    return tuple(fixes)


def _unknown(known: Known, name: str) -> Problem:
    near = did_you_mean(name, [*known.parameters, *known.accepted, *OURS])
    own = ", ".join(known.parameters)
    return Problem(
        "DT411",
        f"{known.name}: there is no parameter {name!r}{near}",
        (f"its own: {own}" if own else f"{known.name} has no parameters of its own",),
        (f"write {near.split(chr(39))[1]} instead of {name}" if near else f"leave {name} out",),
    )


def _missing(known: Known, parameter: Parameter) -> Problem:
    wanted = spoken(parameter.kind, nullable=parameter.nullable)
    return Problem(
        "DT412",
        f"{known.name}: {parameter.name} is missing; it must be {wanted}",
        fixes=(f"{parameter.name}: {written(example_of(parameter))}",),
    )


def _wrong(known: Known, parameter: Parameter, value: object) -> Problem | None:
    if fits(parameter, value):
        return None
    wanted = spoken(parameter.kind, nullable=parameter.nullable)
    why, instead = _why(parameter, value)
    return Problem(
        "DT412",
        f"{known.name}: {parameter.name} is {_shown(value)}{why}, but must be {wanted}",
        fixes=(f"{parameter.name}: {written(instead)}",),
    )


def fits(parameter: Parameter, value: object) -> bool:
    """Whether a parameter may have this value."""
    if value is None:
        return parameter.nullable
    return any(kind.fits(value, unbounded=_unbounded(parameter, kind)) for kind in kinds_of(parameter.kind))


def _unbounded(parameter: Parameter, kind: Kind) -> bool:
    """Whether infinity makes sense: for bounds. A whole number is one only if its default is the largest there is."""
    return _is_endless(parameter.default) or (kind.name == "float" and parameter.name.startswith(("min_", "max_")))


def _is_endless(default: object) -> bool:
    """Whether a default stands for "no bound"."""
    return isinstance(default, int | float) and abs(default) >= sys.maxsize


def example_of(parameter: Parameter) -> Any:
    """A value that fits: the default, if that says something."""
    default = parameter.default
    if _is_endless(default):
        return int(math.copysign(1000, default))
    return kinds_of(parameter.kind)[0].example() if default is REQUIRED or default in (None, "") else default


def _why(parameter: Parameter, value: object) -> tuple[str, Any]:
    """What is special about a wrong value, and what was probably meant."""
    example = example_of(parameter)
    if isinstance(value, str):
        meant = _FLAGS.get(value.lower(), as_number(value))
        if meant is not None and fits(parameter, meant):
            return " (a text: it stands in quotes)", meant
        if "'" in parameter.kind:
            return did_you_mean(value, [kind.constant for kind in kinds_of(parameter.kind)]), example
        return " (a text)", [value] if fits(parameter, [value]) else example
    if isinstance(value, bool):
        if fits(parameter, "no"):
            return " (YAML reads a bare yes, no, on and off as true and false)", "yes" if value else "no"
        return "", example
    if isinstance(value, int | float):
        if value in (0, 1) and fits(parameter, True):
            return " (a number)", bool(value)
        if fits(parameter, str(value)):
            return " (a number: it stands without quotes)", str(value)
        return "", [value] if fits(parameter, [value]) else _nearest(parameter, value, example)
    return "", example


def _nearest(parameter: Parameter, value: float, example: Any) -> Any:
    """The number next to it that fits."""
    for kind in kinds_of(parameter.kind):
        tried = [kind.high, kind.low, None if kind.low is None else kind.low + 1]
        if math.isfinite(value):
            tried = [round(value), *tried]
        for number in tried:
            if number is not None and fits(parameter, number):
                return number
    return example


def _crossed(known: Known, given: Mapping[str, Any]) -> Iterator[tuple[str, Problem]]:
    """Every min_X that is above its max_X, if at least one of them is given."""
    for name, low in known.parameters.items():
        high = known.parameters.get(f"max_{name[4:]}")
        if not name.startswith("min_") or high is None or not {low.name, high.name} & given.keys():
            continue
        bounds = [given.get(bound.name, bound.default) for bound in (low, high)]
        if not fits(low, bounds[0]) or not fits(high, bounds[1]):
            continue
        least, most = _amount(bounds[0]), _amount(bounds[1])
        if least is not None and most is not None and least > most:
            yield low.name if low.name in given else high.name, _above(known, given, low, high)


def _above(known: Known, given: Mapping[str, Any], low: Parameter, high: Parameter) -> Problem:
    said, fixes = [], []
    for bound, other in ((low, high), (high, low)):
        is_default = "" if bound.name in given else ", its default"
        said.append(f"{bound.name} ({_shown(given.get(bound.name, bound.default))}{is_default})")
        instead = given.get(other.name, other.default)
        if fits(bound, instead):
            fixes.append(f"{bound.name}: {written(instead)}")
    message = f"{known.name}: {said[0]} is above {said[1]}, and nothing is between them"
    return Problem("DT412", message, fixes=tuple(fixes))


def _amount(value: object) -> float | Fraction | None:
    """What bounds are compared by: numbers, sizes such as '10KB', ratios such as '9/21'."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        return None
    if _RATIO.fullmatch(value):
        try:
            over, _, under = value.replace(":", "/").partition("/")
            return Fraction(over) / Fraction(under or 1)
        except ZeroDivisionError:
            return None
    try:
        return parse_size(value)
    except ValueError:
        return None


def _shown(value: object) -> str:
    text = written(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
