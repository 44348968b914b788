"""Keys of a jobs file for `dovetail simulate`: workers, classes of jobs, deaths. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dovetail.documents.fields import (
    Field,
    Mistake,
    ParserProblem,
    Record,
    Schema,
    Type,
    WrongValue,
    is_number,
    list_of,
    mapping_of,
    number,
    number_in,
    record_of,
    record_type,
    whole,
)
from dovetail.errors import ClusterError, Problem, did_you_mean
from dovetail.jobs.batch import Batch
from dovetail.jobs.submit_options import (
    BATCH,
    DELAY,
    JOB_OPTIONS,
    to_ms,
    to_priority,
    to_retries,
    to_shape,
)
from dovetail.jobs.submit_options import NAME as QUEUE_NAME
from dovetail.jobs.workers.worker_options import AUTO, SLOTS
from dovetail.pipeline.durations import DURATION, parse_duration
from dovetail.resources.cluster import Cluster
from dovetail.resources.resources import RESOURCES, Resources
from dovetail.text_format import format_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.documents.document import KeyPath
    from dovetail.documents.fields import Located
    from dovetail.jobs.job import Retries
    from dovetail.resources.cluster import Node
    from dovetail.resources.shape import Shape

BAD_JOB_SIMULATION = "DT650"
NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_-]{0,31}$"
NAME_TEXT = "a name of at most 32 letters, digits, _ and -"
WORKERS_LIMIT = 10_000
JOBS_LIMIT = 500_000
"""Jobs of one simulation: about half a gigabyte of memory, and a minute of CPU per kind of worker."""
RATE_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
RATE_PATTERN = r"^\s*(\d+(?:\.\d*)?|\.\d+)\s*/\s*([smhd])\s*$"
RATE_TEXT = "jobs per second, or a text such as 30/m, 12/h or 5/d"
RATE_LIMIT = 1e6
TIMES_TEXT = "a list of durations, or a file with one number of seconds per line"
ARRIVALS_TEXT = "a list of times, or a file with one arrival per line"
DEFAULT_VARIATION = 0.3


# --- types


def parse_rate(value: object) -> float:
    """Jobs per second of 0.5, "30/m" or "12/h"; ValueError if it is neither."""
    if is_number(value):
        found = float(value)
    elif isinstance(value, str) and (match := re.match(RATE_PATTERN, value)):
        found = float(match[1]) / RATE_UNITS_S[match[2]]
    else:
        raise ValueError(f"is not {RATE_TEXT}")
    if not 0 < found <= RATE_LIMIT:
        raise ValueError(f"is not above 0 and at most {RATE_LIMIT:g} per second")
    return found


def _rate_mistakes(value: object) -> Iterator[Mistake]:
    try:
        parse_rate(value)
    except ValueError as error:
        near = number_in(value) if isinstance(value, str) else None
        yield WrongValue(value, RATE_TEXT, str(error), (f"{near:g}/s" if near and near > 0 else "30/m",))


def _node_mistakes(value: object) -> Iterator[Mistake]:
    try:
        nodes = Cluster.parse(value).nodes
    except ClusterError as error:
        for problem in error.problems:
            yield ParserProblem((), problem)
        return
    if len(nodes) != 1:
        yield WrongValue(value, NODE_TEXT, f"describes {len(nodes)} machines", (nodes[0].spec().partition("{")[0],))


def _times_type(text: str, item: Type, example: object) -> Type:
    items = list_of(item, text)

    def check(value: object) -> Iterator[Mistake]:
        if isinstance(value, str) and value:
            return
        if isinstance(value, list | tuple) and value:
            yield from items.check(value)
        else:
            yield WrongValue(value, text, instead=(example,))

    return Type(text, example, {"anyOf": [{"type": "string", "minLength": 1}, {**items.schema, "minItems": 1}]}, check)


NODE_TEXT = "the resources of one machine"
NODE = Type(NODE_TEXT, "8cpu, 32GB", {"type": "string", "minLength": 1}, _node_mistakes)
RATE = Type(
    RATE_TEXT,
    "30/m",
    {
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0, "maximum": RATE_LIMIT},
            {"type": "string", "pattern": RATE_PATTERN},
        ]
    },
    _rate_mistakes,
)
ARRIVALS = _times_type(ARRIVALS_TEXT, DELAY, [10, "5m"])
TIMES = _times_type(TIMES_TEXT, DURATION, ["20s", "45s"])
QUEUES = list_of(QUEUE_NAME, "a list of queues")


# --- objects


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Equal workers, as written."""

    resources: str
    count: int = 1
    queues: Sequence[str] = ("default",)
    slots: int | str = AUTO

    @property
    def node(self) -> Node:
        return Cluster.parse(self.resources).nodes[0]

    @property
    def slot_count(self) -> int | None:
        """None: auto."""
        return self.slots if isinstance(self.slots, int) else None


@dataclass(frozen=True, slots=True)
class JobCalls:
    """How jobs share calls, as written."""

    size: int = Batch().size
    wait: float | str = Batch().wait
    time_per_job: float | str = 0

    @property
    def wait_ms(self) -> int:
        return round(1000 * time_s(self.wait))

    def more_ms(self, jobs: int) -> int:
        """What a call for several jobs takes more than one for a single job."""
        return round(1000 * time_s(self.time_per_job) * (jobs - 1))


@dataclass(frozen=True, slots=True)
class JobClass:
    """Jobs that arrive and run in the same way, as written."""

    rate: float | str | None = None
    every: float | str | None = None
    arrivals: Sequence[Any] | str | None = None
    count: int | None = None
    start: float | str = 0
    end: float | str | None = None
    time: float | str | None = None
    variation: float = DEFAULT_VARIATION
    times: Sequence[Any] | str | None = None
    resources: Resources | None = None
    queue: str = "default"
    priority: str | int = "normal"
    timeout: float | str | None = None
    retries: int | Mapping[str, Any] | None = None
    failures: float = 0.0
    batch: JobCalls | None = None

    @property
    def shape(self) -> Shape:
        """What a job needs; with `batch`, what a call needs."""
        return to_shape(self.resources)

    @property
    def priority_number(self) -> int:
        return to_priority(self.priority)

    @property
    def timeout_ms(self) -> int | None:
        return to_ms(self.timeout)

    @property
    def job_retries(self) -> Retries:
        return to_retries(self.retries)

    @property
    def mean_s(self) -> float | None:
        """Mean time that a job takes; None: the times are listed."""
        return None if self.time is None else parse_duration(self.time)

    @property
    def start_s(self) -> float:
        return time_s(self.start)

    @property
    def end_s(self) -> float | None:
        return None if self.end is None else parse_duration(self.end)

    @property
    def jobs_per_s(self) -> float | None:
        """Rate of random or regular arrivals; None: neither."""
        if self.rate is not None:
            return parse_rate(self.rate)
        return None if self.every is None else 1 / parse_duration(self.every)


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """The loss of one worker, as written."""

    worker: str
    at: float | str
    back: float | str | None = None

    @property
    def at_s(self) -> float:
        return time_s(self.at)

    @property
    def back_s(self) -> float | None:
        """Time from its death until it is back; None: never."""
        return None if self.back is None else parse_duration(self.back)


@dataclass(frozen=True, slots=True)
class JobScenario:
    """What is simulated: a jobs file, as written."""

    workers: Mapping[str, WorkerKind]
    jobs: Mapping[str, JobClass]
    duration: float | str = "1h"
    lease: float | str = "15s"
    deaths: Sequence[WorkerDeath] = field(default_factory=tuple)

    @property
    def duration_s(self) -> float:
        return parse_duration(self.duration)

    @property
    def lease_ms(self) -> int:
        return to_ms(self.lease) or 1

    def with_one_more(self, kind: str) -> JobScenario:
        """The same with one more worker of a kind."""
        more = replace(self.workers[kind], count=self.workers[kind].count + 1)
        return replace(self, workers={**self.workers, kind: more})


def time_s(value: Any) -> float:
    """Seconds of a time that may be 0."""
    return 0.0 if is_number(value) and value == 0 else parse_duration(value)


def worker_names(kind: str, count: int) -> list[str]:
    return [f"{kind}-{number_}" for number_ in range(1, count + 1)]


# --- declaration


def _is_name(name: str) -> bool:
    return re.match(NAME_PATTERN, name) is not None


def _resources_mistakes(value: object) -> Iterator[Mistake]:
    """The keys are checked by the reader, which makes a `Resources` of them."""
    if not isinstance(value, Mapping | Resources):
        yield WrongValue(value, "a mapping", instead=({"cpus": 1},))


RESOURCES_VALUE = Type("[resources](#resources)", {"cpus": 1}, RESOURCES.schema(), _resources_mistakes)
EXAMPLE_KIND = {"count": 2, "resources": "8cpu, 32GB"}
EXAMPLE_CLASS = {"rate": "30/m", "time": "20s", "resources": {"cpus": 1}}
EXAMPLE_FILE = {"workers": {"cpu": EXAMPLE_KIND}, "jobs": {"prepare": EXAMPLE_CLASS}}
EXAMPLE_DEATH = {"worker": "cpu-1", "at": "20m", "back": "5m"}
EXAMPLE_CALLS = {"size": 32, "wait": "10ms", "time_per_job": "1ms"}
_OF_JOBS = JOB_OPTIONS.by_name
_OF_BATCHES = BATCH.by_name
WORKER_KIND = record_of(
    WorkerKind,
    "Workers",
    "Equal workers of a simulation. They are named cpu-1, cpu-2 and so on, after their kind.",
    (
        Field("resources", NODE, "Machine of each worker, as in `dovetail worker --resources`."),
        Field("count", whole(1, WORKERS_LIMIT), "Number of workers."),
        Field("queues", QUEUES, "Queues that they serve."),
        Field("slots", SLOTS, "Jobs at once per worker; auto: by what jobs declare."),
    ),
)
JOB_CALLS = record_of(
    JobCalls,
    "Calls",
    "Jobs of a class that share calls, as with `@dt.job(batch=...)`: `resources` and a slot are taken once per call.",
    (
        Field("size", _OF_BATCHES["size"].type, _OF_BATCHES["size"].description),
        Field("wait", _OF_BATCHES["wait"].type, _OF_BATCHES["wait"].description),
        Field("time_per_job", DELAY, "Additional time of a call for each job after the first."),
    ),
)
JOB_CLASS = record_of(
    JobClass,
    "Jobs",
    "A class of jobs: when they arrive (`rate`, `every`, `arrivals`, or `count` alone), how long they take (`time` or "
    "`times`), and their options.",
    (
        Field("rate", RATE, "Random arrivals at this rate (a Poisson process)."),
        Field("every", DURATION, "Arrivals at regular intervals."),
        Field(
            "arrivals",
            ARRIVALS,
            "Times of arrival since the start. A line of a file has the seconds of an arrival and, if known, after a "
            "comma the seconds that the job takes.",
        ),
        Field(
            "count",
            whole(1, JOBS_LIMIT),
            "Maximum number of jobs; without `rate`, `every` and `arrivals`, all of them arrive at `start`.",
        ),
        Field("start", DELAY, "Start of the arrivals."),
        Field("end", DURATION, "End of the arrivals; that of the simulation if left out."),
        Field("time", DURATION, "Mean time that a job takes; with `batch`, that a call for one job takes."),
        Field("variation", number(0.0, 5.0), "Sigma of the lognormal distribution of `time`; 0: constant."),
        Field("times", TIMES, "Measured times, of which each job takes a random one; instead of `time`."),
        Field("resources", RESOURCES_VALUE, _OF_JOBS["resources"].description),
        Field("queue", _OF_JOBS["queue"].type, _OF_JOBS["queue"].description),
        Field("priority", _OF_JOBS["priority"].type, _OF_JOBS["priority"].description),
        Field("timeout", DURATION, "Time limit of one attempt; an attempt that takes longer is ended and retried."),
        Field("retries", _OF_JOBS["retries"].type, _OF_JOBS["retries"].description),
        Field("failures", number(0.0, 1.0, example=0.05), "Probability that an attempt ends with an error."),
        Field(
            "batch",
            replace(record_type(JOB_CALLS, EXAMPLE_CALLS), text="[calls](#calls)"),
            "One call for several jobs.",
        ),
    ),
)
WORKER_DEATH = record_of(
    WorkerDeath,
    "Death",
    "A worker that is killed: its jobs run again when their leases have expired.",
    (
        Field("worker", QUEUE_NAME, "Name of the worker, such as gpu-1."),
        Field("at", DELAY, "Time of its death."),
        Field("back", DURATION, "Time until it is started again; never if left out."),
    ),
)


def _named(record: Record, text: str, example: Mapping[str, object], of: str) -> Type:
    values = replace(record_type(record, example), text=text)
    return mapping_of(values, f"{of} by name", {"cpu": example}, key=_is_name, key_text=NAME_TEXT, may_be_empty=False)


SCENARIO = record_of(
    JobScenario,
    "Jobs file",
    "A queue of jobs for `dovetail simulate`: workers, and jobs that arrive.",
    (
        Field("workers", _named(WORKER_KIND, "workers", EXAMPLE_KIND, "[workers](#workers)"), "Workers by kind."),
        Field("jobs", _named(JOB_CLASS, "jobs", EXAMPLE_CLASS, "[jobs](#jobs)"), "Classes of jobs."),
        Field(
            "duration",
            DURATION,
            "Time to simulate. It ends earlier if all jobs have finished and no more arrive.",
        ),
        Field("lease", DURATION, "Lease of the workers: the jobs of one that dies run again within this time."),
        Field(
            "deaths",
            list_of(record_type(WORKER_DEATH, EXAMPLE_DEATH), "a list of [deaths](#death)"),
            "Workers that are killed.",
        ),
    ),
)
FILE_RECORDS = (SCENARIO, WORKER_KIND, JOB_CLASS, JOB_CALLS, WORKER_DEATH)


def schema() -> Schema:
    """The JSON Schema of a jobs file."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Dovetail jobs"}
    return {**head, **SCENARIO.schema()}


# --- checks across keys


def scenario_problems(scenario: JobScenario) -> Iterator[Located]:
    """What does not fit together, with the paths of the values."""
    total = sum(kind.count for kind in scenario.workers.values())
    if total > WORKERS_LIMIT:
        message = f"{total:,} workers; a simulation has at most {WORKERS_LIMIT:,}"
        yield ("workers",), _problem(message, ("count: 100",))
    for name, kind in scenario.workers.items():
        if not kind.queues:
            yield ("workers", name, "queues"), _problem(f"workers {name} serve no queue", ("queues: [default]",))
    queues = list(dict.fromkeys(queue for kind in scenario.workers.values() for queue in kind.queues))
    expected = 0.0
    for name, one in scenario.jobs.items():
        path: KeyPath = ("jobs", name)
        for about, problem in _class_problems(name, one, scenario.duration_s):
            yield (*path, *about), problem
        if one.queue not in queues:
            message = f"jobs {name} wait in the queue {one.queue!r}, which no worker serves"
            hint = did_you_mean(one.queue, queues)
            fixes = tuple(f"queue: {queue}" for queue in queues[:3]) or ("queues: [default]",)
            yield (*path, "queue"), _problem(message + hint, fixes, (f"queues with workers: {', '.join(queues)}",))
        expected += expected_jobs(one, scenario.duration_s)
    if expected > JOBS_LIMIT:
        message = f"about {format_number(expected)} jobs would arrive; a simulation has at most {JOBS_LIMIT:,}"
        fix = f"duration: {max(1, int(scenario.duration_s * JOBS_LIMIT / expected))}s"
        yield ("duration",), _problem(message, (fix,))
    yield from _death_problems(scenario)


def expected_jobs(one: JobClass, duration_s: float) -> float:
    """Mean number of arrivals."""
    per_s = one.jobs_per_s
    if per_s is None:
        return float(one.count or 0)
    time_ = max(0.0, min(duration_s, one.end_s or duration_s) - one.start_s)
    return min(per_s * time_, one.count or float("inf"))


def _class_problems(name: str, one: JobClass, duration_s: float) -> Iterator[Located]:
    ways = [key for key in ("rate", "every", "arrivals") if getattr(one, key) is not None]
    if len(ways) > 1:
        yield (ways[1],), _problem(f"jobs {name} have {' and '.join(ways)}: set one of them", (f"remove {ways[1]}",))
    if not ways and one.count is None:
        message = f"jobs {name} have no arrivals"
        yield (), _problem(message, ("rate: 30/m", "every: 10m", "arrivals: [0, 5m]", "count: 100"))
    if one.time is not None and one.times is not None:
        yield ("times",), _problem(f"jobs {name} have time and times: set one of them", ("remove times",))
    if one.time is None and one.times is None and not isinstance(one.arrivals, str):
        yield (), _problem(f"jobs {name} have no time", ("time: 20s", "times: [15s, 40s]"))
    end_s = duration_s if one.end_s is None else one.end_s
    if one.start_s >= end_s:
        message = f"jobs {name}: the arrivals begin at {one.start_s:g} s, and end at {end_s:g} s"
        yield ("start",), _problem(message, ("start: 0", f"duration: {2 * one.start_s:g}s"))


def _death_problems(scenario: JobScenario) -> Iterator[Located]:
    names = [name for kind, one in scenario.workers.items() for name in worker_names(kind, one.count)]
    known = set(names)
    for index, death in enumerate(scenario.deaths):
        if death.worker not in known:
            message = f"there is no worker {death.worker!r}{did_you_mean(death.worker, names[:100])}"
            shown = f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
            yield ("deaths", index, "worker"), _problem(message, (f"worker: {names[0]}",), (f"workers: {shown}",))


def _problem(message: str, fixes: tuple[str, ...], evidence: tuple[str, ...] = ()) -> Problem:
    return Problem(BAD_JOB_SIMULATION, message, evidence, fixes)
