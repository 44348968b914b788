"""A queue in memory with a clock of the test, and a worker without threads."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import dovetail as dt
from dovetail.jobs.application import Application
from dovetail.jobs.job import Outcome
from dovetail.jobs.payload_codec import decode_call, encode_result
from dovetail.jobs.schedule import fire_schedule
from dovetail.jobs.store import Claim, Completion, Exchange, WorkerInfo
from dovetail.jobs.stores.memory_store import MemoryStore
from jobs.store_contract import GPU_NODE, free_of
from jobs.test_memory_store import ManualClock

if TYPE_CHECKING:
    from dovetail.jobs.store import ClaimedJob

FUNCTIONS = Application.load(["jobs.queue_functions"])


@dataclass
class QueueScene:
    """A queue, its clock, and the name of its worker."""

    queue: dt.Queue
    clock: ManualClock

    def register(self, worker: str = "w1", *queues: str, **details: object) -> None:
        self.queue.store.register_worker(WorkerInfo(worker, queues or ("default", "gpu"), 4, details))

    def claim(
        self, worker: str = "w1", slots: int = 1, completions: list[Completion] | None = None
    ) -> list[ClaimedJob]:
        """One exchange: complete, fire schedules that are due, and claim."""
        store = self.queue.store
        request = Exchange(worker, completions or (), claim=Claim(slots, free_of(GPU_NODE), ("default", "gpu")))
        reply = store.exchange(request)
        for schedule in reply.due_schedules:
            fire_schedule(store, schedule, reply.now_ms)
        return list(reply.claimed)

    def run(self, worker: str = "w1", jobs: int = 1_000_000) -> int:
        """Run jobs one after another until none is ready, and return how many were run."""
        done = 0
        completions: list[Completion] = []
        while True:
            claimed = self.claim(worker, 1 if done < jobs else 0, completions)
            if not claimed:
                return done
            completions = [self._executed(claimed[0])]
            done += 1

    def _executed(self, job: ClaimedJob) -> Completion:
        codec = self.queue.codec.of_job(job.spec.id)
        try:
            function = FUNCTIONS.find(job.spec.function)
            args, kwargs = decode_call(job.spec.payload, job.spec.encoding, codec)
            result, encoding = encode_result(function(*args, **kwargs), codec)
        except Exception as error:  # as a worker does
            text = f"{type(error).__name__}: {error}"
            final = isinstance(error, dt.DovetailError)
            return Completion(
                job.spec.id, job.lease.token, Outcome.ERROR, error=text, traceback=traceback.format_exc(), final=final
            )
        return Completion(job.spec.id, job.lease.token, Outcome.SUCCEEDED, result, encoding)


def make_scene(**options: object) -> QueueScene:
    clock = ManualClock()
    return QueueScene(dt.Queue(MemoryStore(clock), **options), clock)  # type: ignore[arg-type]
