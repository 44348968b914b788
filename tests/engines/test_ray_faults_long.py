"""The remaining fault tests of the local engine, on Ray; only in `make test-long`."""

from __future__ import annotations

import pytest

from engines import test_local_faults
from engines.ray_runs import on_ray
from engines.test_local_faults import (
    test_a_batch_that_runs_out_of_memory_is_split,
    test_a_call_that_hung_once_is_retried,
    test_a_result_that_cannot_be_pickled_names_its_stage,
    test_a_setup_that_exceeds_its_timeout_fails_the_run,
    test_a_stage_may_use_a_pool_of_forked_processes,
    test_a_stage_that_cannot_be_pickled_is_an_error_with_its_name_and_the_reason,
    test_a_worker_stopped_by_a_signal_exceeds_its_timeout,
    test_a_worker_that_dies_in_setup_fails_the_run_with_the_cause,
    test_an_item_that_always_exits_is_recorded_with_its_exit_code,
    test_an_item_that_always_kills_its_worker_fails_the_run_with_the_cause,
    test_an_item_that_breaks_its_worker_for_good_costs_no_other_item,
    test_badly_behaved_stages_lose_no_item_and_leave_no_process,
    test_c_code_that_holds_the_gil_is_ended_at_its_timeout,
    test_items_that_cannot_be_unpickled_between_two_stages_fail_at_the_second,
    test_only_items_that_cannot_be_unpickled_are_recorded_as_failed,
    test_ordinary_bad_rows_cost_no_restart_and_one_call_each_of_a_real_worker,
    test_os_exit_is_a_worker_loss_and_the_item_is_retried,
    test_sys_exit_in_a_stage_is_an_exception_and_no_worker_loss,
)

__all__ = [
    "on_ray",
    "test_a_batch_that_runs_out_of_memory_is_split",
    "test_a_call_that_hung_once_is_retried",
    "test_a_result_that_cannot_be_pickled_names_its_stage",
    "test_a_setup_that_exceeds_its_timeout_fails_the_run",
    "test_a_stage_may_use_a_pool_of_forked_processes",
    "test_a_stage_that_cannot_be_pickled_is_an_error_with_its_name_and_the_reason",
    "test_a_worker_that_dies_in_setup_fails_the_run_with_the_cause",
    "test_a_worker_stopped_by_a_signal_exceeds_its_timeout",
    "test_an_item_that_always_kills_its_worker_fails_the_run_with_the_cause",
    "test_an_item_that_always_exits_is_recorded_with_its_exit_code",
    "test_an_item_that_breaks_its_worker_for_good_costs_no_other_item",
    "test_badly_behaved_stages_lose_no_item_and_leave_no_process",
    "test_c_code_that_holds_the_gil_is_ended_at_its_timeout",
    "test_items_that_cannot_be_unpickled_between_two_stages_fail_at_the_second",
    "test_ordinary_bad_rows_cost_no_restart_and_one_call_each_of_a_real_worker",
    "test_os_exit_is_a_worker_loss_and_the_item_is_retried",
    "test_only_items_that_cannot_be_unpickled_are_recorded_as_failed",
    "test_sys_exit_in_a_stage_is_an_exception_and_no_worker_loss",
]
pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("on_ray", "by_value")]
BY_VALUE = (test_local_faults,)
