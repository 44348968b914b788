"""Redis CPU of a claim: queued jobs of many shapes, and many workers with CPUs and GPUs.

    python benchmarks/jobs_claims.py --jobs 1000,10000,100000 --json result.json

Each claim is an exchange of one worker that takes one job. Half of the workers have GPUs, so they compare themselves
with the offers of the others. `aged`: all jobs have waited for a minute, so that claims look for reservations, too.
"""

from __future__ import annotations

from random import Random
from statistics import median
from typing import TYPE_CHECKING

import report
from dovetail.jobs.admission import Admission
from dovetail.jobs.job import JobSpec
from dovetail.jobs.store import Claim, Exchange, WorkerInfo
from dovetail.jobs.stores.redis_store import RedisStore
from dovetail.resources.cluster import Gpu, Node
from dovetail.resources.free_resources import NodeKind
from dovetail.resources.resources import Resources
from redis_process import RedisProcess

if TYPE_CHECKING:
    from dovetail.resources.shape import Shape

GB = 10**9
PARTS, CLAIMS = 5, 100
"""The cost is the median of the parts."""
LEASE_MS = 3_600_000
START_MS = 1_700_000_000_000
AGED_MS = 60_000
BATCH = 500
CPU_NODE = Node("cpu", 64_000, 256 * GB)
GPU_NODE = Node("gpu", 96_000, 512 * GB, (Gpu("a100", 80 * GB, 5, 0),) * 8)


class Clock:
    def __init__(self) -> None:
        self.now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


def random_shapes(random: Random, count: int) -> list[Shape]:
    """Different shapes, half of them with GPUs."""
    found: dict[Shape, None] = {}
    while len(found) < count:
        gpus = random.choice([0, 0, 0, 0, 0.1, 0.25, 0.5, 1, 2, 4])
        cpus, memory = random.randint(1, 16), f"{random.randint(1, 40)}GB"
        found[Resources(cpus=cpus, memory=memory, gpus=gpus).shape()] = None
    return list(found)


def claim_us(server: RedisProcess, jobs: int, shapes: int, workers: int, *, aged: bool, seed: int = 0) -> float:
    """Microseconds of Redis CPU per claim."""
    random, clock, admission = Random(seed), Clock(), Admission()
    store = RedisStore(server.url, prefix=f"claims-{jobs}-{aged}", clock_ms=clock)
    wanted = random_shapes(random, shapes)
    for first in range(0, jobs, BATCH):
        batch = range(first, min(jobs, first + BATCH))
        store.submit([JobSpec(f"j{number:08}", "app:work", b"{}", shape=random.choice(wanted)) for number in batch])
    clock.now_ms += AGED_MS if aged else 0
    requests = []
    for number in range(workers):
        worker, free = f"w{number}", NodeKind(GPU_NODE if number % 2 else CPU_NODE).untouched()
        for _ in range(random.randint(10, 200)):
            free = admission.take(random.choice(wanted), free) or free
        store.register_worker(WorkerInfo(worker))
        store.exchange(Exchange(worker, claim=Claim(0, free, ends_in_ms=60_000), lease_ms=LEASE_MS))
        requests.append(Exchange(worker, claim=Claim(1, free, ("default",), 50, ends_in_ms=60_000), lease_ms=LEASE_MS))
    for request in requests:
        store.exchange(request)
    costs = []
    for part in range(PARTS):
        before_s = server.cpu_s()
        for number in range(CLAIMS):
            clock.now_ms += 1
            store.exchange(requests[(part * CLAIMS + number) * 7 % workers])
        costs.append((server.cpu_s() - before_s) / CLAIMS * 1e6)
    store.close()
    return median(costs)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--jobs", default="1000,10000,100000", help="queued jobs, separated by commas")
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--workers", type=int, default=100)
    options = parser.parse_args()
    result: dict[str, float] = {}
    with RedisProcess() as server:
        for jobs in map(int, options.jobs.split(",")):
            for aged in (False, True):
                cost = claim_us(server, jobs, options.shapes, options.workers, aged=aged)
                result[f"claim_us_{jobs}{'_aged' if aged else ''}"] = cost
    report.table(["queued jobs", "Redis us per claim"], [[name, cost] for name, cost in result.items()])
    report.write(options.json, result)


if __name__ == "__main__":
    main()
