"""Jobs as text: what is written is read back."""

from __future__ import annotations

import json

from hypothesis import given

from dovetail.jobs.job import NO_RESOURCES, Attempt, JobSpec, Outcome
from dovetail.jobs.store import Schedule, WorkerInfo
from dovetail.jobs.stores.serialization import (
    attempts_from_text,
    attempts_to_text,
    schedule_from_text,
    schedule_to_text,
    shape_from_text,
    shape_to_text,
    spec_from_text,
    spec_to_text,
    worker_from_text,
    worker_to_text,
)
from jobs.job_strategies import SHAPES, specs


@given(specs())
def test_a_specification_is_read_back(spec: JobSpec) -> None:
    assert spec_from_text(spec.id, spec_to_text(spec), spec.payload) == spec


def test_a_plain_specification_is_short() -> None:
    assert spec_to_text(JobSpec("a", "app:work")) == '{"function":"app:work"}'


def test_fields_of_a_later_version_are_ignored() -> None:
    assert (
        spec_from_text("a", json.dumps({"function": "f", "later": 1, "retries": {"error": 1, "later": 2}})).function
        == "f"
    )
    attempt = {"number": 1, "token": 1, "worker": "w", "started_ms": 1, "ended_ms": 2, "outcome": "lost", "later": 3}
    assert attempts_from_text(json.dumps([attempt])) == (Attempt(1, 1, "w", 1, 2, Outcome.LOST),)


def test_shapes_are_read_back() -> None:
    texts = [shape_to_text(shape) for shape in (NO_RESOURCES, *SHAPES)]
    assert texts[0] == "{}"
    assert tuple(map(shape_from_text, texts)) == (NO_RESOURCES, *SHAPES)
    assert len(set(texts)) == len(texts)


def test_attempts_workers_and_schedules_are_read_back() -> None:
    attempts = (
        Attempt(1, 1, "w", 5, 9, Outcome.ERROR, "E", "lines", 1, 2, 3),
        Attempt(2, 3, "w", 10, 11, Outcome.SUCCEEDED),
    )
    assert attempts_from_text(attempts_to_text(attempts)) == attempts
    assert attempts_from_text("") == ()
    worker = WorkerInfo("w", ("x", "y"), 3, {"host": "h"}, 1, 2, 3)
    assert worker_from_text("w", worker_to_text(worker), 1, 2, 3) == worker
    schedule = Schedule("s", "* * * * *", "UTC", JobSpec("", "f", b"\xff", shape=SHAPES[0]), 7)
    assert schedule_from_text("s", schedule_to_text(schedule), 7) == schedule
