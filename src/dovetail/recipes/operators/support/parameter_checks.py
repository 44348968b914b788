"""Checks of operator parameters, each returning the value or raising ValueError."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ADAPTER_HINT = "run this operator through Data-Juicer: adapter: data_juicer"


class NeedsDataJuicer(ValueError):
    """A parameter that only Data-Juicer supports; with `adapter: data_juicer` the operator runs there."""


def parameter_error(name: str, wanted: str, value: object) -> ValueError:
    return ValueError(f"{name} must be {wanted}, not {value!r}")


def check_int(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """An integer within bounds."""
    wanted = "a whole number"
    if least is not None:
        wanted += f" of at least {least}" if most is None else f" from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise parameter_error(name, wanted, value)
    if (least is not None and value < least) or (most is not None and value > most):
        raise parameter_error(name, wanted, value)
    return value


def check_optional_count(name: str, value: object) -> int | None:
    """A whole number of at least 1, or None."""
    return None if value is None else check_int(name, value, 1)


def check_bound(name: str, value: object) -> float | None:
    """A number, or None. The low bound may exceed the high one, as in Data-Juicer: then nothing is kept."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise parameter_error(name, "a number", value)
    return value


def check_ratio(name: str, value: object) -> float:
    """A number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise parameter_error(name, "a number from 0 to 1", value)
    return value


def check_optional_ratio(name: str, value: object) -> float | None:
    """A number from 0 to 1, or None."""
    return None if value is None else check_ratio(name, value)


def check_choice(name: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise parameter_error(name, f"one of {', '.join(choices)}", value)
    return value


def check_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise parameter_error(name, "a string", value)
    return value


def check_texts(name: str, value: object) -> Sequence[str]:
    """A list of strings; a single string becomes a list."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise parameter_error(name, "a string or a list of strings", value)
    return value


def reject_tokenization(tokenization: object) -> None:
    """Raise ValueError if tokens require a model."""
    if tokenization is False or tokenization is None:
        return
    if tokenization is not True:
        raise parameter_error("tokenization", "true or false", tokenization)
    raise NeedsDataJuicer(f"tokenization: true needs a model, which Data-Juicer downloads; {ADAPTER_HINT}")
