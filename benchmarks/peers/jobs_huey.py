"""huey: 8 threads, without results. It has no acknowledgements."""

import os

from huey import RedisHuey  # type: ignore[import-not-found]

from job_worker import JobQueue, send_stamp

huey = RedisHuey("jobs", port=int(os.environ["PEER_REDIS_PORT"]), results=False)


@huey.task()  # type: ignore[untyped-decorator]
def noop() -> None:
    pass


@huey.task()  # type: ignore[untyped-decorator]
def stamp(sent: float) -> None:
    send_stamp(sent)


def enqueue(jobs: int) -> None:
    for _ in range(jobs):
        noop()


def left() -> int:
    return int(huey.pending_count())


QUEUE = JobQueue(("huey_consumer", "jobs_huey.huey", "-k", "thread", "-w", "8", "-q"), enqueue, stamp, left)
