"""Features of workers on Ray, on one node and across nodes: slots, gangs, calls, variables, large payloads, use of
Ray."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import dovetail as dt
from dovetail.control.commands import HostedObject, StartWorker, StopWorker
from dovetail.control.engine import CallOptions, WorkerLostError
from dovetail.control.events import BatchesReturned, LossCause, WorkerReady, WorkerStopped
from dovetail.resources.seat import CardShare, Seat
from engines import socket_group, test_local_faults, test_local_gangs, test_worker_environment
from engines.ray_runs import RayEngineScene, agent_pids, on_ray
from engines.socket_group import SocketGroup
from engines.test_local_faults import test_only_results_that_cannot_be_pickled_are_recorded_as_failed
from engines.test_local_gangs import GangCards, Talks, TorchGroup
from engines.test_worker_environment import (
    CLASSES,
    CLUSTER,
    Together,
    TogetherAwaited,
    speaks,
)
from ray_aids import ADDRESS, driver
from runtime.aids import is_there, run_of
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ray_aids import FakeCluster

__all__ = ["on_ray", "test_only_results_that_cannot_be_pickled_are_recorded_as_failed"]
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("on_ray", "by_value")]
BY_VALUE = (socket_group, test_local_faults, test_local_gangs, test_worker_environment)
MB = 1 << 20


@pytest.fixture(scope="module")
def bench(ray_cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayEngineScene]:
    made = RayEngineScene(ray_cluster, tmp_path_factory.mktemp("bench"), "a", "d")
    yield made
    made.close()


# Slots and async


def test_slots_and_async_stages_run_one_call_per_slot_at_once() -> None:
    stages = [
        dt.Stage("threads", Together(3), slots=3, workers=1, fuse=False),
        dt.Stage("awaited", TogetherAwaited(5), slots=5, workers=1, fuse=False),
    ]
    found = list(run_of(*stages, source=range(60)))
    assert sorted(item for (item, _), _ in found) == list(range(60))
    assert max(most for (_, most), _ in found) == 3
    assert max(most for _, most in found) == 5


# Gangs


class Meets:
    """Ranks connect at MASTER_ADDR and MASTER_PORT, as torch does, and exchange their values."""

    def setup(self, worker: Any) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        assert (worker.rank, worker.ranks) == (self.rank, self.ranks)
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR")
        self.about = {name: os.environ[name] for name in names} | {"node": worker.node, "rank": self.rank}
        self.group = SocketGroup()

    def __call__(self, items: list[Any]) -> list[Any]:
        """Rank 0 returns the variables and items of all ranks."""
        if "raise" in items and self.rank == self.ranks - 1:
            raise ValueError(f"rank {self.rank} does not like it")
        if "raise" in items:
            return items
        if "die" in items and self.rank == self.ranks - 1:
            os._exit(7)
        everyone = self.group.exchange([self.about, items])
        return [everyone] * len(items)

    def who(self) -> int:
        return self.rank


@pytest.mark.parametrize("nodes", ["dd", "ad", "ada"], ids=["one node", "two nodes", "three ranks on two nodes"])
def test_the_ranks_of_a_gang_connect(bench: RayEngineScene, nodes: str) -> None:
    worker = 200 + len(nodes) + ("a" in nodes)
    bench.ready(worker, Meets, *nodes)
    (first, second) = bench.done(bench.send(worker, ["x", "y"]))
    assert [about[1] for about in first] == [["x"]] * len(nodes)
    assert [about[1] for about in second] == [["y"]] * len(nodes)
    about = sorted((about for about, _ in first), key=lambda about: int(about["rank"]))
    assert [one["node"] for one in about] == list(nodes)
    groups = list(dict.fromkeys(nodes))
    for rank, one in enumerate(about):
        assert one["rank"] == rank
        assert one["LOCAL_RANK"] == str(nodes[:rank].count(nodes[rank]))
        assert one["LOCAL_WORLD_SIZE"] == str(nodes.count(nodes[rank]))
        assert one["GROUP_RANK"] == one["NODE_RANK"] == str(groups.index(nodes[rank]))
    assert len({one["MASTER_ADDR"] for one in about}) == 1
    assert bench.result(bench.engine.call(worker, "it", "who")) == 0
    calls = [bench.engine.call_with(CallOptions(rank=rank), worker, "it", "who") for rank in range(len(nodes))]
    assert [bench.result(call) for call in calls] == list(range(len(nodes)))
    bench.engine.submit([StopWorker(worker)])
    bench.wait_for_event(WorkerStopped, worker)


@pytest.mark.parametrize("group", [SocketGroup, pytest.param(TorchGroup, marks=pytest.mark.long)])
def test_the_ranks_of_a_node_see_the_same_cards_in_the_same_order(bench: RayEngineScene, group: type[Any]) -> None:
    """Two of the three ranks are on one node. Cards have the names that Ray gave to their positions."""
    worker = 220 + (group is SocketGroup)
    cards = [("d", 1), ("a", 0), ("d", 0)]
    seats = tuple(Seat(node, 100, cards=(CardShare(card, 1000),)) for node, card in cards)
    bench.engine.submit([StartWorker(worker, seats, (HostedObject("it", GangCards(group)),))])
    bench.wait_for_event(WorkerReady, worker)
    (ranks,) = bench.done(bench.send(worker, [0]))
    assert ranks == [[0, 0, "1,0", [0]], [1, 0, "0", [0]], [2, 1, "1,0", [1]]]
    bench.engine.submit([StopWorker(worker)])
    bench.wait_for_event(WorkerStopped, worker)


def test_the_ranks_of_a_gang_on_two_nodes_end_together(bench: RayEngineScene) -> None:
    bench.ready(210, Meets, "a", "d")
    pids = bench.engine.processes()[210][1]
    assert len(pids) == 2
    done = bench.answer(bench.send(210, ["x", "raise", "y"]))
    assert {failure.error for failure in done.failures} == {"ValueError: rank 1 does not like it"}
    assert done.segments == []
    message = bench.send(210, ["die"])
    lost = bench.lost(210)
    assert (lost.cause, "exit code 7" in lost.detail) == (LossCause.EXIT, True)
    assert message in {crumb.message for crumb in lost.breadcrumbs}
    bench.until(lambda: not any(map(is_there, pids)))


def test_a_run_on_a_share_of_the_cluster_has_a_gang_across_nodes() -> None:
    gang = dt.Stage("gang", Meets, dt.Resources(cpus=2), ranks=2, workers=1)
    found = list(run_of(gang, source=["x"] * 20))
    assert len(found) == 20
    assert {len({about["node"] for about, _ in all_ranks}) for all_ranks in found} == {2}


# Calls


def test_workers_call_each_other_on_one_node_and_across_nodes(bench: RayEngineScene) -> None:
    for worker, node in ((301, "a"), (302, "d"), (303, "d")):
        bench.start(worker, Chats, node, slots=2)
    for asks, asked in ((301, 302), (302, 301), (302, 303), (303, 303)):
        assert bench.done(bench.send(asks, [(asked, "hello"), (asked, "bad")])) == [
            f"{asked}:hellohello",
            "ValueError: bad word",
        ]
    assert bench.result(bench.engine.call(303, "it", "ask", 301, "ho")) == "301:hoho"
    assert bench.done(bench.send(301, [(99, "x")]))[0].startswith("gone: ")


def test_large_calls_across_nodes(bench: RayEngineScene) -> None:
    data = b"y" * (3 * MB)
    assert bench.result(bench.engine.call(301, "it", "sizes", 302, data, 20)) == [len(data)] * 20
    assert bench.result(bench.engine.call(301, "it", "lengths", 302, 3 * MB, 20)) == [3 * MB] * 20
    assert len(bench.result(bench.engine.call(302, "it", "large", 20 * MB))) == 20 * MB


def test_slow_calls_across_nodes_do_not_delay_others(bench: RayEngineScene) -> None:
    """Calls to other workers succeed while many calls wait for a busy worker."""
    bench.start(310, Chats, "a", slots=50)
    bench.start(311, Chats, "d", slots=40)
    bench.start(312, Chats, "d", slots=2)
    assert bench.result(bench.engine.call(310, "it", "many_wait", 311, 312, 40)) == ["312:quick"] + ["311:waited"] * 40


class Numbered:
    """Calls the same method of another worker many times, without waiting, with small and large arguments."""

    def setup(self, worker: Any) -> None:
        self._worker = worker
        self._received: list[int] = []

    def receive(self, number: int, data: bytes) -> None:
        self._received.append(number)

    def received(self) -> list[int]:
        return self._received

    def send(self, worker: int, count: int) -> list[int]:
        sizes = [500_000 if number % 3 == 0 else 10 for number in range(count)]
        calls = [self._worker.call(worker, "it", "receive", number, bytes(size)) for number, size in enumerate(sizes)]
        for call in calls:
            call.result(PATIENCE_S)
        found: list[int] = self._worker.call(worker, "it", "received").result(PATIENCE_S)
        return found


def test_calls_across_nodes_arrive_in_the_order_made_also_at_a_worker_that_is_starting(bench: RayEngineScene) -> None:
    bench.ready(330, Numbered, "a")
    bench.start(331, Numbered, "d")
    assert bench.result(bench.engine.call(330, "it", "send", 331, 60)) == list(range(60))
    bench.engine.submit([StopWorker(330), StopWorker(331)])
    bench.wait_for_event(WorkerStopped, 331)


def test_a_call_across_nodes_raises_worker_lost_error_when_its_worker_dies(bench: RayEngineScene) -> None:
    bench.start(321, Chats, "a")
    bench.start(322, Chats, "d")
    (outcome,) = bench.done(bench.send(321, [(322, "die")]))
    assert outcome.startswith("gone: ")
    assert bench.lost(322).cause is LossCause.SIGNAL
    assert bench.done(bench.send(321, [(322, "again")]))[0].startswith("gone: ")


def test_a_call_across_nodes_raises_worker_lost_error_when_the_agent_dies(bench: RayEngineScene) -> None:
    bench.ready(331, Chats, "a", slots=2)
    bench.ready(332, Chats, "d", slots=2)
    call = bench.engine.call(331, "it", "wait_for", 332)
    bench.until(lambda: bench.result(bench.engine.call(332, "it", "waiting")))
    os.kill(agent_pids(bench.engine)["d"], signal.SIGKILL)
    assert bench.result(call).startswith("gone: ")
    assert bench.lost(332).cause is LossCause.NODE_LOST


def test_a_message_whose_input_is_lost_with_an_agent_is_returned(bench: RayEngineScene) -> None:
    bench.ready(341, return_items, "a")
    bench.ready(342, return_items, "d")
    bench.ready(343, return_items, "d", "d")
    made = bench.answer(bench.send(341, ["x"]))
    os.kill(agent_pids(bench.engine)["a"], signal.SIGKILL)
    parts = [(segment, 0, segment.items) for segment in made.segments]
    for worker in (342, 343):  # before and after its loss is known
        message = bench.pass_on(worker, parts)
        assert bench.wait_for_event(BatchesReturned, worker).message == message
        bench.lost(341)
        assert bench.done(bench.send(worker, ["y"])) == ["y"]


class Chats(Talks):
    """The same object, hosted under another name."""

    def ask(self, worker: int, text: str) -> Any:
        try:
            return self.worker.call(worker, "it", "hear", text, times=2).result(60)
        except WorkerLostError as error:
            return f"gone: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def sizes(self, worker: int, data: bytes, count: int) -> list[int]:
        futures = [self.worker.call(worker, "it", "size", data) for _ in range(count)]
        return [future.result(60) for future in futures]

    def lengths(self, worker: int, size: int, count: int) -> list[int]:
        futures = [self.worker.call(worker, "it", "large", size) for _ in range(count)]
        return [len(future.result(60)) for future in futures]

    def setup(self, worker: Any) -> None:
        super().setup(worker)
        import threading

        self.go = threading.Event()
        self.waits = 0

    def wait_for(self, worker: int) -> str:
        try:
            return str(self.worker.call(worker, "it", "wait").result(60))
        except WorkerLostError as error:
            return f"gone: {error}"

    def waiting(self) -> bool:
        return self.waits > 0

    def wait(self) -> str:
        self.waits += 1
        assert self.go.wait(PATIENCE_S), "it was not released"
        return f"{self.worker.id}:waited"

    def let_go(self) -> None:
        self.go.set()

    def many_wait(self, busy: int, other: int, count: int) -> list[str]:
        waiting = [self.worker.call(busy, "it", "wait") for _ in range(count - 1)]
        quick = self.worker.call(other, "it", "hear", "quick").result(PATIENCE_S)
        last = self.worker.call(busy, "it", "let_go_and_wait")
        return [quick, *(future.result(60) for future in (*waiting, last))]

    def let_go_and_wait(self) -> str:
        self.go.set()
        return self.wait()


# Variables


def variables(items: list[str]) -> list[tuple[str, str | None]]:
    return [(item, os.environ.get(item)) for item in items]


def test_variables_come_from_the_driver_the_stage_and_its_runtime_env(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage with a runtime_env has its own agent."""
    given = {"LOG_LEVEL": "all", "HF_HOME": "/hf", "MINE": "named", "OTHER": "not", "CUDA_VISIBLE_DEVICES": "0,1"}
    for name, value in {**given, "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    names = [*given, "RANK", "COLOUR", "SHAPE", "pid"]
    stages = [
        dt.Stage("plain", sees(names), workers=1, fuse=False),
        dt.Stage("own", sees(names), workers=1, fuse=False, env={"COLOUR": "blue"}),
        dt.Stage("apart", sees(names), workers=1, fuse=False, runtime_env={"env_vars": {"SHAPE": "round"}}),
    ]
    run = run_of(*stages, source=[[]], env_from=["MINE"])
    (((plain, own, apart)),) = list(run)
    sent = {
        "LOG_LEVEL": "all",
        "HF_HOME": "/hf",
        "MINE": "named",
        "OTHER": None,
        "CUDA_VISIBLE_DEVICES": "",
        "RANK": None,
    }
    agents = {plain.pop("pid"), own.pop("pid")}, {apart.pop("pid")}
    assert plain == {**sent, "COLOUR": None, "SHAPE": None}
    assert own == {**sent, "COLOUR": "blue", "SHAPE": None}
    assert apart == {**sent, "COLOUR": None, "SHAPE": "round"}
    assert not agents[0] & agents[1]


class sees:  # noqa: N801 - as a function
    """Adds these variables and the pid of its agent to each item."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __call__(self, items: list[Any]) -> list[Any]:
        import psutil

        found = dict(variables(self._names))
        agent = next(one.pid for one in psutil.Process().parents() if "ray::" in " ".join(one.cmdline()))
        return [[*item, {**found, "pid": agent}] for item in items]


@pytest.mark.parametrize("where", ["setup", "call"])
def test_a_variable_that_only_the_driver_has_is_a_hint(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    run = run_of(dt.Stage("needs", Needs(where), retries=0), source=range(3))
    with pytest.raises(dt.RunError) as caught:
        list(run)
    assert 'env_from=["MY_TOKEN"] or --env-from MY_TOKEN' in str(caught.value)
    assert "secret" not in str(caught.value)


class Needs:
    def __init__(self, where: str) -> None:
        self._where = where

    def setup(self) -> None:
        if self._where == "setup":
            os.environ["MY_TOKEN"]

    def __call__(self, items: list[int]) -> list[str]:
        return [os.environ["MY_TOKEN"] for _ in items]


@pytest.mark.parametrize(
    ("runtime_env", "why"),
    [
        ({"working_dir": "/no/such/folder"}, "/no/such/folder is not"),
        ({"working_dir": "/tmp"}, "ray.init(runtime_env="),
        ({"py_modules": ["/tmp"]}, "s3://bucket/code.zip"),
        ({"conda": "no-such-env"}, "conda"),
    ],
    ids=["seen at once", "a folder", "a module", "seen on the node"],
)
def test_a_runtime_env_that_cannot_be_created_fails_the_run_with_the_reason(
    runtime_env: dict[str, Any], why: str
) -> None:
    with pytest.raises(dt.DovetailError, match="DT403") as caught:
        list(run_of(dt.Stage("apart", variables, runtime_env=runtime_env), source=["x"]))
    assert "'apart'" in str(caught.value)
    assert why in str(caught.value)


# Ray in a stage


class UsesRay:
    def setup(self) -> None:
        import ray

        ray.init(log_to_driver=False, logging_level="ERROR")

    def __call__(self, items: list[int]) -> list[tuple[int, str]]:
        import ray

        double = ray.remote(num_cpus=0)(lambda item: 2 * item)
        address = ray.get_runtime_context().gcs_address
        return [(found, address) for found in ray.get([double.remote(item) for item in items])]


def test_stage_code_may_use_the_same_ray(ray_cluster: FakeCluster) -> None:
    found = sorted(run_of(dt.Stage("ray", UsesRay, batch_size=5, workers=1), source=range(10)))
    assert found == [(2 * number, ray_cluster.address) for number in range(10)]


def track(items: list[int]) -> list[str]:
    import ray

    ray.get(ray.get_actor("tracker").add.remote(items))
    return [ray.get_runtime_context().namespace]


def test_stage_code_finds_the_named_actors_of_the_driver(ray_cluster: FakeCluster) -> None:
    """It needs no ray.init: Ray connects on first use."""
    import ray

    from dovetail.engines.ray.attachment import RayAddress, attach

    attach(RayAddress.parse(f"ray:{ray_cluster.address}"))

    class Tracker:  # here, so that it is sent by value: Ray's processes cannot import tests
        def __init__(self) -> None:
            self._items: list[int] = []

        def add(self, items: list[int]) -> None:
            self._items += items

        def items(self) -> list[int]:
            return self._items

    tracker = ray.remote(num_cpus=0)(Tracker).options(name="tracker").remote()
    try:
        (namespace,) = run_of(dt.Stage("track", track, batch_size=3, workers=1), source=range(3))
        assert namespace == ray.get_runtime_context().namespace
        assert ray.get(tracker.items.remote()) == [0, 1, 2]
    finally:
        ray.kill(tracker)


# Payloads


def arrays(items: list[int]) -> list[Any]:
    return [np.full(50 * MB // 8, item, dtype=np.float64) for item in items]


class Sums:
    def setup(self, worker: Any) -> None:
        self._node = worker.node

    def __call__(self, items: list[Any]) -> list[Any]:
        return [(self._node, float(item[0]), float(item[-1]), item.nbytes) for item in items]


@pytest.mark.long
def test_arrays_of_50_mb_within_a_node_and_between_nodes(bench: RayEngineScene) -> None:
    bench.start(401, arrays, "a")
    bench.start(402, Sums, "a")
    bench.start(403, Sums, "d")
    made = bench.answer(bench.send(401, [1, 2, 3]))
    assert made.failures == []
    parts = [(segment, 0, segment.items) for segment in made.segments]
    expected = [(float(number), float(number), 50 * MB) for number in (1, 2, 3)]
    assert bench.done(bench.pass_on(402, parts)) == [("a", *one) for one in expected]
    assert bench.done(bench.pass_on(403, parts)) == [("d", *one) for one in expected]
    assert bench.done(bench.pass_on(403, parts)) == [("d", *one) for one in expected]  # fetched payloads are reused


def test_arrays_of_50_mb_through_a_run() -> None:
    """Arrays are input, messages between stages, and output."""
    stages = [dt.Stage("pass", return_items, fuse=False), dt.Stage("again", return_items, fuse=False)]
    found = list(run_of(*stages, source=(np.full(50 * MB // 8, number, dtype=np.float64) for number in range(2))))
    assert sorted(float(array[-1]) for array in found) == [0.0, 1.0]


def return_items(items: list[Any]) -> list[Any]:
    return items


# A script, its folder, and the command line


ON_RAY = CLASSES.replace(CLUSTER, f'engine="ray:" + os.environ["{ADDRESS}"], share=0.5').replace(
    "import dataclasses,", "import dataclasses, os,"
)


def test_items_may_be_objects_of_classes_of_the_script(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    with driver(ray_cluster, tmp_path, ON_RAY) as script:
        assert script.finish() == "True 20\n"


def command(*arguments: str) -> str:
    import subprocess

    done = subprocess.run([sys.executable, "-m", "dovetail", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_on_ray_has_status_logs_and_trace(tmp_path: Path) -> None:
    def numbers() -> Iterator[int]:
        yield from range(40)
        while len(list((tmp_path / "run" / "logs").glob("*.log"))) < 3:  # late workers get an item, too
            yield 1

    run = run_of(dt.Stage("speak", speaks, workers=3), source=numbers(), run_dir=tmp_path / "run")
    list(run)
    folder = str(tmp_path / "run")
    logs = list((tmp_path / "run" / "logs").glob("*.log"))
    assert len(logs) == 3
    text = "".join(log.read_text() for log in logs)
    for line in ("out 0", "out 39", "err 1", "from a program 1"):
        assert line in text
    status = json.loads(command("status", folder, "--json"))
    assert status["status"] == "finished"
    assert "speak" in json.dumps(status)
    assert "finished" in command("status", folder)
    printed = command("logs", folder)
    assert "out 39" in printed
    assert " on node-" in printed
    command("trace", folder, "-o", str(tmp_path / "t.json"))
    traced = json.loads((tmp_path / "t.json").read_text())
    assert "node-" in json.dumps(traced)
