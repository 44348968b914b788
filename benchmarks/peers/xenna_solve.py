"""Runs in the peer's environment: what one cold solve of cosmos-xenna's scheduler costs on the reference problem."""

import json
import sys
import time
import uuid

from cosmos_xenna.pipelines.private import autoscaling_algorithms, data_structures, resources

STAGES = ((4, 0), (1, 0.25), (2, 0.5), (4, 1), (4, 2), (2, 0))


def solve(nodes: int) -> dict[str, float]:
    cluster = resources.ClusterResources(
        nodes={
            f"node-{i}": resources.NodeResources(
                used_cpus=0,
                total_cpus=128,
                gpus=[resources.GpuResources(index=j, uuid_=uuid.uuid4(), used_fraction=0.0) for j in range(8)],
                name=f"node-{i}",
            )
            for i in range(nodes)
        }
    )
    stages = [
        data_structures.ProblemStage(
            f"s{i}", 1, resources.Resources(cpus=cpus, gpus=gpus).to_worker_shape(cluster), None, None
        )
        for i, (cpus, gpus) in enumerate(STAGES)
    ]
    problem = data_structures.Problem(cluster, stages)
    state = data_structures.ProblemState(
        [data_structures.ProblemStageState(f"s{i}", [], 2, False) for i in range(len(STAGES))]
    )
    estimates = autoscaling_algorithms.Estimates([autoscaling_algorithms.Estimate(1.0, 1.0) for _ in STAGES])
    factory = autoscaling_algorithms.WorkerIdFactory()
    started = time.process_time()
    solution = autoscaling_algorithms.run_fragmentation_autoscaler(problem, state, estimates, 1.5, factory)
    spent = time.process_time() - started
    return {"nodes": nodes, "cpu_s": spent, "rate": float(min(len(stage.new_workers) for stage in solution.stages))}


print(json.dumps([solve(int(nodes)) for nodes in sys.argv[1].split(",")]))
