"""What becomes of items that failed? They are charged, run alone, one by one, and then given up; or halved.

| what happened | first | then | at last |
|---|---|---|---|
| a call raised, or the worker died in it | that batch alone | its items one by one | the item is given up |
| the worker died, and nobody knows where | halves of what it had | ... down to one item | the item is given up |
| out of memory | halves, as smaller batches | ... down to one item | more memory, then given up |
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.control.segments import cut
from dovetail.streaming.messages import Halves

if TYPE_CHECKING:
    from dovetail.streaming.messages import Suspect


def all_again(failed: Suspect, retries: int) -> list[Suspect]:
    """For a barrier, which cannot have less than everything; empty: give it up."""
    charged = failed.charged + 1
    return [replace(failed, charged=charged)] if charged < retries else []


def after_failure(failed: Suspect, retries: int) -> list[Suspect]:
    """What to try next with items whose call raised or killed its worker; empty: give them up."""
    if failed.items > failed.batch_size:  # not one call, but all of a message: nobody knows which
        return _halved(replace(failed, halves=None), failed.batch_size)
    charged = failed.charged + 1
    if not retries or (failed.items == 1 and charged >= retries):
        return []
    batch_size = 1 if charged >= retries - 1 else failed.items
    return [replace(failed, charged=charged, batch_size=batch_size, halves=None)]


def after_a_blind_death(failed: Suspect, retries: int) -> list[Suspect]:
    """The same when it is not known which of these items was to blame."""
    if failed.items == 1 or (not retries and failed.items <= failed.batch_size):
        return after_failure(failed, retries)
    charged = min(failed.charged + 1, max(0, retries - 1))
    return _halved(replace(failed, charged=charged, halves=None), min(failed.batch_size, (failed.items + 1) // 2))


def after_out_of_memory(failed: Suspect, retries: int) -> list[Suspect]:
    """Smaller batches, without blame; a single item that does not fit is charged."""
    if failed.items == 1:
        return after_failure(failed, max(1, retries))
    half = (failed.items + 1) // 2
    if failed.items > failed.batch_size:
        return _halved(failed, failed.batch_size)
    return _halved(replace(failed, halves=Halves(half)), half)


def _halved(failed: Suspect, batch_size: int) -> list[Suspect]:
    """Two suspects; cut at a batch if there are several, else in the middle."""
    middle = (failed.items + 1) // 2
    if failed.items > failed.batch_size:
        middle = max(failed.batch_size, middle - middle % failed.batch_size)
    return [
        replace(failed, parts=cut(failed.parts, start, stop), items=stop - start, batch_size=batch_size)
        for start, stop in ((0, middle), (middle, failed.items))
    ]
