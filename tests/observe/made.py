"""Runs built by hand: views, events, and a recorder that writes them to a folder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.control.commands import Command, Deliver, FailedItem, HostedObject, Note, StartWorker, StopWorker
from dovetail.control.events import Event, LossCause, NodeLeft, WorkerLost, WorkerReady, WorkerStopped
from dovetail.control.payload import Segment
from dovetail.observe.recorder import Recorder
from dovetail.observe.run_folder import RunFolder
from dovetail.observe.run_header import RunDescription
from dovetail.resources.seat import CardShare, Seat
from dovetail.streaming.view import StreamView, UnitView, WorkerView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

IDLE = UnitView(
    name="a",
    wave=0,
    queued=0,
    queued_bytes=0,
    in_flight=0,
    taken_total=0,
    given_total=0,
    batches_total=0,
    busy_s_total=0.0,
    failed_total=0,
    retries_total=0,
    starting=0,
    ready=0,
    draining=0,
    started_total=0,
    stopped_total=0,
    lost_total=0,
    setup_s_total=0.0,
    rate=None,
    returns=1.0,
    backlogged=False,
    finished=False,
)


def unit(name: str = "a", **changes: Any) -> UnitView:
    return replace(IDLE, name=name, **changes)


def view(now: float, *units: UnitView, **changes: Any) -> StreamView:
    plain = StreamView(now, "running", 0, 1, 0, None, 0, 0, 0, "", 0.0, 0, "", units)
    return replace(plain, **changes)


def worker(number: int, unit_name: str = "a", **changes: Any) -> WorkerView:
    return replace(WorkerView(number, unit_name, "node-0", (0,), "ready", 1, 5, 2.5), **changes)


class Clock:
    """A wall clock that tests set."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def run_at(seconds: float) -> StreamView:
    """A run of two stages and 1000 items at 10 items per second, after 10 s of setup; it ends at 110 s."""
    done = int(min(1000, max(0, 10 * (seconds - 10))))
    ready = seconds >= 10
    a = unit(
        "a", taken_total=done, given_total=done, ready=2 * ready, starting=2 * (not ready), started_total=2,
        busy_s_total=done / 10, setup_s_total=20.0 * ready, queued=5,
    )  # fmt: skip
    b = unit("b", taken_total=done, given_total=done, ready=1, started_total=1, busy_s_total=done / 20, failed_total=1)
    state = "finished" if seconds >= 110 else "running"
    use = {"CPUs": (3000 * ready, 4000), "memory": (1 << 30, 4 << 30)}
    counts = {"read": done, "finished": done, "delivered": max(0, done - 1), "failed": int(done > 0)}
    return view(
        seconds, a, b, state=state, total=1000, bottleneck="a" if ready else "b", predicted=12.5, replans=1, use=use,
        **counts,
    )  # fmt: skip


def start(number: int, unit_name: str = "a", node: str = "node-0") -> StartWorker:
    return StartWorker(number, (Seat(node, 1000, 0, (CardShare(1, 500),)),), (HostedObject(unit_name),))


def failed_item(number: int = 0) -> FailedItem:
    detail = "Traceback: line 1"
    return FailedItem("b", (Segment(7, 4), 1, 2), "ValueError: no such frame: 3", detail, key=(number, 2), attempts=3)


STORY: dict[int, tuple[list[Event], list[Command]]] = {
    0: ([], [start(1), start(2, "a", "node-1"), start(3, "b"), Note("decision", "2 workers of a", {"unit": "a"})]),
    10: ([WorkerReady(1, 10.0), WorkerReady(2, 10.0), WorkerReady(3, 0.5)], []),
    50: ([WorkerLost(2, LossCause.NODE_LOST, "power"), NodeLeft("node-1", "power")], [Note("error", "node-1 is gone")]),
    60: (
        [],
        [
            Deliver(0, 0, 0, 500, {"b": [Segment(9, 499)]}, failed_items=[failed_item()]),
            StopWorker(1, reason="the end"),
        ],
    ),
    70: ([WorkerStopped(1)], []),
}


def recorder(
    path: Path,
    seen: Callable[[float], StreamView] = run_at,
    workers: Callable[[], Sequence[WorkerView]] = lambda: [worker(1), worker(3, "b")],
    **options: Any,
) -> Recorder:
    path.mkdir(exist_ok=True, parents=True)
    about = options.pop("about", RunDescription("video", "video.yaml", "local", "1x(4cpu)"))
    return Recorder(RunFolder(path), about, seen, workers, **{"wall": Clock()} | options)


def recorded(path: Path, until: int = 110, **options: Any) -> Path:
    """The folder of the run above, step by step at every second."""
    written = recorder(path, **options)
    for second in range(until + 1):
        written.on_step(float(second), *STORY.get(second, ([], [])))
    written.close(float(until))
    return path
