"""Helpers of the tests of the simulated engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.control.commands import HostedObject, RunBatches, StartWorker
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.engines.simulated.world import (
    Behaviour,
    World,
)
from dovetail.resources.cluster import Cluster
from dovetail.resources.seat import Seat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.control.events import (
        Event,
    )

NODES = Cluster.parse("4x(64cpu)")
HOUR_S = 3600.0


def engine_of(behaviour: Behaviour, *, workers: int = 0, **world: Any) -> SimulatedEngine:
    """An engine with some workers of unit "a", spread over the nodes, all requested at time 0."""
    engine = SimulatedEngine(World({"a": behaviour}, **{"hop_s": 0.0, **world}), NODES)
    engine.submit([start(worker, f"node-{worker % 4}") for worker in range(workers)])
    return engine


def start(worker: int, *nodes: str, slots: int = 1) -> StartWorker:
    return StartWorker(worker, tuple(Seat(node, 100) for node in nodes), (HostedObject("a", slots=slots),))


def message(
    engine: SimulatedEngine,
    number: int,
    worker: int,
    items: int,
    *,
    batch_size: int = 1,
    cut: int = 100,
    node: str = "",
) -> RunBatches:
    keys: Any = [(n,) for n in range(items)] if engine.world.tracked else None
    part = (engine.new_segment(items, 0, node, keys), 0, items)
    return RunBatches(number, worker, "a", [part], items, batch_size, cut)


def all_events(engine: SimulatedEngine, until_s: float) -> list[tuple[float, Event]]:
    log: list[tuple[float, Event]] = []
    while engine.now() < until_s:
        events = engine.poll(until_s - engine.now())
        log += [(engine.now(), event) for event in events]
    return log


def the(kind: type[Any], log: Sequence[tuple[float, Event]]) -> list[Any]:
    return [event for _, event in log if isinstance(event, kind)]
