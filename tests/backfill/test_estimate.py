"""Dry runs: pending work, feasibility, workers and the estimated rate."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("lance")
pytest.importorskip("pyarrow")

import dovetail as dt
import fill_functions as fns
from backfill_aids import HALF, create_table
from backfill_scenes import gated_function, run_beside
from dovetail.backfill.arguments import parse_arguments
from dovetail.backfill.udf import udf
from dovetail.backfill.worker_stage import plan_workers
from dovetail.errors import InfeasibleError

if TYPE_CHECKING:
    from pathlib import Path


def halves(n: int) -> int:
    return n / 2  # type: ignore[return-value]


def test_a_plan_with_a_condition_counts_the_rows_that_match(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 400, 100))
    plan = table.plan_backfill("n", fns.doubled, where="id < 5", sample=False, cluster=HALF)
    assert (plan.rows, plan.fragments) == (5, 1)


def test_a_plan_does_not_wait_for_a_busy_machine(tmp_path: Path) -> None:
    table = dt.table(create_table(tmp_path, 40, 40))
    with run_beside(tmp_path, table, "n", gated_function(tmp_path, 0), cluster="auto", workers=1):
        whole = dt.udf(fns.doubled.fn, cpus=os.cpu_count())
        plan = table.plan_backfill("m", whole)
    assert plan.rate is None
    assert "no rows were sampled: " in str(plan)


@pytest.mark.parametrize(
    ("options", "cluster", "expected_message", "fix"),
    [
        ({"cpus": 3}, "1x(2cpu, 4GB)", "2 CPUs in all, 3 needed", "@dt.udf(cpus=2)"),
        ({"memory": "9GB"}, "1x(2cpu, 4GB)", "4GB memory in all, 9GB needed", '@dt.udf(memory="4GB")'),
        ({"gpus": 1}, "1x(2cpu, 4GB)", "no GPU", "add a node like 1x(1cpu, 1xL40S)"),
        ({"gpus": 3}, "2x(2cpu, 4GB, 2xA100)", "2 GPUs in all, 3 needed", "@dt.udf(gpus=2)"),
        ({"gpu_memory": "99GB"}, "1x(2cpu, 1xL4)", "24GB per card, 99GB needed", '@dt.udf(gpu_memory="24GB")'),
        ({"memory": "1GB"}, "1x(2cpu)", "its memory is not given", "@dt.udf(memory=None)"),
    ],
)
def test_a_function_that_fits_on_no_node_is_refused_with_a_parameter_that_fits(
    options: Any, cluster: str, expected_message: str, fix: str
) -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan_workers(udf(halves, **options), parse_arguments({"cluster": cluster}))
    (problem,) = caught.value.problems
    assert problem.message.startswith("stage 'halves' (")
    assert expected_message in problem.evidence[0]
    assert problem.fix_texts[0] == fix
    if fix.startswith("@dt.udf("):
        fixed = eval(fix.removeprefix("@dt."), {"udf": lambda **given: udf(halves, **{**options, **given})})
        plan_workers(fixed, parse_arguments({"cluster": cluster}))
