"""CPU, rates and latencies of the job queue, and of other job queues for Python.

    python benchmarks/jobs.py --store redis --peers --json result.json
    python benchmarks/jobs.py --store sqlite --json result.json

One worker process runs no-op jobs. It takes none until all are submitted, and then drains the queue. Its cost per job
is user plus system CPU, with all that a job needs until it is acknowledged, at the margin: the median of the
differences between large and small numbers of jobs in one warm worker. Pickup latency is the time from a submission to
the start of the function on an idle queue; on Redis, a process that waits with a bare BRPOP takes turns with it. The
cost of a job with process isolation is printed with that of a bare fork, whose child exits at once, in the same run.

The benchmark starts its own redis-server on a free port of this machine. `--peers` measures dramatiq, arq, taskiq, saq,
rq, celery and huey with it in the same way, each in an environment of its own, started as its documentation says.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dovetail as dt
import report
from dovetail.jobs.job import FINISHED, JobState
from job_worker import JobQueue, Stamps, WorkerProcess, cost_per_job, percentile, pickup_ms, wait_until_ready
from peers.environment import run_in
from redis_process import RedisProcess
from resource_usage import cpu_s

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
WORKER = HERE / "jobs_worker.py"
BRPOP = HERE / "jobs_brpop.py"
BARE_KEY = "bare"
APPLICATION = "jobs_functions"
SLOTS, FEW_SLOTS, PROCESS_SLOTS = 64, 2, 4
FAILED = (JobState.FAILED, JobState.DEAD)
LEASE_S = 2.0
DRAIN_LIMIT_S = 120.0
CANCELLED_AT_ONCE = 1_000
FORKS = 100
WARM_UP = 5
"""Pickups that are not counted."""
PEERS = {
    "dramatiq": (["dramatiq[redis]==2.2.1"], 5_000),
    "huey": (["huey==3.5.4", "redis==8.1.0"], 5_000),
    "taskiq": (["taskiq==0.13.0", "taskiq-redis==1.2.4"], 4_000),
    "arq": (["arq==0.28.0"], 2_000),
    "saq": (["saq[redis]==0.26.4", "typing_extensions"], 2_000),
    "celery": (["celery[redis]==5.7.0"], 2_000),
    "rq": (["rq==2.12.0"], 1_000),
}
"""Packages, and a large number of jobs: a few seconds."""
PEER_LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class Sizes:
    jobs: int
    process_jobs: int
    repeat: int
    pickups: int
    kills: int
    idle_s: float

    @property
    def thread_jobs(self) -> tuple[int, int]:
        return max(1, self.jobs // 10), self.jobs

    @property
    def isolated_jobs(self) -> tuple[int, int]:
        return max(1, self.process_jobs // 5), self.process_jobs


class Ours:
    """The queue on one store, and its workers."""

    def __init__(self, url: str, stamps: Stamps, folder: Path, server_cpu_s: Callable[[], float]) -> None:
        self.url = url
        self.queue = dt.Queue(url, if_no_worker="ignore")
        self.stamps = stamps
        self._folder = folder
        self._server_cpu_s = server_cpu_s

    def enqueue(self, jobs: int) -> None:
        self.queue.submit_many(f"{APPLICATION}:noop", [()] * jobs)

    def stamp(self, sent: float) -> None:
        self.queue.submit(f"{APPLICATION}:stamp", sent)

    def left(self) -> int:
        counts = [item for one in self.queue.store.stats() for item in one.counts.items()]
        failed = sum(count for state, count in counts if state in FAILED)
        assert not failed, f"{failed} jobs failed"
        return sum(count for state, count in counts if state not in FINISHED)

    def job_queue(self, **options: Any) -> JobQueue:
        given = {"log_dir": str(self._folder / "logs"), **options}
        command = (sys.executable, str(WORKER), self.url, json.dumps(given))
        # a worker on SQLite must not be suspended: it may hold the lock of the file
        return JobQueue(command, self.enqueue, self.stamp, self.left, self.queue.pause, self.queue.resume)

    def cost(self, sizes: tuple[int, int], repeat: int, **options: Any) -> dict[str, float]:
        queue = self.job_queue(**options)
        with WorkerProcess(queue.command, self.stamps) as worker:
            wait_until_ready(queue, worker, self.stamps)
            return cost_per_job(queue, worker, sizes, repeat, DRAIN_LIMIT_S, self._server_cpu_s)


def measure(ours: Ours, sizes: Sizes, bare: Callable[[float], None] | None) -> dict[str, float]:
    many = ours.cost(sizes.thread_jobs, sizes.repeat, isolation="thread", slots=SLOTS)
    few = ours.cost(sizes.thread_jobs, sizes.repeat, isolation="thread", slots=FEW_SLOTS)
    isolated = ours.cost(sizes.isolated_jobs, sizes.repeat, isolation="process", slots=PROCESS_SLOTS)
    result = {
        "fork_ms": bare_fork_ms(),
        "worker_us_per_job": many["cpu_us"],
        "worker_us_per_job_2_slots": few["cpu_us"],
        "process_ms_per_job": isolated["cpu_us"] / 1e3,
        "jobs_per_s": many["jobs_per_s"],
        "jobs_per_s_2_slots": few["jobs_per_s"],
        "process_jobs_per_s": isolated["jobs_per_s"],
        "submits_per_s": submits_per_s(ours, sizes.jobs, sizes.repeat),
    }
    if many["server_us"]:
        result["redis_us_per_job"] = many["server_us"]
    return result | idle_and_pickup(ours, sizes, bare) | {"rerun_after_kill_s": rerun_after_kill_s(ours, sizes.kills)}


def bare_fork_ms() -> float:
    """CPU of a fork of this process, of its child, which exits at once, and of the wait for it."""
    before_s = cpu_s()
    for _ in range(FORKS):
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
    return 1e3 * (cpu_s() - before_s) / FORKS


def submits_per_s(ours: Ours, jobs: int, repeat: int) -> float:
    """Median rate of submission in batches, while no worker runs."""
    rates = []
    for _ in range(repeat):
        began = time.perf_counter()
        submitted = ours.queue.submit_many(f"{APPLICATION}:noop", [()] * jobs)
        rates.append(jobs / (time.perf_counter() - began))
        for first in range(0, jobs, CANCELLED_AT_ONCE):
            ours.queue.cancel(submitted[first : first + CANCELLED_AT_ONCE])
    return statistics.median(rates)


def idle_and_pickup(ours: Ours, sizes: Sizes, bare: Callable[[float], None] | None) -> dict[str, float]:
    queue = ours.job_queue(isolation="thread", slots=SLOTS)
    kinds = {"": ours.stamp} if bare is None else {"": ours.stamp, "brpop_": bare}
    with WorkerProcess(queue.command, ours.stamps) as worker:
        wait_until_ready(queue, worker, ours.stamps)
        before_s = worker.cpu_s()
        time.sleep(sizes.idle_s)
        result = {"idle_cpu_percent": 100 * (worker.cpu_s() - before_s) / sizes.idle_s}
        pickup_ms(list(kinds.values()), ours.stamps, WARM_UP)
        for name, times in zip(kinds, pickup_ms(list(kinds.values()), ours.stamps, sizes.pickups), strict=True):
            result |= {f"{name}p50_ms": percentile(times, 50), f"{name}p99_ms": percentile(times, 99)}
    if bare is not None:
        result["p50_ratio"] = result["p50_ms"] / result["brpop_p50_ms"]
        result["p99_ratio"] = result["p99_ms"] / result["brpop_p99_ms"]
    return result


def rerun_after_kill_s(ours: Ours, kills: int) -> float:
    """Longest time from SIGKILL of a worker, with an idle one beside it, to the second start of its job."""
    times = []
    for _ in range(kills):
        first = ours.job_queue(isolation="thread", slots=1, lease=LEASE_S)
        with WorkerProcess(first.command, ours.stamps) as killed:
            wait_until_ready(first, killed, ours.stamps)
            job = ours.queue.submit(f"{APPLICATION}:hold")
            ours.stamps.receive()
            with WorkerProcess(first.command, ours.stamps) as other:
                wait_until_ready(first, other, ours.stamps)
                began = time.monotonic()
                killed.kill()
                ours.stamps.receive()
                times.append(time.monotonic() - began)
            ours.queue.cancel(job)
    return max(times)


# --------------------------------------------------------------------------------------------------------------- peers


def measure_peers(names: list[str], jobs: int, repeat: int, pickups: int) -> dict[str, Any]:
    """Figures of each peer, on a server of its own, and of BRPOP beside it."""
    found: dict[str, Any] = {}
    for name in names:
        packages, large = PEERS[name]
        with RedisProcess() as server:
            arguments = [name, str(server.port), str(min(jobs, large)), str(repeat), str(pickups)]
            try:
                found[name] = run_in(
                    f"jobs-{name}", [*packages, "psutil"], "jobs_measure.py", arguments, limit_s=PEER_LIMIT_S
                )
            except (subprocess.SubprocessError, json.JSONDecodeError, IndexError) as error:
                reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
                print(f"{name} cannot be measured: {reason}")
    return found


def print_peers(result: dict[str, Any]) -> None:
    rows = [["Dovetail, 64 slots", *(result[key] for key in ("worker_us_per_job", "redis_us_per_job")), 1.0]]
    rows[0] += [result[key] for key in ("jobs_per_s", "p50_ms", "p99_ms")]
    for name, found in result["peers"].items():
        ratio = found["worker_us_per_job"] / result["worker_us_per_job"]
        keys = ("worker_us_per_job", "redis_us_per_job", "jobs_per_s", "p50_ms", "p99_ms")
        cpu_us, redis_us, *rest = (found[key] for key in keys)
        rows.append([name, cpu_us, redis_us, ratio, *rest])
    header = [
        "one worker on Redis",
        "CPU us per job",
        "Redis us per job",
        "peer / Dovetail",
        "jobs/s",
        "p50 ms",
        "p99 ms",
    ]
    report.table(header, rows)


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--store", default="redis", choices=["redis", "sqlite"])
    arguments.add_argument("--peers", action="store_true", help="also measure other job queues, on Redis")
    arguments.add_argument("--only-peers", default=",".join(PEERS), help="some of them, default %(default)s")
    arguments.add_argument("--jobs", type=int, default=20_000, help="jobs of a large run, default %(default)s")
    arguments.add_argument("--process-jobs", type=int, default=250, help="with process isolation, default %(default)s")
    arguments.add_argument("--repeat", type=int, default=3, help="runs of each size, default %(default)s")
    arguments.add_argument("--pickups", type=int, default=300, help="jobs on an idle queue, default %(default)s")
    arguments.add_argument("--kills", type=int, default=3, help="killed workers, default %(default)s")
    arguments.add_argument("--idle", type=float, default=10.0, help="seconds of an idle worker, default %(default)s")
    asked = arguments.parse_args()
    sizes = Sizes(asked.jobs, asked.process_jobs, asked.repeat, asked.pickups, asked.kills, asked.idle)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jobs-")))
        stamps = stack.enter_context(Stamps())
        if asked.store == "sqlite":
            ours = Ours(f"sqlite:///{folder}/jobs.db", stamps, folder, lambda: 0.0)
            result: dict[str, Any] = measure(ours, sizes, None)
        else:
            server = stack.enter_context(RedisProcess())
            ours = Ours(server.url, stamps, folder, server.cpu_s)
            stack.enter_context(WorkerProcess((sys.executable, str(BRPOP), str(server.port), BARE_KEY), stamps))
            result = measure(ours, sizes, lambda sent: server.client.lpush(BARE_KEY, sent))
        ours.queue.close()
    report.table(("figure", "value"), list(result.items()))
    if asked.peers:
        result["peers"] = measure_peers(asked.only_peers.split(","), asked.jobs, asked.repeat, asked.pickups)
        print_peers(result)
    report.write(asked.json, result)


if __name__ == "__main__":
    main()
