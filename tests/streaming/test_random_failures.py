"""Random pipelines with random failures: every item is delivered exactly once, or fails with a reason."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.message_execution import part_keys
from streaming.random_runs import random_case, run

SEEDS = st.integers(0, 10**9)


@given(SEEDS)
@example(21)  # all epochs restart after the end of the input, with less than a batch in each
def test_every_item_is_delivered_exactly_once_or_fails_with_its_reason(seed: int) -> None:
    case = random_case(seed)
    result = run(case)
    assert result.run_state is RunState.FINISHED, result.stream.state.error
    assert result.out() == case.expected(result.failed())
    assert all(record.error and record.attempts >= 1 for record in result.data.failed_items)


@given(SEEDS, st.floats(0, 1))
def test_a_resume_from_any_prefix_of_the_commit_log_is_exactly_once(seed: int, share: float) -> None:
    case = random_case(seed)
    log = run(case).data.log
    kept = log[: round(share * len(log))]
    resumed = run(case, resume=kept)
    assert resumed.run_state is RunState.FINISHED, resumed.stream.state.error
    out, aside = resumed.out(), resumed.failed()
    for deliver in kept:
        for leaf, segments in deliver.outputs.items():
            out.update((leaf, key) for key in part_keys((segment, 0, segment.items) for segment in segments))
        aside.update((record.unit, key) for record in deliver.failed_items for key in part_keys([record.part]))
    assert out == case.expected(Counter(aside))


@given(SEEDS)
def test_without_injected_failures_no_item_fails_and_no_worker_is_lost(seed: int) -> None:
    case = random_case(seed, failures=False)
    result = run(case)
    assert result.run_state is RunState.FINISHED
    assert result.out() == case.expected(Counter())
    assert not result.data.failed_items
    assert sum(unit.workers_lost for unit in result.stream.state.all_units) == 0
