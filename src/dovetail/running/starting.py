"""How does a run start? Engine, controller, both ends of the data and the observers are put together, and it goes."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import dovetail
from dovetail.control.commands import Deliver
from dovetail.control.events import CancelRun, Drain
from dovetail.control.lifecycle import RunState
from dovetail.data.ends import Ends
from dovetail.data.results import IteratorSink
from dovetail.observe import leavings
from dovetail.observe.door import Door
from dovetail.observe.recorder import About, Recorder
from dovetail.running.claiming import say
from dovetail.running.handle import NOTHING_RAN, Run
from dovetail.running.looking import item_of, key_of, refresh
from dovetail.running.measuring import Measuring
from dovetail.running.observed import run_observed
from dovetail.running.outputs import with_writers
from dovetail.running.sites import Needs
from dovetail.streaming.controller import Stream

if TYPE_CHECKING:
    from dovetail.control.engine import Observer
    from dovetail.data.commits import CommitLog
    from dovetail.data.committing import CommittedSink
    from dovetail.data.ends import Outputs, Source
    from dovetail.observe.folder import RunFolder
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.running.claiming import Place
    from dovetail.running.hold import Hold
    from dovetail.running.inputs import Input
    from dovetail.running.resuming import Earlier
    from dovetail.running.retrying import Again
    from dovetail.running.sites import Site, Workers
    from dovetail.streaming.options import Options
    from dovetail.streaming.work import Work

BEAT_S = 1.0
ERRORS_BYTES = 256 << 20
"""Of items that a durable run sets aside, so that they can be run again."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is written down and shown of a run."""

    record: bool = False
    progress: bool | None = None
    verbose: bool = False
    pin_cpus: bool = False
    what: str = "dt.run"
    more: dict[str, object] = field(default_factory=dict)


@dataclass
class Begun:
    """A run of which everything is decided."""

    pipeline: Pipeline
    works: tuple[Work, ...]
    site: Site
    place: Place
    folder: RunFolder
    hold: Hold
    given: Input
    kinds: tuple[str, dict[str, str]] | None
    """Of source and sinks, for what later runs may know of this one; None: nothing."""
    outputs: Outputs
    options: Options
    asked: Asked
    earlier: Earlier | None = None
    again: Again | None = None
    notes: list[str] = field(default_factory=list)
    """What people should know before it starts."""

    @property
    def durable(self) -> bool:
        return bool(self.outputs.files or self.outputs.functions)

    def start(self) -> Run:
        plan = self.place.plan
        with ExitStack() as undo:
            self._prepare_sinks(undo)
            writes = tuple(str(sink.parts) for sink in self.outputs.files.values())
            needs = Needs(self.folder.path, self.asked.pin_cpus, tuple(self.given.files()), writes)
            workers = self.site.workers(self.place, needs)
            undo.callback(workers.close)
            workers.keep_spool = self.durable
            self.works = with_writers(self.works, self.outputs, self.pipeline)
            workers.prepare([work.hosted for work in self.works])
            done, lost = self.earlier.done(workers, self.outputs) if self.earlier is not None else ([], [])
            kept = [Deliver(-1, 0, 0, 0, {}, self.again.segments(workers, self.works))] if self.again else []
            stream = Stream(self.works, plan, self.options, [*kept, *done], self.place.reserved)
            log = self._log(lost, undo)
            recorder = self._recorder(stream, workers)
            observers: list[Observer] = [recorder]
            undo.callback(_close_all, observers, workers)
            measuring = Measuring(workers, self.works, plan.cluster, recorder)
            observers += self._observers(stream, [*kept, *done], measuring)
            door = Door(self.folder.path, partial(_act, workers))
            undo.callback(door.close)
            door.start()
            undo.pop_all()
        for note in [*self.notes, *(self.again.notes if self.again is not None else ())]:
            say(f"note: {note}")
        results = IteratorSink(workers, ordered=self.options.ordered)
        source = self.given.feed(workers, self.earlier.marks() if self.earlier is not None else {})
        sink = self._committed(log, results, workers, done, source) if log is not None else None
        ends = Ends(source, sink or results)
        results.wanted = ends.wanted
        if sink is not None:
            sink.wanted = ends.wanted
        return self._run(workers, stream, recorder, observers, measuring, door, source, sink, results, ends)

    # --- both ends

    def _prepare_sinks(self, undo: ExitStack) -> None:
        """They can be written, or nothing starts."""
        before = self.earlier.told.beginning["sinks"] if self.earlier is not None else {}
        if self.again is not None:
            self.again.check_turn(self.earlier.folder.id if self.earlier is not None else None)
        if self.earlier is not None:
            self.earlier.check_again(self.again.folder.id if self.again is not None else None)
            specs = {label: asdict(sink.spec) for label, sink in self.outputs.files.items()}
            self.earlier.check_sinks(specs, sorted(self.outputs.functions))
        for label, sink in self.outputs.files.items():
            undo.callback(sink.close)
            if self.earlier is None:
                undo.callback(sink.discard)
            else:
                sink.set_base(before[label]["base"])
            sink.prepare(resumed=self.earlier is not None)

    def _log(self, lost: list[int], undo: ExitStack) -> CommitLog | None:
        if not self.durable:
            return None
        from dovetail.data.commits import CommitLog
        from dovetail.running.resuming import units_of

        log = CommitLog(self.folder.commit_log)
        undo.callback(log.close)
        units = units_of(self.works)
        if self.earlier is None:
            sinks = {
                label: {"path": sink.spec.path, "kind": sink.kind, "base": sink.base(), "spec": asdict(sink.spec)}
                for label, sink in self.outputs.files.items()
            }
            about: dict[str, Any] = {
                "run": self.folder.id,
                "source": self.given.fingerprint(),
                "sinks": sinks,
                "units": units,
            }
            again = self.again.folder if self.again is not None else None
            about["functions"] = sorted(self.outputs.functions)
            about["again"] = None if again is None else again.id
            about["again_folder"] = None if again is None else str(again.path)
            log.begin(about)
            if self.again is not None:
                self.again.is_run(self.folder)
            return log
        if self.earlier.units != units:
            log.units(units)
        if lost:
            log.void(lost)
            self.notes.append(f"{len(lost)} epochs that were done are lost with their files, and are computed again")
        return log

    def _committed(
        self, log: CommitLog, results: IteratorSink, workers: Workers, done: list[Deliver], source: Source
    ) -> CommittedSink:
        from dovetail.data.committing import CommittedSink, Marking

        sink = CommittedSink(
            log,
            self.outputs,
            results,
            workers,
            workers,
            self.folder.path / "spool",
            ordered=self.options.ordered,
            done=[(deliver.first, deliver.last) for deliver in done if not deliver.wave],
        )
        if isinstance(source, Marking):
            sink.source = source
        return sink

    # --- who watches

    def _recorder(self, stream: Stream, workers: Workers) -> Recorder:
        plan = self.place.plan
        more = {**self.asked.more, "sinks": [sink.spec.path for sink in self.outputs.files.values()]}
        about = About(
            plan.name,
            self.asked.what,
            self.site.engine,
            plan.cluster.spec(),
            version=dovetail.__version__,
            more={"more": more},
        )
        return Recorder(
            self.folder,
            about,
            stream.view,
            stream.workers,
            plan=plan.to_json(),
            item=partial(item_of, workers),
            key=partial(key_of, workers),
            commits=not self.durable and self.earlier is None,
            errors_bytes=ERRORS_BYTES if self.durable else leavings.ERRORS_BYTES,
        )

    def _observers(self, stream: Stream, resume: list[Deliver], measuring: Measuring) -> list[Observer]:
        """What most runs do not need is imported late."""
        found: list[Observer] = []
        if self.kinds is not None:
            from dovetail.running.profiling import Watch, keys_of_run

            keys = keys_of_run(self.pipeline, self.place.plan, *self.kinds)
            found.append(Watch(stream.view, self.works, keys, peaks=measuring.peaks, say=say))
        if self.asked.record:
            from dovetail.observe.replay import ReplayRecorder
            from dovetail.streaming.remake import header_of

            place = self.place
            header = header_of(self.works, place.plan, stream.board.options, resume, reserved=place.reserved)
            found.append(ReplayRecorder(self.folder.replay_log, header))
        if self.asked.verbose:
            from dovetail.observe.tail import LogTail

            found.append(LogTail(self.folder.logs))
        progress = self.asked.progress
        if progress or (progress is None and sys.stderr is not None and sys.stderr.isatty()):
            from dovetail.observe.progress import Progress

            found.append(Progress(stream.view, name=self.place.plan.name))
        return found

    # --- and goes

    def _run(
        self,
        workers: Workers,
        stream: Stream,
        recorder: Recorder,
        observers: list[Observer],
        measuring: Measuring,
        door: Door,
        source: Source,
        sink: CommittedSink | None,
        results: IteratorSink,
        ends: Ends,
    ) -> Run:
        ended = Ended()

        def last() -> None:
            complete = stream.board.state is RunState.FINISHED
            if sink is not None and stream.board.state is not RunState.FAILED:
                ended.files = sink.finish(complete=complete)
            if complete:
                workers.keep_spool = False
                if self.again is not None:
                    self.again.is_run(self.folder, done=True)

        def go() -> None:
            keepers = self.place.keepers(workers.post)
            measuring.start()
            try:
                run_observed(stream, workers, ends, recorder, observers, keepers=keepers, beat_s=BEAT_S, last=last)
            finally:
                measuring.stop()
                source.close()
                self.given.close()
                if sink is not None:
                    sink.close()
                if stream.board.error.startswith(NOTHING_RAN):
                    for file in self.outputs.files.values():
                        file.discard()
                door.close()
                self.place.leave()
                self.hold.let_go()

        return Run(
            self.place.plan,
            self.folder.path,
            workers,
            results,
            go,
            (partial(item_of, workers), partial(key_of, workers)),
            partial(_why_failed, stream, source, sink),
            partial(refresh, recorder, workers),
            ended,
        )


@dataclass(slots=True)
class Ended:
    """What a run has left."""

    files: list[str] = field(default_factory=list)


def _act(workers: Workers, do: str, reason: str) -> None:
    workers.post(Drain(reason) if do == "drain" else CancelRun(reason))


def _why_failed(stream: Stream, source: Source, sink: CommittedSink | None) -> BaseException | tuple[str, str] | None:
    """What the source or the sink raised, or the error and its details."""
    board = stream.board
    raised = source.error or (sink.error if sink is not None else None)
    return raised or ((board.error, board.error_detail) if board.state is RunState.FAILED else None)


def _close_all(observers: list[Observer], workers: Workers) -> None:
    for observer in observers:
        with suppress(Exception):
            observer.close(workers.now())
