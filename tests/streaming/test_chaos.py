"""Whatever dies and whatever is asked: does every item come out exactly once, or is it set aside with its reason?"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dovetail.control.lifecycle import RunState
from dovetail.engines.simulated.message_execution import part_keys
from streaming.worlds import a_case, run

SEEDS = st.integers(0, 10**9)


@given(SEEDS)
def test_every_item_comes_out_exactly_once_or_is_set_aside_with_its_reason(seed: int) -> None:
    case = a_case(seed)
    result = run(case)
    assert result.run_state is RunState.FINISHED, result.stream.state.error
    assert result.out() == case.expected(result.aside())
    assert all(record.error and record.attempts >= 1 for record in result.data.aside)


@given(SEEDS, st.floats(0, 1))
def test_a_resume_from_any_prefix_of_the_commit_log_completes_it_exactly(seed: int, share: float) -> None:
    case = a_case(seed)
    log = run(case).data.log
    kept = log[: round(share * len(log))]
    resumed = run(case, resume=kept)
    assert resumed.run_state is RunState.FINISHED, resumed.stream.state.error
    out, aside = resumed.out(), resumed.aside()
    for deliver in kept:
        for leaf, segments in deliver.outputs.items():
            out.update((leaf, key) for key in part_keys((segment, 0, segment.items) for segment in segments))
        aside.update((record.unit, key) for record in deliver.failed_items for key in part_keys([record.part]))
    assert out == case.expected(Counter(aside))


@given(SEEDS)
def test_without_mishaps_nothing_is_set_aside_and_no_worker_is_lost(seed: int) -> None:
    case = a_case(seed, mishaps=False)
    result = run(case)
    assert result.run_state is RunState.FINISHED
    assert result.out() == case.expected(Counter())
    assert not result.data.aside
    assert sum(unit.workers_lost for unit in result.stream.state.all_units) == 0
