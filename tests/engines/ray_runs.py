"""Fixtures that run tests of the local engine on Ray, and a Ray engine without a run."""

from __future__ import annotations

import os
import sys
import uuid
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.control.commands import HostedObject, RunBatches, StartWorker
from dovetail.control.events import BatchesDone, WorkerLost, WorkerReady
from dovetail.resources.cluster import Node
from dovetail.resources.seat import Seat
from ray_aids import until_available_is
from runtime.aids import MARK, PLACE, marked_pids
from waiting import knows_pids, time_limit, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from dovetail.control.events import Event
    from dovetail.engines.ray.engine import RayEngine
    from ray_aids import FakeCluster

NODES = ("a", "d")
SHARE = 0.5
"""A worker or so per node: there are more CPUs than cores."""


def use_only_nodes(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Hide all other nodes from runs of this process: each node costs an agent."""
    import ray

    real = ray.nodes
    ids = {cluster.nodes[name].node_id for name in names}
    monkeypatch.setattr(ray, "nodes", lambda: [row for row in real() if row["NodeID"] in ids])


@pytest.fixture
def on_ray(ray_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """Run everything that `run_of` starts on two nodes; afterwards no process is left and all resources are free."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)  # variables with this prefix are sent to workers
    use_only_nodes(ray_cluster, monkeypatch, *NODES)
    for name, value in {"engine": f"ray:{ray_cluster.address}", "cluster": "auto", "share": SHARE}.items():
        monkeypatch.setitem(PLACE, name, value)
    before = ray_cluster.available()
    with time_limit():
        yield ray_cluster
    nothing_is_left(mark)
    until_available_is(ray_cluster, before)


def nothing_is_left(mark: str) -> None:
    until(lambda: set(marked_pids(mark)) <= {os.getpid()}, "no process is left")


def agent_pids(engine: RayEngine) -> dict[str, int]:
    """Node -> process id of its agent."""
    links = [link for link in engine.agents.links() if not link.lost_reason]
    return {link.node: link.hello.pid for link in links if link.hello is not None}


class RayEngineScene:
    """A Ray engine on some nodes without a run, and the log of its events."""

    def __init__(self, cluster: FakeCluster, folder: Path, *nodes: str, **more: Any) -> None:
        from dovetail.engines.local.worker_spec import DriverContext
        from dovetail.engines.ray.agent_pool import RayRunContext
        from dovetail.engines.ray.attachment import RayAddress, attach
        from dovetail.engines.ray.engine import RayEngine
        from dovetail.engines.ray.shared_storage import write_marker

        attach(RayAddress.parse(f"ray:{cluster.address}"))
        self.mark = uuid.uuid4().hex
        driver_context = DriverContext(tuple(sys.path), os.getcwd(), {MARK: self.mark})  # noqa: PTH109
        ids = {name: cluster.nodes[name].node_id for name in nodes}
        known = {name: Node(name, 4000) for name in nodes}
        self.engine = RayEngine(
            folder, RayRunContext("bench", known, ids, driver_context, write_marker(folder), **more)
        )
        self.log: list[Event] = []
        self._numbers = count(1)

    def close(self) -> None:
        self.engine.close()
        nothing_is_left(self.mark)

    def start(self, worker: int, work: object, *nodes: str, slots: int = 1) -> None:
        """Start a worker with one rank per node."""
        seats = tuple(Seat(node, 100) for node in nodes)
        self.engine.submit([StartWorker(worker, seats, (HostedObject("it", work, slots),))])

    def ready(self, worker: int, work: object, *nodes: str, slots: int = 1) -> None:
        self.start(worker, work, *nodes, slots=slots)
        self.wait_for_event(WorkerReady, worker)
        self.until(lambda: knows_pids(self.engine, worker, max(1, len(nodes))))

    def until(self, condition: Callable[[], object]) -> None:
        def look() -> bool:
            self.log += self.engine.poll(0.02)
            return bool(condition())

        until(look, f"an event arrives; {self.log}")

    def wait_for_event(self, kind: type[Event], worker: int) -> Any:
        def found() -> list[Event]:
            return [event for event in self.log if isinstance(event, kind) and getattr(event, "worker", 0) == worker]

        self.until(found)
        return found()[0]

    def lost(self, worker: int) -> WorkerLost:
        found: WorkerLost = self.wait_for_event(WorkerLost, worker)
        return found

    def send(self, worker: int, items: list[Any], batch_size: int = 1) -> int:
        segment = self.engine.store(range(len(items)), items)
        return self.pass_on(worker, [(segment, 0, len(items))], batch_size)

    def pass_on(self, worker: int, parts: Any, batch_size: int = 1) -> int:
        """Send segments to a worker, also output of another worker."""
        message = next(self._numbers)
        items = sum(stop - start for _, start, stop in parts)
        self.engine.submit([RunBatches(message, worker, "it", parts, items, batch_size, 100)])
        return message

    def answer(self, message: int) -> BatchesDone:
        def found() -> list[BatchesDone]:
            return [event for event in self.log if isinstance(event, BatchesDone) and event.message == message]

        self.until(found)
        return found()[0]

    def done(self, message: int) -> list[Any]:
        done = self.answer(message)
        assert done.failures == []
        return [item for segment in done.segments for item in self.engine.load(segment)[1]]

    def result(self, future: Future[Any]) -> Any:
        self.until(future.done)
        return future.result(0)
