"""Job functions for the tests of workers. They tell the test where they are by files."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dovetail.jobs.batch import Batch
from dovetail.jobs.job_function import job
from dovetail.jobs.workers.current_job import JobPreempted, current_job

APP = "jobs.worker_app"
LONG_S = 600.0
"""Of jobs that the test ends."""


@job
def noop() -> None:
    pass


@job
def add(one: int, other: int = 0) -> int:
    return one + other


@job
def fail(text: str) -> None:
    raise ValueError(text)


@job
def not_json() -> object:
    return {"model": [1, object()]}


@job
def who_am_i() -> dict[str, Any]:
    current = current_job()
    return {
        "id": current.id,
        "attempt": current.attempt,
        "token": current.token,
        "queue": current.queue,
        "worker": current.worker,
        "pid": os.getpid(),
        "session": os.getsid(0),
    }


@job
def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


@job
def wait_for_file(path: str, began: str = "") -> str:
    """Until the test writes the file."""
    if began:
        Path(began).write_text(str(os.getpid()))
    while not Path(path).exists():
        time.sleep(0.005)
    return Path(path).read_text()


@job
async def wait_for_file_async(path: str, began: str = "") -> str:
    if began:
        Path(began).write_text(str(os.getpid()))
    while not Path(path).exists():
        await asyncio.sleep(0.005)
    return Path(path).read_text()


@job
async def async_add(one: int, other: int = 0) -> int:
    await asyncio.sleep(0)
    return one + other


@job
async def ignore_cancellation(path: str, began: str) -> None:
    """A coroutine that cannot be interrupted."""
    Path(began).write_text("")
    while not Path(path).exists():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.005)


@job
def report(path: str, *steps: float) -> None:
    for step in steps:
        current_job().progress(step, f"step {step:g}")
    while not Path(path).exists():
        time.sleep(0.005)


@job
def until_cancelled(began: str, ended: str) -> str:
    assert not current_job().cancelled  # from here on the worker waits for the job to end by itself
    Path(began).write_text(str(os.getpid()))
    while not current_job().cancelled:
        time.sleep(0.005)
    Path(ended).write_text("saw it")
    return "cancelled"


@job
def count_with_checkpoint(checkpoint: str, began: str, target: int = 3) -> dict[str, int]:
    """Counts one step per preempted attempt and continues from its checkpoint."""
    found = Path(checkpoint)
    step = int(found.read_text()) if found.exists() else 0
    if step < target:
        wait_for_checkpoint_request(began)
        assert not current_job().cancelled
        found.write_text(str(step + 1))
        raise JobPreempted
    return {"steps": step, "attempt": current_job().attempt}


def wait_for_checkpoint_request(began: str) -> None:
    assert not current_job().checkpoint_requested  # from here on the worker waits for the job to end by itself
    Path(began).write_text(str(os.getpid()))
    while not current_job().checkpoint_requested:
        time.sleep(0.005)


@job
async def count_with_checkpoint_async(checkpoint: str, began: str) -> str:
    if Path(checkpoint).exists():
        return Path(checkpoint).read_text()
    assert not current_job().checkpoint_requested
    Path(began).write_text(str(os.getpid()))
    while not current_job().checkpoint_requested:
        await asyncio.sleep(0.005)
    Path(checkpoint).write_text("saved")
    raise JobPreempted


@job
def ignore_checkpoint_request(began: str) -> None:
    wait_for_checkpoint_request(began)
    time.sleep(LONG_S)


@job
def save_on_sigterm(began: str, saved: str) -> str:
    """Handles SIGTERM as training frameworks do, and never looks at `checkpoint_requested`."""
    if Path(saved).exists():
        return Path(saved).read_text()
    try:
        Path(began).write_text(str(os.getpid()))
        time.sleep(LONG_S)
    finally:
        Path(saved).write_text("saved")
    return ""


@job
def raise_preempted() -> None:
    raise JobPreempted


@job
def append_rank(path: str, text: str, seconds: float) -> None:
    """A line with the text, the fencing token and the rank, at the end of some work. It saves nothing when it is asked
    to make room."""
    current = current_job()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if current.checkpoint_requested:
            raise JobPreempted
        time.sleep(0.005)
    with open(path, "a") as file:  # noqa: PTH123
        file.write(f"{text} {current.token} {current.rank}\n")


@job
def gang_member(folder: str, failing_rank: int = -1) -> dict[str, str]:
    """Writes its variables and its pid, and waits for a file of the test. In the first attempt, one rank may fail when
    all have begun."""
    current = current_job()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = {name: os.environ[name] for name in names}
    assert (found["RANK"], found["WORLD_SIZE"]) == (str(current.rank), str(current.ranks))
    print(f"rank {current.rank} of {current.ranks}", flush=True)  # noqa: T201
    path = Path(folder, f"{current.rank}.{current.attempt}")
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(found | {"worker": current.worker, "pid": os.getpid()}))
    unfinished.rename(path)
    if current.attempt == 1 and current.rank == failing_rank:
        while not all(Path(folder, f"{rank}.1").exists() for rank in range(current.ranks)):
            time.sleep(0.005)
        raise ValueError(f"rank {current.rank}")
    while not Path(folder, "go").exists():
        time.sleep(0.005)
    return found


@job
def sum_over_ranks(number: float) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = torch.tensor([number + 1000 * current_job().rank])
    dist.all_reduce(found)
    dist.destroy_process_group()
    return float(found[0])


@job
def gang_with_checkpoints(folder: str) -> int:
    """Each rank saves its state when it is asked to."""
    current = current_job()
    state = Path(folder, f"state{current.rank}")
    if state.exists():
        return current.attempt
    wait_for_checkpoint_request(str(Path(folder, f"began{current.rank}")))
    state.write_text("saved")
    raise JobPreempted


@job
def sleep(began: str, seconds: float = LONG_S) -> None:
    Path(began).write_text(str(os.getpid()))
    time.sleep(seconds)


@job
def sleep_with_clean_up(began: str, cleaned: str) -> None:
    try:
        Path(began).write_text(str(os.getpid()))
        time.sleep(LONG_S)
    finally:
        Path(cleaned).write_text("cleaned up")


@job
def hold_the_gil(began: str) -> None:
    """One call in C that no signal handler of Python can interrupt."""
    Path(began).write_text(str(os.getpid()))
    sum(itertools.repeat(0))


@job
def start_a_tree(folder: str) -> None:
    """Processes in this group, in a session of their own, and one whose parent has ended. Each writes its pid."""
    endless = f"import os, time; open(os.path.join({folder!r}, str(os.getpid())), 'w').close(); time.sleep({LONG_S})"
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {endless}"
    subprocess.Popen([sys.executable, "-c", endless])
    subprocess.Popen([sys.executable, "-c", stubborn])
    subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True)"
    subprocess.run([sys.executable, "-c", orphan], check=True)
    Path(folder, str(os.getpid())).touch()
    time.sleep(LONG_S)


@job
def leave_a_process(folder: str) -> None:
    """Ends, while a process that it has started in another session does not."""
    code = f"import os, time; open(os.path.join({folder!r}, str(os.getpid())), 'w').close(); time.sleep({LONG_S})"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    while not any(Path(folder).iterdir()):
        time.sleep(0.005)


@job
def kill_itself(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)
    time.sleep(LONG_S)


@job
def leave(code: int) -> None:
    os._exit(code)


@job
def system_exit(code: int) -> None:
    raise SystemExit(code)


@job
def print_lines(count: int, text: str = "line") -> None:
    for number in range(count):
        print(f"{text} {number}")  # noqa: T201


@job
def print_and_wait(path: str) -> None:
    print("working", flush=True)  # noqa: T201
    while not Path(path).exists():
        time.sleep(0.005)


@job
def parent() -> int:
    return os.getppid()


@job
def return_bytes(size: int) -> str:
    return "x" * size


@job
def allocate(size: int, began: str = "") -> None:
    block = bytearray(os.urandom(1 << 20) * (size >> 20))
    if began:
        Path(began).touch()
    time.sleep(LONG_S)
    del block


@job
def append_line(path: str, text: str, seconds: float = 0.0) -> None:
    """One write, so that lines of several processes stay whole."""
    with Path(path).open("a") as file:
        file.write(f"{text} {current_job().token}\n")
    time.sleep(seconds)


@job(batch=Batch(size=3, wait="10m"), isolation="warm_process")
def hold_batch(path: list[str], began: list[str]) -> list[int]:
    """Until the test writes the file; the results are the number of jobs of the call."""
    Path(began[0]).write_text(str(os.getpid()))
    while not Path(path[0]).exists():
        time.sleep(0.005)
    return [len(path)] * len(path)


@job(batch=Batch(size=4, wait="50ms"), isolation="warm_process")
def append_batch(path: list[str], number: list[int]) -> list[int]:
    """A line per job, all in one write. Numbers that are divisible by 10 fail."""
    time.sleep(0.05)
    if any(one % 10 == 0 for one in number):
        raise ValueError("divisible by 10")
    with Path(path[0]).open("a") as file:
        file.write("".join(f"{one}\n" for one in number))
    return number


@job
def burn_cpu(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


plain_function = len
"""Not declared with @dt.job."""


@job(isolation="warm_process", model="name")
def use_model(name: str, size: int = 1 << 20, began: str = "", path: str = "") -> dict[str, Any]:
    """Use a model, and wait for a file if one is named."""
    model = current_job().models.get(name, LoadedModel, bytes=size)
    print(f"using {name}")  # noqa: T201
    if began:
        Path(began).write_text(str(os.getpid()))
    while path and not Path(path).exists():
        time.sleep(0.005)
    model.uses += 1
    return {"pid": os.getpid(), "uses": model.uses, "model": id(model)}


class LoadedModel:
    uses = 0


@job
def keep_bytes(size: int) -> bool:
    """Leave memory allocated, as a library that caches does."""
    KEPT.append(bytearray(size))
    time.sleep(0.6)  # for a check of the memory
    return True


KEPT: list[bytearray] = []
