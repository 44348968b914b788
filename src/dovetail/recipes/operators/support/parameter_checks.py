"""Checks of operator parameters, each returning the value or raising ValueError."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


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
