"""Grace of a call that exceeds its timeout, on which the controller and the workers agree."""

from __future__ import annotations

MIN_INTERRUPTION_GRACE_S = 1.0


def interruption_grace_s(timeout_s: float) -> float:
    """Time between the interruption of a call that exceeds its timeout and the end of its process."""
    return max(MIN_INTERRUPTION_GRACE_S, timeout_s / 2)
