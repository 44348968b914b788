"""Rule that tells a broken worker from bad items: how many failures in a row make the worker the culprit. Pure.

It also limits how many workers in succession are replaced before the items are to blame. Units of pipelines and rows of
backfills have the same rule.
"""

from __future__ import annotations

MIN_SUSPICIOUS_STREAK = 2
MAX_FALSE_ALARMS = 0.001
"""Expected number of streaks of bad items that are mistaken for a broken worker, per unit."""
MAX_REPLACEMENTS_WITHOUT_SUCCESS = 3
"""Workers that are replaced, with no call that passes in between, before their items are to blame."""
MIN_LATER_STREAK, LATER_STREAK_GROWTH = 16, 4
"""Failures in succession in a worker before it is replaced nevertheless, and their growth with each such worker."""


def is_suspicious(streak: int, failed: int, calls: int, comparisons: int, longest_cleared: int) -> bool:
    """Whether `streak` failures in succession are too many to be bad items.

    A call fails with about the probability (failed + 1) / (calls + 2), from all earlier calls of the unit and the
    failures that its items were to blame for. `comparisons` is the number of streaks that were or will be looked at.
    Neighbouring items are often bad together: after a streak that was found to be the fault of the items, only twice
    its length is suspicious, so that the number of false alarms grows with the logarithm of the longest streak.
    """
    if streak < MIN_SUSPICIOUS_STREAK or streak < 2 * longest_cleared:
        return False
    probability = (failed + 1) / (calls + 2)
    expected: float = max(1, comparisons) * probability**streak
    return expected < MAX_FALSE_ALARMS


def may_replace(streak: int, replaced: int) -> bool:
    """Whether a worker with `streak` failures in succession may be replaced after `replaced` others, with no call that
    passed in between: new workers fail, too, so that items are to blame, but the last worker may be broken as well. The
    number of replacements grows with the logarithm of the number of items that fail."""
    later = replaced - MAX_REPLACEMENTS_WITHOUT_SUCCESS
    return later < 0 or streak >= MIN_LATER_STREAK * LATER_STREAK_GROWTH**later
