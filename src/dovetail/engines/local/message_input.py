"""Input of one message in a worker: items, rows read from splits, skipped items, and results that cannot be sent."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.control.events import VERDICT_FATAL, VERDICT_RETRY, VERDICT_SKIP, CallFailure
from dovetail.control.payload import BLANK_ROW, BadRow, SourceSinkError, UnwritableItemError
from dovetail.engines.epoch_starts import join_starts
from dovetail.engines.exception_summary import summarize_exception, unsendable_hint, unsendable_text
from dovetail.engines.item_keys import as_tuple, as_tuples, join_keys, slice_keys
from dovetail.engines.local.payload_codec import find_unpicklable
from dovetail.engines.stage_chain import MessageOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.control.engine import UnsendableItemError
    from dovetail.control.payload import Split
    from dovetail.engines.epoch_starts import EpochStarts
    from dovetail.engines.item_keys import Keys
    from dovetail.engines.local.buffer_pool import CopiedPayload, MappedPayload
    from dovetail.engines.worker_context import BreadcrumbCell


class SkippedItem(NamedTuple):
    """An item of a message that is not passed to any stage."""

    at: int
    error: str
    """Empty: dropped without an error."""
    verdict: str = ""
    place: str = ""
    """File and line of a row that cannot be parsed."""


def read_split(split: Split) -> tuple[list[Any], float]:
    """The rows of a split, and the seconds that reading took."""
    began = perf_counter()
    rows = split.read()
    assert len(rows) == split.items, f"{split} gave {len(rows)} rows"
    return rows, perf_counter() - began


def find_skipped(items: list[Any], offset: int) -> list[SkippedItem]:
    """Values among the rows of a split that are not rows."""
    found = []
    for at, item in enumerate(items, offset):
        if item is BLANK_ROW:
            found.append(SkippedItem(at, ""))
        elif type(item) is BadRow:
            found.append(SkippedItem(at, f"BadRow: {item.place}: {item.error_text}", VERDICT_SKIP, item.place))
    return found


def add_stage_seconds(outcome: MessageOutcome, seconds: float, *, stage: int) -> None:
    """Add seconds to a stage: reading and parsing count for the first stage, writing for the last."""
    if seconds and outcome.stages:
        outcome.seconds += seconds
        taken, given, before = outcome.stages[stage]
        outcome.stages[stage] = taken, given, before + seconds


def failure_of_unusable(error: SourceSinkError, items: int) -> CallFailure:
    """A failure that no retry can fix."""
    return CallFailure(0, items, str(error), verdict=VERDICT_FATAL, code=error.code, fix=error.fix)


class MessageInput:
    """The items of a message, and the payloads to close after it."""

    __slots__ = ("epoch_starts", "items", "keys", "read_s", "readings", "skipped")

    def __init__(self, keys: Keys, items: list[Any], readings: list[tuple[int, MappedPayload | CopiedPayload]]) -> None:
        self.keys = keys
        self.items = items
        self.epoch_starts: EpochStarts | None = None
        """Where further epochs begin; None: all items are of one epoch."""
        self.skipped: list[SkippedItem] = []
        """Items that are not passed to any stage, in order."""
        self.read_s = 0.0
        """Seconds spent reading and parsing splits."""
        self.readings = readings
        """Number of the payload in the message, and its mapping."""

    def starts_inside(self, begin: int, items: int) -> EpochStarts | None:
        """Where further epochs begin among some of the items."""
        return None if self.epoch_starts is None else self.epoch_starts.inside(begin, begin + items)


class ShiftedBreadcrumb:
    """A breadcrumb for a message that runs in pieces: adds the start of the piece to the item index."""

    def __init__(self, breadcrumb: BreadcrumbCell, by: int) -> None:
        self._breadcrumb, self._by = breadcrumb, by

    def __setitem__(self, at: int, value: int) -> None:
        self._breadcrumb[at] = value + self._by if at == 1 else value

    def __getitem__(self, at: int) -> int:
        return self._breadcrumb[at] - self._by if at == 1 else self._breadcrumb[at]


def shift_breadcrumb(breadcrumb: BreadcrumbCell, by: int) -> Any:
    return ShiftedBreadcrumb(breadcrumb, by) if by else breadcrumb


def readable_spans(opened: MessageInput) -> Iterator[tuple[int, Keys, list[Any]]]:
    """Runs of readable items: start, keys and items. Usually a single run."""
    if not opened.skipped:
        yield 0, opened.keys, opened.items
        return
    begin = 0
    for end in (*(skipped_item.at for skipped_item in opened.skipped), len(opened.items)):
        if begin < end:
            yield begin, slice_keys(opened.keys, begin, end), opened.items[begin:end]
        begin = end + 1


def join_outcomes(pieces: list[tuple[int, MessageOutcome]], opened: MessageInput) -> MessageOutcome:
    """Merge the outcomes of all pieces; unreadable items become failures."""
    if len(pieces) == 1 and not opened.skipped:
        return pieces[0][1]
    outcomes = [outcome for _, outcome in pieces]
    whole = MessageOutcome(
        join_keys([outcome.keys for outcome in outcomes]),
        [item for outcome in outcomes for item in outcome.items],
        [],
        sum(outcome.seconds for outcome in outcomes),
        [tuple(map(sum, zip(*stages, strict=True))) for stages in zip(*(o.stages for o in outcomes), strict=True)],  # type: ignore[misc]
    )
    for begin, outcome in pieces:
        for failure in outcome.failures:
            failure.start, failure.stop = failure.start + begin, failure.stop + begin
            whole.failures.append(failure)
    whole.failures += [failure_of_skipped(one, opened.keys) for one in opened.skipped if one.error]
    whole.failures.sort(key=lambda failure: failure.start)
    whole.epoch_starts = _joined_starts(pieces, opened)
    return whole


def _joined_starts(pieces: list[tuple[int, MessageOutcome]], opened: MessageInput) -> EpochStarts | None:
    starts = opened.epoch_starts
    if starts is None:
        return None
    found = []
    for (begin, _, items), (_, outcome) in zip(readable_spans(opened), pieces, strict=True):
        assert outcome.epoch_starts is not None
        found.append((begin, begin + len(items), outcome.epoch_starts, len(outcome.items)))
    return join_starts(starts, found)


def failure_of_skipped(item: SkippedItem, keys: Keys) -> CallFailure:
    its_keys = as_tuples(slice_keys(keys, item.at, item.at + 1))
    return CallFailure(item.at, item.at + 1, item.error, keys=its_keys, verdict=item.verdict, place=item.place)


def segment_bounds(
    keys: Keys,
    size: int,
    failures: list[CallFailure],
    starts: EpochStarts | None = None,
    stored: Sequence[int] = (),
) -> list[tuple[int, int]]:
    """Start and stop of each output segment: at most `size` items, of one epoch, never across failed items, whose
    results are inserted there later. What is `stored` already (positions) is a segment by itself."""
    edges = {0, len(keys), *stored, *(position + 1 for position in stored)}
    if starts is not None:
        edges.update(starts.positions)
    if failures:
        ordered = as_tuples(keys)
        edges |= {bisect_left(ordered, failure.keys[0]) for failure in failures if failure.keys}
    begins = sorted(edges)
    return [(start, min(start + size, end)) for begin, end in pairwise(begins) for start in range(begin, end, size)]


def fail_unsendable(outcome: MessageOutcome, opened: MessageInput, batch_size: int, error: UnsendableItemError) -> None:
    """Mark the calls whose results cannot be sent or written as failed; the results of all others are kept.

    The key of a result identifies its call. If keys are not unique (an item that arrived by two paths), every call is
    run again by itself, without counting as an attempt, and the calls that fail alone are reported.
    """
    calls = _call_ranges(opened, batch_size, outcome)
    place = {as_tuple(key): at for at, key in enumerate(opened.keys)}
    blind = len(place) < len(opened.items) and len(calls) > 1
    call_of = {at: call for call in calls for at in range(*call)}
    origins = [call_of.get(_input_position(as_tuple(key), place)) for key in outcome.keys] if not blind else []
    # the index refers to one packed segment: search all results instead
    indices = (
        [error.index]
        if isinstance(error, UnwritableItemError) or blind
        else [index for index, _ in find_unpicklable(outcome.items)]
    )
    bad = set(calls) if blind else {origins[index] for index in indices if index >= 0} - {None}
    bad = bad or set(calls)
    for start, stop in sorted(call for call in bad if call is not None):
        its_keys = as_tuples(slice_keys(opened.keys, start, stop))
        failure = CallFailure(start, stop, unsendable_text(error), unsendable_hint(error), keys=its_keys)
        failure.verdict = VERDICT_RETRY if blind else ""
        outcome.failures.append(failure)
    outcome.failures.sort(key=lambda failure: failure.start)
    stays = [index for index, call in enumerate(origins) if call not in bad] if bad != set(calls) else []
    outcome.keys = [outcome.keys[index] for index in stays]
    outcome.items = [outcome.items[index] for index in stays]
    if outcome.epoch_starts is not None:
        outcome.epoch_starts.keep(stays)


def _call_ranges(opened: MessageInput, batch_size: int, outcome: MessageOutcome) -> list[tuple[int, int]]:
    """Start and stop of each call that succeeded; calls start again behind every skipped item."""
    failed = {failure.start for failure in outcome.failures}
    found = []
    for begin, _, items in readable_spans(opened):
        end = begin + len(items)
        found += [(start, min(start + batch_size, end)) for start in range(begin, end, batch_size)]
    return [call for call in found if call[0] not in failed]


def _input_position(key: tuple[int, ...], place: dict[tuple[int, ...], int]) -> int:
    while key not in place:
        key = key[:-1]
    return place[key]


def failure_from_error(keys: Keys, start: int, stop: int, error: BaseException) -> CallFailure:
    summary = summarize_exception(error)
    its_keys = as_tuples(slice_keys(keys, start, stop))
    return CallFailure(start, stop, summary.line, summary.detail, summary.out_of_memory, summary.on_gpu, its_keys)


def failure_as_tuple(failure: CallFailure) -> tuple[Any, ...]:
    return (
        failure.start,
        failure.stop,
        failure.error,
        failure.detail,
        failure.out_of_memory,
        failure.on_gpu,
        failure.keys,
        failure.verdict,
        failure.stage,
        failure.place,
        failure.code,
        failure.fix,
        failure.worker_broken,
    )
