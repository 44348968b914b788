"""Classes of the roles in the contract suite. Workers get them by value, so that they need not import pytest."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import dovetail as dt

POLL_S = 0.005


class OddError(Exception):
    """An exception of a user's package."""


class Echo:
    """Returns what it gets, and says which instance it is."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.arguments = args, named
        self.calls: list[Any] = []

    def setup(self, worker: Any) -> None:
        self.worker = worker

    def echo(self, *args: Any, **named: Any) -> tuple[Any, ...]:
        return (*args, *sorted(named.items()))

    async def echo_async(self, *args: Any, **named: Any) -> tuple[Any, ...]:
        await asyncio.sleep(0)
        return (*args, *sorted(named.items()))

    def index(self, *_: Any) -> int:
        return int(self.worker.index)

    def pid(self) -> int:
        return os.getpid()

    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.arguments

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def record(self, value: Any) -> None:
        self.calls.append(value)

    def recorded(self) -> list[Any]:
        return self.calls

    def part(self, items: list[Any]) -> tuple[int, list[Any]]:
        return self.worker.index, list(items)

    def fail(self, text: str) -> None:
        raise OddError(text)

    async def fail_async(self, text: str) -> None:
        await asyncio.sleep(0)
        raise OddError(text)

    def size(self, data: bytes) -> int:
        return len(data)

    def zeros(self, count: int) -> bytes:
        return bytes(count)


class Unchecked(Echo):
    """Has no `health`, and records the calls that it has finished."""

    def hold(self, path: str) -> str:
        Path(f"{path}.begun").touch()
        while not Path(path).exists():
            time.sleep(POLL_S)
        self.record(path)
        return path


class Gate:
    """Methods that wait until the test creates a file."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []

    def hold(self, path: str) -> str:
        self.begun.append(path)
        Path(f"{path}.begun").touch()
        while not Path(path).exists():
            time.sleep(POLL_S)
        return path

    async def hold_async(self, path: str) -> str:
        self.begun.append(path)
        Path(f"{path}.begun").touch()
        try:
            while not Path(path).exists():
                await asyncio.sleep(POLL_S)
        except asyncio.CancelledError:
            self.cancelled.append(path)
            raise
        return path

    @dt.idempotent
    def hold_idempotent(self, path: str) -> int:
        self.hold(path)
        return os.getpid()

    def history(self) -> tuple[list[str], list[str]]:
        return self.begun, self.cancelled

    def pid(self) -> int:
        return os.getpid()

    def health(self) -> str:
        return "well"


class Inside:
    """Counts the calls that are inside at the same time."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def enter(self) -> int:
        self.now += 1
        self.peak = max(self.peak, self.now)
        time.sleep(0.001)
        self.now -= 1
        return self.peak

    async def meet(self, count: int) -> int:
        """Returns when this many calls are inside."""
        self.now += 1
        self.peak = max(self.peak, self.now)
        while self.peak < count:
            await asyncio.sleep(POLL_S)
        self.now -= 1
        return self.peak

    async def stay(self, seconds: float) -> int:
        self.now += 1
        self.peak = max(self.peak, self.now)
        await asyncio.sleep(seconds)
        self.now -= 1
        return self.peak


class Asker:
    """Calls other roles."""

    def setup(self, worker: Any) -> None:
        self.worker = worker

    def index(self) -> int:
        return int(self.worker.index)

    def pid(self) -> int:
        return os.getpid()

    def linger(self, seconds: float) -> int:
        time.sleep(seconds)
        return int(self.worker.index)

    def ask(self, role: str, method: str, *args: Any) -> Any:
        return getattr(self.worker.actors[role].one, method)(*args).result(60)

    async def ask_async(self, role: str, method: str, *args: Any) -> Any:
        return await getattr(self.worker.actors[role].one, method)(*args)

    def ask_all(self, role: str, method: str, *args: Any) -> Any:
        return getattr(self.worker.actors[role].all, method)(*args).result(60)

    def ask_index(self, role: str, index: int, method: str, *args: Any) -> Any:
        return getattr(self.worker.actors[role][index], method)(*args).result(60)

    def abandon(self, role: str, method: str, path: str) -> bool:
        """Call a method that makes the file `path.begun` and waits, and cancel the call."""
        call = getattr(self.worker.actors[role].one, method)(path)
        while not os.path.exists(f"{path}.begun"):  # noqa: PTH110
            time.sleep(0.01)
        return bool(call.cancel())

    def roles(self) -> list[str]:
        return sorted(self.worker.actors)


class Rank:
    """One rank of a gang."""

    def setup(self, worker: Any) -> None:
        self.worker = worker

    def environment(self) -> tuple[str, ...]:
        return tuple(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))

    def rank(self) -> int:
        return int(self.worker.rank)

    def pid(self) -> int:
        return os.getpid()


class GlooRank(Rank):
    """A rank of a torch process group."""

    def setup(self, worker: Any) -> None:
        import torch.distributed as dist

        super().setup(worker)
        dist.init_process_group("gloo")

    def sum_over_ranks(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        found = torch.tensor([value + 1000.0 * self.worker.rank])
        dist.all_reduce(found)
        return float(found[0])

    def teardown(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class Mortal(Echo):
    """Kills its own process."""

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_once(self, path: str) -> int:
        if not Path(path).exists():
            Path(path).touch()
            self.die()
        return os.getpid()

    @dt.idempotent
    def die_once_idempotent(self, path: str) -> int:
        return self.die_once(path)


class Unprepared:
    """Its setup fails."""

    def setup(self) -> None:
        raise OddError("no model in this folder")


class Departing:
    """Calls another role in its teardown."""

    def setup(self, worker: Any) -> None:
        self.worker = worker

    def pid(self) -> int:
        return os.getpid()

    def teardown(self) -> None:
        self.worker.actors.echo.one.record("departed").result(60)
