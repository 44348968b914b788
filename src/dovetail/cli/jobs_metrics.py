"""`dovetail jobs metrics`: the metrics of a queue over HTTP, without a worker."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import click

import dovetail as dt
from dovetail.cli.options import http_options
from dovetail.cli.queue_option import opened_queue, queue_url_option
from dovetail.cli.signals import WorkerSignals
from dovetail.jobs.store import StoreUnavailableError
from dovetail.jobs.worker_liveness import live_workers

if TYPE_CHECKING:
    from dovetail.jobs.store import Store

DEFAULT_PORT = 8000
CHECK_S = 0.2
READ_INTERVAL_S = 2.0


@click.command(
    epilog="""\b
Examples:
  dovetail jobs metrics --queue-url redis://queue:6379/0
  DOVETAIL_TOKEN=secret dovetail jobs metrics --host 0.0.0.0
  curl http://127.0.0.1:8000/metrics
  curl http://127.0.0.1:8000/work/gpu,default

\b
Exit codes: 0 stopped by Ctrl-C or SIGTERM, 2 usage or configuration,
5 the store cannot be reached at the start.
"""
)
@queue_url_option()
@http_options(DEFAULT_PORT)
def metrics(url: str | None, port: int, host: str, token: str) -> None:
    """Serve metrics, queues and workers over HTTP, also while there are no workers.

    The pages are those of a worker; /workers/status has the sums over all workers. /work/QUEUE,QUEUE has the number of
    jobs that are ready or run, for autoscalers. /metrics also has the seconds of work that wait.
    """
    from dovetail.jobs.work_signal import WorkReader
    from dovetail.jobs.workers.status_server import StatusServer, address_problems

    problems = list(address_problems(host, token))
    if problems:
        raise dt.ConfigError(problems)
    with ExitStack() as stack:
        queue = stack.enter_context(opened_queue(url, create=True))
        source = QueueSource(queue.store)
        source.read()
        signals = stack.enter_context(WorkerSignals())
        work = WorkReader(queue.store)
        server = stack.enter_context(StatusServer(source, queue.store, host=host, port=port, token=token, work=work))
        click.echo(f"metrics: {server.url}metrics; Ctrl-C stops", err=True)
        ended = threading.Event()
        # a thread, because a store that hangs must not delay the end
        reader = threading.Thread(target=source.read_until, args=(ended,), name="dovetail-metrics", daemon=True)
        reader.start()
        while not signals.count:
            time.sleep(CHECK_S)
        ended.set()
        reader.join(READ_INTERVAL_S)
        click.echo("stopped", err=True)
    sys.exit(0)


class EndEvent(Protocol):
    """A `threading.Event`, as far as it is used."""

    def wait(self, timeout: float) -> bool: ...


class QueueSource:
    """Sums over the workers of a queue, in the place of the status of one worker."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._status: dict[str, Any] = {}
        self._read_at: float | None = None
        self._is_available = False

    def read(self) -> None:
        """Read the workers; raises StoreUnavailableError."""
        workers = live_workers(self._store.workers(), self._store.now_ms())
        self._status = {
            "workers": len(workers),
            "active_jobs": sum(worker.leases for worker in workers),
            "available_slots": sum(max(0, worker.slots - worker.leases) for worker in workers),
        }
        self._read_at, self._is_available = time.monotonic(), True

    def read_until(self, ended: EndEvent) -> None:
        """Read the workers from time to time. The store may hang; readiness then ages (`readiness.py`)."""
        while not ended.wait(READ_INTERVAL_S):
            try:
                self.read()
            except StoreUnavailableError:
                self._is_available = False

    def get_status(self) -> dict[str, Any]:
        age_s = None if self._read_at is None else round(time.monotonic() - self._read_at, 3)
        return {**self._status, "state": "running", "store_available": self._is_available, "last_exchange_s": age_s}
