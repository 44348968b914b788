"""A worker process of the Redis tests: completes every job that it claims, until all jobs have succeeded."""

from __future__ import annotations

import sys

from dovetail.jobs.job import JobState, Outcome
from dovetail.jobs.store import Claim, Completion, Exchange, StoreUnavailableError, WorkerInfo
from dovetail.jobs.stores.redis_store import RedisStore
from jobs.store_contract import CPU_NODE, free_of
from waiting import until


def run(url: str, prefix: str, worker: str, lease_ms: str) -> None:
    store = RedisStore(url, prefix=prefix)
    completions: list[Completion] = []

    def step() -> bool:
        """One exchange, repeated as it was after an error; True: there is nothing left to do."""
        nonlocal completions
        try:
            reply = store.exchange(Exchange(worker, completions, (), Claim(3, free_of(CPU_NODE)), int(lease_ms)))
            if not reply.known:
                store.register_worker(WorkerInfo(worker))
            completions = [
                Completion(job.spec.id, job.lease.token, Outcome.SUCCEEDED, result=worker.encode())
                for job in reply.claimed
            ]
            if not completions:
                counts = store.stats()[0].counts
                return set(counts) == {JobState.SUCCEEDED}
        except StoreUnavailableError:
            pass
        return False

    until(step, "all jobs have succeeded")
    store.close()


if __name__ == "__main__":
    run(*sys.argv[1:])
