"""Gangs of the local engine, and calls between workers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.control.commands import HostedObject, RunBatches, StartWorker, StopWorker
from dovetail.control.engine import WorkerLostError
from dovetail.control.events import BatchesDone, LossCause, WorkerLost, WorkerReady, WorkerStopped
from dovetail.engines.local.engine import LocalEngine
from dovetail.resources.seat import Seat
from engines.socket_group import SocketGroup
from runtime.aids import losses, no_worker_is_left, run_of, workers_of
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from dovetail.control.events import Event

pytestmark = [pytest.mark.time_limit, pytest.mark.usefixtures("by_value")]


class TorchSums:
    """Every rank adds its number to each item; the result is the sum over all ranks."""

    def setup(self, worker: Any) -> None:
        import torch.distributed as dist

        self._rank = worker.rank
        assert os.environ["RANK"] == str(worker.rank)
        assert os.environ["WORLD_SIZE"] == str(worker.ranks) == "2"
        assert os.environ["LOCAL_RANK"] == str(worker.local_rank)
        dist.init_process_group("gloo")

    def __call__(self, items: list[int]) -> list[float]:
        import torch
        import torch.distributed as dist

        found = torch.tensor([float(item + 1000 * self._rank) for item in items])
        dist.all_reduce(found)
        return [float(value) for value in found]

    def teardown(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class Sums:
    """The same sums without torch; one rank may kill itself at an item, once."""

    def __init__(self, folder: str = ".", kill: tuple[int, int] | None = None) -> None:
        """`kill`: the rank and the item."""
        self._marker = Path(folder, "killed")
        self._kill = kill

    def setup(self) -> None:
        self._group = SocketGroup()

    def __call__(self, items: list[int]) -> list[float]:
        rank = self._group.rank
        if any((rank, item) == self._kill for item in items) and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        everyone = self._group.exchange([float(item + 1000 * rank) for item in items])
        return [sum(values) for values in zip(*everyone, strict=True)]


class TorchGroup:
    """The same exchange as `SocketGroup`, with a process group of torch."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self._ranks = dist.get_world_size()

    def exchange(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self._ranks
        dist.all_gather_object(values, value)
        return values


class GangCards:
    """Every item becomes the ranks of the gang: rank, local rank, visible cards, and the indices of its own."""

    def __init__(self, group: type[Any] = SocketGroup) -> None:
        self._group_type = group

    def setup(self, worker: Any) -> None:
        local_rank = int(os.environ["LOCAL_RANK"])
        assert local_rank == worker.local_rank
        self._own = [worker.rank, local_rank, os.environ["CUDA_VISIBLE_DEVICES"], list(worker.gpus)]
        self._group = self._group_type()

    def __call__(self, items: list[int]) -> list[Any]:
        return [sorted(self._group.exchange(self._own)) for _ in items]


def gang(work: object, **settings: Any) -> dt.Stage:
    return dt.Stage("gang", work, ranks=2, workers=1, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("work", [Sums, pytest.param(TorchSums, marks=pytest.mark.long)])
def test_two_ranks_reduce_together(work: type[Any]) -> None:
    run = run_of(gang(work, batch_size=4), source=range(40))
    assert sorted(run) == [2.0 * number + 1000 for number in range(40)]
    no_worker_is_left(run)


@pytest.mark.parametrize("group", [SocketGroup, pytest.param(TorchGroup, marks=pytest.mark.long)])
def test_the_ranks_of_a_node_see_the_same_cards_and_local_rank_is_the_index_of_their_own(group: type[Any]) -> None:
    stage = gang(GangCards(group), resources=dt.Resources(cpus=0.5, gpus=1))
    (ranks,) = run_of(stage, source=[0], cluster="1x(4cpu, 8GB, 2xgpu:20GB)")
    assert ranks == [[0, 0, "0,1", [0]], [1, 1, "0,1", [1]]]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_gang_that_loses_a_rank_is_restarted_and_every_item_is_delivered_once(tmp_path: Path, rank: int) -> None:
    run = run_of(gang(Sums(str(tmp_path), kill=(rank, 13)), batch_size=2), source=range(30))
    assert sorted(run) == [2.0 * number + 1000 for number in range(30)]
    assert losses(run) == 1
    no_worker_is_left(run)


class Picky:
    """One rank raises; no other rank waits for it."""

    def __init__(self, rank: int) -> None:
        self._bad = rank

    def setup(self, worker: Any) -> None:
        self._rank = worker.rank

    def __call__(self, items: list[int]) -> list[int]:
        if self._rank == self._bad and 7 in items:
            raise ValueError(f"rank {self._rank} does not like seven")
        return items


@pytest.mark.parametrize("rank", [0, 1])
def test_an_item_that_fails_on_one_rank_is_recorded_and_the_others_are_delivered(rank: int) -> None:
    run = run_of(gang(Picky(rank), on_error="skip"), source=range(20))
    assert sorted(run) == [number for number in range(20) if number != 7]
    (error,) = run.errors
    assert f"rank {rank} does not like seven" in error.error
    assert error.item == 7
    assert losses(run) == 0


class WhereAmI:
    def setup(self, worker: Any) -> None:
        self._worker = worker

    def __call__(self, items: list[int]) -> list[Any]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
        found = (self._worker.rank, *(os.environ[name] for name in names), os.environ["MASTER_PORT"].isdigit())
        return [found for _ in items]


def test_only_the_first_rank_returns_results() -> None:
    assert list(run_of(gang(WhereAmI), source=range(3))) == [(0, "0", "0", "2", "127.0.0.1", True)] * 3


class DiesInSetup:
    def setup(self, worker: Any) -> None:
        if worker.rank == 1:
            raise RuntimeError("rank one has no card")
        time.sleep(1000)

    def __call__(self, items: list[int]) -> list[int]:
        return items


def test_a_rank_that_cannot_be_set_up_ends_its_gang() -> None:
    run = run_of(gang(DiesInSetup), source=range(3))
    with pytest.raises(dt.RunError, match="rank one has no card"):
        list(run)
    no_worker_is_left(run)


# Calls


class Talks:
    """Hosted object of workers that call each other."""

    def setup(self, worker: Any) -> None:
        self.worker = worker
        self.count = 0

    def __call__(self, items: list[Any]) -> list[Any]:
        """Items are (worker, text); results are the answers of these workers."""
        return [self.ask(*item) for item in items]

    def ask(self, worker: int, text: str) -> Any:
        try:
            return self.worker.call(worker, "talks", "hear", text, times=2).result(60)
        except WorkerLostError as error:
            return f"gone: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def hear(self, text: str, times: int = 1) -> str:
        self.count += 1
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "bad":
            raise ValueError("bad word")
        return f"{self.worker.id}:{text * times}"

    def who(self) -> int:
        worker: int = self.worker.id
        return worker

    def size(self, data: bytes) -> int:
        return len(data)

    def sizes(self, worker: int, data: bytes, count: int) -> list[int]:
        futures = [self.worker.call(worker, "talks", "size", data) for _ in range(count)]
        return [future.result(60) for future in futures]

    def large(self, size: int) -> bytes:
        return b"x" * size

    def lengths(self, worker: int, size: int, count: int) -> list[int]:
        futures = [self.worker.call(worker, "talks", "large", size) for _ in range(count)]
        return [len(future.result(60)) for future in futures]


class AwaitsTalks(Talks):
    async def __call__(self, items: list[Any]) -> list[Any]:  # type: ignore[override]
        import asyncio

        return [await asyncio.wrap_future(self.worker.call(worker, "talks", "hear", text)) for worker, text in items]


class Stage:
    """A local engine with workers, and the log of its events."""

    def __init__(self, folder: Path) -> None:
        self.engine = LocalEngine(folder)
        self.log: list[Event] = []
        self._message = 0

    def start(self, worker: int, work: object = Talks, slots: int = 1) -> None:
        self.engine.submit([StartWorker(worker, (Seat("node-0", 100),), (HostedObject("talks", work, slots),))])
        self.until(lambda: any(isinstance(event, WorkerReady) and event.worker == worker for event in self.log))

    def until(self, condition: Any) -> None:
        def look() -> bool:
            self.log += self.engine.poll(0.02)
            return bool(condition())

        until(look, f"an event arrives; {self.log}")

    def result(self, future: Future[Any]) -> Any:
        self.until(future.done)
        return future.result(0)

    def send(self, worker: int, items: list[Any]) -> int:
        self._message += 1
        segment = self.engine.store(range(len(items)), items)
        parts = [(segment, 0, len(items))]
        self.engine.submit([RunBatches(self._message, worker, "talks", parts, len(items), 1, 100)])
        return self._message

    def done(self, message: int) -> list[Any]:
        self.until(lambda: any(isinstance(event, BatchesDone) and event.message == message for event in self.log))
        (done,) = [event for event in self.log if isinstance(event, BatchesDone) and event.message == message]
        assert done.failures == []
        return [item for segment in done.segments for item in self.engine.load(segment)[1]]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.engine.close()
    assert not workers_of(tmp_path)


def test_workers_call_each_other_in_both_directions(stage: Stage) -> None:
    stage.start(1)
    stage.start(2)
    assert stage.done(stage.send(1, [(2, "hello"), (2, "x")])) == ["2:hellohello", "2:xx"]
    assert stage.done(stage.send(2, [(1, "hello")])) == ["1:hellohello"]
    assert stage.result(stage.engine.call(1, "talks", "ask", 2, "ho")) == "2:hoho"
    assert stage.result(stage.engine.call(2, "talks", "who")) == 2


def test_a_worker_with_slots_can_call_itself(stage: Stage) -> None:
    stage.start(1, slots=2)
    assert stage.done(stage.send(1, [(1, "me")])) == ["1:meme"]


def test_two_workers_with_slots_may_call_each_other_at_the_same_time(stage: Stage) -> None:
    stage.start(1, slots=3)
    stage.start(2, slots=3)
    messages = [stage.send(number % 2 + 1, [(2 - number % 2, f"n{number}")] * 5) for number in range(4)]
    for number, message in enumerate(messages):
        assert stage.done(message) == [f"{2 - number % 2}:n{number}n{number}"] * 5


def test_async_workers_call_each_other(stage: Stage) -> None:
    stage.start(1, AwaitsTalks, slots=4)
    stage.start(2, AwaitsTalks, slots=4)
    messages = [stage.send(number % 2 + 1, [(2 - number % 2, f"n{number}")] * 5) for number in range(4)]
    for number, message in enumerate(messages):
        assert stage.done(message) == [f"{2 - number % 2}:n{number}"] * 5


@pytest.mark.parametrize("slots", [1, 4])
def test_calls_may_be_large_in_both_directions(stage: Stage, slots: int) -> None:
    stage.start(1, slots=slots)
    stage.start(2, slots=slots)
    data = b"y" * 3_000_000
    assert stage.result(stage.engine.call(1, "talks", "sizes", 2, data, 8)) == [len(data)] * 8
    assert stage.result(stage.engine.call(1, "talks", "lengths", 2, 3_000_000, 8)) == [3_000_000] * 8


def test_concurrent_large_calls_and_messages_are_not_mixed_up(stage: Stage) -> None:
    stage.start(1, slots=4)
    stage.start(2, slots=4)
    text = "z" * 700_000
    calls = [stage.engine.call(1, "talks", "lengths", 2, 700_000, 3) for _ in range(3)]
    messages = [stage.send(1, [(2, text)] * 2) for _ in range(6)]
    for message in messages:
        assert stage.done(message) == [f"2:{text * 2}"] * 2
    for call in calls:
        assert stage.result(call) == [700_000] * 3


def test_a_call_whose_target_dies_raises_worker_lost_error(stage: Stage) -> None:
    stage.start(1)
    stage.start(2)
    (answer,) = stage.done(stage.send(1, [(2, "die")]))
    assert answer.startswith("gone: ")
    stage.until(lambda: any(isinstance(event, WorkerLost) for event in stage.log))
    (lost,) = [event for event in stage.log if isinstance(event, WorkerLost)]
    assert (lost.worker, lost.cause) == (2, LossCause.SIGNAL)
    assert stage.done(stage.send(1, [(2, "again")]))[0].startswith("gone: ")


def test_a_call_of_an_unknown_worker_or_object_fails_at_once(stage: Stage) -> None:
    stage.start(1)
    stage.start(2)
    assert stage.done(stage.send(1, [(99, "x")]))[0].startswith("gone: ")
    assert stage.done(stage.send(1, [(2, "bad")])) == ["ValueError: bad word"]
    error = stage.engine.call(1, "talks", "no_such_method")
    stage.until(error.done)
    assert isinstance(error.exception(0), AttributeError)


def test_an_answer_for_a_dead_worker_is_ignored(stage: Stage) -> None:
    stage.start(1)
    stage.start(2, slots=2)
    future = stage.engine.call(1, "talks", "lengths", 2, 3_000_000, 20)
    stage.until(lambda: stage.engine.processes()[1][1])
    os.kill(stage.engine.processes()[1][1][0], signal.SIGKILL)
    stage.until(future.done)
    assert isinstance(future.exception(0), WorkerLostError)
    assert stage.result(stage.engine.call(2, "talks", "who")) == 2


def test_a_drain_waits_for_calls_in_flight(stage: Stage) -> None:
    stage.start(1)
    calls = [stage.engine.call(1, "talks", "who") for _ in range(5)]
    stage.engine.submit([StopWorker(1)])
    stage.until(lambda: any(isinstance(event, WorkerStopped) for event in stage.log))
    assert [call.result(0) for call in calls] == [1] * 5
