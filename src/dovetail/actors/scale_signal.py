"""Signals of `Scale`: calls that are outstanding, or what a method of a role returns. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dovetail.actors.role import Role

OUTSTANDING = "outstanding"


class SignalMeasured(NamedTuple):
    """Event: the signal of a role cannot be measured, or can be measured again."""

    role: str
    problem: str
    """Reason why the signal cannot be measured; empty if it can."""


def signal_parts(role: Role) -> tuple[str, str]:
    """(role, name) of the signal of a role: "pool.is_full" is a method of the role pool, "queue_depth" of the role
    itself; a function has its own name."""
    assert role.scale is not None
    signal = role.scale.signal
    if not isinstance(signal, str):
        return role.name, getattr(signal, "__name__", "the signal")
    of, _, name = signal.rpartition(".")
    return of or role.name, name
