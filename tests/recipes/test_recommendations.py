"""`dovetail recipe advise`: every row is a valid plan."""

from __future__ import annotations

import pytest

import dovetail as dt
from dovetail.recipes.recommendations import CONCURRENT_OPERATORS, Recommendation, recommend

GPU_CLUSTER = "1x(32cpu, 128GB, 2xgpu:20GB)"


def plan_of(row: Recommendation, cluster: dt.Cluster) -> dt.Plan:
    """A plan with the settings and the number of workers of a row."""
    needs = dt.Resources(cpus=row.cpus, gpus=0 if row.memory else row.gpus, gpu_memory=row.memory or None)
    return dt.plan(dt.Pipeline([dt.Stage("one", "any:thing", needs, workers=row.workers, rate=1)]), cluster)


@pytest.mark.parametrize(
    "spec", [GPU_CLUSTER, "1x(2cpu, 8GB)", "4x(16cpu, 64GB, 1xgpu:80GB)", "1x(4cpu, 16GB, 8xgpu:8GB)"]
)
def test_every_row_can_be_planned_and_one_more_worker_does_not_fit(spec: str) -> None:
    cluster = dt.Cluster.of(spec)
    rows = recommend(cluster)
    assert rows
    for row in rows:
        assert plan_of(row, cluster).units[0].workers == row.workers
        more = Recommendation(
            row.what, row.memory, row.workers + 1, row.workers_per_card, row.gpus, row.cpus, row.concurrent_workers
        )
        with pytest.raises(dt.InfeasibleError):
            plan_of(more, cluster)


def test_no_card_is_overcommitted() -> None:
    rows = {row.memory: row for row in recommend(dt.Cluster.of(GPU_CLUSTER)) if row.memory}
    assert rows["1500MB"].workers_per_card == (13, 13)
    assert rows["8GB"].workers_per_card == (2, 2), "two cards of 20 GB are not one of 40"
    assert all(max(row.workers_per_card) * row.gpus <= 1 for row in rows.values())


def test_a_machine_without_gpus_has_only_the_row_for_cpu_operators() -> None:
    (row,) = recommend(dt.Cluster.of("1x(8cpu, 16GB)"))
    assert (row.what, row.workers, row.gpus, len(row.concurrent_workers)) == (
        "CPU operator",
        8,
        0,
        CONCURRENT_OPERATORS,
    )


def test_a_model_that_fits_on_no_card_has_no_row() -> None:
    sizes = [row.memory for row in recommend(dt.Cluster.of("1x(8cpu, 16GB, 1xgpu:3GB)"))]
    assert "2GB" in sizes
    assert "4GB" not in sizes
