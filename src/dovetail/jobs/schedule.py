"""Cron expressions, their fire times in a time zone, and the job of a fire time. Pure: time is an argument.

Five fields: minute, hour, day of month, month, day of week. Each is `*`, a value, a range `1-5`, a step `*/15` or
`8-18/2`, or a list of these; months and days of the week also have names (jan, mon), and Sunday is 0 and 7. If both
days are restricted, a day that matches one of them matches, as in Vixie cron. Also @hourly, @daily (@midnight),
@weekly, @monthly and @yearly (@annually).

When clocks change (the rules of Debian's cron):

- An expression whose minute or hour starts with `*` follows real time: in the hour that occurs twice it fires in
  both, and in the hour that is skipped it does not fire.
- Any other expression fires once per written time: if that time is skipped, at the moment of the change; if it occurs
  twice, at its first occurrence.

After a time without workers, one job is submitted for the latest missed fire times together, not one for each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from typing import TYPE_CHECKING

from dovetail.errors import nearest_word
from dovetail.jobs.job_id import new_job_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.jobs.job import JobSpec
    from dovetail.jobs.store import Receipt, Schedule, Store

SHORTHANDS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
MAX_CHARS = 200
SEARCH_DAYS = 366 * 9
"""Search limit for fire times: 29 February occurs at least once in this time, also around 2100."""
_MARGIN = timedelta(hours=26)
"""Upper limit of a change of a zone's clocks (Samoa skipped a day in 2011)."""
_MINUTE = timedelta(minutes=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)  # noqa: UP017 - the name UTC is a zone here
_UTC = timezone.utc  # noqa: UP017
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


@dataclass(frozen=True, slots=True)
class _FieldRange:
    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()


_FIELDS = (
    _FieldRange("minute", 0, 59),
    _FieldRange("hour", 0, 23),
    _FieldRange("day of month", 1, 31),
    _FieldRange("month", 1, 12, _MONTHS),
    _FieldRange("day of week", 0, 7, _WEEKDAYS),
)


class CronError(ValueError):
    """A cron expression or time zone is invalid; has the reason, and a valid one to write instead."""

    def __init__(self, reason: str, instead: str = "0 3 * * *") -> None:
        super().__init__(reason)
        self.instead = instead


@dataclass(frozen=True, slots=True)
class Cron:
    """A parsed cron expression."""

    text: str
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0 is Sunday."""
    either_day: bool
    """Whether both days are restricted, so that one of them has to match."""
    follows_real_time: bool

    def matches(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        in_month, in_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return (in_month or in_week) if self.either_day else (in_month and in_week)

    def times(self, start: datetime) -> Iterator[datetime]:
        """Local fire times from this time on, without zone."""
        day = start.date()
        for _ in range(SEARCH_DAYS):
            if self.matches(day):
                midnight = datetime(day.year, day.month, day.day)
                for hour in self.hours:
                    for minute in self.minutes:
                        found = midnight.replace(hour=hour, minute=minute)
                        if found >= start:
                            yield found
            if day >= date(9999, 12, 1):
                return
            day += timedelta(days=1)


# --- parsing


@lru_cache(1024)
def parse_cron(text: str) -> Cron:
    """Parse a cron expression. Raises CronError if it is invalid or never fires."""
    if len(text) > MAX_CHARS:
        raise CronError(f"is longer than {MAX_CHARS} characters")
    written = " ".join(text.split()).lower()
    if written.startswith("@") and written not in SHORTHANDS:
        near = nearest_word(written, SHORTHANDS) or "@daily"
        raise CronError(f"is none of {', '.join(SHORTHANDS)}", near)
    parts = SHORTHANDS.get(written, written).split()
    if len(parts) != len(_FIELDS):
        seconds = ": seconds are not supported" if len(parts) == 6 else ""
        instead = " ".join(parts[1:]) if len(parts) == 6 else "0 3 * * *"
        reason = f"has {len(parts)} fields instead of minute, hour, day of month, month, day of week{seconds}"
        raise CronError(reason, instead)
    values = [_values(part, field, parts) for part, field in zip(parts, _FIELDS, strict=True)]
    minutes, hours, days, months, weekdays = values
    cron = Cron(
        " ".join(parts),
        tuple(sorted(minutes)),
        tuple(sorted(hours)),
        frozenset(days),
        frozenset(months),
        frozenset(day % 7 for day in weekdays),
        either_day=not (parts[2].startswith("*") or parts[4].startswith("*")),
        follows_real_time=parts[0].startswith("*") or parts[1].startswith("*"),
    )
    if not any(map(cron.matches, _all_days())):
        raise CronError("never fires: no such day exists", "0 3 1 * *")
    return cron


def _all_days() -> Iterator[date]:
    """Every month and day on every day of the week."""
    start = date(2000, 1, 1)
    return (start + timedelta(days=count) for count in range(366 * 28))


def _values(text: str, field: _FieldRange, parts: list[str]) -> set[int]:
    found: set[int] = set()
    for item in text.split(","):
        found |= _item_values(item, field, parts)
    return found


def _item_values(item: str, field: _FieldRange, parts: list[str]) -> set[int]:
    match = re.fullmatch(r"(\*|[a-z0-9]+)(?:-([a-z0-9]+))?(?:/(\d{1,4}))?", item)
    if match is None or (match[1] == "*" and match[2]):
        raise CronError(
            f"has {item!r} as {field.name}, which is not a value, range, step or list", _with_star(field, parts)
        )
    first, last, step = match[1], match[2], match[3]
    if first == "*":
        low, high = field.low, field.high - (field.name == "day of week")
    else:
        low = _value(first, field, parts)
        high = _value(last, field, parts) if last else field.high if step else low
    if last == "sun" and low > high:
        high = 7
    if low > high:
        reason = f"has {item!r} as {field.name}: the range ends before it starts"
        raise CronError(reason, _with(field, parts, f"{low}-{field.high},{field.low}-{high}"))
    if step is not None and not 1 <= int(step) <= field.high:
        reason = f"has {item!r} as {field.name}: the step is not a number from 1 to {field.high}"
        raise CronError(reason, _with_star(field, parts))
    return set(range(low, high + 1, int(step or 1)))


def _value(text: str, field: _FieldRange, parts: list[str]) -> int:
    if text in field.names:
        return field.names.index(text) + field.low
    if text.isdigit() and len(text) <= 4 and field.low <= int(text) <= field.high:
        return int(text)
    near = nearest_word(text, field.names) if field.names else None
    named = f" or {field.names[0]}-{field.names[-1]}" if field.names else ""
    reason = f"has {text!r} as {field.name}, which is not {field.low}-{field.high}{named}"
    raise CronError(reason, _with(field, parts, near) if near else _with_star(field, parts))


def _with_star(field: _FieldRange, parts: list[str]) -> str:
    return _with(field, parts, "*")


def _with(field: _FieldRange, parts: list[str], text: str) -> str:
    """The expression with another text for a field."""
    return " ".join(text if other is field else part for part, other in zip(parts, _FIELDS, strict=True))


@lru_cache(256)
def parse_zone(name: str) -> tzinfo:
    """A time zone of the IANA database. Raises CronError with the nearest name."""
    if name == "UTC":
        return _UTC
    import zoneinfo  # late: processes of jobs import this module

    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        known = zoneinfo.available_timezones()
    if not known:
        raise CronError("cannot be looked up: this machine has no time zones; pip install tzdata", "UTC")
    near = nearest_word(str(name)[:100], known) or "Europe/Berlin"
    raise CronError(f"is not a time zone (did you mean {near!r}?)", near)


# --- fire times


def next_fire(cron: str, zone: str, after_ms: int) -> int:
    """The first fire time after a time, in Unix milliseconds."""
    parsed, tz = parse_cron(cron), parse_zone(zone)
    after = _EPOCH + timedelta(milliseconds=after_ms)
    local = after.astimezone(tz).replace(tzinfo=None)
    start = local if _is_steady(after, tz) else local - _MARGIN
    earliest: datetime | None = None
    for time in parsed.times(start.replace(second=0, microsecond=0)):
        instants = _instants(time, tz, parsed)
        for instant in instants:
            if instant > after and (earliest is None or instant < earliest):
                earliest = instant
        if earliest is not None and (not instants or instants[0] > after):
            break
    assert earliest is not None, f"{cron} never fires after {after}"
    return (earliest - _EPOCH) // timedelta(milliseconds=1)


def _is_steady(after: datetime, tz: tzinfo) -> bool:
    """Whether the clocks do not change around this time."""
    try:
        return (after - _MARGIN).astimezone(tz).utcoffset() == (after + _MARGIN).astimezone(tz).utcoffset()
    except OverflowError:
        return False


def _instants(time: datetime, tz: tzinfo, cron: Cron) -> list[datetime]:
    """When a local time occurs, as the expression counts it."""
    first, second = (time.replace(tzinfo=tz, fold=fold).astimezone(_UTC) for fold in (0, 1))
    if first == second:
        return [first]
    if first < second:
        return [first, second] if cron.follows_real_time else [first]
    return [] if cron.follows_real_time else [_change_between(second, first, tz)]


def _change_between(before: datetime, after: datetime, tz: tzinfo) -> datetime:
    """The moment at which the clocks change, to the second."""
    old = before.astimezone(tz).utcoffset()
    while after - before > timedelta(seconds=1):
        middle = before + timedelta(seconds=(after - before) // timedelta(seconds=2))
        if middle.astimezone(tz).utcoffset() == old:
            before = middle
        else:
            after = middle
    return after


# --- jobs


def job_of(schedule: Schedule, fire_ms: int, job_id: str | None = None) -> JobSpec:
    """The job of a fire time. Its idempotency key is the schedule and the time; `options["fire_ms"]` is the time."""
    return replace(
        schedule.template,
        id=job_id or new_job_id(),
        key=f"schedule:{schedule.name}:{fire_ms}",
        schedule=schedule.name,
        options={**schedule.template.options, "fire_ms": fire_ms},
    )


def fire_schedule(store: Store, schedule: Schedule, now_ms: int) -> Receipt | None:
    """Submit the job of a schedule that is due. Returns None if another worker has done so. Fire times that were missed
    are left out: the next one is after now.
    """
    next_ms = next_fire(schedule.cron, schedule.timezone, max(schedule.next_ms, now_ms))
    return store.fire(schedule.name, schedule.next_ms, next_ms, job_of(schedule, schedule.next_ms))
