"""Running pipelines to replan: random ones for properties, and what becomes of one when a replan is carried out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st

import dovetail as dt
from dovetail.resources.ledger import Ledger
from dovetail.scheduling.packing import NodeFiller, group_nodes
from dovetail.scheduling.placement import Placer
from dovetail.scheduling.replan.snapshot import Snapshot, UnitSnapshot, WorkerPhase, WorkerSnapshot
from dovetail.scheduling.replan.steps import ReplanRules, replan
from scheduling.leftover_scores import BestFit
from scheduling.strategies import clusters, gangs, shapes

if TYPE_CHECKING:
    from dovetail.resources.cluster import Cluster
    from dovetail.resources.shape import Shape
    from dovetail.scheduling.replan.snapshot import Replan

RATES = (0.5, 1.0, 1.0, 2.0, 5.0)
RESOURCES = ((1, 0), (0.5, 0), (2, 0), (0.5, 0.25), (1, 0.5), (1, 1), (1, 2))
"""CPUs and GPUs."""


def shape(ranks: int = 1, *, cpus: float = 1, gpus: float = 0) -> Shape:
    return dt.Resources(cpus=cpus, gpus=gpus).shape(ranks)


def plain_shapes() -> st.SearchStrategy[Shape]:
    return st.builds(
        lambda asked, ranks: shape(ranks, cpus=asked[0], gpus=asked[1]),
        st.sampled_from(RESOURCES),
        st.sampled_from((1, 1, 1, 2)),
    )


def plain_clusters() -> st.SearchStrategy[Cluster]:
    specs = ("1x(8cpu, 2xgpu)", "2x(8cpu, 2xgpu)", "3x(6cpu, 4xgpu)", "2x(4cpu, 1xgpu) + 1x(12cpu)", "4x(4cpu)")
    return st.sampled_from(specs).map(dt.Cluster.parse)


@st.composite
def units(draw: st.DrawFn, name: str, of: st.SearchStrategy[Shape], *, calm: bool) -> UnitSnapshot:
    """A unit; a calm one has a rate, and nothing about it asks for more or less than its rate does."""
    low, high = draw(st.sampled_from(((1, None), (1, None), (1, None), (2, 2), (1, 3), (2, None))))
    unit = UnitSnapshot(
        name,
        draw(of),
        rate=draw(st.sampled_from(RATES)),
        per_source=draw(st.sampled_from((1.0, 1.0, 0.5, 2.0))),
        low=low,
        high=high,
        per_node=draw(st.sampled_from((None,) * 6 + (1,))),
        setup_s=draw(st.sampled_from((0.0, 0.0, 30.0))),
        drain_s=draw(st.sampled_from((0.0, 5.0))),
    )
    if calm:
        return unit
    return replace(
        unit,
        rate=draw(st.sampled_from((*RATES, None))),
        confidence=draw(st.sampled_from((1.0, 1.0, 0.2))),
        backlogged=draw(st.booleans()),
        queued=draw(st.sampled_from((0, 50))),
        starved_s=draw(st.sampled_from((0.0, 0.0, 10.0, 100.0))),
        finished=draw(st.sampled_from((False,) * 7 + (True,))),
    )


@st.composite
def snapshots(draw: st.DrawFn, *, plain: bool = False, calm: bool = False) -> Snapshot:
    """Any cluster, any units, and workers wherever there was room for them."""
    cluster = draw(plain_clusters() if plain else clusters())
    of = plain_shapes() if plain else st.one_of(plain_shapes(), shapes(), gangs(most_ranks=3))
    mine = tuple(draw(units(f"u{number}", of, calm=calm)) for number in range(draw(st.integers(0, 4))))
    placer = Placer(Ledger(cluster), BestFit(cluster))
    workers: list[WorkerSnapshot] = []
    wished = st.lists(st.integers(0, len(mine) - 1), max_size=14) if mine else st.just([])
    for number in draw(wished):
        other = draw(of) if not calm and draw(st.integers(0, 9)) == 0 else mine[number].shape
        seats = placer.place(other)
        if seats is not None:
            standing = draw(st.sampled_from((WorkerPhase.READY,) * 3 + (WorkerPhase.STARTING, WorkerPhase.DRAINING)))
            moveable = draw(st.integers(0, 9)) > 0
            standing, moveable = (WorkerPhase.READY, True) if calm else (standing, moveable)
            workers.append(WorkerSnapshot(len(workers), mine[number].name, seats, standing, moveable))
    return Snapshot(cluster, mine, tuple(workers), horizon_s=draw(st.sampled_from((60.0, 600.0, 1e5))))


def apply_replan(snapshot: Snapshot, result: Replan, standing: WorkerPhase = WorkerPhase.READY) -> Snapshot:
    """Snapshot after the replan: stopped and draining workers are gone, started ones are ready. Fails if a worker has
    no seat, or if the replan stops a worker that does not exist."""
    stops = {stop.worker for stop in result.stops}
    assert len(stops) == len(result.stops)
    by_number = {worker.worker: worker for worker in snapshot.workers}
    drains = {worker.worker for worker in snapshot.workers if worker.phase is WorkerPhase.DRAINING}
    assert stops <= set(by_number) - drains
    assert all(by_number[worker].movable for worker in stops)
    assert set(result.cancelled_drains) <= drains
    names = {node.name for node in snapshot.cluster.nodes}
    stay = [
        replace(worker, phase=WorkerPhase.READY)
        for worker in snapshot.workers
        if worker.worker not in stops | (drains - set(result.cancelled_drains)) and worker.seats[0].node in names
    ]
    first = max(by_number, default=-1) + 1
    come = [WorkerSnapshot(first + i, start.unit, start.seats, standing) for i, start in enumerate(result.starts)]
    workers = (*stay, *come)
    Ledger(snapshot.cluster, (seat for worker in workers for seat in worker.seats))
    return replace(snapshot, workers=workers)


def worker_counts(snapshot: Snapshot) -> dict[str, int]:
    return {unit.name: sum(worker.unit == unit.name for worker in snapshot.workers) for unit in snapshot.units}


def plan_from_empty(cluster: Cluster, mine: tuple[UnitSnapshot, ...]) -> Snapshot:
    """The pipeline as a replan from empty starts it."""
    empty = Snapshot(cluster, mine, ())
    return apply_replan(empty, replan(empty))


def max_workers(cluster: Cluster, of: Shape) -> int:
    """Number of workers of this shape that fit on the empty cluster, each within one node."""
    filler = NodeFiller(of)
    return sum(filler.capacity(free) // of.ranks * len(nodes) for free, nodes in group_nodes(Ledger(cluster)).items())


__all__ = ["ReplanRules", "apply_replan", "max_workers", "plan_from_empty", "shape", "snapshots", "worker_counts"]
