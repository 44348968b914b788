"""Read-only views of a running stream, its units and its workers, for observers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dovetail.control.lifecycle import RunState, WorkerState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.streaming.replanner import Replanner
    from dovetail.streaming.state import StreamState, UnitState


CALLS = "calls"
"""What a system of actors counts; its units are roles. See `StreamView.noun`."""


def unit_word(noun: str) -> str:
    """What a unit of a run that counts these things is called."""
    return "role" if noun == CALLS else "stage"


def rate_label(noun: str) -> str:
    """The unit of the speed of a unit: stages always count items."""
    return f"{CALLS}/s" if noun == CALLS else "items/s"


@dataclass(frozen=True, slots=True)
class UnitView:
    """One unit at one moment. Fields that end in `_total` never decrease."""

    name: str
    wave: int
    queued: int
    """Items that wait for the unit."""
    queued_bytes: int
    in_flight: int
    """Items at its workers."""
    taken_total: int
    """Items processed: done, dropped or failed."""
    given_total: int
    """Items produced."""
    batches_total: int
    busy_s_total: float
    """Seconds that its workers spent in user code."""
    failed_total: int
    retries_total: int
    starting: int
    ready: int
    draining: int
    """Draining or stopping."""
    started_total: int
    stopped_total: int
    lost_total: int
    setup_s_total: float
    """Worker-seconds spent in setup."""
    rate: float | None
    """Items per second of one worker while it has work: measured, or configured until it is measured."""
    returns: float
    """Items out per item in."""
    backlogged: bool
    finished: bool
    stages: tuple[tuple[str, int, int, float], ...] = ()
    """Name, items in, items out and seconds in its code of each stage (several if fused). Empty in simulated runs."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one moment."""

    worker: int
    unit: str
    node: str
    gpus: tuple[int, ...]
    state: str
    in_flight: int
    """Messages at the worker."""
    batches_total: int
    busy_s_total: float


@dataclass(frozen=True, slots=True)
class StreamView:
    """A run at one moment."""

    now: float
    state: str
    """Value of control.lifecycle.RunState."""
    wave: int
    waves: int
    read: int
    """Source items read."""
    total: int | None
    """Number of source items, once known."""
    finished: int
    """Source items whose epochs are delivered."""
    delivered: int
    """Items that have left the run."""
    failed: int
    bottleneck: str
    predicted: float
    """Source items per second according to the last plan; 0: unknown."""
    replans: int
    error: str
    """Why the run failed; empty otherwise."""
    units: tuple[UnitView, ...]
    use: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Resource -> (used by workers, total), in the integer units of scheduling.plan.Use."""
    expected: int | None = None
    """Estimated number of source items; None: unknown."""
    noun: str = "items"
    """What `finished`, `total`, `delivered` and `failed` count."""
    details: tuple[str, ...] = ()
    """More about the progress, for people; the most important first."""
    source_rate: float | None = None
    """Items per second that the source delivers while items are requested; None: unknown."""
    drain_s: float | None = None
    """Seconds until a run that is being drained has finished its work; None: unknown, or it is not being drained."""


@dataclass(frozen=True, slots=True)
class WorkCounts:
    """Progress of a run in another unit than items, if an item stands for many of them: the rows of a backfill."""

    noun: str
    finished: int
    total: int
    failed: int
    details: tuple[str, ...] = ()


def with_counts(view: StreamView, counts: WorkCounts) -> StreamView:
    """The view in the unit of `counts`; a prediction in items per second is dropped."""
    return replace(
        view,
        total=counts.total,
        expected=None,
        read=counts.finished,
        finished=counts.finished,
        delivered=counts.finished - counts.failed,
        failed=counts.failed,
        predicted=0.0,
        noun=counts.noun,
        details=counts.details,
    )


def make_view(state: StreamState, replanner: Replanner, waves: int, now: float) -> StreamView:
    return StreamView(
        now=now,
        state=state.run_state.value,
        wave=max(state.wave, 0),
        waves=waves,
        read=state.items_read,
        total=state.total_items,
        expected=state.expected_items,
        finished=state.finished_items,
        delivered=state.items_delivered,
        failed=state.items_failed,
        bottleneck=replanner.bottleneck,
        predicted=replanner.predicted_rate,
        replans=replanner.replans,
        error=state.error,
        units=tuple(_unit_view(unit) for unit in state.all_units),
        use=replanner.fleet.resource_use(),
        source_rate=replanner.feeder.source_rate(),
        drain_s=_drain_s(state) if state.run_state is RunState.DRAINING else None,
    )


def _drain_s(state: StreamState) -> float | None:
    """The longest time that a unit needs for the items that wait for it or are still to arrive."""
    items: dict[str, float] = {}
    longest = 0.0
    for unit in state.units:
        waiting = unit.queue.items + unit.items_in_flight + sum(suspect.items for suspect in unit.suspects)
        pending = items.get(unit.name, 0.0) + waiting
        for child in unit.children:
            items[child.name] = items.get(child.name, 0.0) + pending * unit.throughput.returns
        seconds = unit.throughput.seconds_per_item
        if pending and seconds is None:
            return None
        longest = max(longest, pending * (seconds or 0.0) / unit.total_slots)
    return longest


def _unit_view(unit: UnitState) -> UnitView:
    states = [worker.state for worker in unit.workers.values()]
    seconds = unit.throughput.seconds_per_item
    return UnitView(
        name=unit.name,
        wave=unit.spec.wave,
        queued=unit.queue.items + sum(suspect.items for suspect in unit.waiting_suspects()),
        queued_bytes=unit.queue.bytes,
        in_flight=unit.items_in_flight,
        taken_total=unit.items_taken,
        given_total=unit.items_given,
        batches_total=unit.batches,
        busy_s_total=unit.busy_s,
        failed_total=unit.items_failed,
        retries_total=unit.retries,
        starting=states.count(WorkerState.STARTING),
        ready=states.count(WorkerState.READY),
        draining=states.count(WorkerState.DRAINING) + states.count(WorkerState.STOPPING),
        started_total=unit.workers_started,
        stopped_total=unit.workers_stopped,
        lost_total=unit.workers_lost,
        setup_s_total=unit.setup_s,
        rate=1 / seconds if seconds else None,
        returns=unit.throughput.returns,
        backlogged=unit.queue.items >= max(unit.batch_size, unit.items_in_flight),
        finished=unit.finished,
        stages=_stage_totals(unit),
    )


def _stage_totals(unit: UnitState) -> tuple[tuple[str, int, int, float], ...]:
    if not any(total[2] for total in unit.stage_totals):
        return ()
    return tuple(
        (name, int(total[0]), int(total[1]), total[2])
        for name, total in zip(unit.spec.stages, unit.stage_totals, strict=True)
    )


def make_worker_views(state: StreamState) -> list[WorkerView]:
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
        for worker in state.workers.values()
    ]
