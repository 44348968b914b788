"""Read-only views of a running stream, its units and its workers, for observers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.control.lifecycle import WorkerState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.streaming.replanner import Replanner
    from dovetail.streaming.state import StreamState, UnitState


@dataclass(frozen=True, slots=True)
class UnitView:
    """One unit at one moment. Everything that ends in `_total` only grows."""

    name: str
    wave: int
    queued: int
    """Items that wait for it."""
    queued_bytes: int
    in_flight: int
    """Items that are with its workers."""
    taken_total: int
    """Items it has dealt with: done, dropped or set aside."""
    given_total: int
    """Items it has given on."""
    batches_total: int
    busy_s_total: float
    """Seconds that its workers spent in the user's code."""
    aside_total: int
    retries_total: int
    starting: int
    ready: int
    draining: int
    """Or stopping."""
    started_total: int
    stopped_total: int
    lost_total: int
    setup_s_total: float
    """Worker-seconds that went into setting workers up."""
    rate: float | None
    """Items per second that one worker takes in while it has work, as measured (or given, before that)."""
    returns: float
    """Items out per item in."""
    backlogged: bool
    finished: bool
    stages: tuple[tuple[str, int, int, float], ...] = ()
    """Of real runs, per stage: its name, items in, items out, seconds in its code. Fused stages are several."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one moment."""

    worker: int
    unit: str
    node: str
    gpus: tuple[int, ...]
    state: str
    in_flight: int
    """Messages."""
    batches_total: int
    busy_s_total: float


@dataclass(frozen=True, slots=True)
class StreamView:
    """A run at one moment."""

    now: float
    state: str
    """As in control.lifecycle.RunState."""
    wave: int
    waves: int
    read: int
    """Source items read."""
    total: int | None
    """Source items there are, once that is known."""
    finished: int
    """Source items whose epochs are delivered."""
    delivered: int
    """Items that have left the run."""
    aside: int
    bottleneck: str
    predicted: float
    """Source items per second that the last plan expects; 0: not known."""
    replans: int
    error: str
    """Why it failed; empty otherwise."""
    units: tuple[UnitView, ...]
    use: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Resource -> (taken by seats, there in all), in the resource's own integers, as in scheduling.plan.Use."""
    expected: int | None = None
    """Source items there will be, about; None: nobody knows."""


def make_view(board: StreamState, balance: Replanner, waves: int, now: float) -> StreamView:
    return StreamView(
        now=now,
        state=board.run_state.value,
        wave=max(board.wave, 0),
        waves=waves,
        read=board.items_read,
        total=board.total_items,
        expected=board.expected_items,
        finished=board.finished_items,
        delivered=board.items_delivered,
        aside=board.items_failed,
        bottleneck=balance.bottleneck,
        predicted=balance.predicted_rate,
        replans=balance.replans,
        error=board.error,
        units=tuple(_unit_view(lane) for lane in board.all_units),
        use=balance.fleet.resource_use(),
    )


def _unit_view(lane: UnitState) -> UnitView:
    states = [worker.state for worker in lane.workers.values()]
    seconds = lane.throughput.seconds_per_item
    return UnitView(
        name=lane.name,
        wave=lane.spec.wave,
        queued=lane.queue.items + sum(suspect.items for suspect in lane.suspects),
        queued_bytes=lane.queue.bytes,
        in_flight=lane.items_in_flight,
        taken_total=lane.items_taken,
        given_total=lane.items_given,
        batches_total=lane.batches,
        busy_s_total=lane.busy_s,
        aside_total=lane.items_failed,
        retries_total=lane.retries,
        starting=states.count(WorkerState.STARTING),
        ready=states.count(WorkerState.READY),
        draining=states.count(WorkerState.DRAINING) + states.count(WorkerState.STOPPING),
        started_total=lane.workers_started,
        stopped_total=lane.workers_stopped,
        lost_total=lane.workers_lost,
        setup_s_total=lane.setup_s,
        rate=1 / seconds if seconds else None,
        returns=lane.throughput.returns,
        backlogged=lane.queue.items >= max(lane.batch_size, lane.items_in_flight),
        finished=lane.finished,
        stages=_stage_totals(lane),
    )


def _stage_totals(lane: UnitState) -> tuple[tuple[str, int, int, float], ...]:
    if not any(total[2] for total in lane.stage_totals):
        return ()
    return tuple(
        (name, int(total[0]), int(total[1]), total[2])
        for name, total in zip(lane.spec.stages, lane.stage_totals, strict=True)
    )


def make_worker_views(board: StreamState) -> list[WorkerView]:
    return [
        WorkerView(
            worker=worker.id,
            unit=worker.unit,
            node=worker.node,
            gpus=worker.seats[0].gpus,
            state=worker.state.value,
            in_flight=len(worker.messages),
            batches_total=worker.batches,
            busy_s_total=worker.busy_s,
        )
        for worker in board.workers.values()
    ]
