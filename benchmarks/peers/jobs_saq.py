"""saq: 64 jobs at once."""

import asyncio
import os
from typing import Any

from saq import Queue  # type: ignore[import-not-found]

from job_worker import JobQueue, send_stamp


async def noop(_: dict[str, Any]) -> None:
    pass


async def stamp(_: dict[str, Any], *, sent: float) -> None:
    send_stamp(sent)


queue = Queue.from_url(f"redis://127.0.0.1:{os.environ['PEER_REDIS_PORT']}")
settings = {"queue": queue, "functions": [noop, stamp], "concurrency": 64}
loop = asyncio.new_event_loop()


def run(function: str, count: int, **arguments: Any) -> None:
    async def send() -> None:
        for _ in range(count):
            await queue.enqueue(function, **arguments)

    loop.run_until_complete(send())


def left() -> int:
    return int(loop.run_until_complete(queue.count("incomplete")))


QUEUE = JobQueue(
    ("saq", "jobs_saq.settings"),
    lambda jobs: run("noop", jobs),
    lambda sent: run("stamp", 1, sent=sent),
    left,
)
