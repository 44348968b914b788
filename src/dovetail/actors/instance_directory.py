"""Directory of an actor system: which worker hosts each instance at present, and which methods each role has. Pure.

The driver and every worker have a copy. Workers import this module, so it imports little.
"""

from __future__ import annotations

import inspect
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")
IDEMPOTENT_MARK = "__dovetail_idempotent__"


class InstanceState(Enum):
    """State of an instance, and of a system as a whole."""

    STARTING = "starting"
    """Started, or about to be started or restarted; calls wait for it."""
    READY = "ready"
    DEGRADED = "degraded"
    """State of an instance whose `health` reports a problem or that does not answer, and of a system in which some
    instances are not ready."""
    DRAINING = "draining"
    """Finishes its calls, then stops."""
    DEAD = "dead"
    """Stopped, or lost without a restart."""


class InstanceAddress(NamedTuple):
    """Address of one instance for calls."""

    state: InstanceState
    worker: int | None
    """The worker of its current incarnation; None: not started yet, waiting for its restart, or dead."""
    hosted: str
    """Name of the object in the worker."""
    incarnation: int
    reason: str = ""

    @property
    def is_expected(self) -> bool:
        """Whether calls may be sent, now or later."""
        return self.state not in (InstanceState.DRAINING, InstanceState.DEAD)


class RoleMethods(NamedTuple):
    """Methods of the class of a role."""

    names: frozenset[str] | None
    """Names of the methods; None if they are unknown, because a function makes the object or the driver cannot import
    the class."""
    idempotent: frozenset[str] = frozenset()

    @classmethod
    def of(cls, target: object) -> RoleMethods:
        """The methods of a class that callers may use."""
        if not isinstance(target, type) or hasattr(target, "__getattr__"):
            return cls(None)
        found = {name: inspect.getattr_static(target, name, None) for name in dir(target) if not name.startswith("_")}
        names = frozenset(name for name, value in found.items() if callable(value) or isinstance(value, classmethod))
        return cls(names, frozenset(name for name in names if is_idempotent(found[name])))


def is_idempotent(method: object) -> bool:
    return bool(getattr(method, IDEMPOTENT_MARK, False))


class RoleEntry(NamedTuple):
    """The instances of one role, by index."""

    instances: tuple[InstanceAddress, ...]
    methods: RoleMethods
    ranks: int = 1


class Directory(NamedTuple):
    """The instances of all roles. A later version replaces an earlier one."""

    version: int
    roles: Mapping[str, RoleEntry]


class WorkerContext(NamedTuple):
    """Data about the system for the objects of one worker (`StartWorker.context`, pickled)."""

    system: str
    instances: Mapping[str, tuple[str, int]]
    """Name of a hosted object -> its role, and the index of the instance."""
    incarnation: int
    directory: Directory


def instance_name(role: str, index: int) -> str:
    return f"{role}[{index}]"


def idempotent(method: T) -> T:
    """Mark a method that may be called again when its instance died during the call."""
    setattr(method, IDEMPOTENT_MARK, True)
    return method
