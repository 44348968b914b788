"""Jobs, attempts, workers and schedules as JSON text, for stores outside of this process. Pure.

Fields that have their default value are left out. Fields that this version does not know are ignored: they were
written by a later version with the same schema version.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dovetail.jobs.job import (
    NO_RESOURCES,
    NORMAL_RETRIES,
    Attempt,
    DependencyPolicy,
    Gang,
    JobSpec,
    Member,
    Outcome,
    Retries,
)
from dovetail.jobs.store import Schedule, WorkerInfo
from dovetail.resources.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Iterable

SHAPES_CACHED = 10_000
_PLAIN_SPEC = JobSpec("", "")
_SPEC_FIELDS = tuple(
    (item.name, getattr(_PLAIN_SPEC, item.name))
    for item in fields(JobSpec)
    if item.name not in ("id", "function", "payload", "shape", "retries", "after")
)
_spec_values = attrgetter(*(name for name, _ in _SPEC_FIELDS))
_PLAIN_VALUES = _spec_values(_PLAIN_SPEC)
_ATTEMPT_DEFAULTS = {item.name: item.default for item in fields(Attempt)}
_ATTEMPT_NAMES = tuple(_ATTEMPT_DEFAULTS)
_ATTEMPT_ITEMS = tuple(_ATTEMPT_DEFAULTS.items())
_attempt_values = attrgetter(*_ATTEMPT_NAMES)
_dumps = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


# --- shapes


@lru_cache(SHAPES_CACHED)
def shape_to_text(shape: Shape) -> str:
    """Canonical text: equal shapes have equal texts. It names the bucket of a job."""
    plain = NO_RESOURCES.to_dict()
    data = shape.to_dict()
    return json.dumps({key: data[key] for key in sorted(data) if data[key] != plain[key]}, separators=(",", ":"))


@lru_cache(SHAPES_CACHED)
def shape_from_text(text: str) -> Shape:
    data = json.loads(text)
    return Shape.from_dict(NO_RESOURCES.to_dict() | data) if data else NO_RESOURCES


# --- specifications


def spec_to_text(spec: JobSpec) -> str:
    """Everything but the id and the payload, which stores keep apart."""
    values = _spec_values(spec)
    if values == _PLAIN_VALUES and spec.shape is NO_RESOURCES and spec.retries is NORMAL_RETRIES and not spec.after:
        return _plain_spec_text(spec.function)
    data: dict[str, Any] = {"function": spec.function}
    for (name, default), value in zip(_SPEC_FIELDS, values, strict=True):
        if value != default:
            data[name] = value
    if spec.shape is not NO_RESOURCES and spec.shape != NO_RESOURCES:
        data["shape"] = shape_to_text(spec.shape)
    if spec.retries != _PLAIN_SPEC.retries:
        data["retries"] = {item.name: getattr(spec.retries, item.name) for item in fields(Retries)}
    if spec.after:
        data["after"] = spec.after
    return _dumps(data)


@lru_cache(SHAPES_CACHED)
def _plain_spec_text(function: str) -> str:
    return _dumps({"function": function})


def spec_from_text(job_id: str, text: str, payload: bytes = b"") -> JobSpec:
    data = json.loads(text)
    known = {name: data[name] for name, _ in _SPEC_FIELDS if name in data}
    if "shape" in data:
        known["shape"] = shape_from_text(data["shape"])
    if "retries" in data:
        names = {item.name for item in fields(Retries)}
        known["retries"] = Retries(**{name: value for name, value in data["retries"].items() if name in names})
    if "after" in data:
        known["after"] = tuple(data["after"])
    if "if_dependency_fails" in known:
        known["if_dependency_fails"] = DependencyPolicy(known["if_dependency_fails"])
    return JobSpec(id=job_id, function=data["function"], payload=payload, **known)


# --- gangs


def gang_to_text(gang: Gang | None) -> str | None:
    if gang is None:
        return None
    result = None if gang.result is None else b64encode(gang.result).decode()
    return _dumps([gang.members, gang.address, result, gang.result_encoding, gang.is_preempted])


def gang_from_text(text: str | None) -> Gang | None:
    if not text:
        return None
    members, address, result, encoding, is_preempted = json.loads(text)
    content = None if result is None else b64decode(result)
    return Gang(tuple(Member(*member) for member in members), address, content, encoding, is_preempted)


# --- attempts


def attempts_to_text(attempts: Iterable[Attempt]) -> str:
    return _dumps([_attempt_data(attempt) for attempt in attempts])


def attempts_from_text(text: str) -> tuple[Attempt, ...]:
    return tuple(_attempt_from(data) for data in json.loads(text)) if text else ()


def _attempt_data(attempt: Attempt) -> dict[str, object]:
    values = zip(_ATTEMPT_ITEMS, _attempt_values(attempt), strict=True)
    return {name: value for (name, default), value in values if value != default}


def _attempt_from(data: dict[str, Any]) -> Attempt:
    known = {name: data[name] for name in _ATTEMPT_NAMES if name in data}
    return Attempt(**known | {"outcome": Outcome(known["outcome"])})


# --- workers and schedules


def worker_to_text(worker: WorkerInfo) -> str:
    """What the worker registered; times and leases are kept apart."""
    return _dumps({"queues": worker.queues, "slots": worker.slots, "details": worker.details})


def worker_from_text(
    worker_id: str, text: str, registered_ms: int = 0, heartbeat_ms: int = 0, leases: int = 0
) -> WorkerInfo:
    data = json.loads(text)
    return WorkerInfo(
        worker_id, tuple(data["queues"]), data["slots"], data["details"], registered_ms, heartbeat_ms, leases
    )


def schedule_to_text(schedule: Schedule) -> str:
    """The declaration; the name and the next fire time are kept apart. The same declaration has the same text."""
    return _dumps(
        {
            "cron": schedule.cron,
            "timezone": schedule.timezone,
            "template": spec_to_text(schedule.template),
            "payload": b64encode(schedule.template.payload).decode(),
        }
    )


def schedule_from_text(name: str, text: str, next_ms: int) -> Schedule:
    data = json.loads(text)
    template = spec_from_text("", data["template"], b64decode(data["payload"]))
    return Schedule(name, data["cron"], data["timezone"], template, next_ms)
