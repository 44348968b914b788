"""Assembly and start of a run: engine, controller, source, sinks, observers and control socket."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import dovetail
from dovetail.control.commands import Deliver
from dovetail.control.events import CancelRun, Drain
from dovetail.control.lifecycle import RunState
from dovetail.control.payload import BadRow
from dovetail.data.interfaces import SourceAndSink
from dovetail.data.iterator_sink import IteratorSink
from dovetail.observe import failed_items
from dovetail.observe.control_socket import ControlSocket
from dovetail.observe.recorder import Recorder, RunDescription
from dovetail.runtime.admission import print_stderr
from dovetail.runtime.delayed_telemetry import DelayedTelemetry
from dovetail.runtime.outputs import attach_writers
from dovetail.runtime.run_handle import NOT_STARTED_CODES, Run
from dovetail.runtime.run_loop import run_with_observers
from dovetail.runtime.sites import WorkerEnvironment
from dovetail.streaming.controller import StreamController

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dovetail.control.engine import Observer
    from dovetail.control.payload import SegmentSlice
    from dovetail.data.commit_log import CommitLog
    from dovetail.data.commit_sink import CommitSink
    from dovetail.data.interfaces import RunOutputs, Source
    from dovetail.observe.run_folder import RunFolder
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.runtime.admission import Admission
    from dovetail.runtime.failed_item_retry import FailedItemRetry
    from dovetail.runtime.inputs import Input
    from dovetail.runtime.resume import ResumedRun
    from dovetail.runtime.run_lock import RunLock
    from dovetail.runtime.sites import RunEngine, Site
    from dovetail.streaming.settings import StreamOptions, UnitSpec


@contextmanager
def undo_on_error() -> Iterator[list[Callable[[], None]]]:
    """Whoever begins something adds how it is undone."""
    undo: list[Callable[[], None]] = []
    try:
        yield undo
    except BaseException:
        for one in reversed(undo):
            one()
        raise


def remove_run_folder(folder: RunFolder) -> None:
    from shutil import rmtree  # late: most runs begin

    rmtree(folder.path, ignore_errors=True)


REFRESH_TIMEOUT_S = 0.5
"""How long somebody who asks how a run stands waits for the newest figures."""


def load_item(workers: RunEngine, part: SegmentSlice) -> object:
    """Of one item; a row that cannot be parsed as it stands in the source."""
    segment, start, _ = part
    item = workers.load(segment)[1][start]
    return item.raw if type(item) is BadRow else item


def load_key(workers: RunEngine, part: SegmentSlice) -> tuple[int, ...]:
    segment, start, _ = part
    key = workers.load(segment)[0][start]
    return key if isinstance(key, tuple) else (key,)


def refresh_status(recorder: Recorder, workers: RunEngine) -> None:
    """The run folder says how it stands now."""
    written = recorder.request_view()
    workers.nudge()
    written.wait(REFRESH_TIMEOUT_S)


LOOP_TICK_S = 1.0
MAX_FAILED_ITEM_BYTES = 256 << 20
"""Of items that a durable run sets aside, so that they can be run again."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What is written down and shown of a run."""

    record: bool = False
    progress: bool | None = None
    verbose: bool = False
    pin_cpus: bool = False
    what: str = "dt.run"
    more: dict[str, object] = field(default_factory=dict)


@dataclass
class PreparedRun:
    """A run of which everything is decided."""

    pipeline: Pipeline
    units: tuple[UnitSpec, ...]
    site: Site
    admission: Admission
    folder: RunFolder
    lock: RunLock
    run_input: Input
    kinds: tuple[str, dict[str, str]] | None
    """Of source and sinks, for what later runs may know of this one; None: nothing."""
    outputs: RunOutputs
    options: StreamOptions
    launch_options: LaunchOptions
    resumed: ResumedRun | None = None
    retry: FailedItemRetry | None = None
    notes: list[str] = field(default_factory=list)
    """What people should know before it starts."""

    @property
    def durable(self) -> bool:
        return bool(self.outputs.files or self.outputs.functions)

    def start(self) -> Run:
        plan = self.admission.plan
        with ExitStack() as undo:
            self._prepare_sinks(undo)
            writes = tuple(str(sink.parts) for sink in self.outputs.files.values())
            needs = WorkerEnvironment(
                self.folder.path, self.launch_options.pin_cpus, tuple(self.run_input.files()), writes
            )
            workers = self.site.start_engine(self.admission, needs)
            undo.callback(workers.close)
            workers.keep_spool = self.durable
            self.units = attach_writers(self.units, self.outputs, self.pipeline)
            workers.prepare([work.hosted for work in self.units])
            done, lost = (
                self.resumed.completed_deliveries(workers, self.outputs) if self.resumed is not None else ([], [])
            )
            kept = [Deliver(-1, 0, 0, 0, {}, self.retry.segments(workers, self.units))] if self.retry else []
            stream = StreamController(self.units, plan, self.options, [*kept, *done], self.admission.reserved)
            log = self._open_commit_log(lost, undo)
            recorder = self._recorder(stream, workers)
            observers: list[Observer] = [recorder]
            undo.callback(_close_observers, observers, workers)
            measuring = DelayedTelemetry(workers, self.units, plan.cluster, recorder)
            observers += self._observers(stream, [*kept, *done], measuring)
            door = ControlSocket(self.folder.path, partial(_on_control_command, workers))
            undo.callback(door.close)
            door.start()
            undo.pop_all()
        for note in [*self.notes, *(self.retry.notes if self.retry is not None else ())]:
            print_stderr(f"note: {note}")
        results = IteratorSink(workers, ordered=self.options.ordered)
        source = self.run_input.make_source(workers, self.resumed.marks() if self.resumed is not None else {})
        sink = self._committed_sink(log, results, workers, done, source) if log is not None else None
        ends = SourceAndSink(source, sink or results)
        results.on_space = ends.on_space
        if sink is not None:
            sink.on_space = ends.on_space
        return self._run(workers, stream, recorder, observers, measuring, door, source, sink, results, ends)

    # --- both ends

    def _prepare_sinks(self, undo: ExitStack) -> None:
        """They can be written, or nothing starts."""
        before = self.resumed.commits.header["sinks"] if self.resumed is not None else {}
        if self.retry is not None:
            self.retry.check_not_started(self.resumed.folder.id if self.resumed is not None else None)
        if self.resumed is not None:
            self.resumed.check_retry_of(self.retry.folder.id if self.retry is not None else None)
            specs = {label: asdict(sink.spec) for label, sink in self.outputs.files.items()}
            self.resumed.check_sinks(specs, sorted(self.outputs.functions))
        for label, sink in self.outputs.files.items():
            undo.callback(sink.close)
            if self.resumed is None:
                undo.callback(sink.discard)
            else:
                sink.set_base(before[label]["base"])
            sink.prepare(resumed=self.resumed is not None)

    def _open_commit_log(self, lost: list[int], undo: ExitStack) -> CommitLog | None:
        if not self.durable:
            return None
        from dovetail.data.commit_log import CommitLog
        from dovetail.runtime.resume import unit_waves

        log = CommitLog(self.folder.commit_log)
        undo.callback(log.close)
        units = unit_waves(self.units)
        if self.resumed is None:
            sinks = {
                label: {"path": sink.spec.path, "kind": sink.kind, "base": sink.base(), "spec": asdict(sink.spec)}
                for label, sink in self.outputs.files.items()
            }
            about: dict[str, Any] = {
                "run": self.folder.id,
                "source": self.run_input.fingerprint(),
                "sinks": sinks,
                "units": units,
            }
            again = self.retry.folder if self.retry is not None else None
            about["functions"] = sorted(self.outputs.functions)
            about["again"] = None if again is None else again.id
            about["again_folder"] = None if again is None else str(again.path)
            log.begin(about)
            if self.retry is not None:
                self.retry.mark_retried(self.folder)
            return log
        if self.resumed.units != units:
            log.units(units)
        if lost:
            log.void_entries(lost)
            self.notes.append(f"{len(lost)} epochs that were done are lost with their files, and are computed again")
        return log

    def _committed_sink(
        self, log: CommitLog, results: IteratorSink, workers: RunEngine, done: list[Deliver], source: Source
    ) -> CommitSink:
        from dovetail.data.commit_sink import CommitSink, SeekableSource

        sink = CommitSink(
            log,
            self.outputs,
            results,
            workers,
            workers,
            self.folder.path / "spool",
            ordered=self.options.ordered,
            done=[(deliver.first, deliver.last) for deliver in done if not deliver.wave],
        )
        if isinstance(source, SeekableSource):
            sink.source = source
        return sink

    # --- who watches

    def _recorder(self, stream: StreamController, workers: RunEngine) -> Recorder:
        plan = self.admission.plan
        more = {**self.launch_options.more, "sinks": [sink.spec.path for sink in self.outputs.files.values()]}
        about = RunDescription(
            plan.name,
            self.launch_options.what,
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
            item=partial(load_item, workers),
            key=partial(load_key, workers),
            commits=not self.durable and self.resumed is None,
            errors_bytes=MAX_FAILED_ITEM_BYTES if self.durable else failed_items.MAX_ERRORS_BYTES,
        )

    def _observers(
        self, stream: StreamController, resume: list[Deliver], measuring: DelayedTelemetry
    ) -> list[Observer]:
        """What most runs do not need is imported late."""
        found: list[Observer] = []
        if self.kinds is not None:
            from dovetail.runtime.stage_profiles import ProfileObserver, storage_keys

            keys = storage_keys(self.pipeline, self.admission.plan, *self.kinds)
            found.append(ProfileObserver(stream.view, self.units, keys, peaks=measuring.peaks, say=print_stderr))
        if self.launch_options.record:
            from dovetail.observe.replay import ReplayRecorder, controller_record

            place = self.admission
            header = controller_record(self.units, place.plan, stream.state.options, resume, reserved=place.reserved)
            found.append(ReplayRecorder(self.folder.replay_log, header))
        if self.launch_options.verbose:
            from dovetail.observe.log_tail import LogTail

            found.append(LogTail(self.folder.logs))
        progress = self.launch_options.progress
        if progress or (progress is None and sys.stderr is not None and sys.stderr.isatty()):
            from dovetail.observe.progress import ProgressDisplay

            found.append(ProgressDisplay(stream.view, name=self.admission.plan.name))
        return found

    # --- and goes

    def _run(
        self,
        workers: RunEngine,
        stream: StreamController,
        recorder: Recorder,
        observers: list[Observer],
        measuring: DelayedTelemetry,
        door: ControlSocket,
        source: Source,
        sink: CommitSink | None,
        results: IteratorSink,
        ends: SourceAndSink,
    ) -> Run:
        ended = RunOutput()

        def last() -> None:
            complete = stream.state.run_state is RunState.FINISHED
            if sink is not None and stream.state.run_state is not RunState.FAILED:
                ended.files = sink.finish(complete=complete)
            if complete:
                workers.keep_spool = False
                if self.retry is not None:
                    self.retry.mark_retried(self.folder, done=True)

        def go() -> None:
            keepers = self.admission.claim_observers(workers.post)
            measuring.start()
            try:
                run_with_observers(
                    stream, workers, ends, recorder, observers, keepers=keepers, beat_s=LOOP_TICK_S, last=last
                )
            finally:
                measuring.stop()
                source.close()
                self.run_input.close()
                if sink is not None:
                    sink.close()
                if stream.state.error.startswith(NOT_STARTED_CODES):
                    for file in self.outputs.files.values():
                        file.discard()
                door.close()
                self.admission.release()
                self.lock.release()

        return Run(
            self.admission.plan,
            self.folder.path,
            workers,
            results,
            go,
            (partial(load_item, workers), partial(load_key, workers)),
            partial(_failure, stream, source, sink),
            partial(refresh_status, recorder, workers),
            ended,
        )


@dataclass(slots=True)
class RunOutput:
    """What a run has left."""

    files: list[str] = field(default_factory=list)


def _on_control_command(workers: RunEngine, do: str, reason: str) -> None:
    workers.post(Drain(reason) if do == "drain" else CancelRun(reason))


def _failure(
    stream: StreamController, source: Source, sink: CommitSink | None
) -> BaseException | tuple[str, str] | None:
    """What the source or the sink raised, or the error and its details."""
    board = stream.state
    raised = source.error or (sink.error if sink is not None else None)
    return raised or ((board.error, board.error_detail) if board.run_state is RunState.FAILED else None)


def _close_observers(observers: list[Observer], workers: RunEngine) -> None:
    for observer in observers:
        with suppress(Exception):
            observer.close(workers.now())
