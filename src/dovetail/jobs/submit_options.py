"""Options of `Queue.submit` and `@dt.job`: declaration, checks and conversion to the units of `JobSpec`.

The declarations `JOB_OPTIONS` (of a function) and `SUBMIT_OPTIONS` (of one job) drive the checks, the JSON Schema and
docs/reference.md. A value that is not given is None.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dovetail.documents.fields import (
    FLAG,
    Field,
    Mistake,
    Record,
    Type,
    UnknownKey,
    WrongValue,
    choice,
    is_int,
    nearest,
    predicate,
    setting_problem,
    whole,
)
from dovetail.errors import ConfigError, ObjectSource, did_you_mean, nearest_word, python_literal
from dovetail.jobs.batch import SIZE_LIMIT, Batch
from dovetail.jobs.job import (
    NO_RESOURCES,
    NORMAL_RETRIES,
    PRIORITY_LIMIT,
    PRIORITY_NAMES,
    RETRIES_LIMIT,
    DependencyPolicy,
    Retries,
)
from dovetail.jobs.schedule import CronError, parse_cron, parse_zone
from dovetail.pipeline.durations import DURATION, DURATION_LIMIT_S, DURATION_TEXT, parse_duration
from dovetail.resources.resources import RESOURCES, Resources, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dovetail.errors import Problem
    from dovetail.resources.shape import Shape

BAD_OPTION = "DT602"
BAD_CRON = "DT610"
ISOLATIONS = ("process", "warm_process", "thread", "async")
NAME_LIMIT_CHARS = 100
KEY_LIMIT_CHARS = 500
GANG_LIMIT = 1_000
AFTER_LIMIT = 1_000
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}$"
ID_PATTERN = r"^[0-9a-z]{1,64}$"
PRIORITY_TEXT = "high, normal, low, or a whole number (higher is more urgent)"
BATCH_TEXT = "a dt.Batch"
RETRIES_TEXT = "a number for every cause, or a mapping with the keys of [retries](#retries)"
AT_TEXT = "a time with its time zone, or Unix seconds"


def _priority_mistakes(value: object) -> Iterator[Mistake]:
    if isinstance(value, str) and value in PRIORITY_NAMES:
        return
    if isinstance(value, str):
        yield WrongValue(value, PRIORITY_TEXT, instead=(nearest_word(value, PRIORITY_NAMES) or "high",))
    elif not is_int(value) or not -PRIORITY_LIMIT <= value <= PRIORITY_LIMIT:
        near = int(nearest(value, -PRIORITY_LIMIT, PRIORITY_LIMIT, otherwise=0))
        reason = f"is not high, normal, low, or a whole number from -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}"
        yield WrongValue(value, PRIORITY_TEXT, reason, (near,))


def _resources_mistakes(value: object) -> Iterator[Mistake]:
    if isinstance(value, Resources):
        return
    if isinstance(value, Mapping):
        for mistake in RESOURCES.mistakes(value):
            yield _inside(value, mistake, "a dt.Resources", _corrected_resources(value, mistake))
        return
    yield WrongValue(value, "a dt.Resources", instead=(ObjectSource("dt.Resources(cpus=1)", {"cpus": 1}),))


def _corrected_resources(value: Mapping[str, Any], mistake: Mistake) -> ObjectSource:
    """The request with another value in the place of the one that is wrong, if that makes it valid."""
    if isinstance(mistake, WrongValue) and len(mistake.path) == 1 and mistake.instead:
        given: dict[str, Any] = {str(name): amount for name, amount in value.items() if amount not in ({}, None)}
        given[str(mistake.path[0])] = mistake.instead[0]
        if next(iter(RESOURCES.mistakes(given)), None) is None:
            arguments = ", ".join(f"{name}={python_literal(amount)}" for name, amount in given.items())
            return ObjectSource(f"dt.Resources({arguments})", given)
    return ObjectSource("dt.Resources(cpus=1)", {"cpus": 1})


def _retries_mistakes(value: object) -> Iterator[Mistake]:
    if isinstance(value, Retries):
        counts = all(COUNT.accepts(getattr(value, name)) for name in _RETRY_COUNTS)
        if not counts or not all(map(BACKOFF_MS.accepts, (value.backoff_ms, value.max_backoff_ms))):
            reason = f"has a count that is not from 0 to {RETRIES_LIMIT}, or a backoff that is not from 0 to 366 days"
            yield WrongValue(value, RETRIES_TEXT, reason, ({"error": 3, "backoff": "2s"},))
        return
    if isinstance(value, Mapping):
        for mistake in RETRIES.mistakes(value):
            yield _inside(value, mistake, RETRIES_TEXT, {"error": 3})
    elif not is_int(value) or not 0 <= value <= RETRIES_LIMIT:
        reason = f"is not a whole number from 0 to {RETRIES_LIMIT}, or a mapping such as {{'error': 3}}"
        yield WrongValue(value, RETRIES_TEXT, reason, (int(nearest(value, 0, RETRIES_LIMIT, otherwise=3)),))


def _batch_mistakes(value: object) -> Iterator[Mistake]:
    example = ObjectSource("dt.Batch(size=32)", {"size": 32})
    if not isinstance(value, Batch):
        yield WrongValue(value, BATCH_TEXT, instead=(example,))
        return
    given = {item.name: getattr(value, item.name) for item in fields(value)}
    for mistake in BATCH.mistakes({name: amount for name, amount in given.items() if amount is not None}):
        yield _inside(value, mistake, BATCH_TEXT, example)


def _inside(value: object, mistake: Mistake, text: str, example: object) -> WrongValue:
    """A mistake inside a mapping, as one of the whole value."""
    name = ".".join(map(str, mistake.path))
    match mistake:
        case WrongValue():
            reason = (
                f"has {name}={python_literal(mistake.value)}, which {mistake.reason or 'is not ' + mistake.expected}"
            )
        case UnknownKey(path=path, known=known):
            reason = f"has the unknown key {name!r}{did_you_mean(str(path[-1]), known)}"
        case _:
            reason = f"has the unknown key {name!r}"
    return WrongValue(value, text, reason, (example,))


def _at_mistakes(value: object) -> Iterator[Mistake]:
    try:
        at_ms(value)
    except ValueError as error:
        yield WrongValue(value, AT_TEXT, str(error), ("2030-01-31T08:00:00+00:00",))


def _delay_mistakes(value: object) -> Iterator[Mistake]:
    if is_int(value) and value == 0:
        return
    yield from DURATION.check(value)


def _after_mistakes(value: object) -> Iterator[Mistake]:
    ids = after_ids(value)
    if ids is None:
        yield WrongValue(value, AFTER_TEXT, instead=([],))
    elif len(ids) > AFTER_LIMIT:
        reason = f"has {len(ids):,} jobs; the limit is {AFTER_LIMIT:,}"
        yield WrongValue(f"{len(ids):,} jobs", AFTER_TEXT, reason, ("a job that waits for groups of them",))


def _text_of(limit: int, text: str, example: str, pattern: str = "") -> Type:
    def accepts(value: object) -> bool:
        return (
            isinstance(value, str)
            and 0 < len(value) <= limit
            and (re.match(pattern, value) is not None if pattern else value.isprintable())
        )

    schema = {"type": "string", "minLength": 1, "maxLength": limit} | ({"pattern": pattern} if pattern else {})
    return predicate(text, example, schema, accepts)


def _cron_type(text: str, example: str, parse: Callable[[str], object]) -> Type:
    def check(value: object) -> Iterator[Mistake]:
        if not isinstance(value, str):
            yield WrongValue(value, text, "is not a text", (example,), BAD_CRON)
            return
        try:
            parse(value)
        except CronError as error:
            yield WrongValue(value, text, str(error), (error.instead,), BAD_CRON)

    return Type(text, example, {"type": "string", "minLength": 1}, check)


CRON = _cron_type("minute, hour, day of month, month, day of week; or @daily", "0 3 * * *", parse_cron)
TIMEZONE = _cron_type("a name of the IANA time zone database", "Europe/Berlin", parse_zone)
AFTER_TEXT = "jobs or ids of jobs"
COUNT = whole(0, RETRIES_LIMIT)
RANKS = whole(1, GANG_LIMIT)
BACKOFF_MS = whole(0, DURATION_LIMIT_S * 1000)
NAME = _text_of(NAME_LIMIT_CHARS, "a name of at most 100 letters, digits and _ . : -", "gpu", NAME_PATTERN)
KEY = _text_of(KEY_LIMIT_CHARS, "a text of 1 to 500 printable characters", "train-2030-01-31")
PARAMETER = predicate(
    "the name of a parameter of the function",
    "model",
    {"type": "string"},
    lambda value: isinstance(value, str) and value.isidentifier(),
)
DELAY = Type(DURATION_TEXT, "90s", DURATION.schema, _delay_mistakes)
PRIORITY = Type(
    PRIORITY_TEXT,
    "high",
    {
        "anyOf": [
            {"enum": list(PRIORITY_NAMES)},
            {"type": "integer", "minimum": -PRIORITY_LIMIT, "maximum": PRIORITY_LIMIT},
        ]
    },
    _priority_mistakes,
)
RETRIES = Record(
    "Retries",
    "Retries of a job by cause, and the delay before them: random, from 0 to `backoff` doubled for every retry.",
    (
        Field("error", COUNT, "After an exception.", NORMAL_RETRIES.error),
        Field("timeout", COUNT, "After a timeout.", NORMAL_RETRIES.timeout),
        Field("lost", COUNT, "After the worker or its process died.", NORMAL_RETRIES.lost),
        Field("out_of_memory", COUNT, "After it ran out of memory.", NORMAL_RETRIES.out_of_memory),
        Field("backoff", DELAY, "Longest delay before the first retry.", "2s"),
        Field("max_backoff", DELAY, "Longest delay before any retry.", "10m"),
    ),
)
BATCH = Record(
    "Batch",
    'One call of a function for many jobs: `@dt.job(batch=dt.Batch(size=32, wait="10ms", key="model"))`.',
    (
        Field("size", whole(1, SIZE_LIMIT), "Maximum number of jobs.", Batch().size),
        Field("wait", DELAY, "How long the first job waits for others.", Batch().wait),
        Field("bytes", size(may_be_zero=False), "Size of the encoded arguments from which no more jobs are added."),
        Field("key", PARAMETER, "Parameter that must be equal, and is passed as one value."),
    ),
)
_RETRY_COUNTS = ("error", "timeout", "lost", "out_of_memory")
RETRIES_VALUE = Type(RETRIES_TEXT, 3, {"anyOf": [COUNT.schema, RETRIES.schema()]}, _retries_mistakes)
RESOURCES_VALUE = Type("[resources](#resources)", {"cpus": 1}, RESOURCES.schema(), _resources_mistakes)
BATCH_VALUE = Type("[batch](#batch)", {"size": 32}, BATCH.schema(), _batch_mistakes)
AT = Type(AT_TEXT, "2030-01-31T08:00:00+00:00", {"type": ["string", "number"]}, _at_mistakes)
AFTER = Type(AFTER_TEXT, [], {"type": "array", "items": {"type": "string", "pattern": ID_PATTERN}}, _after_mistakes)

_JOB_FIELDS = (
    Field("resources", RESOURCES_VALUE, "Resources of one attempt; without it, one slot of a worker and nothing else."),
    Field("ranks", RANKS, "Members of a gang: as many processes run at once, and `resources` is what each needs.", 1),
    Field("queue", NAME, "Name of its queue.", "default"),
    Field("priority", PRIORITY, "Order in its queue: one step is worth 60 s of waiting.", "normal"),
    Field("timeout", DURATION, "Time limit of one attempt."),
    Field("retries", RETRIES_VALUE, "Maximum number of retries."),
    Field(
        "isolation",
        choice(ISOLATIONS),
        "Where it runs: in a process of its own, in a process that keeps models, in a thread or in an event loop.",
    ),
    Field("preemptible", FLAG, "Whether it may be ended for a job of higher priority, without using a retry.", False),
    Field("preemption_grace", DURATION, "Time to save its state when it is preempted.", "30s"),
)
_FUNCTION_FIELDS = (
    Field("model", PARAMETER, "Parameter whose value names the model that a job uses, for jobs in warm processes."),
    Field("batch", BATCH_VALUE, "One call for many jobs, with a list of arguments and of results."),
)
FUNCTION_OPTIONS = tuple(item.name for item in _FUNCTION_FIELDS)
"""Options of a function that its jobs cannot change."""
JOB_OPTIONS = Record("Job", 'Options of a function: `@dt.job(timeout="1h")`.', (*_JOB_FIELDS, *_FUNCTION_FIELDS))
SUBMIT_OPTIONS = Record(
    "Submit",
    'Options of one job: `queue.submit(train, cfg, priority="high")`.',
    (
        *_JOB_FIELDS,
        Field(
            "key", KEY, "Idempotency key: while the queue keeps a job with this key, submitting it again returns it."
        ),
        Field("after", AFTER, "Jobs that must have succeeded before it starts."),
        Field(
            "if_dependency_fails",
            choice(tuple(DependencyPolicy)),
            "Cancel or block the job if one of them does not succeed.",
            "cancel",
        ),
        Field("at", AT, "Earliest start."),
        Field("delay", DELAY, "Minimum delay between submission and start."),
        Field("cron", CRON, "Times at which jobs are submitted, instead of one job now."),
        Field("timezone", TIMEZONE, "Time zone of `cron`.", "UTC"),
    ),
)


@dataclass(frozen=True)
class JobOptions:
    """Options that `@dt.job` declared for a function, as written."""

    resources: Resources | Mapping[str, Any] | None = None
    queue: str | None = None
    priority: str | int | None = None
    timeout: str | float | None = None
    retries: int | Retries | Mapping[str, Any] | None = None
    isolation: str | None = None
    preemptible: bool | None = None
    preemption_grace: str | float | None = None
    model: str | None = None
    ranks: int | None = None
    batch: Batch | None = None

    @property
    def of_jobs(self) -> dict[str, Any]:
        """The options that are defaults of its jobs."""
        return {name: value for name, value in self.given.items() if name not in FUNCTION_OPTIONS}

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given, by name."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def shape(self) -> Shape | None:
        return None if self.resources is None and self.ranks is None else to_shape(self.resources, self.ranks or 1)

    @property
    def timeout_ms(self) -> int | None:
        return to_ms(self.timeout)

    @property
    def isolation_name(self) -> str | None:
        return self.isolation


def option_problems(record: Record, values: Mapping[str, object], label: str = "") -> list[Problem]:
    """All problems of the values of options."""
    return [setting_problem(name, mistake, BAD_OPTION, label) for name, mistake in record.value_mistakes(values)]


# --- conversion; the values are valid


def to_shape(value: Resources | Mapping[str, Any] | None, ranks: int = 1) -> Shape:
    """`ranks`: members of a gang, each of which needs this."""
    if value is None:
        return NO_RESOURCES if ranks == 1 else replace(NO_RESOURCES, ranks=ranks)
    return (value if isinstance(value, Resources) else Resources(**value)).shape(ranks)


def to_ms(value: object) -> int | None:
    """Milliseconds of a duration, at least 1; None: none."""
    return None if value is None else max(1, round(parse_duration(value) * 1000))


def to_priority(value: str | int) -> int:
    return PRIORITY_NAMES[value] if isinstance(value, str) else value


def to_retries(value: int | Retries | Mapping[str, Any] | None) -> Retries:
    """Retries of a number for every cause, or of a mapping."""
    match value:
        case None:
            return NORMAL_RETRIES
        case Retries():
            return value
        case int():
            return _equal_retries(value)
        case _:
            given: dict[str, Any] = {name: value[name] for name in _RETRY_COUNTS if name in value}
            for name in ("backoff", "max_backoff"):
                if name in value:
                    given[f"{name}_ms"] = (to_ms(value[name]) if value[name] else 0) or 0
            return replace(NORMAL_RETRIES, **given)


@lru_cache(RETRIES_LIMIT + 1)
def _equal_retries(count: int) -> Retries:
    return Retries(count, count, count, count)


def at_ms(value: object) -> int:
    """Unix milliseconds of a datetime (without a zone: local time), an ISO text or Unix seconds; else ValueError."""
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value)
        except ValueError:
            raise ValueError("is not a time such as 2030-01-31T08:00:00+00:00") from None
    if isinstance(value, datetime.datetime):
        try:
            seconds = value.timestamp()
        except (OverflowError, OSError, ValueError):
            raise ValueError("is out of range") from None
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    else:
        raise ValueError("is not a datetime, an ISO 8601 text, or Unix seconds")  # noqa: TRY004 - shown as a reason
    if not 0 <= seconds <= _LATEST_S:
        raise ValueError(
            "is not between the years 1970 and 2200" + (": Unix seconds, not milliseconds" * (seconds > 0))
        )
    return round(seconds * 1000)


_LATEST_S = 7_258_118_400


def after_ids(value: object) -> list[str] | None:
    """Ids of jobs, or of objects with an `id`; None if it is neither."""
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    ids = [item if isinstance(item, str) else getattr(item, "id", None) for item in items]
    if not all(map(is_job_id, ids)):
        return None
    return [one for one in dict.fromkeys(ids) if isinstance(one, str)]


def is_job_id(value: object) -> bool:
    return isinstance(value, str) and re.match(ID_PATTERN, value) is not None


def checked_job_options(options: JobOptions) -> JobOptions:
    """The options of a function; ConfigError with everything that is wrong."""
    problems = option_problems(JOB_OPTIONS, options.given, "@dt.job")
    if problems:
        raise ConfigError(problems)
    return options


__all__ = [
    "DURATION_LIMIT_S",
    "BATCH",
    "JOB_OPTIONS",
    "RETRIES",
    "SUBMIT_OPTIONS",
    "JobOptions",
    "after_ids",
    "at_ms",
    "checked_job_options",
    "is_job_id",
    "option_problems",
    "to_ms",
    "to_priority",
    "to_retries",
    "to_shape",
]
