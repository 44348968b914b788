"""States of workers and runs, and the tables of legal transitions between them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection

AnyState = TypeVar("AnyState", bound=Enum)


class WorkerState(Enum):
    STARTING = "starting"
    """Requested, not ready yet."""
    READY = "ready"
    DRAINING = "draining"
    """Gets no further messages; the drain can still be cancelled."""
    STOPPING = "stopping"
    """The stop command was sent."""
    STOPPED = "stopped"
    """Exited on command; its seats are free."""
    LOST = "lost"
    """Gone without a command; its seats are free."""


class RunState(Enum):
    RUNNING = "running"
    DRAINING = "draining"
    """No more input is read; the work in flight is finished."""
    STOPPING = "stopping"
    """The outcome is decided; workers are being stopped."""
    FINISHED = "finished"
    DRAINED = "drained"
    """Ended by a drain, before all of the source was read."""
    FAILED = "failed"
    CANCELLED = "cancelled"


_W = WorkerState
LEGAL_WORKER_MOVES = frozenset(
    {
        (_W.STARTING, _W.READY),
        (_W.STARTING, _W.STOPPING),
        (_W.STARTING, _W.LOST),
        (_W.READY, _W.DRAINING),
        (_W.READY, _W.STOPPING),
        (_W.READY, _W.LOST),
        (_W.DRAINING, _W.READY),
        (_W.DRAINING, _W.STOPPING),
        (_W.DRAINING, _W.LOST),
        (_W.STOPPING, _W.STOPPED),
        (_W.STOPPING, _W.LOST),
    }
)

_R = RunState
LEGAL_RUN_MOVES = frozenset(
    {
        (_R.RUNNING, _R.DRAINING),
        (_R.RUNNING, _R.STOPPING),
        (_R.DRAINING, _R.STOPPING),
        (_R.STOPPING, _R.FINISHED),
        (_R.STOPPING, _R.DRAINED),
        (_R.STOPPING, _R.FAILED),
        (_R.STOPPING, _R.CANCELLED),
    }
)
FINAL_RUN_STATES = frozenset({_R.FINISHED, _R.DRAINED, _R.FAILED, _R.CANCELLED})
FINAL_WORKER_STATES = frozenset({_W.STOPPED, _W.LOST})


def checked_move(legal: Collection[tuple[AnyState, AnyState]], old: AnyState, new: AnyState, what: str) -> AnyState:
    """The new state, which a table of legal transitions must contain. Every lifecycle uses it."""
    assert (old, new) in legal, f"{what}: {old.value} -> {new.value} is not a legal transition"
    return new
