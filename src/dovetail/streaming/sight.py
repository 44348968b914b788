"""How does an observer's view come out of a board?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.control.lifecycle import WorkerState
from dovetail.streaming.view import UnitView, View, WorkerView

if TYPE_CHECKING:
    from dovetail.streaming.balance import Balance
    from dovetail.streaming.board import Board
    from dovetail.streaming.lane import Lane


def view_of(board: Board, balance: Balance, waves: int, now: float) -> View:
    return View(
        now=now,
        state=board.state.value,
        wave=max(board.wave, 0),
        waves=waves,
        read=board.read,
        total=board.total,
        expected=board.expected,
        finished=board.finished_items,
        delivered=board.delivered,
        aside=board.aside,
        bottleneck=balance.bottleneck,
        predicted=balance.predicted,
        replans=balance.replans,
        error=board.error,
        units=tuple(_unit(lane) for lane in board.all_lanes),
        use=balance.fleet.use(),
    )


def _unit(lane: Lane) -> UnitView:
    states = [worker.state for worker in lane.workers.values()]
    seconds = lane.speeds.seconds_per_item
    return UnitView(
        name=lane.name,
        wave=lane.work.wave,
        queued=lane.queue.items + sum(suspect.items for suspect in lane.suspects),
        queued_bytes=lane.queue.bytes,
        in_flight=lane.in_flight,
        taken_total=lane.taken,
        given_total=lane.given,
        batches_total=lane.batches,
        busy_s_total=lane.busy_s,
        aside_total=lane.aside,
        retries_total=lane.retries,
        starting=states.count(WorkerState.STARTING),
        ready=states.count(WorkerState.READY),
        draining=states.count(WorkerState.DRAINING) + states.count(WorkerState.STOPPING),
        started_total=lane.started,
        stopped_total=lane.stopped,
        lost_total=lane.lost,
        setup_s_total=lane.setup_s,
        rate=1 / seconds if seconds else None,
        returns=lane.speeds.returns,
        backlogged=lane.queue.items >= max(lane.batch_size, lane.in_flight),
        finished=lane.finished,
        stages=_stages(lane),
    )


def _stages(lane: Lane) -> tuple[tuple[str, int, int, float], ...]:
    if not any(total[2] for total in lane.stages):
        return ()
    return tuple(
        (name, int(total[0]), int(total[1]), total[2])
        for name, total in zip(lane.work.stages, lane.stages, strict=True)
    )


def workers_of(board: Board) -> list[WorkerView]:
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
