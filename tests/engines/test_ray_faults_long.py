"""What else of the local engine's faults is the same on Ray? Everything that is not tried each time."""

from __future__ import annotations

import pytest

from engines.ray_runs import on_ray
from engines.test_local_faults import (
    test_a_batch_that_runs_out_of_memory_is_run_in_smaller_ones,
    test_a_call_that_hung_once_is_tried_again,
    test_a_result_that_cannot_be_pickled_names_its_stage,
    test_a_setup_past_its_timeout_fails_the_run,
    test_a_stage_may_use_a_pool_of_forked_processes,
    test_a_stage_that_cannot_be_sent_says_which_and_why,
    test_a_worker_that_dies_in_setup_fails_the_run_with_the_cause,
    test_a_worker_that_is_stopped_by_a_signal_meets_its_timeout_too,
    test_an_item_that_always_kills_its_worker_fails_the_run_with_the_cause,
    test_an_item_that_always_leaves_is_set_aside_with_its_exit_code,
    test_bad_manners_cost_no_item_and_leave_no_process,
    test_c_code_that_keeps_the_gil_is_ended_at_its_timeout_too,
    test_items_that_cannot_be_unpickled_between_two_stages_are_set_aside_there,
    test_leaving_by_os_exit_is_a_death_and_the_item_is_tried_again,
    test_only_items_that_cannot_be_unpickled_are_set_aside,
    test_sys_exit_in_a_stage_is_an_exception_and_no_death,
)

__all__ = [
    "on_ray",
    "test_a_batch_that_runs_out_of_memory_is_run_in_smaller_ones",
    "test_a_call_that_hung_once_is_tried_again",
    "test_a_result_that_cannot_be_pickled_names_its_stage",
    "test_a_setup_past_its_timeout_fails_the_run",
    "test_a_stage_may_use_a_pool_of_forked_processes",
    "test_a_stage_that_cannot_be_sent_says_which_and_why",
    "test_a_worker_that_dies_in_setup_fails_the_run_with_the_cause",
    "test_a_worker_that_is_stopped_by_a_signal_meets_its_timeout_too",
    "test_an_item_that_always_kills_its_worker_fails_the_run_with_the_cause",
    "test_an_item_that_always_leaves_is_set_aside_with_its_exit_code",
    "test_bad_manners_cost_no_item_and_leave_no_process",
    "test_c_code_that_keeps_the_gil_is_ended_at_its_timeout_too",
    "test_items_that_cannot_be_unpickled_between_two_stages_are_set_aside_there",
    "test_leaving_by_os_exit_is_a_death_and_the_item_is_tried_again",
    "test_only_items_that_cannot_be_unpickled_are_set_aside",
    "test_sys_exit_in_a_stage_is_an_exception_and_no_death",
]
pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("on_ray")]
