"""dramatiq: one process with its default of 8 threads."""

import os

import dramatiq  # type: ignore[import-not-found]
import redis
from dramatiq.brokers.redis import RedisBroker  # type: ignore[import-not-found]

from job_worker import JobQueue, send_stamp

PORT = int(os.environ["PEER_REDIS_PORT"])
dramatiq.set_broker(RedisBroker(port=PORT))
client = redis.Redis(port=PORT)


@dramatiq.actor  # type: ignore[untyped-decorator]
def noop() -> None:
    pass


@dramatiq.actor  # type: ignore[untyped-decorator]
def stamp(sent: float) -> None:
    send_stamp(sent)


def enqueue(jobs: int) -> None:
    for _ in range(jobs):
        noop.send()


def left() -> int:
    """In the queue, and delivered but not acknowledged."""
    waiting = client.llen("dramatiq:default")
    return int(waiting + sum(client.scard(key) for key in client.keys("dramatiq:__acks__.*.default")))


QUEUE = JobQueue(("dramatiq", "jobs_dramatiq", "--processes", "1"), enqueue, stamp.send, left)
