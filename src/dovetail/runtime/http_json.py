"""JSON over HTTP: server, request handler, access checks and error responses, for services and the status of workers.

One thread per connection. With `max_connections`, a connection beyond the limit closes the oldest one, so that slow
clients cannot keep others from being answered.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

IDLE_TIMEOUT_S = 60.0
"""Time limit for a client to send a request, or the next one of a connection."""
RETRY_AFTER_S = 1
LINGER_S, LINGER_BYTES = 1.0, 1 << 20
"""How long, and how much, of a refused request is still read: closing at once would reset the connection, and the
client might not see the response."""
JSON_TYPE = "application/json"


class RequestError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: HTTPStatus, message: str, code: str, **more: object) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"code": code, "message": message, **more}


class JsonServer(ThreadingHTTPServer):
    """Listens at once, without looking up the name of the host, which may take seconds."""

    daemon_threads = True  # connections that are idle do not delay the exit
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        host: str,
        port: int,
        handler: type[JsonHandler],
        *,
        token: str = "",
        max_connections: int | None = None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.token = token
        self.is_stopping = False
        self._max_connections = max_connections
        self._connections: dict[int, socket.socket] = {}
        """Open connections by id, oldest first."""
        self._lock = Lock()
        super().__init__((host, port), handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        text = host.decode() if isinstance(host, bytes | bytearray) else str(host)
        return f"http://[{text}]:{port}/" if ":" in text else f"http://{text}:{port}/"

    def server_bind(self) -> None:
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._connections) == self._max_connections:
                oldest = self._connections.pop(next(iter(self._connections)))
                with suppress(OSError):  # ends the thread that reads from it
                    oldest.shutdown(socket.SHUT_RDWR)
            self._connections[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnects is not an error of the server."""


class JsonHandler(BaseHTTPRequestHandler):
    """One connection. Responses are JSON objects; errors are {"error": {"code": ..., "message": ...}}."""

    error_code: ClassVar[str]
    """Code of errors of requests."""
    protocol_version = "HTTP/1.1"
    server_version = "dovetail"
    sys_version = ""
    timeout = IDLE_TIMEOUT_S
    wbufsize = 1 << 16  # headers and body in one packet, sent at once: otherwise a response may wait 40 ms for an ACK
    disable_nagle_algorithm = True
    has_unread_input = False
    """A part of the request was not read."""

    @property
    def json_server(self) -> JsonServer:
        assert isinstance(self.server, JsonServer)
        return self.server

    def refuse(self, status: HTTPStatus, message: str, **more: object) -> RequestError:
        """A request error with the code of this handler."""
        return RequestError(status, message, self.error_code, **more)

    def has_token(self) -> bool:
        """Whether the request carries the token of the server."""
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self.json_server.token}".encode())

    def check_token(self) -> None:
        if not self.has_token():
            raise self.closing(self.refuse(HTTPStatus.UNAUTHORIZED, "send the header Authorization: Bearer TOKEN"))

    def closing(self, error: RequestError) -> RequestError:
        """The same error, after which the connection cannot be used again, because the body was not read."""
        self.close_connection = self.has_unread_input = True
        return error

    def send_json(
        self,
        status: HTTPStatus,
        answer: dict[str, Any],
        *,
        allow: str = "",
        default: Callable[[Any], Any] | None = None,
    ) -> None:
        try:
            body = json.dumps(answer, ensure_ascii=False, default=default, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            about = {"code": self.error_code, "message": f"the result cannot be written as JSON: {error}"}
            body = json.dumps({"error": about}).encode()
        self.send_body(status, body + b"\n", JSON_TYPE, allow=allow)

    def send_body(self, status: HTTPStatus, body: bytes, content_type: str, *, allow: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if allow:
            self.send_header("Allow", allow)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", str(RETRY_AFTER_S))
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if self.json_server.is_stopping or self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()  # before the request counts as answered

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """A request that is not HTTP, or has a method that there is not."""
        self.close_connection = self.has_unread_input = True
        status = HTTPStatus(code)
        self.send_json(status, {"error": {"code": self.error_code, "message": message or status.phrase}})

    def finish(self) -> None:
        super().finish()
        if self.has_unread_input:
            self._discard_input()

    def _discard_input(self) -> None:
        connection, deadline, remaining = self.connection, time.monotonic() + LINGER_S, LINGER_BYTES
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
            while remaining > 0 and (timeout := deadline - time.monotonic()) > 0:
                connection.settimeout(timeout)
                part = connection.recv(1 << 16)
                if not part:
                    return
                remaining -= len(part)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name is that of the base class
        """Requests are not logged."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_header_value(token: str) -> bool:
    """Whether HTTP headers can carry this token."""
    return token.isascii() and token.isprintable() and " " not in token
