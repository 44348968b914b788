"""arq: 64 jobs at once, results not kept; it looks every 10 ms instead of every 500 ms."""

import asyncio
import os
from typing import Any, ClassVar

from arq import create_pool  # type: ignore[import-not-found]
from arq.connections import RedisSettings  # type: ignore[import-not-found]

from job_worker import JobQueue, send_stamp

SETTINGS = RedisSettings(port=int(os.environ["PEER_REDIS_PORT"]))


async def noop(_: dict[str, Any]) -> None:
    pass


async def stamp(_: dict[str, Any], sent: float) -> None:
    send_stamp(sent)


class WorkerSettings:
    functions: ClassVar = [noop, stamp]
    redis_settings = SETTINGS
    max_jobs = 64
    poll_delay = 0.01
    keep_result = 0


loop = asyncio.new_event_loop()
pool: Any = None


def run(function: str, count: int, *arguments: Any) -> None:
    async def send() -> None:
        global pool
        pool = pool or await create_pool(SETTINGS)
        for _ in range(count):
            await pool.enqueue_job(function, *arguments)

    loop.run_until_complete(send())


def left() -> int:
    assert pool is not None
    return int(loop.run_until_complete(pool.zcard("arq:queue")))


QUEUE = JobQueue(
    ("arq", "jobs_arq.WorkerSettings"),
    lambda jobs: run("noop", jobs),
    lambda sent: run("stamp", 1, sent),
    left,
)
