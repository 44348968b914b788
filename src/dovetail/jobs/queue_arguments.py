"""Arguments of the methods of `dt.Queue`: filters, ages, sizes, and items with keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dovetail.documents.fields import whole
from dovetail.errors import (
    UNSET,
    Change,
    ConfigError,
    Given,
    Problem,
    Text,
    argument_problem,
    did_you_mean,
    nearest_word,
)
from dovetail.jobs.job import JobState
from dovetail.jobs.job_function import reference_of
from dovetail.jobs.store import JobFilter
from dovetail.jobs.submission import checked_reference
from dovetail.jobs.submit_options import BAD_OPTION, DELAY, KEY, NAME, SUBMIT_OPTIONS, to_ms
from dovetail.pipeline.durations import parse_duration
from dovetail.resources.sizes import SizeError, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

BAD_FILTER = "DT619"
LIMIT = whole(1, 10_000)
"""Jobs of one page."""
QUEUE_LIMIT = whole(1, 1_000_000)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    known = {name: value for name, value in options.items() if name in SUBMIT_OPTIONS.by_name}
    return known, {name: value for name, value in options.items() if name not in known}


def with_keys(items: Iterable[Any], keys: Iterable[str] | None) -> Iterator[tuple[str | None, Any]]:
    if keys is None:
        return ((None, item) for item in items)
    keys = list(keys)
    invalid = [key for key in keys if not KEY.accepts(key)]
    if invalid:
        raise ConfigError(argument_problem(BAD_OPTION, "keys", invalid[0], KEY.text, ["train-1", "train-2"]))
    listed = list(items)
    if len(listed) != len(keys):
        message = f"keys has {len(keys):,} entries for {len(listed):,} items"
        raise ConfigError(Problem(BAD_OPTION, message, fixes=("give one key per item", Change({"keys": UNSET}))))
    return iter(list(zip(keys, listed, strict=True)))


def job_filter(state: object, queue: Any, function: Any, schedule: Any, problems: list[Problem]) -> JobFilter:
    written = [state] if isinstance(state, str) else state if isinstance(state, Iterable) else []
    if state is not None and not written:
        problems.append(argument_problem(BAD_FILTER, "state", state, "a state, or several", "dead"))
    names = [str(one) for one in written]
    known = [str(one) for one in JobState]
    for name in names:
        if name not in known:
            message = Text(Given("state", name), f" is none of {', '.join(known)}{did_you_mean(name, known)}")
            fix = Change({"state": nearest_word(name, known) or "dead"})
            problems.append(Problem(BAD_FILTER, message, fixes=(fix,)))
    if queue is not None and not NAME.accepts(queue):
        problems.append(argument_problem(BAD_FILTER, "queue", queue, NAME.text, "gpu"))
    if schedule is not None and not isinstance(schedule, str):
        problems.append(argument_problem(BAD_FILTER, "schedule", schedule, "the name of a schedule", "nightly"))
    if function is not None:
        try:
            function = checked_reference(function) if isinstance(function, str) else reference_of(function)
        except ConfigError as error:
            problems += error.problems
    states = frozenset(JobState(name) for name in names if name in known)
    return JobFilter(states=states, queue=queue, function=function, schedule=schedule)


def queue_name(queue: str | None, otherwise: str) -> str:
    if queue is None:
        return otherwise
    if not NAME.accepts(queue):
        raise ConfigError(argument_problem(BAD_FILTER, "queue", queue, NAME.text, "gpu"))
    return queue


def limit_of(name: str, value: object) -> int | None:
    """A weight or a number of jobs; None: no limit."""
    if value is not None and not QUEUE_LIMIT.accepts(value):
        raise ConfigError(argument_problem(BAD_FILTER, name, value, f"{QUEUE_LIMIT.text}, or None", 2))
    return None if value is None else int(str(value))


def age_ms_of(name: str, value: object, problems: list[Problem]) -> int | None:
    if value is None or DELAY.accepts(value):
        return to_ms(value) if value else None if value is None else 0
    try:
        parse_duration(value)
        reason = ""
    except ValueError as error:
        reason = str(error)
    message = Text(Given(name, value), f" {reason}")
    problems.append(Problem(BAD_OPTION, message, fixes=(Change({name: "7d"}), Change({name: None}))))
    return None


def size_of(name: str, value: object, problems: list[Problem]) -> int | None:
    if value is None:
        return None
    try:
        return parse_size(value)
    except SizeError as error:
        message = Text(Given(name, value), f" {error.reason}")
        problems.append(Problem(BAD_OPTION, message, fixes=tuple(Change({name: one}) for one in error.examples)))
        return None
