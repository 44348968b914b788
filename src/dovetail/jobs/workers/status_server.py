"""HTTP server with the status of a worker, for people, load balancers, Kubernetes and Prometheus.

    GET /workers/status   this worker: active jobs, available slots, GPUs and more
    GET /workers          all workers that are registered in the store
    GET /queues           jobs by queue and state, longest wait, what ready jobs need
    GET /jobs/ID          one job with its attempts
    GET /work/A,B         number of jobs that are ready or run in these queues, for autoscalers
    GET /healthz          200 while the process lives
    GET /readyz           200 while the worker takes jobs, else 503 with the reason
    GET /metrics          Prometheus text

Responses are JSON objects, but for /metrics. It listens on this machine only; any other address needs a token, which
all paths but /healthz and /readyz ask for. Readiness is what the worker knows, so a store that hangs does not delay it.
"""

from __future__ import annotations

import errno
import time
from http import HTTPStatus
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Protocol, Self
from urllib.parse import unquote, urlsplit

from dovetail.errors import ConfigError, DovetailError, Problem
from dovetail.jobs.job_view import job_data, queue_data, queue_work, worker_data
from dovetail.jobs.metrics import CONTENT_TYPE, metrics_text, work_families
from dovetail.jobs.store import StoreUnavailableError
from dovetail.jobs.workers.readiness import readiness_problem
from dovetail.runtime.http_json import JsonHandler, JsonServer, RequestError, is_header_value, is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dovetail.jobs.store import QueueStats, Store, WorkerInfo
    from dovetail.jobs.work_signal import WorkReader

STATUS_REQUEST_CODE = "DT640"
ADDRESS_CODE = "DT641"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
PORTS_TRIED = 100
MAX_CONNECTIONS = 64
REQUEST_TIMEOUT_S = 10.0
"""Time limit for a client to send its request."""
SNAPSHOT_S = 1.0
"""Minimum time between two reads of the store's counts, however many clients there are."""
OPEN_PATHS = ("/healthz", "/readyz")
"""Paths that need no token."""


class StatusSource(Protocol):
    """The port of the server to a worker."""

    def get_status(self) -> Mapping[str, Any]: ...


class StatusServer:
    """HTTP server on a thread of its own, from its creation until `close`."""

    def __init__(
        self,
        worker: StatusSource,
        store: Store,
        *,
        host: str = DEFAULT_HOST,
        port: int = DEFAULT_PORT,
        token: str = "",
        work: WorkReader | None = None,
    ) -> None:
        """`port`: the first port to try; 0 is any free one. `work`: for metrics of the work that waits. ConfigError if
        no port is free."""
        problems = list(address_problems(host, token))
        if problems:
            raise ConfigError(problems)
        self._server = _listening(host, port, token, StatusPages(worker, store, work))
        self._thread = Thread(target=self._server.serve_forever, args=(0.1,), name="status server", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        self._server.is_stopping = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def address_problems(host: str, token: str) -> Iterator[Problem]:
    """Problems of an address and a token."""
    if not token and not is_loopback(host):
        message = f"--host {host} shows the status of jobs to other machines, and there is no token"
        fixes = ("export DOVETAIL_TOKEN=$(openssl rand -hex 16)", f"--host {DEFAULT_HOST}")
        yield Problem(ADDRESS_CODE, message, fixes=fixes)
    if token and not is_header_value(token):
        message = "the token has spaces or characters that HTTP headers cannot carry"
        yield Problem(ADDRESS_CODE, message, fixes=("use letters and digits",))


def _listening(host: str, port: int, token: str, pages: StatusPages) -> PageServer:
    """A server on the first free port from `port` on."""
    last = min(port + PORTS_TRIED, 65536) - 1 if port else 0
    for tried in range(port, last + 1):
        try:
            return PageServer(host, tried, token, pages)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and tried < last:
                continue
            message = f"cannot listen on {host} port {port}: {error.strerror or error}"
            fixes = ("--port 0 to use any free port", f"--host {DEFAULT_HOST}")
            raise ConfigError(Problem(ADDRESS_CODE, message, fixes=fixes)) from None
    raise AssertionError("no port was tried")


class PageServer(JsonServer):
    def __init__(self, host: str, port: int, token: str, pages: StatusPages) -> None:
        super().__init__(host, port, PageHandler, token=token, max_connections=MAX_CONNECTIONS)
        self.pages = pages


class StatusPages:
    """Content of the pages."""

    def __init__(self, worker: StatusSource, store: Store, work: WorkReader | None = None) -> None:
        self.worker = worker
        self._work = work
        self._store = store
        self._lock = Lock()
        self._snapshot: tuple[Sequence[QueueStats], Sequence[WorkerInfo], int] = ((), (), 0)
        self._read_at: float | None = None

    def status(self) -> dict[str, Any]:
        return dict(self.worker.get_status())

    def readiness(self) -> tuple[HTTPStatus, dict[str, Any]]:
        problem = readiness_problem(self.worker.get_status())
        if problem is None:
            return HTTPStatus.OK, {"status": "ready"}
        return HTTPStatus.SERVICE_UNAVAILABLE, {"status": "not ready", "reason": problem}

    def queues(self) -> dict[str, Any]:
        stats, _, now_ms = self._counts()
        return {"queues": [queue_data(one, now_ms) for one in stats]}

    def workers(self) -> dict[str, Any]:
        _, workers, now_ms = self._counts()
        return {"workers": [worker_data(one, now_ms) for one in workers]}

    def job(self, job_id: str) -> dict[str, Any] | None:
        [record] = self._store.get([job_id])
        return None if record is None else job_data(record, self._store.now_ms())

    def work(self, queues: Sequence[str]) -> dict[str, Any]:
        """0 for queues that have never had a job."""
        return {"queues": list(queues), **queue_work(self._counts()[0], queues)}

    def metrics(self) -> str:
        status = self.worker.get_status()
        try:
            more = () if self._work is None else work_families(self._work.read())
            return metrics_text(status, *self._counts(), more)
        except StoreUnavailableError:
            return metrics_text(status, None)

    def _counts(self) -> tuple[Sequence[QueueStats], Sequence[WorkerInfo], int]:
        """Queues, workers and the time of the store, not older than `SNAPSHOT_S`."""
        with self._lock:
            if self._read_at is None or time.monotonic() - self._read_at > SNAPSHOT_S:
                self._snapshot = self._store.stats(), self._store.workers(), self._store.now_ms()
                self._read_at = time.monotonic()
            return self._snapshot


class PageHandler(JsonHandler):
    """One connection."""

    error_code = STATUS_REQUEST_CODE
    timeout = REQUEST_TIMEOUT_S
    server: PageServer

    def do_GET(self) -> None:  # noqa: N802 - the name is that of the base class
        try:
            self._answer(self._path())
        except RequestError as error:
            self.send_json(error.status, {"error": error.body})
        except DovetailError as error:
            away = isinstance(error, StoreUnavailableError)
            status = HTTPStatus.SERVICE_UNAVAILABLE if away else HTTPStatus.INTERNAL_SERVER_ERROR
            problem = error.problems[0]
            self.send_json(status, {"error": {"code": problem.code, "message": problem.message}})

    do_HEAD = do_GET  # noqa: N815

    def _refuse_method(self) -> None:
        self.close_connection = self.has_unread_input = True
        self.send_json(
            HTTPStatus.METHOD_NOT_ALLOWED,
            {"error": {"code": self.error_code, "message": "use GET"}},
            allow="GET, HEAD",
        )

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse_method  # noqa: N815

    def _path(self) -> str:
        try:
            return urlsplit(self.path).path.rstrip("/") or "/"
        except ValueError as error:
            raise self.refuse(HTTPStatus.BAD_REQUEST, f"not a path: {error}") from None

    def _answer(self, path: str) -> None:
        if self.headers.get("Content-Length", "0") != "0" or self.headers.get("Transfer-Encoding"):
            self.close_connection = self.has_unread_input = True
        pages = self.server.pages
        if path == "/healthz":
            self.send_json(HTTPStatus.OK, {"status": "alive"})
            return
        if path == "/readyz":
            self.send_json(*pages.readiness())
            return
        self._check_access()
        if path == "/metrics":
            self.send_body(HTTPStatus.OK, pages.metrics().encode(), CONTENT_TYPE)
            return
        self.send_json(HTTPStatus.OK, self._page(path))

    def _page(self, path: str) -> dict[str, Any]:
        pages = self.server.pages
        by_path: dict[str, Callable[[], dict[str, Any]]] = {
            "/workers/status": pages.status,
            "/workers": pages.workers,
            "/queues": pages.queues,
        }
        if path in by_path:
            return by_path[path]()
        if path.startswith("/work/"):
            return pages.work(unquote(path.removeprefix("/work/")).split(","))
        if path.startswith("/jobs/"):
            job_id = unquote(path.removeprefix("/jobs/"))
            found = pages.job(job_id)
            if found is None:
                raise self.refuse(HTTPStatus.NOT_FOUND, f"there is no job {job_id[:100]!r}")
            return found
        known = [*by_path, "/jobs/ID", "/work/QUEUE", "/metrics", *OPEN_PATHS]
        raise self.refuse(HTTPStatus.NOT_FOUND, "unknown path", paths=known)

    def _check_access(self) -> None:
        """With a token, requests must carry it. Without, the name of the host must be one of this machine: otherwise a
        web page whose name resolves to this machine could read the status."""
        if self.server.token:
            self.check_token()
            return
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or DEFAULT_HOST
        except ValueError:
            host = ""
        if not is_loopback(host):
            raise self.refuse(HTTPStatus.FORBIDDEN, "use 127.0.0.1 or localhost, or start the worker with a token")
