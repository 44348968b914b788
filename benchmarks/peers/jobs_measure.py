"""Runs in a peer's environment: the figures of `job_queue_costs.py` for its worker.

    python jobs_measure.py PEER PORT JOBS REPEAT PICKUPS

`jobs_PEER.py` declares the jobs, and the queue that is measured as `QUEUE`; its worker imports it too.
"""

import importlib
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import redis  # noqa: E402

from job_worker import Stamps, WorkerProcess, cost_per_job, percentile, pickup_ms, wait_until_ready  # noqa: E402

DRAIN_LIMIT_S = 60.0
WARM_UP = 5


def main() -> None:
    name, port, jobs, repeat, pickups = sys.argv[1:]
    os.environ["PEER_REDIS_PORT"] = port
    os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{HERE.parent}"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    client = redis.Redis(port=int(port))
    queue = importlib.import_module(f"jobs_{name}").QUEUE

    def server_cpu_s() -> float:
        used = client.info("cpu")
        return float(used["used_cpu_sys"]) + float(used["used_cpu_user"])

    with Stamps() as stamps, WorkerProcess(queue.command, stamps, str(HERE)) as worker:
        wait_until_ready(queue, worker, stamps)
        sizes = max(1, int(jobs) // 10), int(jobs)
        cost = cost_per_job(queue, worker, sizes, int(repeat), DRAIN_LIMIT_S, server_cpu_s)
        pickup_ms([queue.stamp], stamps, WARM_UP)
        [times] = pickup_ms([queue.stamp], stamps, int(pickups))
    found = {
        "worker_us_per_job": cost["cpu_us"],
        "redis_us_per_job": cost["server_us"],
        "jobs_per_s": cost["jobs_per_s"],
        "p50_ms": percentile(times, 50),
        "p99_ms": percentile(times, 99),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
