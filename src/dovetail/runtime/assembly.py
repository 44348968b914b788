"""Assembly of a run, shared by `dt.run` and `dt.serve`: plan, folder, admission, engine, controller, observers, socket.

The two differ only in their source and sink: `dt.run` reads a source and writes sinks or an iterator (`run.py`);
`dt.serve` reads a queue of requests and writes their responses (`service.py`).
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import dovetail
from dovetail.control.events import CancelRun, Drain
from dovetail.control.lifecycle import RunState
from dovetail.control.payload import BadRow
from dovetail.observe import failed_items
from dovetail.observe.control_socket import ControlSocket
from dovetail.observe.recorder import Recorder
from dovetail.observe.run_folder import create_run
from dovetail.observe.run_header import RunDescription, write_unstarted_header
from dovetail.runtime.admission import print_stderr
from dovetail.runtime.delayed_telemetry import DelayedTelemetry
from dovetail.runtime.run_lock import RunLock
from dovetail.runtime.run_loop import run_with_observers
from dovetail.runtime.sites import WorkerEnvironment
from dovetail.scheduling.planner import plan as make_plan
from dovetail.streaming.controller import StreamController
from dovetail.streaming.view import with_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dovetail.control.commands import Deliver
    from dovetail.control.engine import Observer
    from dovetail.control.events import RunFailure
    from dovetail.control.payload import Segment, SegmentSlice
    from dovetail.data.interfaces import SourceAndSink
    from dovetail.observe.profile_store import ProfileKey
    from dovetail.observe.progress import ProgressDisplay
    from dovetail.observe.run_folder import RunFolder
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.cluster import Cluster
    from dovetail.runtime.admission import Admission
    from dovetail.runtime.sites import PlanFactory, RunEngine, Site
    from dovetail.scheduling.plan import Plan
    from dovetail.streaming.settings import StreamOptions, UnitSpec
    from dovetail.streaming.view import StreamView, WorkCounts

LOOP_TICK_S = 1.0
REFRESH_TIMEOUT_S = 0.5
"""Time that a request for the status waits for the latest figures."""
DRAIN_ESTIMATE_TIMEOUT_S, DRAIN_POLL_S = 0.3, 0.01
"""Time that the loop has to handle a drain before its duration is estimated."""


PROBE_RUN = "probe"
"""`what` of a probe run."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Settings of recording and display, and the description of a run."""

    record: bool = False
    progress: bool | None = None
    verbose: bool = False
    pin_cpus: bool = False
    what: str = "dt.run"
    more: dict[str, object] = field(default_factory=dict)
    counts: Callable[[], WorkCounts] | None = None
    """Progress in another unit than items."""


# --- plan and admission


def plan_on_site(
    site: Site,
    pipeline: Pipeline,
    plan: Plan | None,
    cluster: Cluster | str,
    mode: str,
    profiles: Mapping[str, Any] | None = None,
) -> tuple[Plan, PlanFactory | None]:
    """The plan for an otherwise empty cluster, and a function that plans for the part that other runs leave free.

    The function is None for a plan that the user passed: such a plan is not changed.
    """
    if plan is not None:
        return site.adapt_plan(plan, earlier=False)
    plan_for = partial(make_plan, pipeline, mode=mode, profiles=profiles or {})
    return plan_for(cluster), plan_for


def describe_run(site: Site, plan: Plan, launch: LaunchOptions, sinks: Sequence[str]) -> RunDescription:
    return RunDescription(
        plan.name,
        launch.what,
        site.engine,
        plan.cluster.spec(),
        version=dovetail.__version__,
        more={"more": {**launch.more, "sinks": list(sinks)}},
    )


def create_locked_run(
    about: RunDescription, run_dir: str | Path | None, undo: ExitStack, unstarted: Mapping[str, Any]
) -> tuple[RunFolder, RunLock]:
    """A new run folder, locked by this process, with its run.json: the run exists from here on."""
    folder = create_run(about.name, run_dir)
    undo.callback(_remove_run_folder, folder)
    lock = RunLock(folder)
    undo.callback(lock.release)
    write_unstarted_header(folder, about, unstarted, time.time())
    return folder, lock


def _remove_run_folder(folder: RunFolder) -> None:
    from shutil import rmtree  # late: most runs start

    rmtree(folder.path, ignore_errors=True)


# --- engine, controller and observers


@dataclass(frozen=True, slots=True)
class AdmittedRun:
    """A run that is planned and admitted: where and how it executes."""

    site: Site
    admission: Admission
    folder: RunFolder
    lock: RunLock
    options: StreamOptions
    launch_options: LaunchOptions

    def start_engine(
        self, undo: ExitStack, *, files: Sequence[str] = (), writes: Sequence[str] = (), keep_spool: bool = False
    ) -> RunEngine:
        """`files`: what workers read; `writes`: the folders that they write results to."""
        needs = WorkerEnvironment(self.folder.path, self.launch_options.pin_cpus, tuple(files), tuple(writes))
        engine = self.site.start_engine(self.admission, needs)
        undo.callback(engine.close)
        engine.keep_spool = keep_spool
        return engine

    def connect(
        self,
        engine: RunEngine,
        units: tuple[UnitSpec, ...],
        undo: ExitStack,
        *,
        resume: Sequence[Deliver] = (),
        sinks: Sequence[str] = (),
        durable: bool = False,
        profile_keys: Mapping[str, Sequence[ProfileKey]] | None = None,
        on_command: Callable[[str, str], None] | None = None,
    ) -> ActiveRun:
        """Connects a controller, observers and the control socket to the engine.

        `resume`: epochs of an earlier attempt that are done. `durable`: results outlive the driver. `profile_keys`:
        store measurements of stages under these keys. `on_command` replaces what `dovetail drain` and `dovetail cancel`
        do.
        """
        plan = self.admission.plan
        controller = StreamController(units, plan, self.options, list(resume), self.admission.reserved)
        items = _ItemLoader(engine)
        recorder = self._recorder(items, controller, sinks, durable=durable)
        observers: list[Observer] = [recorder]
        undo.callback(_close_observers, observers, engine)
        shapes = {unit.name: unit.plan.shape for unit in units}
        telemetry = DelayedTelemetry(engine, shapes, plan.cluster, recorder)
        if profile_keys is not None:
            from dovetail.runtime.stage_profiles import ProfileObserver

            is_probe = self.launch_options.what == PROBE_RUN
            observers.append(
                ProfileObserver(
                    controller.view,
                    units,
                    profile_keys,
                    peaks=telemetry.peaks,
                    say=print_stderr,
                    end_probe=partial(engine.post, Drain("measured")) if is_probe else None,
                )
            )
        observers += self._optional_observers(controller, units, resume)
        display = self._progress_display(controller)
        observers += [] if display is None else [display]
        control_socket = ControlSocket(self.folder.path, on_command or partial(_on_control_command, engine))
        undo.callback(control_socket.close)
        control_socket.start()
        return ActiveRun(
            self.admission,
            self.folder,
            self.lock,
            engine,
            controller,
            recorder,
            observers,
            telemetry,
            control_socket,
            display,
            items,
            self._shown_view(controller),
        )

    def _recorder(
        self, items: _ItemLoader, controller: StreamController, sinks: Sequence[str], *, durable: bool
    ) -> Recorder:
        plan = self.admission.plan
        return Recorder(
            self.folder,
            describe_run(self.site, plan, self.launch_options, sinks),
            self._shown_view(controller),
            controller.workers,
            plan=plan.to_json(),
            item=items.load_item,
            key=items.load_key,
            errors_bytes=failed_items.MAX_FAILED_ITEM_BYTES if durable else failed_items.MAX_ERRORS_BYTES,
        )

    def _shown_view(self, controller: StreamController) -> Callable[[float], StreamView]:
        """The view that is recorded and displayed."""
        counts = self.launch_options.counts
        return controller.view if counts is None else lambda now: with_counts(controller.view(now), counts())

    def _optional_observers(
        self, controller: StreamController, units: tuple[UnitSpec, ...], resume: Sequence[Deliver]
    ) -> list[Observer]:
        """Imported late: most runs need none of them."""
        found: list[Observer] = []
        if self.launch_options.record:
            from dovetail.observe.replay import ReplayRecorder, controller_record

            plan, reserved = self.admission.plan, self.admission.reserved
            header = controller_record(units, plan, controller.state.options, list(resume), reserved=reserved)
            found.append(ReplayRecorder(self.folder.replay_log, header))
        if self.launch_options.verbose:
            from dovetail.observe.worker_logs import LogPrinter

            found.append(LogPrinter(self.folder.logs))
        return found

    def _progress_display(self, controller: StreamController) -> ProgressDisplay | None:
        progress = self.launch_options.progress
        if not (progress or (progress is None and sys.stderr is not None and sys.stderr.isatty())):
            return None
        from dovetail.observe.progress import ProgressDisplay  # late, like the other optional observers

        return ProgressDisplay(self._shown_view(controller), name=self.admission.plan.name)


@dataclass(frozen=True, slots=True)
class ActiveRun:
    """The parts of a run that has started. `drive` runs the control loop; all else is called from any thread."""

    admission: Admission
    folder: RunFolder
    lock: RunLock
    engine: RunEngine
    controller: StreamController
    recorder: Recorder
    observers: list[Observer]
    telemetry: DelayedTelemetry
    control_socket: ControlSocket
    display: ProgressDisplay | None
    items: _ItemLoader
    view: Callable[[float], StreamView]
    """The view that is displayed."""

    @property
    def plan(self) -> Plan:
        return self.admission.plan

    @property
    def state(self) -> RunState:
        return self.controller.state.run_state

    @property
    def error(self) -> str:
        return self.controller.state.error

    @property
    def failure(self) -> RunFailure | None:
        state = self.controller.state
        return state.failure if state.run_state is RunState.FAILED else None

    def load_item(self, part: SegmentSlice) -> object:
        return self.items.load_item(part)

    def load_key(self, part: SegmentSlice) -> tuple[int, ...]:
        return self.items.load_key(part)

    def announce_drain(self, signal_name: str) -> str:
        """Show that the run is being drained, and how long that takes. Returns the text to print, or nothing if the
        live display shows it. Called in a signal handler, after the drain was requested."""
        from dovetail.observe.progress import stop_notice  # late: most runs are not interrupted

        if self.display is not None and self.display.show_stop(signal_name):
            return ""
        end = time.monotonic() + DRAIN_ESTIMATE_TIMEOUT_S
        while self.state is RunState.RUNNING and time.monotonic() < end:
            time.sleep(DRAIN_POLL_S)
        drain_s = None
        with suppress(Exception):  # the loop may change the state while it is read
            drain_s = self.controller.view(self.engine.now()).drain_s
        return f"\n{stop_notice(drain_s, signal_name)}\n"

    def refresh_status(self) -> None:
        """Writes the current figures to the run folder, and waits for that."""
        written = self.recorder.request_view()
        self.engine.nudge()
        written.wait(REFRESH_TIMEOUT_S)

    def drive(
        self,
        ends: SourceAndSink,
        *,
        on_end: Callable[[], None] | None = None,
        close_ends: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs the control loop to the end, and closes everything on every path. `on_end` runs after the last step,
        while the engine is still open."""
        with ExitStack() as closing:
            closing.callback(self.lock.release)
            closing.callback(self.admission.release)
            closing.callback(self.control_socket.close)
            closing.callback(close_ends)
            claim_observers = self.admission.claim_observers(self.engine.post)
            self.telemetry.start()
            closing.callback(self.telemetry.stop)
            run_with_observers(
                self.controller,
                self.engine,
                ends,
                self.recorder,
                self.observers,
                claim_observers=claim_observers,
                beat_s=LOOP_TICK_S,
                last=on_end,
            )


class _ItemLoader:
    """Loads single items and keys. Failed items are often neighbours, so the last payload is kept open."""

    def __init__(self, engine: RunEngine) -> None:
        self._engine = engine
        self._last: tuple[Segment, tuple[Any, list[Any]]] | None = None

    def _load(self, segment: Segment) -> tuple[Any, list[Any]]:
        last = self._last
        if last is None or last[0] is not segment:
            last = self._last = segment, self._engine.load(segment)
        return last[1]

    def load_item(self, part: SegmentSlice) -> object:
        """One item; a row that cannot be parsed is returned as it is in the source."""
        item = self._load(part[0])[1][part[1]]
        return item.raw if type(item) is BadRow else item

    def load_key(self, part: SegmentSlice) -> tuple[int, ...]:
        key = self._load(part[0])[0][part[1]]
        return key if isinstance(key, tuple) else (key,)


def _on_control_command(engine: RunEngine, command: str, reason: str) -> None:
    engine.post(Drain(reason) if command == "drain" else CancelRun(reason))


def _close_observers(observers: list[Observer], engine: RunEngine) -> None:
    for observer in observers:
        with suppress(Exception):
            observer.close(engine.now())
