"""Metrics of queues and workers in the text format of Prometheus. Pure.

A family is a metric with its samples; `render` writes any number of them, so that other modules can add their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.jobs.job import JobState
from dovetail.jobs.job_view import ready_by_needs
from dovetail.jobs.worker_liveness import live_workers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dovetail.jobs.store import QueueStats, WorkerInfo
    from dovetail.jobs.work_signal import QueuedWork

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "dovetail_"
GAUGE, COUNTER = "gauge", "counter"

Sample = tuple["Mapping[str, str]", float]
"""Labels and value."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: name without prefix, kind, one line of help, and samples."""

    name: str
    kind: str
    help: str
    samples: tuple[Sample, ...]


def render(families: Iterable[Family]) -> str:
    """The text of all families that have samples."""
    return "".join(line + "\n" for family in families if family.samples for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    name = PREFIX + family.name
    yield f"# HELP {name} {_escaped(family.help)}"
    yield f"# TYPE {name} {family.kind}"
    for labels, value in family.samples:
        written = ",".join(f'{key}="{_label_value(text)}"' for key, text in labels.items())
        yield f"{name}{f'{{{written}}}' if written else ''} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _label_value(text: str) -> str:
    return _escaped(text).replace('"', '\\"')


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


# --- families


def queue_families(stats: Sequence[QueueStats], now_ms: int) -> tuple[Family, ...]:
    """What the store has: jobs by queue and state, the longest wait, ready jobs by what they need."""
    return (
        Family(
            "jobs",
            GAUGE,
            "Jobs in the store by queue and state.",
            tuple(
                ({"queue": one.queue, "state": state.value}, one.counts.get(state, 0))
                for one in stats
                for state in JobState
            ),
        ),
        Family(
            "queue_oldest_ready_seconds",
            GAUGE,
            "How long the longest-waiting ready job has waited.",
            tuple(
                ({"queue": one.queue}, 0 if one.oldest_ms is None else max(0, now_ms - one.oldest_ms) / 1000)
                for one in stats
            ),
        ),
        Family(
            "queue_ready_jobs",
            GAUGE,
            "Ready jobs by queue and what they need.",
            tuple(
                ({"queue": one.queue, "needs": needs}, count)
                for one in stats
                for needs, count in ready_by_needs(one).items()
            ),
        ),
        Family(
            "queue_paused", GAUGE, "1 if the queue is paused.", tuple(({"queue": s.queue}, s.paused) for s in stats)
        ),
    )


def work_families(work: QueuedWork) -> tuple[Family, ...]:
    """Seconds of work of ready jobs, and the jobs whose time is not known."""

    def by_class(amounts: Mapping[tuple[str, str], float]) -> tuple[Sample, ...]:
        return tuple(({"queue": queue, "class": one}, value) for (queue, one), value in sorted(amounts.items()))

    def by_kind(amounts: Mapping[str, float]) -> tuple[Sample, ...]:
        return tuple(({"kind": kind}, value) for kind, value in sorted(amounts.items()))

    return (
        Family(
            "queue_work_seconds",
            GAUGE,
            "Seconds of work of ready jobs whose functions were measured, by queue and resource class.",
            by_class(work.seconds),
        ),
        Family(
            "queue_unmeasured_jobs",
            GAUGE,
            "Ready jobs whose time is not known, by queue and resource class.",
            by_class(work.unmeasured),
        ),
        Family(
            "worker_kind_work_seconds",
            GAUGE,
            "Seconds of work of ready jobs by the kind of worker that can run them.",
            by_kind(work.kind_seconds),
        ),
        Family(
            "worker_kind_unmeasured_jobs",
            GAUGE,
            "Ready jobs whose time is not known, by the kind of worker that can run them.",
            by_kind(work.kind_unmeasured),
        ),
        Family(
            "function_seconds",
            GAUGE,
            "Mean time of the latest attempts of a function that succeeded.",
            tuple(({"function": one}, value) for one, value in sorted(work.function_seconds.items())),
        ),
    )


def fleet_families(workers: Sequence[WorkerInfo], now_ms: int) -> tuple[Family, ...]:
    """All workers that are registered in the store and were heard of lately: number, slots and jobs by queue."""
    live = live_workers(workers, now_ms)
    queues = sorted({queue for worker in live for queue in worker.queues})

    def by_queue(count: Mapping[str, int]) -> tuple[Sample, ...]:
        return tuple(({"queue": queue}, count[queue]) for queue in queues)

    def total(amount: str) -> dict[str, int]:
        return {
            queue: sum(getattr(worker, amount) if amount else 1 for worker in live if queue in worker.queues)
            for queue in queues
        }

    return (
        Family("workers", GAUGE, "Live workers by queue that they serve.", by_queue(total(""))),
        Family("workers_slots", GAUGE, "Slots of live workers by queue that they serve.", by_queue(total("slots"))),
        Family(
            "workers_jobs", GAUGE, "Jobs that live workers hold by queue that they serve.", by_queue(total("leases"))
        ),
    )


def worker_families(status: Mapping[str, Any]) -> tuple[Family, ...]:
    """This worker, from its status; fields that the status does not have are left out. Nothing if it is of no single
    worker: `dovetail jobs metrics` has sums over all of them."""
    if "worker_id" not in status:
        return ()
    labels: Mapping[str, str] = {"worker": str(status["worker_id"])}

    def gauge(name: str, key: str, text: str) -> Family:
        value = status.get(key)
        return Family(name, GAUGE, text, ((labels, value),) if isinstance(value, int | float) else ())

    outcomes = status.get("totals")
    counts = outcomes.items() if isinstance(outcomes, dict) else ()
    return (
        gauge("worker_active_jobs", "active_jobs", "Jobs that this worker runs now."),
        gauge("worker_available_slots", "available_slots", "Free slots of this worker."),
        gauge("worker_slots", "max_concurrent_jobs", "Jobs that this worker runs at once."),
        gauge("worker_gpu_enabled", "gpu_enabled", "1 if this worker runs jobs that need a GPU."),
        gauge("worker_uptime_seconds", "uptime_s", "Seconds since this worker started."),
        gauge("worker_last_exchange_seconds", "last_exchange_s", "Seconds since the store last answered this worker."),
        *_resource_families(status, labels),
        *_model_families(status, labels),
        Family(
            "worker_attempts_total",
            COUNTER,
            "Attempts that ended in this worker, by outcome.",
            tuple(({**labels, "outcome": str(outcome)}, count) for outcome, count in counts),
        ),
        Family(
            "worker_batches_total",
            COUNTER,
            "Calls for several jobs that ended in this worker.",
            ((labels, status["batches"]),) if "batches" in status else (),
        ),
    )


def _resource_families(status: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[Family]:
    """What the worker has, and what its jobs hold."""
    for name, key, text in (
        ("worker_resources", "resources", "What this worker may use, by resource."),
        ("worker_resources_used", "used", "What the jobs of this worker hold, by resource."),
    ):
        amounts = status.get(key)
        found = amounts.items() if isinstance(amounts, dict) else ()
        yield Family(name, GAUGE, text, tuple(({**labels, "resource": str(one)}, amount) for one, amount in found))


def _model_families(status: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[Family]:
    """Models that stay loaded between jobs."""
    models = status.get("models")
    if not isinstance(models, dict):
        return
    for name, key, text in (
        ("worker_model_hits_total", "hits", "Uses of a model that was loaded."),
        ("worker_model_misses_total", "misses", "Uses of a model that had to be loaded."),
        ("worker_model_evictions_total", "evictions", "Models that were evicted for others."),
        ("worker_model_load_seconds_total", "load_s", "Seconds in which models were loaded."),
        (
            "worker_model_reloads_total",
            "reloads",
            "Loads of a model shortly after its eviction: the memory for models is too small.",
        ),
        ("worker_model_load_failures_total", "failures", "Loads of models that failed."),
    ):
        yield Family(name, COUNTER, text, ((labels, models[key]),))
    sizes = models["bytes"].items()
    samples = tuple(({**labels, "device": device}, size) for device, size in sizes)
    yield Family("worker_model_bytes", GAUGE, "Memory of cached models, by device.", samples)
    yield Family("worker_models", GAUGE, "Cached models.", ((labels, len(models["models"])),))


def ingest_families(status: Mapping[str, Any]) -> tuple[Family, ...]:
    """Ingestion of lists by this worker."""
    routes = [one for one in status.get("ingest", ()) if isinstance(one, dict)]

    def counter(key: str, text: str) -> Family:
        samples = tuple(({"list": str(one["list"])}, one[key]) for one in routes)
        return Family(f"ingest_{key}_total", COUNTER, text, samples)

    return (
        counter("submitted", "Messages of a list that became jobs."),
        counter("rejected", "Messages of a list that could not be jobs."),
    )


def metrics_text(
    status: Mapping[str, Any],
    stats: Sequence[QueueStats] | None,
    workers: Sequence[WorkerInfo] = (),
    now_ms: int = 0,
    more: Iterable[Family] = (),
) -> str:
    """The page /metrics. `stats` is None while the store cannot be reached: the metrics of this worker remain."""
    reachable = Family("store_reachable", GAUGE, "1 if the store of jobs answers.", (({}, stats is not None),))
    of_store = () if stats is None else (*queue_families(stats, now_ms), *fleet_families(workers, now_ms))
    return render((*worker_families(status), *ingest_families(status), reachable, *of_store, *more))
