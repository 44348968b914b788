"""Job functions with batches for tests. They tell the test how they were called by lines of a file, one per call."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from dovetail.jobs.batch import Batch
from dovetail.jobs.job_function import job
from dovetail.jobs.workers.current_job import current_job
from dovetail.resources.resources import Resources

APP = "jobs.batch_app"


def note(path: str, *words: object) -> None:
    with Path(path).open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


@job(batch=Batch(size=4, wait="10m", key="calls"), isolation="thread")
def double(calls: str, number: list[int]) -> list[Any]:
    """Sizes of calls go to `calls`. Negative numbers make the call raise; 0 is a failure of its own job."""
    note(calls, len(number))
    if any(one < 0 for one in number):
        raise ValueError(f"negative: {min(number)}")
    return [2 * one or ZeroDivisionError("nothing to double") for one in number]


@job(batch=Batch(size=4, wait="20ms", key="calls"), isolation="async")
async def double_async(calls: str, number: list[int]) -> list[int]:
    note(calls, len(number))
    await asyncio.sleep(0)
    if any(one < 0 for one in number):
        raise ValueError("negative")
    return [2 * one for one in number]


@job(batch=Batch(size=100, wait="10m", bytes="1KB"), isolation="thread")
def lengths(text: list[str]) -> list[dict[str, int]]:
    return [{"chars": len(one), "jobs": len(text)} for one in text]


@job(batch=Batch(size=2, wait="1ms"), isolation="thread")
def too_few(number: list[int]) -> list[int]:
    return number[1:]


@job(batch=Batch(size=4, wait="10m"), isolation="thread")
def hold(path: list[str], began: list[str]) -> list[str]:
    """Until the test writes the file, or all of its jobs are cancelled."""
    for one in began:
        Path(one).write_text(current_job().id)
    while not Path(path[0]).exists() and not current_job().cancelled:
        time.sleep(0.005)
    if current_job().cancelled:
        raise InterruptedError("cancelled")
    return [f"{len(path)} jobs"] * len(path)


@job(batch=Batch(size=4, wait="20ms", key="folder"), isolation="warm_process", resources=Resources(cpus=1))
def in_process(folder: str, name: list[str]) -> list[dict[str, Any]]:
    """Jobs named "kill" end their process, those named "sleep" never end. Each call writes a file."""
    Path(folder, f"call-{time.monotonic_ns()}").write_text(" ".join(name))
    current_job().progress(0.5, "half")
    print(f"call for {len(name)} jobs")  # noqa: T201 - the output of the job
    if "kill" in name:
        os.kill(os.getpid(), signal.SIGKILL)
    if "sleep" in name:
        time.sleep(600)
    return [{"pid": os.getpid(), "jobs": len(name)} for _ in name]


@job(batch=Batch(size=32, wait="10ms"), isolation="thread")
def with_fixed_cost(number: list[int]) -> list[float]:
    """How long the call took, in milliseconds."""
    began = time.perf_counter()
    time.sleep(0.01)
    return [1000 * (time.perf_counter() - began)] * len(number)


@job(isolation="thread")
def alone_with_fixed_cost(number: int) -> int:
    time.sleep(0.01)
    return number
