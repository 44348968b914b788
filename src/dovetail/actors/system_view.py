"""View of an actor system for the observers of runs: a role is shown as a unit, a call as an item."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.actors.instance_directory import InstanceState
from dovetail.streaming.view import CALLS, StreamView, UnitView, WorkerView

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.actors.heartbeat_monitor import Heartbeat, HeartbeatMonitor
    from dovetail.actors.process_state import ProcessState
    from dovetail.actors.system_controller import ActorController


def system_view(controller: ActorController, monitor: HeartbeatMonitor, now: float) -> StreamView:
    units = [_unit_view(role, controller.processes, monitor) for role in controller.counts()]
    calls = sum(unit.taken_total for unit in units)
    return StreamView(
        now=now,
        state=controller.run_state.value,
        wave=0,
        waves=1,
        read=calls,
        total=None,
        finished=calls,
        delivered=calls,
        failed=sum(unit.failed_total for unit in units),
        bottleneck="",
        predicted=0.0,
        replans=0,
        error=controller.error,
        units=tuple(units),
        noun=CALLS,
    )


def _unit_view(role: str, processes: Sequence[ProcessState], monitor: HeartbeatMonitor) -> UnitView:
    mine = [process for process in processes for name, _ in process.instances if name == role]
    figures = [beat.figures for (name, _), beat in monitor.heartbeats.items() if name == role]
    calls, failed, busy_s = monitor.totals(role)
    states = [process.state for process in mine]
    restarts = sum(process.restarts for process in mine)
    return UnitView(
        name=role,
        wave=0,
        queued=0,
        queued_bytes=0,
        in_flight=sum(one.get("outstanding", 0) for one in figures),
        taken_total=calls,
        given_total=calls,
        batches_total=calls,
        busy_s_total=busy_s,
        failed_total=failed,
        retries_total=0,
        starting=states.count(InstanceState.STARTING),
        ready=states.count(InstanceState.READY),
        draining=states.count(InstanceState.DRAINING),
        started_total=sum(process.incarnation for process in mine),
        stopped_total=0,
        lost_total=restarts,
        setup_s_total=0.0,
        rate=None,
        returns=1.0,
        backlogged=False,
        finished=False,
    )


def worker_views(controller: ActorController, heartbeats: Mapping[tuple[str, int], Heartbeat]) -> list[WorkerView]:
    found = []
    for process in controller.processes:
        if process.worker is None:
            continue
        beats = [heartbeats[one].figures for one in process.instances if one in heartbeats]
        seat = process.seats[0]
        found.append(
            WorkerView(
                process.worker,
                process.instances[0][0],
                seat.node,
                seat.gpus,
                process.state.value,
                sum(one.get("outstanding", 0) for one in beats),
                sum(one.get("calls", 0) for one in beats),
                0.0,
            )
        )
    return found
