"""How do the rows of a split, and what stands for rows, get to a stage?"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.control.events import ASIDE, FATAL, Failure
from dovetail.control.splits import BLANK, BadRow, Unusable

if TYPE_CHECKING:
    from dovetail.control.splits import Split
    from dovetail.engines.batches import Outcome


class Odd(NamedTuple):
    """An item of a message that no stage gets to see."""

    at: int
    error: str
    """Empty: it is dropped without a word."""
    verdict: str = ""


def read(split: Split) -> tuple[list[Any], float]:
    """Its rows, and how long that took."""
    began = perf_counter()
    rows = split.read()
    assert len(rows) == split.items, f"{split} gave {len(rows)} rows"
    return rows, perf_counter() - began


def odd_ones(items: list[Any], offset: int) -> list[Odd]:
    """What is no row among the rows of a split."""
    found = []
    for at, item in enumerate(items, offset):
        if item is BLANK:
            found.append(Odd(at, ""))
        elif type(item) is BadRow:
            found.append(Odd(at, f"BadRow: {item.place}: {item.error_text}", ASIDE))
    return found


def count(outcome: Outcome, seconds: float, *, stage: int) -> None:
    """Reading and parsing is work of the first stage, writing of the last."""
    if seconds and outcome.stages:
        outcome.seconds += seconds
        taken, given, before = outcome.stages[stage]
        outcome.stages[stage] = taken, given, before + seconds


def of_unusable(error: Unusable, items: int) -> Failure:
    """Nobody can go on. Its code, message and fix are told apart again by `problem_of`."""
    return Failure(0, items, f"{error.code} {error}", error.fix, verdict=FATAL)
