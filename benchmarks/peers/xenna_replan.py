"""Runs in the peer's environment: how cosmos-xenna's scheduler follows speeds that drift, one solve per step."""

import json
import sys
import uuid
from pathlib import Path
from typing import Any

from cosmos_xenna.pipelines.private import autoscaling_algorithms, data_structures, resources


def cluster_of(nodes: list[dict[str, Any]]) -> Any:
    return resources.ClusterResources(
        nodes={
            f"node-{i}": resources.NodeResources(
                used_cpus=0,
                total_cpus=node["cpus"],
                gpus=[
                    resources.GpuResources(index=j, uuid_=uuid.uuid4(), used_fraction=0.0) for j in range(node["gpus"])
                ],
                name=f"node-{i}",
            )
            for i, node in enumerate(nodes)
        }
    )


def follow(problem: dict[str, Any]) -> list[dict[str, Any]]:
    """Step 0 from empty, then one solve per step from the allocation before."""
    cluster = cluster_of(problem["nodes"])
    names = [stage["name"] for stage in problem["stages"]]
    shapes = [resources.Resources(cpus=s["cpus"], gpus=s["gpus"]).to_worker_shape(cluster) for s in problem["stages"]]
    stages = [
        data_structures.ProblemStage(name, 1, shape, None, None) for name, shape in zip(names, shapes, strict=True)
    ]
    asked = data_structures.Problem(cluster, stages)
    workers: list[dict[str, Any]] = [{} for _ in names]
    factory = autoscaling_algorithms.WorkerIdFactory()
    rows: list[dict[str, Any]] = []
    for number, step in enumerate(problem["steps"]):
        state = data_structures.ProblemState(
            [
                data_structures.ProblemStageState(name, list(mine.values()), 2, False)
                for name, mine in zip(names, workers, strict=True)
            ]
        )
        estimates = autoscaling_algorithms.Estimates(
            [autoscaling_algorithms.Estimate(rate, 1.0) for rate in step["rates"]]
        )
        try:
            solution = autoscaling_algorithms.run_fragmentation_autoscaler(asked, state, estimates, 1.5, factory)
        except RuntimeError:  # it finds no room for the first workers, although there is: not held against it
            return rows
        before = sum(map(len, workers))
        changes = 0
        for mine, stage in zip(workers, solution.stages, strict=True):
            for worker in stage.deleted_workers:
                del mine[worker.id]
            mine |= {worker.id: worker for worker in stage.new_workers}
            changes += len(stage.deleted_workers) + len(stage.new_workers)
        rate = min(len(mine) * each for mine, each in zip(workers, step["rates"], strict=True))
        ops = changes / max(before, sum(map(len, workers)))
        rows.append({"name": problem["name"], "step": number, "share": rate / step["bound"], "ops_per_worker": ops})
    return rows


lines = Path(sys.argv[1]).read_text().splitlines()
print(json.dumps([row for line in lines if line.strip() for row in follow(json.loads(line))]))
