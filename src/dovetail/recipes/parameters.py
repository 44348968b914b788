"""Validation of operator parameters against the catalogue; every problem has a fix that is valid.

Parameters of workers (num_proc, memory, ...) are validated in `requirements`.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dovetail.documents.fields import is_finite
from dovetail.errors import Problem, did_you_mean, nearest_word
from dovetail.recipes.catalogue import REQUIRED, OperatorSpec, Parameter
from dovetail.recipes.file_keys import DEPRECATED_NAMES, DOVETAIL_KEYS
from dovetail.recipes.operators.support.parameter_checks import NeedsDataJuicer
from dovetail.recipes.parameter_types import ParameterType, parse_number, parse_types, to_int, to_yaml, type_text
from dovetail.resources.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dovetail.recipes.operators.base import Operator

WORKER_PARAMETERS = frozenset(
    {
        *("num_proc", "num_cpus", "num_gpus", "memory", "batch_size", "accelerator", "runtime_env"),
        *("ray_execution_mode", *DEPRECATED_NAMES, *DOVETAIL_KEYS),
    }
)
"""Parameters of workers: not validated here, unless an operator has its own parameter of that name."""
_RATIO = re.compile(r"\d{1,9}(?:\.\d{1,9})?(?:[/:]\d{1,9})?")
_FLAGS = {"true": True, "false": False, "yes": True, "no": False}
_MAX_SHOWN_CHARACTERS = 60


def parameter_problems(known: OperatorSpec, given: Mapping[str, Any]) -> Iterator[tuple[str, Problem]]:
    """(parameter, problem) pairs."""
    accepted = known.accepted
    for name, value in given.items():
        if name in WORKER_PARAMETERS and name not in known.parameters:
            continue
        parameter = accepted.get(name)
        problem = _unknown_problem(known, str(name)) if parameter is None else _value_problem(known, parameter, value)
        if problem is not None:
            yield str(name), problem
    for name, parameter in known.parameters.items():
        if parameter.default is REQUIRED and name not in given:
            yield name, _missing_problem(known, parameter)
    yield from _crossed_bounds(known, given)


def coerce_parameters(known: OperatorSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Valid parameters with integers where the operator expects integers."""
    accepted = known.accepted
    found = dict(given)
    for name, value in given.items():
        kinds = parse_types(accepted[name].kind) if name in accepted and name not in WORKER_PARAMETERS else ()
        if any(kind.name in ("int", "ints") for kind in kinds) and not any(kind.name == "float" for kind in kinds):
            found[name] = to_int(value)
    return found


def constructor_problem(cls: type[Operator], given: Mapping[str, Any]) -> Problem | None:
    """The error that the constructor raises for its parameters, as a problem without the operator's name."""
    try:
        cls(**given)
    except (ValueError, TypeError, re.error) as error:
        reason = str(error) or type(error).__name__
        needs_adapter = isinstance(error, NeedsDataJuicer)
        fixes = ("adapter: data_juicer",) if needs_adapter else _removable_parameters(cls, given)
        return Problem("DT415", f"does not accept these parameters: {reason}", (f"given: {_shorten(given)}",), fixes)
    return None


def _removable_parameters(cls: type[Operator], given: Mapping[str, Any]) -> tuple[str, ...]:
    """Fixes: parameters without which the constructor succeeds. Each was tried."""
    fixes = []
    for name in given:
        try:
            cls(**{other: value for other, value in given.items() if other != name})
        except (ValueError, TypeError, re.error):
            continue
        default = inspect.signature(cls).parameters.get(name)
        is_known = default is not None and default.default is not inspect.Parameter.empty
        fixes.append(f"remove {name}" + (f" (default: {_shorten(default.default)})" if default and is_known else ""))
    return tuple(fixes)


def _unknown_problem(known: OperatorSpec, name: str) -> Problem:
    near = nearest_word(name, [*known.parameters, *known.accepted, *DOVETAIL_KEYS])
    hint = f" (did you mean {near!r}?)" if near is not None else ""
    own = ", ".join(known.parameters)
    return Problem(
        "DT411",
        f"{known.name}: there is no parameter {name!r}{hint}",
        (f"its own: {own}" if own else f"{known.name} has no parameters of its own",),
        (f"write {near} instead of {name}" if near is not None else f"remove {name}",),
    )


def _missing_problem(known: OperatorSpec, parameter: Parameter) -> Problem:
    wanted = type_text(parameter.kind, nullable=parameter.nullable)
    return Problem(
        "DT412",
        f"{known.name}: {parameter.name} is missing; it must be {wanted}",
        fixes=(f"{parameter.name}: {to_yaml(example_value(parameter))}",),
    )


def _value_problem(known: OperatorSpec, parameter: Parameter, value: object) -> Problem | None:
    if is_valid(parameter, value):
        return None
    wanted = type_text(parameter.kind, nullable=parameter.nullable)
    why, instead = _explain_mistake(parameter, value)
    return Problem(
        "DT412",
        f"{known.name}: {parameter.name} is {_shorten(value)}{why}, but must be {wanted}",
        fixes=(f"{parameter.name}: {to_yaml(instead)}",),
    )


def is_valid(parameter: Parameter, value: object) -> bool:
    """Whether a parameter may have this value."""
    if value is None:
        return parameter.nullable
    return any(kind.fits(value, unbounded=_allows_infinity(parameter, kind)) for kind in parse_types(parameter.kind))


def _allows_infinity(parameter: Parameter, kind: ParameterType) -> bool:
    """Infinity is valid for bounds. An integer is a bound only if its default is the largest integer."""
    return _is_unbounded_default(parameter.default) or (
        kind.name == "float" and parameter.name.startswith(("min_", "max_"))
    )


def _is_unbounded_default(default: object) -> bool:
    """Whether a default stands for "no bound"."""
    return isinstance(default, int | float) and abs(default) >= sys.maxsize


def example_value(parameter: Parameter) -> Any:
    """A valid value: the default, if it is informative."""
    default = parameter.default
    if _is_unbounded_default(default):
        return int(math.copysign(1000, default))
    return parse_types(parameter.kind)[0].example() if default is REQUIRED or default in (None, "") else default


def _explain_mistake(parameter: Parameter, value: object) -> tuple[str, Any]:
    """A remark on a wrong value, and the value that was probably meant."""
    example = example_value(parameter)
    if isinstance(value, str):
        meant = _FLAGS.get(value.lower(), parse_number(value))
        if meant is not None and is_valid(parameter, meant):
            return " (a string, because it is quoted)", meant
        if "'" in parameter.kind:
            return did_you_mean(value, [kind.constant for kind in parse_types(parameter.kind)]), example
        return " (a string)", [value] if is_valid(parameter, [value]) else example
    if isinstance(value, bool):
        if is_valid(parameter, "no"):
            return " (YAML reads a bare yes, no, on and off as true and false)", "yes" if value else "no"
        return "", example
    if isinstance(value, int | float):
        if value in (0, 1) and is_valid(parameter, True):
            return " (a number)", bool(value)
        if is_valid(parameter, str(value)):
            return " (a number, because it is not quoted)", str(value)
        return "", [value] if is_valid(parameter, [value]) else _nearest_valid(parameter, value, example)
    return "", example


def _nearest_valid(parameter: Parameter, value: float, example: Any) -> Any:
    """The nearest valid number."""
    for kind in parse_types(parameter.kind):
        tried = [kind.high, kind.low, None if kind.low is None else kind.low + 1]
        if is_finite(value):
            tried = [round(value), *tried]
        for number in tried:
            if number is not None and is_valid(parameter, number):
                return number
    return example


def _crossed_bounds(known: OperatorSpec, given: Mapping[str, Any]) -> Iterator[tuple[str, Problem]]:
    """Every min_X that is greater than its max_X, if at least one of them is given."""
    for name, low in known.parameters.items():
        high = known.parameters.get(f"max_{name[4:]}")
        if not name.startswith("min_") or high is None or not {low.name, high.name} & given.keys():
            continue
        bounds = [given.get(bound.name, bound.default) for bound in (low, high)]
        if not is_valid(low, bounds[0]) or not is_valid(high, bounds[1]):
            continue
        least, most = _comparable_amount(bounds[0]), _comparable_amount(bounds[1])
        if least is not None and most is not None and least > most:
            yield low.name if low.name in given else high.name, _crossed_problem(known, given, low, high)


def _crossed_problem(known: OperatorSpec, given: Mapping[str, Any], low: Parameter, high: Parameter) -> Problem:
    texts, fixes = [], []
    for bound, other in ((low, high), (high, low)):
        is_default = "" if bound.name in given else ", its default"
        texts.append(f"{bound.name} ({_shorten(given.get(bound.name, bound.default))}{is_default})")
        instead = given.get(other.name, other.default)
        if is_valid(bound, instead):
            fixes.append(f"{bound.name}: {to_yaml(instead)}")
    message = f"{known.name}: {texts[0]} is greater than {texts[1]}"
    return Problem("DT412", message, fixes=tuple(fixes))


def _comparable_amount(value: object) -> float | Fraction | None:
    """The value of a bound as a number: numbers, sizes such as '10KB', ratios such as '9/21'."""
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


def _shorten(value: object) -> str:
    text = to_yaml(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[: _MAX_SHOWN_CHARACTERS - 3]}..."
