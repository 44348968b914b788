"""Control socket of a run: drain, cancel, ping, stats and requests of its own kind as JSON lines over a Unix socket.

{"do": "drain", "reason": "dovetail drain"} -> {"ok": true, "do": "drain", "run": "...", "pid": 4711}

Only the user who started the run can open it (mode 0600). No input can disturb the run.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError, DovetailError, Problem, did_you_mean, short_repr
from dovetail.machine.processes import is_stopped
from dovetail.observe.run_folder import RunFolder, read_json_object, resume_instruction, run_reference
from dovetail.observe.run_status import run_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SOCKET_NAME = "control.sock"
NOT_REACHABLE = "DT362"
ACTIONS = ("drain", "cancel")
QUERIES = ("ping", "stats")
MAX_LINE_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 26
"""The status of a large actor system has several megabytes."""
MAX_REASON_CHARACTERS = 1000
EXCHANGE_TIMEOUT_S = 2.0
"""Time limit for a client to send one line."""
ANSWER_TIMEOUT_S = 10.0
"""Time limit for an answer: the driver may be busy."""
ANSWER_MARGIN_S = 1.0
"""A request expires this long before its client gives up, so that a client that gave up knows that nothing happens."""
CONNECT_TIMEOUT_S = 3.0
"""A run that has just started creates its socket within this time."""
MAX_ADDRESS_BYTES = 100
"""Longer paths do not fit into a socket address on every system."""


class ControlSocket:
    """Server side, in the driver. `act(do, reason)` is called for "drain" and "cancel" in a separate thread: it should
    only post an event. `requests`: further commands -> a function of the request that returns the answer."""

    def __init__(
        self,
        folder: Path,
        act: Callable[[str, str], None],
        requests: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.unavailable_reason = ""
        """Why there is no socket: some file systems do not support sockets, and the run continues without one."""
        self._on_action = act
        self._requests = dict(requests or {})
        self._socket: socket.socket | None = None
        self._wake, self._woken = socket.socketpair()
        self._thread: Thread | None = None

    def set_requests(self, requests: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]) -> None:
        """Set the further commands. Call it before `start`."""
        self._requests = dict(requests)

    def start(self) -> None:
        """Raises ConfigError if the socket of another live driver answers."""
        self._check_no_other_driver()
        try:
            self._socket = _listen(self.folder)
        except OSError as error:
            self.unavailable_reason = f"{SOCKET_NAME} cannot be made in {self.folder}: {error.strerror or error}"
            return
        self._thread = Thread(target=self._serve, args=(self._socket,), name="control-socket", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the socket. Idempotent; may be called without a start."""
        with suppress(OSError):
            self._wake.send(b"x")
        if self._thread is not None:
            self._thread.join(EXCHANGE_TIMEOUT_S + 1)
            self._thread = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with suppress(OSError):
                (self.folder / SOCKET_NAME).unlink()
        self._wake.close()
        self._woken.close()

    def _check_no_other_driver(self) -> None:
        try:
            found = _exchange(self.folder, {"do": "ping"}, EXCHANGE_TIMEOUT_S)
        except (OSError, ValueError, TypeError):
            return  # no listener, or the socket of a dead driver
        if found.get("pid") != os.getpid():
            message = f"process {found.get('pid')} is executing this run"
            fixes = (f"dovetail status {run_reference(self.folder)}",)
            raise ConfigError(Problem(NOT_REACHABLE, message, fixes=fixes, place=str(self.folder)))

    def _serve(self, listening: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listening, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not any(key.fileobj is self._woken for key, _ in selector.select()):
                try:
                    client, _ = listening.accept()
                except BlockingIOError:
                    continue  # the client disconnected
                except OSError:
                    time.sleep(0.1)  # out of descriptors: try again later
                    continue
                with client, suppress(OSError):
                    self._handle_client(client)

    def _handle_client(self, client: socket.socket) -> None:
        try:
            answer = self._answer(_read_line(client, EXCHANGE_TIMEOUT_S, MAX_LINE_BYTES))
        except Exception as error:  # no input may disturb the run
            answer = {"ok": False, "error": _error_text(error), "code": _error_code(error)}
        client.settimeout(EXCHANGE_TIMEOUT_S)
        client.sendall(json.dumps(answer).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, Any]:
        asked = json.loads(line)
        if not isinstance(asked, dict):
            raise TypeError(f'expected one JSON object, such as {{"do": "ping"}}, not {short_repr(asked)}')
        do, reason = asked.get("do"), asked.get("reason", "")
        known = (*ACTIONS, *QUERIES, *self._requests)
        if do not in known:
            raise ValueError(
                f"unknown command {short_repr(do)}{did_you_mean(str(do), known)}; commands: {', '.join(known)}"
            )
        if not isinstance(reason, str):
            raise TypeError(f"reason must be a string, not {short_repr(reason)}")
        answer = {"ok": True, "do": do, "run": self.folder.name, "pid": os.getpid()}
        if do in ACTIONS:
            _check_not_expired(asked.get("expires"))
            self._on_action(do, reason[:MAX_REASON_CHARACTERS] or f"asked to {do}")
        elif do == "stats":
            answer["stats"] = read_json_object(RunFolder(self.folder).header).get("progress") or {}
        elif do in self._requests:
            _check_not_expired(asked.get("expires"))
            answer |= self._requests[do](asked)
        return answer


def _error_text(error: Exception) -> str:
    if isinstance(error, DovetailError):
        return "; ".join(problem.message for problem in error.problems)
    return str(error) or type(error).__name__


def _error_code(error: Exception) -> str:
    """The code under which the client reports the error."""
    return error.problems[0].code if isinstance(error, DovetailError) else NOT_REACHABLE


def _check_not_expired(expires: object) -> None:
    """A driver that was stopped finds the requests of clients that have given up since."""
    if isinstance(expires, int | float) and time.monotonic() > expires:
        raise TimeoutError("the request has expired")


def send_request(folder: Path, do: str, reason: str = "", **values: Any) -> dict[str, Any]:
    """Send a command, with further values, to the driver of the run in this folder; returns its answer. Raises
    ConfigError if it is not running or not reachable."""
    folder = Path(folder)
    give_up = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        _check_running(folder)
        # the monotonic clock is the same for all processes of a machine
        expires = time.monotonic() + ANSWER_TIMEOUT_S - ANSWER_MARGIN_S
        asked = {**values, "do": do, "reason": reason, "expires": expires}
        try:
            return _check_answer(_exchange(folder, asked, ANSWER_TIMEOUT_S), folder, do)
        except PermissionError:
            owner = _owner(folder)
            raise _unreachable_error(folder, do, f"belongs to another user, {owner}", f"sudo -u {owner}") from None
        except (OSError, ValueError, TypeError) as error:
            if time.monotonic() > give_up:
                message = f"does not answer: {getattr(error, 'strerror', None) or error}"
                raise _unreachable_error(folder, do, message) from None
            time.sleep(0.05)


def _check_answer(answer: dict[str, Any], folder: Path, do: str) -> dict[str, Any]:
    if answer.get("ok") is True:
        return answer
    message = f"refused: {answer.get('error')}"
    if do in ACTIONS:
        raise _unreachable_error(folder, do, message)
    fixes = (f"dovetail status {run_reference(folder)}",)
    code = answer.get("code")
    code = code if isinstance(code, str) and re.fullmatch(r"DT\d{3}", code) else NOT_REACHABLE
    raise ConfigError(Problem(code, f"run {folder.name} {message}", fixes=fixes))


def _check_running(folder: Path) -> None:
    header = read_json_object(RunFolder(folder).header)
    status = run_status(header, time.time()) if header else "lost"
    name = run_reference(folder)
    if status != "running":
        words = {"lost": "lost: its process exited"}.get(status, status)
        fixes: tuple[str, ...] = (f"dovetail status {name}", "dovetail ls --status running")
        resume = resume_instruction(folder) if status != "finished" else ""
        if resume:
            fixes = (resume, *fixes)
        raise ConfigError(Problem("DT361", f"run {folder.name} is not running: it is {words}", fixes=fixes))
    host = header.get("host")
    if host != socket.gethostname():
        message = f"run {folder.name} runs on {host} and can only be controlled there"
        raise ConfigError(Problem(NOT_REACHABLE, message, fixes=(f"run the same command on {host}",)))


def _unreachable_error(folder: Path, do: str, message: str, prefix: str = "") -> ConfigError:
    header = read_json_object(RunFolder(folder).header)
    fixes = [f"{prefix} dovetail {do} {run_reference(folder)}"] if prefix else []
    pid = header.get("pid")
    if not prefix and isinstance(pid, int):
        fixes = [f"kill -INT {pid} stops reading and finishes the work in flight"]
        if is_stopped(pid):
            message = f"does not answer, and was not asked to {do}: its process {pid} is stopped"
            fixes = [f"kill -CONT {pid}; dovetail {do} {run_reference(folder)}"]
    return ConfigError(Problem(NOT_REACHABLE, f"run {folder.name} {message}", fixes=tuple(fixes)))


def _owner(folder: Path) -> str:
    try:
        return folder.owner()
    except (OSError, KeyError):
        return "root"


# --- sockets


@contextmanager
def _address(folder: Path, name: str) -> Iterator[str]:
    """A socket address has 107 bytes: a longer path is opened through a descriptor of its folder."""
    path = folder / name
    if len(os.fsencode(path)) <= MAX_ADDRESS_BYTES:
        yield str(path)
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def _listen(folder: Path) -> socket.socket:
    """Create the socket under a temporary name and rename it when it is private and listening; replaces an old one."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f".{SOCKET_NAME}.{os.getpid()}"
    try:
        with suppress(FileNotFoundError):
            (folder / name).unlink()
        os.fchmod(made.fileno(), 0o600)
        with _address(folder, name) as address:
            made.bind(address)
        (folder / name).chmod(0o600)  # before it listens; some systems ignore the mode of the bind
        made.setblocking(False)
        made.listen(16)
        (folder / name).replace(folder / SOCKET_NAME)
    except BaseException:
        made.close()
        with suppress(OSError):
            (folder / name).unlink()
        raise
    return made


def _exchange(folder: Path, request: dict[str, Any], patience_s: float) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ours:
        ours.settimeout(patience_s)
        with _address(folder, SOCKET_NAME) as address:
            ours.connect(address)
        ours.sendall(json.dumps(request).encode() + b"\n")
        answer = json.loads(_read_line(ours, patience_s, MAX_ANSWER_BYTES))
    if not isinstance(answer, dict):
        raise TypeError("malformed answer")
    return answer


def _read_line(talking: socket.socket, patience_s: float, limit_bytes: int) -> bytes:
    """Read one line, with limits of time and size."""
    end = time.monotonic() + patience_s
    found = bytearray()
    while b"\n" not in found[-MAX_LINE_BYTES:]:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("no complete line received")
        talking.settimeout(left)
        more = talking.recv(MAX_LINE_BYTES)
        if not more:
            break
        found += more
        if len(found) > limit_bytes:
            raise ValueError(f"a line has at most {limit_bytes} bytes")
    return bytes(found.partition(b"\n")[0])
