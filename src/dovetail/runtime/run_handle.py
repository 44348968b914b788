"""`Run`, the user's handle of a run, and `RunHandle`, the part of it that `dt.run` and `dt.serve` share."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from dovetail.control.events import CancelRun, Drain, FailureCause
from dovetail.control.payload import SourceSinkError
from dovetail.data.iterator_sink import SIGNAL_CHECK_S
from dovetail.errors import Change, ConfigError, DovetailError, EngineError, Fix, Problem, RunError, Subject
from dovetail.observe.run_folder import read_json_object
from dovetail.observe.run_status import run_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

    from dovetail.control.events import RunFailure
    from dovetail.data.iterator_sink import IteratorSink
    from dovetail.observe.history import HistoryReader
    from dovetail.observe.run_folder import RunFolder
    from dovetail.observe.summary import RunSummary
    from dovetail.runtime.assembly import ActiveRun
    from dovetail.runtime.sites import RunEngine
    from dovetail.scheduling.plan import Plan

MAX_TRACEBACK_LINES = 12
EXIT_TIMEOUT_S = 10.0
RAY_LOST_CODE = "DT397"
"""Ray stopped during the run."""
NOT_STARTED_CODES = ("DT401", "DT405")
"""Errors before any work was done: nodes cannot read the source, or cannot write to the folder of the results."""


class ActiveParts(Protocol):
    """The parts of a run, a service or an actor system that its handle needs."""

    @property
    def plan(self) -> Plan: ...

    @property
    def folder(self) -> RunFolder: ...

    @property
    def engine(self) -> RunEngine: ...

    def refresh_status(self) -> None: ...


class RunHandle:
    """A run that is driven by its own thread; cancelled when the program ends."""

    _noun = "run"
    _exit_hint = ""

    def __init__(self, active: ActiveParts) -> None:
        self.plan = active.plan
        self.folder = active.folder.path
        self._parts = active
        self._engine = active.engine
        self._over = Event()
        self._history: HistoryReader | None = None
        self._history_lock = Lock()
        self._crash: BaseException | None = None
        self._end_lock = Lock()
        self._at_end: list[Callable[[Any], object]] | None = []
        """Functions to call when the run has ended; None: they were called."""
        self._thread = Thread(target=self._run_thread, name=f"dovetail-{active.plan.name}", daemon=True)

    def _start(self) -> None:
        _ACTIVE_RUNS.add(self)
        self._thread.start()

    def _run_thread(self) -> None:
        try:
            self._drive()
        except BaseException as error:
            self._crash = error
        finally:
            self._call_at_end()
            self._close()
            self._over.set()
            _ACTIVE_RUNS.discard(self)

    def call_at_end(self, function: Callable[[Any], object]) -> None:
        """Call a function with this run when it has ended, however it ended, and before `wait` returns."""
        with self._end_lock:
            if self._at_end is not None:
                self._at_end.append(function)
                return
        function(self)

    def _call_at_end(self) -> None:
        with self._end_lock:
            functions, self._at_end = self._at_end or [], None
        for function in functions:
            try:
                function(self)
            except Exception as error:
                self._crash = self._crash or error

    def _drive(self) -> None:
        """Runs the control loop to the end. Thread: the run's own."""
        raise NotImplementedError

    def _close(self) -> None:
        """Informs readers of results that no more follow. Thread: the run's own."""
        raise NotImplementedError

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def _wait_until_over(self, timeout: float | None = None) -> bool:
        """Whether the run ended within `timeout` seconds. Ctrl-C is handled within SIGNAL_CHECK_S."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._over.wait(SIGNAL_CHECK_S if end is None else min(SIGNAL_CHECK_S, end - time.monotonic())):
            if end is not None and time.monotonic() >= end:
                return False
        return True

    @property
    def stats(self) -> RunSummary:
        """Statistics so far; `print(run.stats)` shows them as a table."""
        if not self.done:
            self._parts.refresh_status()
        from dovetail.observe.history import HistoryReader  # late: not needed to start a run
        from dovetail.observe.summary import summarize_run

        with self._history_lock:
            self._history = self._history or HistoryReader(self.folder)
            return summarize_run(self._history.read())

    def cancel(self, reason: str = "asked") -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ItemError:
    """A failed item."""

    stage: str
    """The unit: fused stages are joined by +."""
    error: str
    """Type and message."""
    traceback: str
    key: tuple[int, ...] | None
    """The number of the source item, followed by those of its children; None: unknown."""
    attempts: int
    item: Any
    """The item itself, if it can still be read."""
    place: str = ""
    """Where the source item is: "data/pages.jsonl:17" or "item 17"; empty: unknown."""


class RunProgress(NamedTuple):
    """Progress of a run."""

    fraction: float | None
    """From 0 to 1; None: the size of the input is unknown."""
    text: str
    """'1,200 of 5,000 items, 3 failed'."""


class Run(RunHandle):
    """Iterate over it to get the results, or call `wait()`. Leaving a `with` block before the end cancels the run."""

    _exit_hint = "; call run.wait() to wait for the end"

    def __init__(
        self,
        active: ActiveRun,
        sink: IteratorSink,
        drive: Callable[[], None],
        failure: Callable[[], BaseException | RunFailure | None],
        files: list[str],
        place_of: Callable[[int], str],
    ) -> None:
        """`drive` runs the control loop; `failure` returns what the source or sink raised, or why the run failed;
        `files` is filled with the output files at the end; `place_of` returns where a source item is."""
        super().__init__(active)
        self._active = active
        self._sink = sink
        self._drive_loop = drive
        self._failed = failure
        self._files = files
        self._place_of = place_of
        self._interrupts = 0
        self._fetching = Lock()
        self._items: Iterator[Any] = iter(())
        """Results that are loaded and not consumed yet; an iteration that was stopped can be continued later."""
        self._start()

    # --- results

    def __iter__(self) -> Iterator[Any]:
        """Yield results as they arrive; several iterators share them. Raises RunError at the end if the run failed.

        Ctrl-C drains the run; a second Ctrl-C stops it.
        """
        with self._interruptible():
            while True:
                items = self._items
                yield from items  # an iterator, so that a stopped iteration can be continued
                with self._fetching:
                    if self._items is not items:
                        continue  # another iterator fetched more
                    fetched = self._sink.next_batch()
                    if fetched is None:
                        break
                    self._items = iter(fetched)
        self._finish()
        if self._sink.dropped:
            message = f"{self._sink.dropped} results were discarded: wait() was called, and they were not read"
            raise RunError(Problem("DT339", message, fixes=("iterate over the run instead of run.wait()",)))

    def wait(self, timeout: float | None = None) -> RunSummary:
        """Wait for the end without reading results; results that exceed the buffer are discarded.

        Raises RunError if the run failed, and TimeoutError after `timeout` seconds. Ctrl-C drains the run; a second
        Ctrl-C stops it.
        """
        self._sink.set_may_drop()
        with self._interruptible():
            if not self._wait_until_over(timeout):
                self._sink.set_may_drop(False)
                raise TimeoutError(f"the run has not ended after {timeout} s")
        self._finish()
        return self.stats

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Handles Ctrl-C while the main thread iterates or waits, also in the loop body, unless the program has its own
        handler."""
        before = signal.getsignal(signal.SIGINT)
        if current_thread() is not main_thread() or before is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        except KeyboardInterrupt:
            self._wait_until_over(EXIT_TIMEOUT_S)
            raise
        finally:
            if signal.getsignal(signal.SIGINT) == self._on_interrupt:  # not replaced meanwhile
                with suppress(ValueError):  # a generator may be finalised in any thread
                    signal.signal(signal.SIGINT, before)

    # --- status

    @property
    def progress(self) -> RunProgress:
        """How much of the input is finished."""
        with suppress(Exception):  # the loop may change the state while it is read
            view = self._active.view(self._engine.now())
            total = view.total if view.total is not None else view.expected
            text = f"{view.finished:,} of {total:,} {view.noun}" if total else f"{view.finished:,} {view.noun}"
            text += f", {view.failed:,} failed" if view.failed else ""
            return RunProgress(min(1.0, view.finished / total) if total else None, text)
        return RunProgress(None, "")

    @property
    def status(self) -> str:
        """running, finished, drained, failed, cancelled."""
        return run_status(read_json_object(self._active.folder.header), time.time())

    @property
    def errors(self) -> list[ItemError]:
        """Failed items so far."""
        found = []
        for failed in list(self._sink.failed_items):
            item, key, place = None, failed.key, failed.place
            with suppress(Exception):
                item = self._active.load_item(failed.part)
                key = key or self._active.load_key(failed.part)
            with suppress(Exception):  # the file may be gone
                place = place or (self._place_of(key[0]) if key else "")
            found.append(ItemError(failed.unit, failed.error, failed.detail, key, failed.attempts, item, place))
        return found

    @property
    def files(self) -> list[str]:
        """Output files; empty until the end."""
        return list(self._files)

    def __repr__(self) -> str:
        """One line from run.json, which is up to date within two seconds."""
        from dovetail.observe.run_folder import RunFolder, read_json_object  # late: not needed to start a run
        from dovetail.observe.summary_text import header_text

        header = read_json_object(RunFolder(self.folder).header)
        text = header_text(header) if header else "its folder was removed"
        return f"<Run {self.folder.name}: {text}>"

    def _repr_html_(self) -> str:
        return self.stats._repr_html_()

    # --- end

    def announce_drain(self, signal_name: str = "Ctrl-C") -> str:
        """Show that the run stops at the next epoch. Returns the text to print, if no live display shows it."""
        return self._active.announce_drain(signal_name)

    def drain(self, reason: str = "asked") -> None:
        """Stop reading input, finish the work in flight, then end."""
        self._engine.post(Drain(reason))

    def cancel(self, reason: str = "asked") -> None:
        """Stop immediately; work in flight is discarded."""
        self._engine.post(CancelRun(reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.done:
            self.cancel("left its with block" if error is None else f"left with {type(error).__name__}")
            self._sink.set_may_drop()
        self._wait_until_over()
        if error is None:
            failed = self._failed()
            if failed is not None:
                self._finish()

    def _drive(self) -> None:
        self._drive_loop()

    def _close(self) -> None:
        self._sink.end()

    def _on_interrupt(self, *_: object) -> None:
        """The first Ctrl-C drains, the second stops."""
        self._interrupts += 1
        if self._interrupts == 1 and not self.done:
            self.drain("Ctrl-C")
            with suppress(RuntimeError, OSError):  # the signal may have interrupted a print
                print(self.announce_drain(), file=sys.stderr, end="", flush=True)  # noqa: T201
            return
        self.cancel("Ctrl-C twice")
        raise KeyboardInterrupt

    def _last_stats(self) -> RunSummary | None:
        """None if the run folder was removed or cannot be read."""
        with suppress(DovetailError, OSError):
            return self.stats
        return None

    def _finish(self) -> None:
        self._wait_until_over()
        failed = self._crash or self._failed()
        if isinstance(failed, SourceSinkError):
            raise RunError(_unusable_problem(failed, self.folder)) from None
        if isinstance(failed, BaseException):
            raise failed
        if failed is not None:
            raise _run_error(failed, self._last_stats(), self.folder)
        bad = self._sink.unreadable
        if bad:
            message = f"{len(bad)} results cannot be unpickled in the driver: {bad[0]}"
            raise RunError(Problem("DT336", message, fixes=("return plain values, or objects of importable classes",)))


def _unusable_problem(error: SourceSinkError, folder: Path) -> Problem:
    return Problem(error.code, error.message, fixes=_fixes_with_resume(error.fix, folder), place=error.place)


def _fixes_with_resume(fix: str, folder: Path) -> tuple[str, ...]:
    """The fix, followed by how to resume."""
    return tuple(filter(None, (fix, _resume_hint(folder))))


def _resume_hint(folder: Path) -> str:
    from dovetail.observe.run_folder import resume_instruction  # late: most runs end well

    return resume_instruction(folder)


def _run_error(failure: RunFailure, summary: RunSummary | None, folder: Path) -> DovetailError:
    """The error of a run that failed. One with a code is not the fault of an item: a changed source, a full disk."""
    if failure.code in NOT_STARTED_CODES:
        return ConfigError(Problem(failure.code, failure.error, fixes=(failure.fix,)))
    if failure.code:
        kind = EngineError if failure.code == RAY_LOST_CODE else RunError
        return kind(Problem(failure.code, failure.error, fixes=_fixes_with_resume(failure.fix, folder)))
    return RunError(_run_problem(failure, summary, folder))


def _run_problem(failure: RunFailure, summary: RunSummary | None, folder: Path) -> Problem:
    evidence = _detail_lines(failure)
    place, item = _failed_item(folder, len(failure.items)) if failure.items else ("", ())
    evidence = (*item, *evidence)
    if summary is not None:
        evidence += (f"{summary.finished} of {summary.read} items read were finished; details: {folder}",)
    from dovetail.observe.run_folder import run_reference  # late: most runs end well

    fixes: tuple[Fix, ...] = (f"dovetail status {run_reference(folder)}",)
    subject: Subject | None = None
    if failure.cause is FailureCause.ERROR_LIMIT:
        fixes += (Change({"max_errors": None}, note="no limit; run.errors has the failed items"),)
    elif failure.cause in (FailureCause.ITEM, FailureCause.BROKEN_WORKERS):
        if failure.cause is FailureCause.ITEM:
            fixes += (Change({"on_error": "skip"}, note="record failing items and continue"),)
        else:
            fixes += (Change({"on_failure": "retry"}, note="if the exception leaves its process intact"),)
        stages = failure.items[0].stage or failure.items[0].unit if failure.items else ""
        subject = Subject("stage", stages, tuple(stages.split("+"))) if stages else None
    hint = _resume_hint(folder)
    if hint:
        fixes += (f"correct the error and resume: {hint}",)
    return Problem("DT330", failure.error or "the run failed", evidence, fixes, place, subject)


def _detail_lines(failure: RunFailure) -> tuple[str, ...]:
    """The last lines of the traceback, without lines at its beginning that only repeat the error."""
    lines = [line for line in failure.detail.splitlines() if line.strip()]
    while lines and failure.error.endswith(lines[0].strip()):
        del lines[0]
    return tuple(lines[-MAX_TRACEBACK_LINES:])


def _failed_item(folder: Path, count: int) -> tuple[str, tuple[str, ...]]:
    """Place of the item with which the run failed, and lines about it. It was recorded while it could be read."""
    from dovetail.observe.failed_items import read_failures
    from dovetail.observe.run_folder import RunFolder  # late: most runs end well

    items = [failure for failure in read_failures(RunFolder(folder).errors) if failure.ended_run][-count:]
    if not items:
        return "", ()
    what = "item" if count == 1 else f"first of {count} items"
    return items[0].place, (f"{what}: {items[0].item}",) if items[0].item else ()


_ACTIVE_RUNS: weakref.WeakSet[RunHandle] = weakref.WeakSet()


def active_runs() -> list[RunHandle]:
    """Runs, services and actor systems of this process that have not ended. Thread: any."""
    return list(_ACTIVE_RUNS)


def _cancel_all_at_exit() -> None:
    """Cancels runs that are still active when the program ends: workers stop, and the run folder records it."""
    for run in list(_ACTIVE_RUNS):
        print(  # noqa: T201
            f"{run._noun} {run.folder.name} is cancelled: the program ended{run._exit_hint}",  # noqa: SLF001
            file=sys.stderr,
        )
        run.cancel("the program ended")
    for run in list(_ACTIVE_RUNS):
        run._over.wait(EXIT_TIMEOUT_S)  # noqa: SLF001


def register_exit_handler() -> None:
    """Registers it again, so that it runs before the exit handlers of modules imported since (Ray)."""
    atexit.unregister(_cancel_all_at_exit)
    atexit.register(_cancel_all_at_exit)


register_exit_handler()
os.register_at_fork(after_in_child=_ACTIVE_RUNS.clear)  # a forked child has no runs of its own
