"""State machine of jobs, order of jobs, and their ids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dovetail.jobs import state_machine
from dovetail.jobs.job import FINISHED, REQUEUEABLE, JobRecord, JobSpec, JobState, Outcome, Retries
from dovetail.jobs.job_id import JobIds, new_job_id
from dovetail.jobs.ordering import order_key
from dovetail.jobs.retry_backoff import backoff_ms
from dovetail.jobs.store import Completion

SPEC = JobSpec("a", "jobs_app:work")


def ready() -> JobRecord:
    return state_machine.submitted(0, SPEC)


def leased() -> JobRecord:
    return state_machine.claimed(0, ready(), "w", 1000)


def test_every_state_is_in_the_table_of_legal_moves() -> None:
    assert set(state_machine.LEGAL_MOVES) == set(JobState)
    assert {state for state in FINISHED if state_machine.LEGAL_MOVES[state]} == REQUEUEABLE


def test_an_illegal_move_is_refused() -> None:
    done = state_machine.completed(5, leased(), Completion("a", 1, Outcome.SUCCEEDED))
    with pytest.raises(AssertionError):
        state_machine.claimed(6, done, "w", 1000)
    with pytest.raises(AssertionError):
        state_machine.requeued(6, done)
    with pytest.raises(AssertionError):
        state_machine.completed(6, leased(), Completion("a", 2, Outcome.SUCCEEDED))
    with pytest.raises(AssertionError, match="illegal move from succeeded to cancelled"):
        state_machine.cancelled(6, done)


def test_every_way_to_end_an_attempt_is_a_legal_move() -> None:
    for outcome in Outcome:
        for retries in (Retries(), Retries(0, 0, 0, 0)):
            for jitter in (0.0, 0.5):
                record = replace(leased(), spec=replace(SPEC, retries=retries))
                after = state_machine.completed(9, record, Completion("a", 1, outcome, jitter=jitter))
                assert after.state in state_machine.LEGAL_MOVES[JobState.LEASED]
                assert (after.worker, after.started_ms) == (None, None)
                assert (after.due_ms is None) == (after.state is not JobState.SCHEDULED)
                assert (after.finished_ms is None) == (not after.state.is_finished)


def test_two_waiting_jobs_never_change_places() -> None:
    assert order_key(0, 0) == order_key(60_000, 1) == order_key(-60_000, -1)
    assert order_key(1_000, 0) > order_key(60_999, 1)
    assert order_key(1_000, 0) < order_key(61_001, 1)


def test_the_backoff_doubles_up_to_its_maximum() -> None:
    retries = Retries(backoff_ms=100, max_backoff_ms=1000)
    assert [backoff_ms(retries, failures, 0.5) for failures in (1, 2, 3, 4, 5, 1000)] == [50, 100, 200, 400, 500, 500]
    assert backoff_ms(retries, 1, 0.0) == 0


def test_job_ids_are_unique_and_sort_by_time() -> None:
    ids = [new_job_id() for _ in range(5000)]
    assert ids == sorted(set(ids))
    assert {len(job_id) for job_id in ids} == {20}
    assert JobIds().new()[-7:] != ids[0][-7:]
