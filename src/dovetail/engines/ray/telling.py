"""How is what happened at an agent told to the driver, and read there? Events as plain tuples, both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.control.events import (
    BatchesDone,
    BatchesReturned,
    Cause,
    Crumb,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from dovetail.control.writing import Piece
from dovetail.engines.local.opened import as_plain
from dovetail.engines.local.payload import extent
from dovetail.engines.local.refs import InFile
from dovetail.engines.ray.wire import ABOUT, HELD, HOME, IN_FILE, IN_PIECES, WRITTEN, Told

if TYPE_CHECKING:
    from dovetail.control.events import Event
    from dovetail.control.segments import Segment
    from dovetail.engines.local.engine import LocalEngine
    from dovetail.engines.ray.parcels import Parcels

PER_SEGMENT, PER_FAILURE = 60, 400
PIECE = 4 << 20


class Teller:
    """The agent's side."""

    def __init__(self, engine: LocalEngine, parcels: Parcels) -> None:
        self._engine = engine
        self._parcels = parcels

    def tell(self, event: Event) -> list[Told]:
        if isinstance(event, BatchesDone):
            return self._done(event)
        if isinstance(event, BatchesReturned):
            self._parcels.homeward.discard(event.message)
            return [Told(("returned", event.worker, event.message))]
        if isinstance(event, WorkerReady):
            return [self.processes(event.worker), Told(("ready", event.worker, event.setup_s))]
        if isinstance(event, WorkerStopped):
            self._parcels.gone(event.worker)
            return [Told(("stopped", event.worker))]
        if isinstance(event, WorkerLost):
            self._parcels.gone(event.worker)
            crumbs = [(crumb.message, crumb.index, crumb.exact) for crumb in event.crumbs]
            told = (event.worker, event.cause.value, event.detail, crumbs, event.peak_bytes)
            return [Told(("lost", *told), ABOUT + len(event.detail))]
        return []

    def processes(self, worker: int) -> Told:
        name, pids = self._engine.processes().get(worker, ("", ()))
        return Told(("pids", worker, name, pids))

    def _done(self, event: BatchesDone) -> list[Told]:
        home = event.message in self._parcels.homeward
        self._parcels.homeward.discard(event.message)
        size = ABOUT + PER_FAILURE * len(event.failures)
        segments = []
        before: list[Told] = []
        for segment in event.segments:
            told, more = self._segment(segment, home, before)
            segments.append(told)
            size += PER_SEGMENT + more
        failures = [as_plain(failure) for failure in event.failures]
        op = ("done", event.worker, event.message, segments, event.seconds, failures, event.peak_bytes, event.stages)
        return [*before, Told(op, size)]

    def _segment(self, segment: Segment, home: bool, before: list[Told]) -> tuple[tuple[Any, ...], int]:
        """What is told of it, and how many bytes that is; a large payload that goes home goes before, in pieces: an
        agent that needs long for one answer would be believed lost."""
        ref: Any = segment.ref
        first = (segment.items, segment.size_bytes, segment.first)
        if type(ref) is Piece:
            return (WRITTEN, *first, tuple(ref)), 0
        if type(ref) is InFile:
            return (IN_FILE, *first, (ref.path, ref.offset, ref.sizes)), len(ref.path)
        if home:
            data = self._engine.raw(segment)
            if len(data) > PIECE:
                before += [
                    Told(("piece", segment.id, data[at : at + PIECE]), ABOUT + PIECE)
                    for at in range(0, len(data), PIECE)
                ]
                return (IN_PIECES, *first, (ref.sizes, segment.id)), 0
            return (HOME, *first, (ref.sizes, data)), len(data)
        return (HELD, *first, (self._parcels.keep(segment), ref.sizes)), 0


def lost(worker: int, cause: str, detail: str, crumbs: list[tuple[int, int, bool]], peak: int) -> WorkerLost:
    return WorkerLost(worker, Cause(cause), detail, tuple(Crumb(*crumb) for crumb in crumbs), peak)


def parts_of(data: bytes, sizes: list[tuple[int, ...]]) -> list[memoryview]:
    """Several payloads that came one behind another."""
    found, at = [], 0
    view = memoryview(data)
    for one in sizes:
        length = extent(one)
        found.append(view[at : at + length])
        at += length
    return found
