"""taskiq: one process, a Redis stream, which has acknowledgements."""

import asyncio
import os

import redis
from taskiq_redis import RedisStreamBroker  # type: ignore[import-not-found]

from job_worker import JobQueue, send_stamp

PORT = int(os.environ["PEER_REDIS_PORT"])
broker = RedisStreamBroker(f"redis://127.0.0.1:{PORT}", consumer_id="0")  # also what was sent before
client = redis.Redis(port=PORT)
loop = asyncio.new_event_loop()


@broker.task  # type: ignore[untyped-decorator]
async def noop() -> None:
    pass


@broker.task  # type: ignore[untyped-decorator]
async def stamp(sent: float) -> None:
    send_stamp(sent)


def enqueue(jobs: int) -> None:
    async def send() -> None:
        for _ in range(jobs):
            await noop.kiq()

    loop.run_until_complete(send())


def send_one(sent: float) -> None:
    loop.run_until_complete(stamp.kiq(sent))


def left() -> int:
    """Not delivered yet, and delivered but not acknowledged."""
    [group] = client.xinfo_groups("taskiq")
    return int((group["lag"] or 0) + group["pending"])


COMMAND = ("taskiq", "worker", "jobs_taskiq:broker", "--workers", "1", "--log-level", "WARNING")
QUEUE = JobQueue(COMMAND, enqueue, send_one, left)
