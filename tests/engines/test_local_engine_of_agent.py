"""Local engine hosted by an agent: parts of gangs, pickled code, context of a driver on another machine, calls to other
nodes, workers ended by the agent."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.control.commands import Cancel, HostedObject, RunBatches, StartWorker, StopWorker
from dovetail.control.engine import WorkerLostError
from dovetail.control.events import BatchesDone, LossCause, WorkerLost, WorkerReady, WorkerStopped
from dovetail.control.payload import PartFileRange
from dovetail.engines.local.call_body import PIECE_BYTES, load_portable, pack_portable
from dovetail.engines.local.code_pickle import PickledWork, pickle_hosted
from dovetail.engines.local.engine import LocalEngine
from dovetail.engines.local.worker_environment import (
    DROPPED_VARIABLES,
    RAY_PATH_SUFFIXES,
    agent_environment,
    rendezvous_variables,
)
from dovetail.engines.local.worker_spec import DriverContext
from dovetail.resources.seat import CardShare, Seat
from engines.socket_group import SocketGroup
from ray_aids import driver
from runtime.aids import is_there, workers_of
from waiting import PATIENCE_S, knows_pids, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from dovetail.control.engine import CallOptions
    from dovetail.control.events import Event
    from ray_aids import FakeCluster

pytestmark = [pytest.mark.time_limit, pytest.mark.usefixtures("by_value")]

SEAT = Seat("node-0", 100)
NO_CONTEXT = DriverContext((), "", {})


class Scene:
    """Engines as agents host them, one per node, and the log of events of each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.engines: list[LocalEngine] = []
        self.logs: list[list[Event]] = []

    @property
    def folders(self) -> list[Path]:
        return [self._folder / f"engine-{number}" for number in range(len(self.engines))]

    def agent(self, **settings: Any) -> LocalEngine:
        self.engines.append(LocalEngine(self._folder / f"engine-{len(self.engines)}", **settings))
        self.logs.append([])
        return self.engines[-1]

    def log_of(self, engine: LocalEngine) -> list[Event]:
        return self.logs[self.engines.index(engine)]

    def until(self, condition: Callable[[], object], what: str) -> None:
        def look() -> object:
            for engine, log in zip(self.engines, self.logs, strict=True):
                log += engine.poll(0.01)
            return condition()

        until(look, f"{what}; {self.logs}")

    def ready(self, engine: LocalEngine, worker: int, hosted: HostedObject, seat: Seat = SEAT) -> None:
        engine.submit([StartWorker(worker, (seat,), (hosted,))])
        self.wait_for(engine, WorkerReady, worker)

    def wait_for(self, engine: LocalEngine, kind: type[Any], worker: int) -> Any:
        self.until(lambda: self.events_of(engine, kind, worker), f"worker {worker}: {kind.__name__}")
        (found,) = self.events_of(engine, kind, worker)
        return found

    def events_of(self, engine: LocalEngine, kind: type[Any], worker: int) -> list[Any]:
        return [event for event in self.log_of(engine) if isinstance(event, kind) and event.worker == worker]

    def send(self, engine: LocalEngine, worker: int, message: int, items: list[Any], name: str = "it") -> None:
        segment = engine.store(range(len(items)), items)
        engine.submit([RunBatches(message, worker, name, [(segment, 0, len(items))], len(items), 1, 100)])

    def done(self, engine: LocalEngine, worker: int, message: int) -> BatchesDone:
        def found() -> list[BatchesDone]:
            return [event for event in self.events_of(engine, BatchesDone, worker) if event.message == message]

        self.until(found, f"message {message} is done")
        (done,) = found()
        return done

    def results(self, engine: LocalEngine, worker: int, message: int) -> list[Any]:
        done = self.done(engine, worker, message)
        assert done.failures == []
        return [item for segment in done.segments for item in engine.load(segment)[1]]

    def lost(self, engine: LocalEngine, worker: int) -> WorkerLost:
        found: WorkerLost = self.wait_for(engine, WorkerLost, worker)
        return found

    def answer(self, future: Future[tuple[bool, list[bytes]]]) -> tuple[bool, Any]:
        self.until(future.done, "the call is answered")
        fine, pieces = future.result(0)
        return fine, load_portable(pieces)


@pytest.fixture
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("engines"))
    yield made
    for engine in made.engines:
        engine.close()
    assert not any(map(workers_of, made.folders))


# Context of a driver on another machine


def variable(items: list[str]) -> list[str | None]:
    return [os.environ.get(item) for item in items]


def place(items: list[int]) -> list[Any]:
    return [(os.getcwd(), list(sys.path)) for _ in items]  # noqa: PTH109


def test_pickled_code_runs_with_the_variables_of_its_stages(scene: Scene) -> None:
    stage = dt.Stage("it", variable, env={"ASKED": "yes"})
    sent = pickle.loads(pickle.dumps(pickle_hosted(HostedObject("it", (stage,)))))
    assert isinstance(sent, PickledWork)
    assert sent.env == {"ASKED": "yes"}
    engine = scene.agent(driver_context=NO_CONTEXT)
    scene.ready(engine, 1, HostedObject("it", sent))
    scene.send(engine, 1, 1, ["ASKED", "DOVETAIL_INSIDE"])
    assert scene.results(engine, 1, 1) == ["yes", "1"]


def test_code_that_is_already_pickled_is_not_pickled_again() -> None:
    sent = PickledWork(b"code", {})
    assert pickle_hosted(HostedObject("it", sent)) is sent


class Files:
    """A writer that writes its results into a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, name: str) -> None:
        self.path = self.folder / name

    def write(self, keys: Any, items: list[Any]) -> PartFileRange:
        self.path.write_text(repr(items))
        return PartFileRange(self.path.name, 0, 0, len(items), [0], [0])

    def end(self) -> None:
        pass


def test_a_writer_may_be_pickled(scene: Scene, tmp_path: Path) -> None:
    import cloudpickle

    writer = cloudpickle.dumps(Files(tmp_path))
    engine = scene.agent(driver_context=NO_CONTEXT)
    scene.ready(
        engine, 1, HostedObject("it", pickle_hosted(HostedObject("it", (dt.Stage("it", variable),))), writer=writer)
    )
    scene.send(engine, 1, 1, ["NO_SUCH_VARIABLE"])
    scene.done(engine, 1, 1)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["[None]"]


def test_workers_use_the_drivers_folder_and_paths_where_they_exist(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    gone = str(tmp_path / "gone")
    driver_context = DriverContext(
        (str(tmp_path / "lib"), gone, "lib", "nowhere", ""), str(tmp_path), {"FROM_DRIVER": "1"}
    )
    engine = scene.agent(driver_context=driver_context)
    hosted = HostedObject("it", pickle_hosted(HostedObject("it", (dt.Stage("it", place),))))
    scene.ready(engine, 1, hosted)
    scene.send(engine, 1, 1, [1])
    ((folder, path),) = scene.results(engine, 1, 1)
    assert folder == str(tmp_path)
    assert path[:3] == [str(tmp_path / "lib"), "lib", ""]
    assert not {gone, "nowhere"} & set(path)
    # each entry once, without those that earlier tests added by using Ray
    own = [entry for entry in dict.fromkeys(sys.path) if entry and not entry.endswith(RAY_PATH_SUFFIXES)]
    assert [entry for entry in path[3:] if entry] == own


def test_workers_use_the_agents_folder_where_the_drivers_is_missing(scene: Scene, tmp_path: Path) -> None:
    engine = scene.agent(driver_context=DriverContext((), str(tmp_path / "gone"), {}))
    scene.ready(engine, 1, HostedObject("it", pickle_hosted(HostedObject("it", (dt.Stage("it", place),)))))
    scene.send(engine, 1, 1, [1])
    ((folder, _),) = scene.results(engine, 1, 1)
    assert folder == str(Path.cwd())


def test_variables_of_the_driver_override_those_of_the_node_except_rays(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"OURS": "machine", "BOTH": "machine", "RAY_JOB_ID": "1", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)  # after the start of this process, as Ray does
    engine = scene.agent(driver_context=DriverContext((), "", {"BOTH": "driver", "RAY_ADDRESS": "here:1"}))
    seat = Seat("node-0", 3000)
    scene.ready(engine, 1, HostedObject("it", pickle_hosted(HostedObject("it", (dt.Stage("it", variable),)))), seat)
    scene.send(engine, 1, 1, ["OURS", "BOTH", "RAY_JOB_ID", "RAY_ADDRESS", "OMP_NUM_THREADS"])
    assert scene.results(engine, 1, 1) == ["machine", "driver", None, "here:1", "3"]


def test_thread_counts_set_on_the_node_are_kept() -> None:
    agent = {"OMP_NUM_THREADS": "7", "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace", "RAY_RAYLET_PID": "5", "X": "1"}
    assert agent_environment(agent, {"OMP_NUM_THREADS": "7"}, DriverContext((), "", {"Y": "2"})) == {
        "OMP_NUM_THREADS": "7",
        "X": "1",
        "Y": "2",
    }


def test_variables_read_at_interpreter_start_reach_workers_from_the_driver(scene: Scene) -> None:
    engine = scene.agent(driver_context=DriverContext((), "", {"PYTHONHASHSEED": "77"}))

    def flags(items: list[int]) -> list[Any]:
        return [(sys.flags.hash_randomization, hash("a")) for _ in items]

    scene.ready(engine, 1, HostedObject("it", pickle_hosted(HostedObject("it", (dt.Stage("it", flags),)))))
    scene.ready(
        engine,
        2,
        HostedObject("it", pickle_hosted(HostedObject("it", (dt.Stage("it", flags, env={"PYTHONHASHSEED": "77"}),)))),
    )
    scene.send(engine, 1, 1, [1])
    scene.send(engine, 2, 2, [1])
    assert scene.results(engine, 1, 1) == scene.results(engine, 2, 2)


def test_cards_have_the_names_set_by_the_agent(scene: Scene) -> None:
    engine = scene.agent(driver_context=NO_CONTEXT)
    engine.set_devices("node-0", {0: "5", 1: "GPU-abc", 3: "2"})
    hosted = HostedObject("it", pickle_hosted(HostedObject("it", (dt.Stage("it", variable),))))
    scene.ready(engine, 1, hosted, Seat("node-0", 100, cards=(CardShare(3, 1000), CardShare(1, 1000))))
    scene.ready(engine, 2, hosted)
    scene.send(engine, 1, 1, ["CUDA_VISIBLE_DEVICES"])
    scene.send(engine, 2, 2, ["CUDA_VISIBLE_DEVICES"])
    assert scene.results(engine, 1, 1) == ["2,GPU-abc"]
    assert scene.results(engine, 2, 2) == [""]


# Gangs across nodes


GANG_SEATS = (Seat("a", 100), Seat("a", 100), Seat("b", 100), Seat("b", 100))


def test_every_rank_gets_the_variables_that_torchrun_would_set() -> None:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE")
    found = [rendezvous_variables(GANG_SEATS[:3], rank, 29500, "10.0.0.7") for rank in range(3)]
    assert [tuple(one[name] for name in names) for one in found] == [
        ("0", "0", "2", "0", "0", "3", "2"),
        ("1", "1", "2", "0", "0", "3", "2"),
        ("2", "0", "1", "1", "1", "3", "2"),
    ]
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found} == {("10.0.0.7", "29500")}
    assert set(found[0]) <= set(DROPPED_VARIABLES)


class Reduces:
    """All ranks, on both nodes, exchange the sum of their ranks."""

    def setup(self, worker: Any) -> None:
        self.worker = worker
        self.group = SocketGroup()

    def __call__(self, items: list[int]) -> list[Any]:
        total = sum(self.group.exchange(self.worker.rank))
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        about = (self.worker.rank, self.worker.ranks, *(os.environ[name] for name in names))
        return [(total, about) for _ in items]


def test_a_gang_on_two_nodes_connects_and_only_its_first_rank_returns_results(scene: Scene) -> None:
    driver_context = DriverContext(tuple(sys.path), "", {})
    a, b = scene.agent(driver_context=driver_context), scene.agent(driver_context=driver_context)
    meeting = ("127.0.0.1", a.free_port())
    command = StartWorker(
        1, GANG_SEATS, (HostedObject("it", pickle_hosted(HostedObject("it", (dt.Stage("it", Reduces),)))),)
    )
    a.start_ranks(command, (0, 1), meeting)
    b.start_ranks(command, (2, 3), meeting)
    for engine in (a, b):
        scene.wait_for(engine, WorkerReady, 1)
        scene.until(partial(knows_pids, engine, 1, 2), "the pids are known")
    for engine in (a, b):
        scene.send(engine, 1, 1, [1, 2])
    assert scene.results(a, 1, 1) == [(6, (0, 4, "0", "2", "0"))] * 2
    assert scene.done(b, 1, 1).segments == []
    assert scene.done(b, 1, 1).failures == []
    for engine in (a, b):
        engine.submit([StopWorker(1)])
        scene.wait_for(engine, WorkerStopped, 1)


class Says:
    """Returns its items on every rank; some items fail or kill one rank."""

    def setup(self, worker: Any) -> None:
        self.worker = worker

    def __call__(self, items: list[Any]) -> list[Any]:
        for item in items:
            if item == ("fail", self.worker.rank):
                raise ValueError(f"rank {self.worker.rank} does not like it")
            if item == ("die", self.worker.rank):
                os.kill(os.getpid(), signal.SIGKILL)
        return items


def a_part(scene: Scene, ranks: tuple[int, ...]) -> LocalEngine:
    engine = scene.agent(driver_context=NO_CONTEXT)
    command = StartWorker(
        1, GANG_SEATS, (HostedObject("it", pickle_hosted(HostedObject("it", (dt.Stage("it", Says),)))),)
    )
    engine.start_ranks(command, ranks, ("127.0.0.1", 1))
    scene.wait_for(engine, WorkerReady, 1)
    return engine


@pytest.mark.parametrize("rank", [2, 3])
def test_a_failure_of_a_rank_is_reported_by_the_engine_of_its_node(scene: Scene, rank: int) -> None:
    engine = a_part(scene, (3, 2))
    scene.send(engine, 1, 1, ["fine", ("fail", rank)])
    done = scene.done(engine, 1, 1)
    assert done.segments == []
    assert {failure.error for failure in done.failures} == {f"ValueError: rank {rank} does not like it"}


def test_a_lost_rank_is_named_and_its_messages_cannot_be_cancelled(scene: Scene) -> None:
    engine = a_part(scene, (3,))
    scene.send(engine, 1, 1, ["fine"])
    scene.send(engine, 1, 2, ["fine"])
    engine.submit([Cancel(2, 1)])
    assert scene.done(engine, 1, 2).segments == []
    scene.send(engine, 1, 3, [("die", 3)])
    lost = scene.lost(engine, 1)
    assert lost.cause is LossCause.SIGNAL
    assert lost.detail.startswith("rank 3: signal 9")


def test_a_single_process_needs_no_rendezvous(scene: Scene) -> None:
    engine = scene.agent(driver_context=NO_CONTEXT)
    hosted = HostedObject("it", pickle_hosted(HostedObject("it", (dt.Stage("it", variable),))))
    engine.start_ranks(StartWorker(1, (SEAT,), (hosted,)), (0,), None)
    scene.send(engine, 1, 1, ["RANK", "MASTER_ADDR"])
    assert scene.results(engine, 1, 1) == [None, None]


# Ends


class Waits:
    def __call__(self, items: list[int]) -> list[int]:
        signal.pause()
        return items


def test_a_worker_ended_by_the_agent_is_lost_with_the_agents_reason(scene: Scene) -> None:
    engine = scene.agent()
    scene.ready(engine, 1, HostedObject("it", (dt.Stage("it", Waits),)))
    scene.send(engine, 1, 7, [1])
    scene.until(lambda: engine.running(1) == (7,), "the message runs")
    engine.end_worker(1, LossCause.OUT_OF_MEMORY, "the node was full")
    engine.end_worker(1, LossCause.EXIT, "too late")
    lost = scene.lost(engine, 1)
    assert (lost.cause, lost.detail) == (LossCause.OUT_OF_MEMORY, "the node was full")
    assert [crumb.message for crumb in lost.breadcrumbs] == [7]
    assert lost.peak_bytes > 1 << 20
    engine.end_worker(1, LossCause.EXIT, "it is not there any more")
    engine.end_worker(99, LossCause.EXIT, "it never was")


def test_a_worker_can_be_ended_during_its_setup(scene: Scene) -> None:
    class Sleeps:
        def setup(self, worker: Any) -> None:
            signal.pause()

        def __call__(self, items: list[int]) -> list[int]:
            return items

    engine = scene.agent()
    engine.submit([StartWorker(1, (SEAT,), (HostedObject("it", (dt.Stage("it", Sleeps),)),))])
    engine.end_worker(1, LossCause.OUT_OF_MEMORY, "the node was full")
    assert scene.lost(engine, 1).cause is LossCause.OUT_OF_MEMORY


# Calls


class Talks:
    def setup(self, worker: Any) -> None:
        self.worker = worker

    def ask(self, worker: int, text: str) -> Any:
        try:
            return self.worker.call(worker, "it", "hear", text).result(60)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def chain(self, *workers: int) -> str:
        """Call the first worker, which calls the second one, and so on."""
        if not workers:
            return "end"
        first, *others = workers
        try:
            answer = self.worker.call(first, "it", "chain", *others).result(60)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return str(answer)

    async def hold_async(self, path: str) -> None:
        Path(path).touch()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            Path(f"{path}.cancelled").touch()
            raise

    def abandon(self, worker: int, path: str) -> bool:
        """Call an async method of a worker, and cancel it when it is running."""
        call = self.worker.call(worker, "it", "hold_async", path)
        while not Path(path).exists():
            time.sleep(0.01)
        return bool(call.cancel())

    def hear(self, text: str) -> str:
        if text == "bad":
            raise ValueError("bad word")
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return f"{self.worker.id}:{text}"

    def wait(self) -> None:
        signal.pause()


TALKS = HostedObject("it", Talks)


def arguments(*args: Any, **named: Any) -> list[bytes]:
    return pack_portable((args, named))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_call_to_another_node_is_forwarded_without_unpickling(scene: Scene, at_once: bool) -> None:
    """The answer is sent while the call is being forwarded."""
    a, b = scene.agent(), scene.agent()
    scene.ready(a, 1, TALKS)
    scene.ready(b, 2, TALKS)
    asked: list[tuple[Any, ...]] = []

    def pass_on(
        token: int, number: int, worker: int, hosted: str, method: str, pieces: list[bytes], options: CallOptions
    ) -> None:
        if not hosted:
            return  # asks what a call waits for that takes long
        asked.append((worker, hosted, method, len(pieces), options.rank))
        if at_once:
            a.answer_foreign_call(token, number, True, pack_portable("at once"))
            return
        future = b.call_pickled(worker, hosted, method, pieces)
        future.add_done_callback(lambda done: a.answer_foreign_call(token, number, *done.result(0)))

    a.on_foreign_call = pass_on
    expected = "at once" if at_once else "2:hello"
    assert scene.answer(a.call_pickled(1, "it", "ask", arguments(2, text="hello"))) == (True, expected)
    assert asked == [(2, "it", "hear", 1, 0)]
    if not at_once:
        assert scene.answer(a.call_pickled(1, "it", "ask", arguments(2, "bad"))) == (True, "ValueError: bad word")
        (_, message) = scene.answer(a.call_pickled(1, "it", "ask", arguments(2, "die")))
        assert message == "WorkerLostError: worker 2 is gone"


def test_large_arguments_and_results_are_forwarded_in_pieces(scene: Scene) -> None:
    a, b = scene.agent(), scene.agent()
    scene.ready(a, 1, TALKS)
    scene.ready(b, 2, TALKS)
    sizes: list[list[int]] = []

    def pass_on(
        token: int, number: int, worker: int, hosted: str, method: str, pieces: list[bytes], _options: CallOptions
    ) -> None:
        if not hosted:
            return  # as above

        def answer(done: Future[tuple[bool, list[bytes]]]) -> None:
            fine, found = done.result(0)
            sizes.append([len(piece) for piece in found])
            a.answer_foreign_call(token, number, fine, found)

        sizes.append([len(piece) for piece in pieces])
        b.call_pickled(worker, hosted, method, pieces).add_done_callback(answer)

    a.on_foreign_call = pass_on
    text = "ab" * (PIECE_BYTES - 7)
    assert scene.answer(a.call_pickled(1, "it", "ask", arguments(2, text))) == (True, f"2:{text}")
    for pieces in sizes:
        assert max(pieces) == PIECE_BYTES
        assert len(text) < sum(pieces) < len(text) + 1000


def connect(*engines: LocalEngine) -> None:
    """Pass calls between workers of two engines on, and their cancellation."""
    running: dict[tuple[int, int], Future[Any]] = {}

    def forward(one: LocalEngine, other: LocalEngine) -> None:
        def call(
            token: int, number: int, worker: int, hosted: str, method: str, pieces: list[bytes], options: CallOptions
        ) -> None:
            def answer(done: Future[tuple[bool, list[bytes]]]) -> None:
                if not done.cancelled():
                    one.answer_foreign_call(token, number, *done.result(0))

            running[token, number] = other.call_pickled(worker, hosted, method, pieces, options)
            running[token, number].add_done_callback(answer)

        one.on_foreign_call = call
        one.on_foreign_cancel = lambda token, number: running[token, number].cancel()

    one, other = engines
    forward(one, other)
    forward(other, one)


@pytest.mark.parametrize("workers", [(2, 1), (2, 3, 1), (3, 2, 1)])
def test_a_cycle_of_calls_across_nodes_fails_and_is_named(scene: Scene, workers: tuple[int, ...]) -> None:
    """Workers 1 and 3 are on one node, worker 2 is on another one."""
    a, b = scene.agent(), scene.agent()
    connect(a, b)
    for engine, worker in ((a, 1), (b, 2), (a, 3)):
        scene.ready(engine, worker, TALKS)
    fine, error = scene.answer(a.call_pickled(1, "it", "chain", arguments(*workers)))
    assert fine
    assert "calls wait for each other" in error
    assert all(f"it (worker {worker})" in error for worker in workers)
    assert scene.answer(a.call_pickled(1, "it", "chain", arguments(*workers[:-1]))) == (True, "end")


def test_the_cancellation_of_a_call_to_another_node_is_forwarded(scene: Scene, tmp_path: Path) -> None:
    a, b = scene.agent(), scene.agent()
    connect(a, b)
    scene.ready(a, 1, TALKS)
    scene.ready(b, 2, TALKS)
    path = tmp_path / "held"
    assert scene.answer(a.call_pickled(1, "it", "abandon", arguments(2, str(path)))) == (True, True)
    scene.until(lambda: Path(f"{path}.cancelled").exists(), "the method is cancelled")
    assert scene.answer(b.call_pickled(2, "it", "hear", arguments("x"))) == (True, "2:x")


def test_a_call_to_a_worker_of_the_same_node_is_not_forwarded(scene: Scene) -> None:
    engine = scene.agent()
    scene.ready(engine, 1, TALKS)
    scene.ready(engine, 2, TALKS)
    engine.on_foreign_call = lambda *_: pytest.fail("it is not for others")
    assert scene.answer(engine.call_pickled(1, "it", "ask", arguments(2, "hello"))) == (True, "2:hello")


def test_without_other_nodes_a_call_to_an_unknown_worker_fails(scene: Scene) -> None:
    engine = scene.agent()
    scene.ready(engine, 1, TALKS)
    assert scene.answer(engine.call_pickled(1, "it", "ask", arguments(2, "x"))) == (
        True,
        "CallNotSentError: worker 2 is gone",
    )


def test_a_call_to_a_gang_goes_to_the_node_of_its_first_rank(scene: Scene) -> None:
    engine = scene.agent()
    asked: list[int] = []

    def pass_on(token: int, number: int, worker: int, hosted: str, *_: object) -> None:
        if not hosted:
            return  # as above
        asked.append(worker)
        engine.answer_foreign_call(token, number, True, pack_portable("from rank 0"))

    engine.on_foreign_call = pass_on
    scene.ready(engine, 1, TALKS)
    engine.start_ranks(StartWorker(2, GANG_SEATS, (TALKS,)), (2, 3), ("127.0.0.1", 1))
    scene.wait_for(engine, WorkerReady, 2)
    assert scene.answer(engine.call_pickled(1, "it", "ask", arguments(2, "x"))) == (True, "from rank 0")
    assert asked == [2]


def test_a_pickled_call_ends_with_pickled_results_and_errors(scene: Scene) -> None:
    engine = scene.agent()
    scene.ready(engine, 1, TALKS)
    fine, error = scene.answer(engine.call_pickled(1, "it", "hear", arguments("bad")))
    assert (fine, type(error), str(error)) == (False, ValueError, "bad word")
    fine, error = scene.answer(engine.call_pickled(99, "it", "hear", arguments("x")))
    assert (fine, isinstance(error, WorkerLostError)) == (False, True)
    fine, error = scene.answer(engine.call_pickled(1, "nobody", "hear", arguments("x")))
    assert (fine, type(error)) == (False, LookupError)
    waiting = engine.call_pickled(1, "it", "wait", arguments())
    engine.end_worker(1, LossCause.OUT_OF_MEMORY, "the node was full")
    fine, error = scene.answer(waiting)
    assert (fine, type(error)) == (False, WorkerLostError)


def test_calls_and_answers_between_two_polls_are_sent_at_once(scene: Scene) -> None:
    """They are not delayed until the next poll ends, which may wait for long."""
    engine = scene.agent()
    tokens: list[tuple[int, int]] = []

    def forward(token: int, number: int, _worker: int, hosted: str, *_: object) -> None:
        if hosted:  # otherwise as above
            tokens.append((token, number))
            engine.nudge()

    engine.on_foreign_call = forward
    scene.ready(engine, 1, TALKS)
    began = time.monotonic()
    call = engine.call_pickled(1, "it", "ask", arguments(2, "x"))
    call.add_done_callback(lambda _: engine.nudge())
    engine.poll(PATIENCE_S)
    engine.answer_foreign_call(*tokens[0], True, pack_portable("hello"))
    engine.poll(PATIENCE_S)
    assert call.done()
    assert time.monotonic() - began < PATIENCE_S


def test_an_answer_for_an_exited_process_is_ignored(scene: Scene) -> None:
    engine = scene.agent()
    tokens: list[tuple[int, int]] = []
    engine.on_foreign_call = lambda token, number, *_: tokens.append((token, number))
    scene.ready(engine, 1, TALKS)
    engine.call_pickled(1, "it", "ask", arguments(2, "x"))
    scene.until(lambda: tokens, "the call is forwarded")
    engine.end_worker(1, LossCause.OUT_OF_MEMORY, "the node was full")
    scene.lost(engine, 1)
    engine.answer_foreign_call(*tokens[0], True, pack_portable("late"))
    scene.ready(engine, 3, TALKS)
    assert scene.answer(engine.call_pickled(3, "it", "hear", arguments("on"))) == (True, "3:on")


# In a Ray worker process


AGENT = """
import json, os, sys, time
import cloudpickle, ray
import dovetail as dt
from dovetail.control.commands import HostedObject, RunBatches, StartWorker
from dovetail.control.events import BatchesDone, WorkerLost
from dovetail.engines.local.engine import LocalEngine
from dovetail.engines.local.code_pickle import pickle_hosted
from dovetail.engines.local.worker_spec import DriverContext
from dovetail.resources.seat import Seat

class Looks:
    def __call__(self, items):
        return [getattr(self, item)() for item in items]

    def environment(self):
        return dict(os.environ)

    def place(self):
        return os.getcwd(), list(sys.path), os.getpid()  # importing ray changes it

    def breakpoint(self):
        return sys.breakpointhook.__module__

    def cluster(self):
        import ray
        ray.init(log_to_driver=False, logging_level="ERROR")
        return ray.get_runtime_context().gcs_address, sorted(node["NodeID"] for node in ray.nodes())

@ray.remote(num_cpus=0)
class Agent:
    def __init__(self, driver_context):
        self.engine = LocalEngine(driver_context=driver_context)

    def run(self, hosted, items):
        engine = self.engine
        engine.submit([StartWorker(1, (Seat("here", 3000),), (hosted,))])
        segment = engine.store(range(len(items)), items)
        engine.submit([RunBatches(1, 1, "it", [(segment, 0, len(items))], len(items), 1, 100)])
        while True:
            for event in engine.poll(1.0):
                if isinstance(event, WorkerLost) or getattr(event, "failures", None):
                    raise RuntimeError(str(event))
                if isinstance(event, BatchesDone):
                    found = [item for segment in event.segments for item in engine.load(segment)[1]]
                    return os.getpid(), dict(os.environ), found

os.environ["OURS"] = "1"
ray.init(address=os.environ["DOVETAIL_TEST_RAY"], log_to_driver=False, logging_level="ERROR")
address = ray.get_runtime_context().gcs_address
driver_context = DriverContext(tuple(sys.path), os.getcwd(), {"RAY_ADDRESS": address, "FROM_DRIVER": "yes"})
cloudpickle.register_pickle_by_value(sys.modules["__main__"])
hosted = HostedObject("it", pickle_hosted(HostedObject("it", (dt.Stage("it", Looks),))))
agent = Agent.remote(driver_context)
pid, of_agent, found = ray.get(agent.run.remote(hosted, ["environment", "place", "breakpoint", "cluster"]))
nodes = sorted(node["NodeID"] for node in ray.nodes())
print("FOUND", json.dumps([pid, of_agent, *found, address, nodes]), "END", flush=True)
time.sleep(1000)
"""


@pytest.mark.ray
def test_workers_of_an_agent_are_no_ray_workers_but_can_connect_to_its_cluster(
    ray_cluster: FakeCluster, tmp_path: Path
) -> None:
    with driver(ray_cluster, tmp_path, AGENT) as script:
        script.says("END")
        found_text = script.output.partition("FOUND ")[2].partition(" END")[0]
        agent, of_agent, child, (folder, path, pid), hook, cluster, address, nodes = json.loads(found_text)
        assert {"RAY_JOB_ID", "RAY_RAYLET_PID", "PYTHONBREAKPOINT"} <= set(of_agent), "else nothing is tested"
        assert of_agent["OMP_NUM_THREADS"] == "1"
        ours = {name: value for name, value in child.items() if of_agent.get(name) != value}
        assert {name: ours.get(name) for name in ("FROM_DRIVER", "RAY_ADDRESS", "OMP_NUM_THREADS")} == {
            "FROM_DRIVER": "yes",
            "RAY_ADDRESS": address,
            "OMP_NUM_THREADS": "3",
        }
        assert not {"RAY_JOB_ID", "RAY_RAYLET_PID", "PYTHONBREAKPOINT", "SPT_NOENV", "OURS"} & set(child)
        assert (folder, path[0]) == (str(tmp_path), str(tmp_path))
        assert not [entry for entry in path if "/site-packages/ray/" in entry], "packages that only Ray should find"
        assert hook == "sys"
        assert cluster == [address, nodes], "code of a worker that uses Ray joins the same cluster"
        os.kill(agent, signal.SIGKILL)
        until(lambda: not is_there(pid), "nothing is left of the workers of an agent that was killed")
