"""End of a probe: when its measurements are precise enough. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_PROBE_ITEMS, MIN_PROBE_S = 50, 1.0
MIN_PROBE_MESSAGES = 8
TARGET_ERROR = 0.1
"""A probe ends when the standard error of the speed of every important unit is below this share of it, ..."""
MIN_TIME_SHARE = 0.1
"""... which is a unit that takes at least this share of the time of the slowest, ..."""
MAX_PROBE_S = 30.0
"""... or after this time."""


class MeasuredWork(Protocol):
    """Work of a unit in a probe, without the first messages of its workers."""

    @property
    def slot_s(self) -> float:
        """Seconds of slots."""

    @property
    def items(self) -> float: ...

    @property
    def standard_error(self) -> float | None:
        """Standard error of the seconds per item, as a share of them; None: fewer than MIN_PROBE_MESSAGES messages."""


def is_precise(works: Sequence[MeasuredWork | None], elapsed_s: float) -> bool:
    """Whether a probe can end. `works`: one per unit, None as long as nothing of it is measured; `elapsed_s`: since its
    first message ended."""
    if not MIN_PROBE_S <= elapsed_s <= MAX_PROBE_S:
        return elapsed_s > MAX_PROBE_S
    known = [work for work in works if work is not None]
    if len(known) < len(works):
        return False
    longest = max((work.slot_s for work in known), default=0.0)
    important = [work for work in known if work.slot_s >= MIN_TIME_SHARE * longest]
    if max((work.items for work in known), default=0.0) < MIN_PROBE_ITEMS:
        return False
    errors = [work.standard_error for work in important]
    return all(error is not None and error < TARGET_ERROR for error in errors)
