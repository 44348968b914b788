"""What came with a message, and what of it cannot be read, or cannot be sent on?"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dovetail.control.events import AGAIN, Failure
from dovetail.engines.batches import Outcome
from dovetail.engines.failures import tell
from dovetail.engines.keys import as_tuple, as_tuples, join, slice_of
from dovetail.engines.local.payload import unpicklable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.control.engine import Unsendable
    from dovetail.engines.keys import Keys
    from dovetail.engines.local.pool import Reading
    from dovetail.engines.local.reading import Copied
    from dovetail.engines.rows import Odd

TEXT_LIMIT = 500
UNPICKLABLE, UNWRITABLE = "the result cannot be pickled", "the result cannot be written"


class Opened:
    """The items of a message, and what must be closed after it."""

    __slots__ = ("items", "keys", "read_s", "readings", "unreadable")

    def __init__(self, keys: Keys, items: list[Any], readings: list[tuple[int, Reading | Copied]]) -> None:
        self.keys = keys
        self.items = items
        self.unreadable: list[Odd] = []
        """Those that no stage gets to see, in order."""
        self.read_s = 0.0
        """Seconds that went into reading and parsing splits."""
        self.readings = readings
        """Number of the payload in the message, and its mapping."""


class Shifted:
    """A crumb for a message that is run in pieces."""

    def __init__(self, crumb: memoryview, by: int) -> None:
        self._crumb, self._by = crumb, by

    def __setitem__(self, at: int, value: int) -> None:
        self._crumb[at] = value + self._by if at == 1 else value

    def __getitem__(self, at: int) -> int:
        return self._crumb[at] - self._by if at == 1 else self._crumb[at]


def shifted(crumb: memoryview, by: int) -> Any:
    return Shifted(crumb, by) if by else crumb


def spans(opened: Opened) -> Iterator[tuple[int, Keys, list[Any]]]:
    """What can be read, between what cannot: where it begins, its keys and items. Mostly all at once."""
    if not opened.unreadable:
        yield 0, opened.keys, opened.items
        return
    begin = 0
    for end in (*(odd.at for odd in opened.unreadable), len(opened.items)):
        if begin < end:
            yield begin, slice_of(opened.keys, begin, end), opened.items[begin:end]
        begin = end + 1


def joined(pieces: list[tuple[int, Outcome]], opened: Opened) -> Outcome:
    """One outcome, with what could not be read among its failures."""
    if len(pieces) == 1 and not opened.unreadable:
        return pieces[0][1]
    outcomes = [outcome for _, outcome in pieces]
    whole = Outcome(
        join([outcome.keys for outcome in outcomes]),
        [item for outcome in outcomes for item in outcome.items],
        [],
        sum(outcome.seconds for outcome in outcomes),
        [tuple(map(sum, zip(*stages, strict=True))) for stages in zip(*(o.stages for o in outcomes), strict=True)],  # type: ignore[misc]
    )
    for begin, outcome in pieces:
        for failure in outcome.failures:
            failure.start, failure.stop = failure.start + begin, failure.stop + begin
            whole.failures.append(failure)
    for at, error, verdict in opened.unreadable:
        if error:
            its_keys = as_tuples(slice_of(opened.keys, at, at + 1))
            whole.failures.append(Failure(at, at + 1, error, keys=its_keys, verdict=verdict))
    whole.failures.sort(key=lambda failure: failure.start)
    return whole


def cuts(keys: Keys, size: int, failures: list[Failure]) -> list[tuple[int, int]]:
    """Where each segment of the output begins and ends: so many items, and none reaches over items that failed; those
    come later, and belong in between."""
    edges = {0, len(keys)}
    if failures:
        ordered = as_tuples(keys)
        edges |= {bisect_left(ordered, failure.keys[0]) for failure in failures if failure.keys}
    begins = sorted(edges)
    return [(start, min(start + size, end)) for begin, end in pairwise(begins) for start in range(begin, end, size)]


def leave_out(outcome: Outcome, opened: Opened, batch_size: int, error: Unsendable, why: str) -> None:
    """The calls whose results cannot be sent, or written, have failed; all others' results go on.

    Whose result it was is told by its key. Where keys are not unique (an item that came by two ways), nobody can tell:
    then every call is run again by itself, uncharged, and what fails alone is to blame.
    """
    calls = _calls(opened, batch_size, outcome)
    place = {as_tuple(key): at for at, key in enumerate(opened.keys)}
    blind = len(place) < len(opened.items) and len(calls) > 1
    call_of = {at: call for call in calls for at in range(*call)}
    origins = [call_of.get(_origin(as_tuple(key), place)) for key in outcome.keys] if not blind else []
    # the index counts within what was packed; whichever it was, look for all that cannot be sent
    indices = [error.index] if why != UNPICKLABLE or blind else [index for index, _ in unpicklable(outcome.items)]
    bad = set(calls) if blind else {origins[index] for index in indices if index >= 0} - {None}
    bad = bad or set(calls)
    for start, stop in sorted(call for call in bad if call is not None):
        its_keys = as_tuples(slice_of(opened.keys, start, stop))
        failure = Failure(start, stop, f"{why}: {error.error_text}"[:TEXT_LIMIT], keys=its_keys)
        failure.verdict = AGAIN if blind else ""
        outcome.failures.append(failure)
    outcome.failures.sort(key=lambda failure: failure.start)
    stays = [index for index, call in enumerate(origins) if call not in bad] if bad != set(calls) else []
    outcome.keys = [outcome.keys[index] for index in stays]
    outcome.items = [outcome.items[index] for index in stays]


def _calls(opened: Opened, batch_size: int, outcome: Outcome) -> list[tuple[int, int]]:
    """From where to where the calls went that did not fail: they begin anew behind every item that no stage sees."""
    failed = {failure.start for failure in outcome.failures}
    found = []
    for begin, _, items in spans(opened):
        end = begin + len(items)
        found += [(start, min(start + batch_size, end)) for start in range(begin, end, batch_size)]
    return [call for call in found if call[0] not in failed]


def _origin(key: tuple[int, ...], place: dict[tuple[int, ...], int]) -> int:
    while key not in place:
        key = key[:-1]
    return place[key]


def failure_of(keys: Keys, start: int, stop: int, error: BaseException) -> Failure:
    told = tell(error)
    its_keys = as_tuples(slice_of(keys, start, stop))
    return Failure(start, stop, told.line, told.detail, told.out_of_memory, told.on_gpu, its_keys)


def as_plain(failure: Failure) -> tuple[Any, ...]:
    return (
        failure.start,
        failure.stop,
        failure.error,
        failure.detail,
        failure.out_of_memory,
        failure.on_gpu,
        failure.keys,
        failure.verdict,
    )
