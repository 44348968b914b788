"""HTTP server in front of a service: requests as JSON, one thread per connection.

    POST /             an item, or a list of items, as JSON
    GET  /health       200 when the workers are ready, else 503

A response is a JSON object: {"result": ...} for an item, {"results": [...], "errors": [...]} for a list, and
{"error": {"code": ..., "message": ...}} for a request that failed.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from http import HTTPStatus
from threading import Condition
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from dovetail.cli.json_values import json_default
from dovetail.data.request_queue import ItemFailed, ServiceClosed, TooManyRequests
from dovetail.errors import DovetailError
from dovetail.resources.sizes import format_size
from dovetail.runtime.http_json import JsonHandler, JsonServer, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.runtime.service import RequestFuture, Service

SERVICE_REQUEST_CODE = "DT308"
LAST_RESPONSES_TIMEOUT_S = 10.0
TRUE_WORDS = ("1", "true", "yes", "")


class ServiceServer(JsonServer):
    """Listens at once; requests are answered as soon as `service` is set. Responses in progress are awaited."""

    def __init__(self, host: str, port: int, *, token: str, max_body_bytes: int) -> None:
        super().__init__(host, port, RequestHandler, token=token)
        self.service: Service | None = None
        self.max_body_bytes = max_body_bytes
        self._responses = 0
        self._changed = Condition()

    @contextmanager
    def response(self) -> Iterator[None]:
        """Counts a request that is being answered."""
        with self._changed:
            self._responses += 1
        try:
            yield
        finally:
            with self._changed:
                self._responses -= 1
                self._changed.notify_all()

    def wait_for_responses(self) -> None:
        """Waits until all requests are answered, up to a time limit."""
        with self._changed:
            self._changed.wait_for(lambda: self._responses == 0, LAST_RESPONSES_TIMEOUT_S)


class RequestHandler(JsonHandler):
    """One connection."""

    error_code = SERVICE_REQUEST_CODE
    server: ServiceServer

    def do_GET(self) -> None:  # noqa: N802 - the name is that of the base class
        if urlsplit(self.path).path != "/health":
            self._refuse_path(is_known=urlsplit(self.path).path == "/", allow="POST")
            return
        service = self.server.service
        is_ready = service is not None and service.ready and not self.server.is_stopping
        status = "stopping" if self.server.is_stopping else "ready" if is_ready else "starting"
        about = {} if service is None else {"run": service.folder.name, "pending": service.pending}
        self._send(HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE, {"status": status, **about})

    def do_POST(self) -> None:  # noqa: N802
        if urlsplit(self.path).path != "/":
            self._refuse_path(is_known=urlsplit(self.path).path == "/health", allow="GET")
            return
        with self.server.response():
            try:
                status, answer = self._answer()
            except RequestError as error:
                status, answer = error.status, {"error": error.body}
            self._send(status, answer)

    def _answer(self) -> tuple[HTTPStatus, dict[str, Any]]:
        self._check_access()
        items = self._read_json()
        service = self.server.service
        if service is None:
            raise self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, "the service has not started")
        many = parse_qs(urlsplit(self.path).query, keep_blank_values=True).get("many", ["no"])[-1].lower() in TRUE_WORDS
        if not isinstance(items, list):
            result = _result(_submit(service, items, many=many, block=False))
            return HTTPStatus.OK, {"results" if many else "result": result}
        return self._answer_list(service, items, many=many)

    def _answer_list(self, service: Service, items: list[Any], *, many: bool) -> tuple[HTTPStatus, dict[str, Any]]:
        """All results that there are: an item that fails does not affect the others."""
        futures: list[RequestFuture | RequestError] = []
        for item in items:
            try:
                futures.append(_submit(service, item, many=many, block=True))
            except RequestError as error:
                futures.append(error)
        results: list[Any] = []
        errors: list[dict[str, object]] = []
        for index, future in enumerate(futures):
            try:
                results.append(_result(future))
            except RequestError as error:
                results.append(None)
                errors.append({"index": index, **error.body})
        status = HTTPStatus.UNPROCESSABLE_ENTITY if errors else HTTPStatus.OK
        return status, {"results": results, "errors": errors}

    def _check_access(self) -> None:
        if self.server.token:
            self.check_token()
        elif self.headers.get("Origin"):
            message = "requests of web pages need a token: dovetail serve --token"
            raise self.closing(self.refuse(HTTPStatus.FORBIDDEN, message))

    def _read_json(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or self.headers.get("Transfer-Encoding"):
            raise self.closing(self.refuse(HTTPStatus.LENGTH_REQUIRED, "send the header Content-Length"))
        if int(length) > self.server.max_body_bytes:
            message = f"the body is larger than {format_size(self.server.max_body_bytes)}; see --max-body"
            raise self.closing(self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message))
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise self.refuse(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from None

    def _refuse_path(self, *, is_known: bool, allow: str) -> None:
        self.close_connection = self.has_unread_input = True
        status = HTTPStatus.METHOD_NOT_ALLOWED if is_known else HTTPStatus.NOT_FOUND
        message = f"use {allow}" if is_known else "there are POST / and GET /health"
        self._send(
            status, {"error": {"code": SERVICE_REQUEST_CODE, "message": message}}, allow=allow if is_known else ""
        )

    def _send(self, status: HTTPStatus, answer: dict[str, Any], *, allow: str = "") -> None:
        self.send_json(status, answer, allow=allow, default=json_default)


def _submit(service: Service, item: Any, *, many: bool, block: bool) -> RequestFuture:
    try:
        return service.submit(item, many=many, block=block)
    except DovetailError as error:
        raise _request_error(error) from None


def _result(future: RequestFuture | RequestError) -> Any:
    if isinstance(future, RequestError):
        raise future
    try:
        return future.result()
    except TimeoutError as error:
        raise RequestError(HTTPStatus.GATEWAY_TIMEOUT, str(error), SERVICE_REQUEST_CODE) from None
    except DovetailError as error:
        raise _request_error(error) from None


def _request_error(error: DovetailError) -> RequestError:
    problem = error.problems[0]
    is_closed = isinstance(error, ServiceClosed | TooManyRequests)
    status = HTTPStatus.SERVICE_UNAVAILABLE if is_closed else HTTPStatus.UNPROCESSABLE_ENTITY
    more = {"stage": error.stage} if isinstance(error, ItemFailed) and error.stage else {}
    return RequestError(status, problem.message, problem.code, **more)
