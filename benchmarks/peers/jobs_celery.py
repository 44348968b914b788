"""Celery: prefork with 2 processes, results ignored."""

import os

import redis
from celery import Celery  # type: ignore[import-not-found]

from job_worker import JobQueue, send_stamp

PORT = int(os.environ["PEER_REDIS_PORT"])
app = Celery("jobs_celery", broker=f"redis://127.0.0.1:{PORT}/0")
app.conf.task_ignore_result = True
client = redis.Redis(port=PORT)


@app.task  # type: ignore[untyped-decorator]
def noop() -> None:
    pass


@app.task  # type: ignore[untyped-decorator]
def stamp(sent: float) -> None:
    send_stamp(sent)


def enqueue(jobs: int) -> None:
    for _ in range(jobs):
        noop.delay()


def left() -> int:
    return int(client.llen("celery") + client.hlen("unacked"))


QUEUE = JobQueue(
    ("celery", "-A", "jobs_celery", "worker", "--concurrency", "2", "--loglevel", "ERROR"), enqueue, stamp.delay, left
)
