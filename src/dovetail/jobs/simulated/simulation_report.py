"""Figures and report of a simulated queue: waiting times, utilisation, queue lengths, one more worker. Pure."""

from __future__ import annotations

import textwrap
from bisect import bisect_right
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dovetail.text_format import (
    DEFAULT_WIDTH,
    cut_text,
    fit_table,
    format_duration,
    format_number,
    format_percent,
    sparkline,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dovetail.jobs.simulated.simulation_fields import JobScenario, WorkerKind
    from dovetail.resources.seat import Seat

TIMELINE_POINTS = 60
SPARKLINE_WIDTH = 30
NAME_WIDTH = 16


# --- what a simulation counts


class SimulatedJob:
    """A job and its times, in milliseconds."""

    __slots__ = ("arrived_ms", "finished_ms", "has_succeeded", "name", "started_ms", "time_ms")

    def __init__(self, name: str, arrived_ms: int, time_ms: int) -> None:
        self.name = name
        """Name of the class of the job."""
        self.arrived_ms = arrived_ms
        self.time_ms = time_ms
        self.started_ms: int | None = None
        """Start of its first attempt."""
        self.finished_ms: int | None = None
        self.has_succeeded = False

    def start(self, now_ms: int) -> None:
        if self.started_ms is None:
            self.started_ms = now_ms

    def end(self, now_ms: int, *, succeeded: bool) -> None:
        self.finished_ms = now_ms
        self.has_succeeded = succeeded

    def waited_ms(self, now_ms: int) -> int:
        """Until its first start, or until now."""
        return (now_ms if self.started_ms is None else self.started_ms) - self.arrived_ms


class Usage:
    """Resources that attempts on the workers of one kind have used, times milliseconds."""

    __slots__ = ("alive_ms", "attempts", "cpu", "gpu", "memory", "plain_slots_only", "slots", "used_slots")

    def __init__(self, slots: int, *, plain_slots_only: bool) -> None:
        """`slots`: of one worker. `plain_slots_only`: only jobs that declare no resources take one (`auto`)."""
        self.slots = slots
        self.plain_slots_only = plain_slots_only
        self.attempts = 0
        self.cpu = self.gpu = self.memory = self.used_slots = 0
        self.alive_ms = 0
        """Time that the workers were alive, added up."""

    def count(self, seat: Seat | None, took_ms: int, attempts: int = 1) -> None:
        """Add an attempt, or the attempts that share a call."""
        self.attempts += attempts
        if seat is None or not self.plain_slots_only:
            self.used_slots += took_ms
        if seat is not None:
            self.cpu += took_ms * seat.cpu_milli
            self.memory += took_ms * seat.memory_bytes
            self.gpu += took_ms * sum(share.milli for share in seat.cards)

    def count_worker(self, alive_ms: int) -> None:
        self.alive_ms += alive_ms


class CallCount:
    """Calls of one class of jobs with batches."""

    __slots__ = ("calls", "jobs")

    def __init__(self) -> None:
        self.calls = self.jobs = 0

    def count(self, jobs: int) -> None:
        self.calls += 1
        self.jobs += jobs


class QueueLength:
    """Number of ready jobs of one queue over time."""

    __slots__ = ("_lengths", "_times")

    def __init__(self, start_ms: int) -> None:
        self._times = [start_ms]
        self._lengths = [0]

    def change(self, now_ms: int, by: int) -> None:
        length = self._lengths[-1] + by
        if self._times[-1] == now_ms:
            self._lengths[-1] = length
        else:
            self._times.append(now_ms)
            self._lengths.append(length)

    def figures(self, queue: str, end_ms: int) -> QueueFigures:
        start_ms = self._times[0]
        points = min(TIMELINE_POINTS, max(1, end_ms - start_ms))
        edges = [start_ms + (end_ms - start_ms) * point // points for point in range(points + 1)]
        means = [self._mean(low, high) for low, high in pairwise(edges)]
        return QueueFigures(queue, self._mean(start_ms, end_ms), max(self._lengths), self._lengths[-1], tuple(means))

    def _mean(self, low_ms: int, high_ms: int) -> float:
        if high_ms <= low_ms:
            return float(self._lengths[-1])
        index = bisect_right(self._times, low_ms) - 1
        total, at_ms = 0, low_ms
        while at_ms < high_ms:
            following = self._times[index + 1] if index + 1 < len(self._times) else high_ms
            until_ms = min(high_ms, following)
            total += self._lengths[index] * (until_ms - at_ms)
            at_ms, index = until_ms, index + 1
        return total / (high_ms - low_ms)


# --- figures


@dataclass(frozen=True, slots=True)
class WaitingTimes:
    """Times from the arrival of jobs to their first start; of jobs that have not started, to the end."""

    jobs: int
    """Jobs that arrived."""
    mean_s: float
    p50_s: float
    p95_s: float
    max_s: float
    succeeded: int
    failed: int
    """Jobs that failed for good."""
    unstarted: int
    unfinished: int
    """Jobs that neither succeeded nor failed, those that have not started included."""


@dataclass(frozen=True, slots=True)
class KindFigures:
    """What the workers of one kind did. Utilisation: share of what they had while they were alive; None: they have
    none of it."""

    kind: str
    workers: int
    attempts: int
    cpus: float | None
    memory: float | None
    gpus: float | None
    slots: float | None
    """Used share of the slots; with `auto`, of those for jobs that declare no resources."""


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """Ready jobs of one queue."""

    queue: str
    mean: float
    maximum: int
    at_end: int
    timeline: tuple[float, ...]
    """Means of equal intervals."""


@dataclass(frozen=True, slots=True)
class CallFigures:
    """Calls for several jobs that have ended."""

    calls: int
    jobs: int
    """Attempts in them."""


@dataclass(frozen=True, slots=True)
class JobSimulation:
    """Result of a simulated queue of jobs; `str()` is the report."""

    name: str
    duration_s: float
    """Simulated time."""
    all_jobs: WaitingTimes
    classes: Mapping[str, WaitingTimes]
    priorities: Mapping[int, WaitingTimes]
    kinds: tuple[KindFigures, ...]
    queues: tuple[QueueFigures, ...]
    misfits: tuple[str, ...]
    """Classes of jobs that no worker can run, with the reason."""
    calls: Mapping[str, CallFigures] = field(default_factory=dict)
    """Class of jobs with batches -> its calls."""
    one_more: Mapping[str, JobSimulation] = field(default_factory=dict)
    """Kind of workers -> the same with one more worker of it."""

    def compared_with(self, more: Mapping[str, JobSimulation]) -> JobSimulation:
        return replace(self, one_more=dict(more))

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "name": self.name,
            "duration_s": self.duration_s,
            "all_jobs": _plain(self.all_jobs),
            "classes": {name: _plain(one) for name, one in self.classes.items()},
            "priorities": {str(priority): _plain(one) for priority, one in self.priorities.items()},
            "workers": [_plain(one) for one in self.kinds],
            "queues": [_plain(one) for one in self.queues],
            "misfits": list(self.misfits),
        }
        if self.calls:
            found["calls"] = {name: _plain(one) for name, one in self.calls.items()}
        if self.one_more:
            found["one_more"] = {kind: one.to_dict() for kind, one in self.one_more.items()}
        return found

    def __str__(self) -> str:
        return "\n".join(_report_lines(self))


def _plain(one: WaitingTimes | KindFigures | QueueFigures | CallFigures) -> dict[str, Any]:
    return {item.name: _listed(getattr(one, item.name)) for item in fields(one)}


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def make_report(
    name: str,
    scenario: JobScenario,
    jobs: Iterable[SimulatedJob],
    lengths: Mapping[str, QueueLength],
    usage: Mapping[str, Usage],
    calls: Mapping[str, CallCount],
    span_ms: tuple[int, int],
    misfits: Sequence[str],
) -> JobSimulation:
    """The figures of a simulation from `span_ms[0]` to `span_ms[1]`."""
    start_ms, end_ms = span_ms
    by_class: dict[str, list[SimulatedJob]] = {one: [] for one in scenario.jobs}
    for job in jobs:
        by_class[job.name].append(job)
    by_priority: dict[int, list[SimulatedJob]] = {}
    for one, found in by_class.items():
        by_priority.setdefault(scenario.jobs[one].priority_number, []).extend(found)
    every = [job for found in by_class.values() for job in found]
    return JobSimulation(
        name=name,
        duration_s=(end_ms - start_ms) / 1000,
        all_jobs=_waiting_times(every, end_ms),
        classes={one: _waiting_times(found, end_ms) for one, found in by_class.items()},
        priorities={one: _waiting_times(by_priority[one], end_ms) for one in sorted(by_priority, reverse=True)},
        kinds=tuple(_kind_figures(kind, one, usage[kind]) for kind, one in scenario.workers.items()),
        queues=tuple(length.figures(queue, end_ms) for queue, length in sorted(lengths.items())),
        misfits=tuple(misfits),
        calls={one: CallFigures(count.calls, count.jobs) for one, count in calls.items()},
    )


def _waiting_times(jobs: Sequence[SimulatedJob], end_ms: int) -> WaitingTimes:
    waited_s = sorted(job.waited_ms(end_ms) / 1000 for job in jobs)
    finished = [job for job in jobs if job.finished_ms is not None]
    succeeded = sum(1 for job in finished if job.has_succeeded)
    return WaitingTimes(
        jobs=len(jobs),
        mean_s=sum(waited_s) / len(waited_s) if waited_s else 0.0,
        p50_s=_percentile(waited_s, 0.5),
        p95_s=_percentile(waited_s, 0.95),
        max_s=waited_s[-1] if waited_s else 0.0,
        succeeded=succeeded,
        failed=len(finished) - succeeded,
        unstarted=sum(1 for job in jobs if job.started_ms is None),
        unfinished=len(jobs) - len(finished),
    )


def _kind_figures(kind: str, one: WorkerKind, usage: Usage) -> KindFigures:
    node, alive_ms = one.node, usage.alive_ms
    return KindFigures(
        kind=kind,
        workers=one.count,
        attempts=usage.attempts,
        cpus=_share(usage.cpu, node.usable_cpu_milli * alive_ms),
        memory=_share(usage.memory, node.memory_bytes * alive_ms),
        gpus=_share(usage.gpu, 1000 * len(node.gpus) * alive_ms),
        slots=_share(usage.used_slots, usage.slots * alive_ms),
    )


def _share(used: int, of: int) -> float | None:
    return used / of if of else None


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


# --- the report


def _report_lines(result: JobSimulation) -> Iterator[str]:
    jobs, attempts = result.all_jobs, sum(one.attempts for one in result.kinds)
    yield cut_text(f"{result.name}, simulated for {format_duration(result.duration_s)}", DEFAULT_WIDTH)
    yield (
        f"  {format_number(jobs.jobs)} jobs: {format_number(jobs.succeeded)} succeeded, {jobs.failed} failed, "
        f"{jobs.unfinished} not finished ({jobs.unstarted} not started)"
    )
    if attempts > jobs.jobs:
        yield f"  {format_number(attempts)} attempts"
    for name, one in result.calls.items():
        mean = f", {one.jobs / one.calls:.1f} each" if one.calls else ""
        calls = f"{format_number(one.calls)} calls for {format_number(one.jobs)} jobs{mean}"
        yield cut_text(f"  {cut_text(name, NAME_WIDTH)}: {calls}", DEFAULT_WIDTH)
    for misfit in result.misfits:
        yield from textwrap.wrap(f"warning: {misfit}", DEFAULT_WIDTH, subsequent_indent="  ")
    yield ""
    yield from _table(_waiting_rows("jobs", result.classes.items()))
    if len(result.priorities) > 1:
        yield ""
        yield from _table(_waiting_rows("priority", ((str(one), of) for one, of in result.priorities.items())))
    yield ""
    yield from _table(_kind_rows(result.kinds))
    yield ""
    yield "ready jobs over time"
    rows = [
        (
            one.queue,
            sparkline(one.timeline, SPARKLINE_WIDTH),
            f"mean {format_number(one.mean)}",
            f"max {format_number(one.maximum)}",
            f"end {format_number(one.at_end)}",
        )
        for one in result.queues
    ]
    yield from (f"  {line}" for line in fit_table(rows, DEFAULT_WIDTH - 2, left=2))
    if result.one_more:
        yield ""
        yield from _table(_one_more_rows(result))


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    return fit_table(rows, DEFAULT_WIDTH)


def _waiting_rows(title: str, of: Iterable[tuple[str, WaitingTimes]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [(title, "number", "waiting p50", "p95", "max", "not finished")]
    for name, one in of:
        waits = (format_duration(value) if one.jobs else "-" for value in (one.p50_s, one.p95_s, one.max_s))
        rows.append((name, format_number(one.jobs), *waits, format_number(one.unfinished)))
    return rows


def _kind_rows(kinds: Sequence[KindFigures]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("workers", "number", "CPUs", "memory", "GPUs", "slots", "attempts")]
    for one in kinds:
        shares = map(format_percent, (one.cpus, one.memory, one.gpus, one.slots))
        rows.append((one.kind, str(one.workers), *shares, format_number(one.attempts)))
    return rows


def _one_more_rows(result: JobSimulation) -> list[tuple[str, ...]]:
    """Waiting times of all jobs with one more worker of each kind, and the class that gains most."""
    rows: list[tuple[str, ...]] = [("one more worker", "not finished", "p50", "p95", "max", "gains most, p95")]
    for kind, more in [("", result), *result.one_more.items()]:
        jobs = more.all_jobs
        waits = (format_duration(value) for value in (jobs.p50_s, jobs.p95_s, jobs.max_s))
        gain = _largest_gain(result, more) if kind else ""
        rows.append((f"+1 {kind}" if kind else "as it is", format_number(jobs.unfinished), *waits, gain))
    return rows


def _largest_gain(before: JobSimulation, after: JobSimulation) -> str:
    """The class of jobs whose 95th percentile falls most."""
    gains = {name: one.p95_s - after.classes[name].p95_s for name, one in before.classes.items()}
    name = max(gains, key=lambda one: gains[one])
    if gains[name] <= 0:
        return "none"
    return f"{cut_text(name, NAME_WIDTH)} -{format_duration(gains[name])}"
