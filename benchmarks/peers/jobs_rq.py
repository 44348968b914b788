"""rq: its SimpleWorker, which runs jobs in its own process; the default one forks for each job."""

import os

import redis
from rq import Queue  # type: ignore[import-not-found]

from job_worker import JobQueue, send_stamp

PORT = int(os.environ["PEER_REDIS_PORT"])
client = redis.Redis(port=PORT)
queue = Queue(connection=client)


def noop() -> None:
    pass


def stamp(sent: float) -> None:
    send_stamp(sent)


def enqueue(jobs: int) -> None:
    for _ in range(jobs):
        queue.enqueue("jobs_rq.noop", result_ttl=0)


def left() -> int:
    return len(queue) + int(queue.started_job_registry.get_job_count())


COMMAND = ("rq", "worker", "--url", f"redis://127.0.0.1:{PORT}", "-w", "rq.SimpleWorker", "--quiet")
QUEUE = JobQueue(COMMAND, enqueue, lambda sent: queue.enqueue("jobs_rq.stamp", sent, result_ttl=0), left)
