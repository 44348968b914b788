"""Worker of the job queue: `dt.Worker`. It claims jobs, runs them within its resources, and completes them.

Worker ── WorkerLoop ───── exchange, wait ──▶ Store
  │          │  ▲                              ▲
  │          ▼  │ outbox                       │ once per third of a lease
  │       runners: process, thread, async   LeaseRenewal
  └── WorkerCapacity ── claim of the machine
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from dovetail.claims.owner import this_process
from dovetail.errors import UNSET, DovetailError
from dovetail.jobs.application import Application, load_application
from dovetail.jobs.job_logs import JobLogs
from dovetail.jobs.queue import Queue
from dovetail.jobs.run_submission import FOLDERS_VARIABLE, resolved_folders
from dovetail.jobs.store import WorkerInfo
from dovetail.jobs.workers.async_runner import AsyncRunner
from dovetail.jobs.workers.attempt_table import AttemptTable
from dovetail.jobs.workers.job_batches import JobBatches
from dovetail.jobs.workers.job_process import ProcessSetup
from dovetail.jobs.workers.lease_renewal import LeaseRenewal
from dovetail.jobs.workers.model_cache import JobModels
from dovetail.jobs.workers.model_ledger import LocalPort, ModelLedger
from dovetail.jobs.workers.process_runner import ProcessRunner
from dovetail.jobs.workers.running_attempt import StopReason
from dovetail.jobs.workers.signal_wait import SignalWait
from dovetail.jobs.workers.thread_runner import ThreadRunner
from dovetail.jobs.workers.worker_capacity import FixedLimit, MachineClaim, WorkerCapacity, node_amounts
from dovetail.jobs.workers.worker_loop import LoopState, WorkerLoop
from dovetail.jobs.workers.worker_options import AUTO, chosen_cards, worker_node, worker_options
from dovetail.machine.processes import parse_statm
from dovetail.resources.cluster import Cluster
from dovetail.runtime.admission import print_stderr

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from dovetail.jobs.store import Store
    from dovetail.jobs.workers.running_attempt import Membership, Runner, RunningAttempt
    from dovetail.resources.cluster import Node
    from dovetail.resources.resources import Resources
    from dovetail.resources.seat import Seat

CLEANING_S = 600.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Worker:
    """Worker that runs the jobs of a queue whose functions are declared with `@dt.job` in the modules of `app`.

    - `runs`: folders, and URL prefixes, whose pipelines, recipes, actors files and tables it may run and fill as jobs.
      Files there name functions, so they can run code.
    - `slots`: maximum number of jobs at once. "auto": as many as the resources that jobs request allow; a table of
      sizes for jobs that declare no resources.
    - `resources`: "auto" shares this machine with runs, actor systems and other workers by a claim; a `dt.Resources`,
      or a specification such as "8cpu, 32GB", is used as it is.
    - `isolation`: that of jobs that set none and need none (`isolation.isolation_of`).
    - `grace`: time for running jobs when the worker stops. `kill_grace`: from SIGTERM to SIGKILL of a job.
    - `placement_delay`: time for which a job is left to a better worker (`worker_choice`); 0: not at all.
    - `rendezvous_host`: address of this machine at which other workers reach rank 0 of a gang; by default that of the
      route to Redis, else 127.0.0.1.
    - `recycle_jobs`, `recycle_bytes`: end the worker (`is_recycled`) after this many jobs in its own process, or above
      this memory; also a warm process, whose models do not count.

    The variables MAX_CONCURRENT_JOBS, USE_GPU, GPU_DEVICE, JOB_TIMEOUT and WORKER_ID set arguments that are not given.
    """

    def __init__(
        self,
        queue: Queue | Store | str,
        *,
        app: Sequence[str] | str | Application = (),
        runs: Sequence[str | os.PathLike[str]] = (),
        queues: Sequence[str] | str = ("default",),
        slots: str | int = AUTO,
        isolation: str | None = None,
        resources: str | Resources = AUTO,
        worker_id: Any = UNSET,
        use_gpu: Any = UNSET,
        gpu_device: Any = UNSET,
        job_timeout: Any = UNSET,
        lease: str | float = "15s",
        grace: str | float = "30s",
        kill_grace: str | float = "5s",
        placement_delay: str | float = "50ms",
        rendezvous_host: str | None = None,
        recycle_jobs: int | None = None,
        recycle_bytes: str | int | None = None,
        allow_pickle: bool = False,
        log_dir: str | os.PathLike[str] | None = None,
        say: Callable[[str], None] = print_stderr,
    ) -> None:
        self.options = worker_options(
            {
                "queues": queues,
                "slots": slots,
                "isolation": isolation,
                "worker_id": worker_id,
                "use_gpu": use_gpu,
                "gpu_device": gpu_device,
                "job_timeout_s": job_timeout,
                "lease_ms": lease,
                "grace_s": grace,
                "kill_grace_s": kill_grace,
                "placement_delay_ms": placement_delay,
                "rendezvous_host": rendezvous_host,
                "recycle_jobs": recycle_jobs,
                "recycle_bytes": recycle_bytes,
            }
        )
        node, is_given = worker_node(resources)
        cards = self._cards = chosen_cards(node, self.options)
        self._run_folders = resolved_folders(runs)
        self.application = app if isinstance(app, Application) else load_application(app, runs=bool(runs))
        self.id = self.options.worker_id
        self._queue = _opened(queue, allow_pickle=allow_pickle)
        self._store, self._codec = self._queue.store, self._queue.codec
        self._say = say
        self.logs = JobLogs(self._codec.files, log_dir)
        offered = replace(node, gpus=()) if cards == () else node
        self.capacity = WorkerCapacity(offered, self.options.slots, cards or ())
        self._claim: FixedLimit | MachineClaim = (
            self._fixed_limit(node, cards) if is_given else MachineClaim(self.id, Cluster((node,)), cards)
        )
        self._ledger = self.capacity.models = ModelLedger(self.capacity, lambda: self._store.wake(self.id))
        self._cache = LocalPort(self._ledger).cache
        self.models = JobModels(self._cache)
        """Models of this process, for programs that run a worker: a model that they `get` stays until they release it.
        Jobs use `dt.current_job().models`."""
        self._table = AttemptTable(self._release, lambda: self._store.wake(self.id))
        self._runners = self._make_runners()
        self._renewal = LeaseRenewal(
            self._store, self.id, self.options.lease_ms, self._table, self._stop_attempt, self._on_tick
        )
        self._batches = JobBatches(self._table, self._runners, lambda: self._store.wake(self.id))
        self._loop = WorkerLoop(
            self._store,
            self._info,
            self.options,
            self.application,
            self.capacity,
            self._table,
            self._renewal,
            self._runners,
            self._batches,
            say,
        )
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._stop_requested = threading.Event()
        self._on_end: Callable[[], None] = _do_nothing
        self._signals = 0
        self._cleaned_at = float("-inf")
        self.is_recycled = False
        """Whether it has ended, or is ending, so that a new process takes its place."""
        self.error: BaseException | None = None
        """Why it has ended, if not by `stop`."""

    # --- life

    def start(self) -> Self:
        """Run in a thread of this process. Returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="dovetail-worker", daemon=True)
            self._thread.start()
        return self

    def run(self, *, handle_signals: bool = False) -> None:
        """Run until the worker is stopped or recycled. `handle_signals`: SIGTERM and SIGINT drain it, a second one ends
        it now; only in the main thread."""
        if handle_signals:
            waiting = SignalWait(STOP_SIGNALS, self._on_signal)
            self._on_end = waiting.end
            with waiting.installed():
                self.start()
                waiting.wait()
        else:
            self.start()
        self._ended.wait()
        self._raise_error()

    def request_stop(self, grace: float | None = None) -> None:
        """Begin to drain: claim nothing, give back what has not begun, end the rest after the grace (seconds; None:
        that of the worker). Returns at once."""
        self._stop_requested.set()
        self._loop.request_drain(self.options.grace_s if grace is None else grace)

    def stop(self, grace: float | None = None) -> None:
        """`request_stop`, and wait for the end. Attempts that it ends do not count against retries."""
        self.request_stop(grace)
        if self._thread is not None:
            self._ended.wait()
        self._raise_error()

    def stop_now(self) -> None:
        """Kill running jobs and end."""
        self._stop_requested.set()
        self._loop.request_end_now()
        if self._thread is not None:
            self._ended.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended within this time."""
        return self._ended.wait(timeout_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.stop_now()
            if error is not None and self.error is not None:
                error.add_note(f"the worker {self.id} had ended with {self.error!r}")

    def _main(self) -> None:
        try:
            if self._claim.acquire(self.capacity, self._stop_requested):
                self._renewal.start()
                try:
                    self._loop.run()
                finally:
                    self._renewal.close()
        except BaseException as error:
            self.error = error
        finally:
            self._loop.state = LoopState.ENDED
            for runner in self._runners.values():
                runner.close()
            self._cache.close()
            self._claim.release()
            self._ended.set()
            self._on_end()

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        name = signal.Signals(number).name
        if self._signals == 1:
            running = len(self._table.running)
            waiting = f"waiting up to {self.options.grace_s:g} s for running jobs ({running})"
            self._say(f"{name}: {waiting}; a second signal ends them now")
            self.request_stop()
        else:
            self._say(f"{name}: ending now")
            self._stop_requested.set()
            self._loop.request_end_now()

    # --- parts

    def _fixed_limit(self, node: Node, cards: tuple[int, ...] | None) -> FixedLimit:
        """The limit of a worker whose resources were given: these, on the chosen cards."""
        allowed = {key: amount for key, amount in node_amounts(node).items() if cards is None or key[1] in (-1, *cards)}
        self.capacity.set_limit(allowed)
        return FixedLimit(allowed)

    def _make_runners(self) -> dict[str, Runner]:
        """Isolation -> its runner."""
        processes = self._process_runner()
        return {
            "thread": ThreadRunner(self.id, self._codec, self._table, self._models_of),
            "async": AsyncRunner(self.id, self._codec, self._table, self._models_of),
            "process": processes,
            "warm_process": processes,
        }

    def _process_runner(self) -> ProcessRunner:
        setup = ProcessSetup(
            tuple(self.application.modules),
            tuple(map(str, sys.path)),
            os.getcwd(),  # noqa: PTH109
            self.id,
            self._codec.allow_pickle,
            None if self._codec.files is None else self._codec.files.location,
            self._codec.inline_limit_bytes,
        )
        return ProcessRunner(
            setup,
            self.logs,
            self._table,
            self._environment,
            self._member_environment,
            self.capacity,
            self._ledger,
            self._codec,
            kill_grace_s=self.options.kill_grace_s,
            recycle_jobs=self.options.recycle_jobs,
            recycle_bytes=self.options.recycle_bytes,
            on_start_failed=self._on_start_failed,
        )

    def _environment(self, seat: Seat | None) -> dict[str, str]:
        return self.capacity.environment(os.environ, seat) | {FOLDERS_VARIABLE: json.dumps(self._run_folders)}

    def _member_environment(self, membership: Membership) -> dict[str, str]:
        found = self.capacity.rank_environment(os.environ, membership.seats, membership.local_rank)
        return found | {FOLDERS_VARIABLE: json.dumps(self._run_folders)} | membership.variables()

    def _release(self, seat: Seat | None) -> None:
        self.capacity.release(seat)
        self._ledger.on_job_ended()

    def _models_of(self, seat: Seat | None) -> JobModels:
        """Models of this process for a job. It sees all cards of the worker; its first one is that of its seat."""
        cards = self.capacity.cards_of(seat)
        first = cards[0] if cards else None
        return JobModels(self._cache, lambda number: first if number is None else number)

    def _on_start_failed(self, reason: str) -> None:
        self._say(f"a process for a job could not be started; its job is returned to the queue: {reason}")
        self._loop.pause_claims()

    def _stop_attempt(self, attempt: RunningAttempt, reason: StopReason, detail: str) -> None:
        self._batches.stop(attempt, reason, detail)

    def _on_tick(self) -> None:
        """Once per third of a lease, on the renewal thread."""
        now = time.monotonic()
        for attempt in list(self._table.running.values()):
            overdue = (
                attempt.timeout_s is not None and now > attempt.started + attempt.timeout_s + self.options.kill_grace_s
            )
            if attempt.isolation == "async" and overdue:
                self._abandon_overdue(attempt)
        if now >= self._cleaned_at + CLEANING_S:
            self._cleaned_at = now
            self.logs.clean()
            self._expire_results()
        self._ledger.trim()
        self._recycle_if_due()

    def _expire_results(self) -> None:
        with suppress(DovetailError):  # it is tried again
            self._queue.expire_results()

    def _abandon_overdue(self, attempt: RunningAttempt) -> None:
        """A coroutine that blocks its loop, or catches its cancellation."""
        attempt.try_stop(StopReason.TIMEOUT)
        self._table.abandon(attempt)

    def _recycle_if_due(self) -> None:
        options = self.options
        many = options.recycle_jobs is not None and self._table.ended_here >= options.recycle_jobs
        large = options.recycle_bytes is not None and own_memory_bytes() >= options.recycle_bytes
        if (many or large) and self._loop.state is LoopState.RUNNING:
            self.is_recycled = True
            self._loop.request_drain(None)

    # --- status

    def _info(self) -> WorkerInfo:
        options = self.options
        details = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": list(this_process()),
            "isolation": options.isolation,
            "resources": Cluster((self._offered_node(),)).to_dict(),
            "modules": list(self.application.modules),
            "runs": list(self._run_folders),
            "logs": self.logs.folder,
            "gpu_enabled": self._uses_gpu(),
            "gpu_device": options.gpu_device,
        }
        return WorkerInfo(self.id, options.queues, self.capacity.plain_slots, details)

    def _offered_node(self) -> Node:
        """What jobs can get at most."""
        node = self.capacity.node
        if self._cards is None:
            return node
        return replace(node, gpus=tuple(node.gpus[card] for card in self._cards))

    def _uses_gpu(self) -> bool:
        return bool(self.capacity.plain_cards) or (self.options.use_gpu is not False and bool(self.capacity.node.gpus))

    def get_status(self) -> dict[str, Any]:
        """The state of the worker and its jobs, as plain JSON data. Thread: any."""
        now = time.monotonic()
        loop, table = self._loop, self._table
        running = list(table.running.values())
        most = self.capacity.plain_slots
        taken = len({attempt.batch or attempt for attempt in (*running, *list(table.abandoned.values()))})
        held, limit = self.capacity.usage()
        exchanged_at = loop.exchanged_at
        return {
            "worker_id": self.id,
            "state": loop.state.value,
            "active_jobs": len(running) + len(table.abandoned),
            "available_slots": max(0, most - taken),
            "max_concurrent_jobs": most,
            "gpu_enabled": self._uses_gpu(),
            "gpu_device": self.options.gpu_device,
            "queues": list(self.options.queues),
            "isolation": self.options.isolation,
            "job_timeout_s": self.options.job_timeout_s,
            "store_available": loop.is_store_available,
            "last_exchange_s": None if exchanged_at is None else round(now - exchanged_at, 3),
            "resources": _totals(limit),
            "used": _totals(held),
            "models": self._ledger.status(),
            "batches": table.calls,
            "totals": {name: count for name, count in sorted(table.totals.items()) if count},
            "jobs": [_job_status(attempt, now) for attempt in running],
            "abandoned": [_job_status(attempt, now) for attempt in list(table.abandoned.values())],
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "logs": self.logs.folder,
        }


def _do_nothing() -> None:
    pass


def _job_status(attempt: RunningAttempt, now: float) -> dict[str, Any]:
    call = None if attempt.batch is None else attempt.batch.call
    return {
        "id": attempt.spec.id,
        "function": attempt.spec.function,
        "queue": attempt.spec.queue,
        "attempt": attempt.attempt,
        "rank": attempt.key.rank,
        "isolation": attempt.isolation,
        "age_s": round(now - attempt.started, 3),
        "timeout_s": attempt.timeout_s,
        "progress": attempt.progress,
        "message": attempt.message or "",
        "stopping": None if attempt.stop_reason is None else attempt.stop_reason.value,
        "pid": attempt.pid if call is None else call.pid,
    }


def _totals(amounts: dict[tuple[str, int, str], int]) -> dict[str, float]:
    """'cpus', 'memory_bytes', 'gpus', 'gpu_memory_bytes' and custom resources."""
    names = {(True, "cpu_milli"): "cpus", (True, "memory_bytes"): "memory_bytes"}
    names |= {(False, "milli"): "gpus", (False, "memory_bytes"): "gpu_memory_bytes"}
    found: dict[str, float] = {"cpus": 0.0, "memory_bytes": 0, "gpus": 0.0, "gpu_memory_bytes": 0}
    for (_, card, what), amount in amounts.items():
        name = names.get((card == -1, what), what.removeprefix("custom "))
        found[name] = found.get(name, 0) + (amount if name.endswith("_bytes") else amount / 1000)
    return found


def own_memory_bytes() -> int:
    """Private memory of this process."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
            return parse_statm(file.read())
    except OSError:
        return 0


def _opened(queue: Queue | Store | str, *, allow_pickle: bool) -> Queue:
    return queue if isinstance(queue, Queue) else Queue(queue, allow_pickle=allow_pickle)
