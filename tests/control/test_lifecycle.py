"""State machines of runs and workers: legal moves."""

from __future__ import annotations

import pytest

from dovetail.control.lifecycle import (
    FINAL_RUN_STATES,
    FINAL_WORKER_STATES,
    LEGAL_RUN_MOVES,
    LEGAL_WORKER_MOVES,
    RunState,
    WorkerState,
    checked_move,
)


def test_final_states_have_no_successor() -> None:
    assert not [move for move in LEGAL_WORKER_MOVES if move[0] in FINAL_WORKER_STATES]
    assert not [move for move in LEGAL_RUN_MOVES if move[0] in FINAL_RUN_STATES]


def test_every_state_leads_to_a_final_state() -> None:
    for states, moves, ends in (
        (WorkerState, LEGAL_WORKER_MOVES, FINAL_WORKER_STATES),
        (RunState, LEGAL_RUN_MOVES, FINAL_RUN_STATES),
    ):
        reached = set(ends)
        for _ in states:
            reached |= {old for old, new in moves if new in reached}
        assert reached == set(states)


@pytest.mark.parametrize("state", [state for state in WorkerState if state not in FINAL_WORKER_STATES])
def test_every_live_worker_can_be_lost(state: WorkerState) -> None:
    assert checked_move(LEGAL_WORKER_MOVES, state, WorkerState.LOST, "worker 1") is WorkerState.LOST


def test_an_illegal_move_names_the_object_and_the_states() -> None:
    with pytest.raises(AssertionError, match="worker 7: lost -> ready"):
        checked_move(LEGAL_WORKER_MOVES, WorkerState.LOST, WorkerState.READY, "worker 7")
    with pytest.raises(AssertionError, match="run: finished -> running"):
        checked_move(LEGAL_RUN_MOVES, RunState.FINISHED, RunState.RUNNING, "run")


def test_a_drain_can_be_cancelled_and_a_stop_cannot() -> None:
    assert (WorkerState.DRAINING, WorkerState.READY) in LEGAL_WORKER_MOVES
    assert (WorkerState.STOPPING, WorkerState.READY) not in LEGAL_WORKER_MOVES
