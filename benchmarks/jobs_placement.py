"""Share of a GPU cluster that jobs of a queue allocate, on the trace of `placement.py`: a worker per node, a job a pod.

    python benchmarks/jobs_placement.py --seeds 1 --json result.json

Jobs never end, as the pods of the trace. The memory store decides, in virtual time. When a job is submitted, the worker
that asks first is a random one on which it fits; if the store leaves the job to another one, that is woken and asks.
`us_per_job`: CPU of the store for the submission and all claims of a job.
"""

from __future__ import annotations

import statistics
import time
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import openb
import placement
import report
from dovetail.jobs.admission import Admission
from dovetail.jobs.job import JobSpec
from dovetail.jobs.store import Claim, Exchange, WorkerInfo
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.resources.free_resources import NodeKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import dovetail as dt
    from dovetail.resources.free_resources import FreeResources

T = TypeVar("T")
START_MS = 1_700_000_000_000
LEASE_MS = 10**12
"""So that leases and offers need no renewals."""
SLOTS = 1_000
DELAY_MS = 50


class Clock:
    def __init__(self) -> None:
        self.now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


class Fleet:
    """A worker per node. `store_ns`: CPU time of the store."""

    def __init__(self, nodes: tuple[dt.Node, ...], seed: int) -> None:
        self.clock, self.store_ns, self.claims = Clock(), 0, 0
        self.store = MemoryStore(self.clock)
        self._random = Random(f"asks {seed}")
        self._admission = Admission()
        kinds: dict[object, NodeKind] = {}
        self.free: dict[str, FreeResources] = {}
        for number, node in enumerate(nodes):  # named in the order of the tie-break
            kind = kinds.setdefault((node.cpu_milli, node.memory_bytes, node.gpus), NodeKind(node))
            self.free[f"w{number:04}"] = kind.untouched()
        self._names = list(self.free)
        for name in self._names:
            self.store.register_worker(WorkerInfo(name))
            self._exchange(name)
        self.store_ns = self.claims = 0

    def submit(self, number: int, shape: dt.Shape) -> bool:
        """Whether a worker has started it."""
        self.clock.now_ms += 1_000
        job_id = f"j{number:06}"
        self._timed(lambda: self.store.submit([JobSpec(job_id, "app:pod", shape=shape)]))
        self._woken()
        asking = self._first(shape)
        if asking is None:
            self.store.cancel([job_id])
            return False
        while not self._exchange(asking):
            [asking] = self._woken()
        return True

    def _first(self, shape: dt.Shape) -> str | None:
        """A random worker on which it fits."""
        for name in self._random.sample(self._names, len(self._names)):
            if self._admission.take(shape, self.free[name]) is not None:
                return name
        return None

    def _woken(self) -> list[str]:
        return [name for name in self._names if self.store.wait(name, 0.0)]

    def _exchange(self, worker: str) -> bool:
        """Whether it has started a job."""
        claim = Claim(SLOTS, self.free[worker], placement_delay_ms=DELAY_MS)
        reply = self._timed(lambda: self.store.exchange(Exchange(worker, claim=claim, lease_ms=LEASE_MS)))
        self.claims += 1
        for job in reply.claimed:
            left = self._admission.take(job.shape, self.free[worker])
            assert left is not None, f"{worker} is over-committed"
            self.free[worker] = left
        return bool(reply.claimed)

    def _timed(self, act: Callable[[], T]) -> T:
        began_ns = time.thread_time_ns()
        try:
            return act()
        finally:
            self.store_ns += time.thread_time_ns() - began_ns


def replay(data: Path, trace: list[dt.Shape], seed: int, most: int | None) -> dict[str, float]:
    """One pass over the arrivals; the share of all GPUs that is allocated, by the share that was asked for."""
    cluster = openb.cluster(data, seed)
    capacity = 1000 * sum(len(node.gpus) for node in cluster.nodes)
    fleet = Fleet(cluster.nodes, seed)
    bins: dict[int, list[float]] = {}
    asked = used = 0
    arrivals = openb.arrivals(trace, capacity, seed)[:most]
    for number, shape in enumerate(arrivals):
        milli = openb.asked_milli(shape)
        asked += milli
        if fleet.submit(number, shape):
            used += milli
        bins.setdefault(round(asked / capacity * 100), []).append(used / capacity * 100)
    found = {f"alloc_{mark}": statistics.fmean(bins[mark]) for mark in placement.MARKS if mark in bins}
    return found | {"us_per_job": fleet.store_ns / 1000 / len(arrivals), "claims_per_job": fleet.claims / len(arrivals)}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--trace", default="default", choices=sorted(placement.PUBLISHED))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=None, help="only so many arrivals")
    options = parser.parse_args()
    trace = openb.pods(options.data, options.trace)
    results: dict[str, Any] = {}
    for name, runs in (
        ("jobs", [replay(options.data, trace, seed, options.jobs) for seed in range(options.seeds)]),
        ("fgd", [placement.replay(options.data, trace, "fgd", seed) for seed in range(options.seeds)]),
    ):
        results[name] = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
    marks = [f"alloc_{mark}" for mark in (100, 130)]
    columns = [*marks, "us_per_job", "claims_per_job"]
    report.table(["", *columns], [[name, *(of.get(key, "-") for key in columns)] for name, of in results.items()])
    report.write(options.json, {"trace": options.trace, "seeds": options.seeds, "results": results})


if __name__ == "__main__":
    main()
