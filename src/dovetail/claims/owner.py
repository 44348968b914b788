"""Who holds what of a machine? One row of the ledger of claims."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.seat import Seats


class Process(NamedTuple):
    """A process, told apart from others that get its number later."""

    pid: int
    born: str
    """When it began, in the words of its machine."""
    space: str = ""
    """Where its number means anything: boot and process namespace."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A run, cast or worker that shares a machine. At every moment the grants of all owners fit into it together."""

    id: str
    name: str
    process: Process
    since: float
    need: Seats
    """Without this it cannot go on: its least workers, seated as if it were alone."""
    ideal: Seats | None = None
    """More than this it cannot use; None: all there is."""
    granted: Amounts = field(default_factory=dict)
    """What it may use until its workers have left: others plan around this."""
    limit: Amounts = field(default_factory=dict)
    """What it was last told to keep to."""
    held: Amounts = field(default_factory=dict)
    """What its workers sit on."""
    waiting: bool = True
    """It has not begun."""
    heartbeat: float = 0.0
    cap: Amounts | None = None
    """More than this it must not use, node by node; None: no such limit."""
    asks: tuple[str, ...] | None = None
    """Labels of nodes that its stages ask for: other nodes do if these are the same there. None: nobody knows which."""
