"""Connections to a Redis or Valkey server, calls of the functions in `redis_functions/`, and the errors of both.

The functions are one library, whose name has a digest of its source: versions of Dovetail on one server do not disturb
each other. It is loaded when a call does not find it, which also covers a server that was restarted without it.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dovetail.errors import ConfigError, Problem, short_repr
from dovetail.jobs.claim_reservations import MAX_RESERVE_TRIES, RESERVE_AFTER_MS, RESERVE_AGAIN_MS
from dovetail.jobs.job import DEFAULT_QUEUE, NORMAL_RETRIES
from dovetail.jobs.ordering import AGEING_MS_PER_STEP
from dovetail.jobs.retry_backoff import MAX_DOUBLINGS
from dovetail.jobs.state_machine import PREEMPTED, PREEMPTIONS_KEPT
from dovetail.jobs.store import DUE_PER_STEP, SCHEMA_VERSION, StoreUnavailableError, StoreVersionError
from dovetail.jobs.transaction import LEASE_EXPIRED
from dovetail.jobs.worker_choice import DEFERRAL_KEPT_MS
from dovetail.jobs.worker_liveness import WORKER_FORGOTTEN_MS

if TYPE_CHECKING:
    from collections.abc import Callable


REPLY_TIMEOUT_S = 10.0
RECEIVE_BYTES = 65_536
DOLLAR, STAR, COLON, MINUS = b"$*:-"
CONNECT_TIMEOUT_S = 5.0
MIN_SERVER_VERSION = (7, 0)
FUNCTIONS = Path(__file__).parent / "redis_functions"
FUNCTION_FILES = (
    *("order", "fit", "records", "buckets", "machine", "shares", "placement", "reservation", "offers", "preemption"),
    *("gangs", "claim", "lookup", "purge", "plain_submission", "plain_claim", "steps", "functions"),
)
SHAPES_CACHED = 1_000
FREE_VECTORS_CACHED = 5_000
PLAIN_TEXT_BYTES = 1_000
"""Longest specification of which the server keeps what follows from it."""


@cache
def library() -> tuple[str, str]:
    """Name and source of the library of functions."""
    parts = "\n".join((FUNCTIONS / f"{name}.lua").read_text(encoding="utf-8") for name in FUNCTION_FILES)
    constants = {
        "version": SCHEMA_VERSION,
        "default_queue": DEFAULT_QUEUE,
        "retries": asdict(NORMAL_RETRIES),
        "ageing_ms_per_step": AGEING_MS_PER_STEP,
        "max_doublings": MAX_DOUBLINGS,
        "preemptions_kept": PREEMPTIONS_KEPT,
        "due_per_step": DUE_PER_STEP,
        "deferral_kept_ms": DEFERRAL_KEPT_MS,
        "reserve_after_ms": RESERVE_AFTER_MS,
        "reserve_again_ms": RESERVE_AGAIN_MS,
        "max_reserve_tries": MAX_RESERVE_TRIES,
        "worker_forgotten_ms": WORKER_FORGOTTEN_MS,
        "lease_expired": LEASE_EXPIRED,
        "preempted": PREEMPTED,
        "shapes_cached": SHAPES_CACHED,
        "plain_text_bytes": PLAIN_TEXT_BYTES,
        "free_vectors_cached": FREE_VECTORS_CACHED,
    }
    name = "dovetail_" + sha256((parts + _lua(constants)).encode()).hexdigest()[:12]
    return name, f"#!lua name={name}\nlocal CONSTANTS = {_lua(constants | {'library': name})}\n{parts}"


def _lua(value: object) -> str:
    """A value as Lua source; there is no JSON yet while a library is loaded."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_lua(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def pack_command(parts: tuple[bytes, ...]) -> bytes:
    """A command in the protocol of Redis."""
    packed = [b"*%d\r\n" % len(parts)]
    for part in parts:
        packed += (b"$%d\r\n" % len(part), part, b"\r\n")
    return b"".join(packed)


class RedisLink:
    """One connection. The package redis opens it (address, TLS, credentials); commands and replies are packed and read
    here, in the second version of the protocol: it takes a third of the time."""

    def __init__(self, connection: Any, errors: Any) -> None:
        self._connection = connection
        self._errors = errors
        self.socket: Any = connection._sock  # noqa: SLF001 - of all versions of redis-py

    def send(self, *parts: bytes) -> None:
        self.send_packed(pack_command(parts))

    def send_packed(self, command: bytes) -> None:
        try:
            self.socket.sendall(command)
        except OSError as error:
            raise self._broken(error) from error

    def read(self) -> Any:
        """The next reply, which must be the only one; read pushed messages with `read_all`."""
        [reply] = self.read_all()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def read_all(self) -> list[Any]:
        """All replies that have arrived, at least one; error replies as exceptions."""
        data = self._receive()
        if data[0] == DOLLAR:  # one text, mostly
            end = data.index(b"\r\n") + 2 if b"\r\n" in data else -1
            if end > 0 and (size := int(data[1 : end - 2])) >= 0:
                parts, missing = [data], end + size + 2 - len(data)
                while missing > 0:
                    parts.append(self._receive())
                    missing -= len(parts[-1])
                if missing == 0:
                    return [(data if len(parts) == 1 else b"".join(parts))[end : end + size]]
                data = b"".join(parts)
        while True:
            try:
                return self._parse_all(data)
            except IndexError:
                data += self._receive()

    def disconnect(self) -> None:
        self._connection.disconnect()

    def _receive(self) -> bytes:
        try:
            data: bytes = self.socket.recv(RECEIVE_BYTES)
        except OSError as error:
            raise self._broken(error) from error
        if not data:
            raise self._broken("the server has closed the connection")
        return data

    def _broken(self, reason: object) -> Exception:
        kind = self._errors.TimeoutError if isinstance(reason, TimeoutError) else self._errors.ConnectionError
        error: Exception = kind(str(reason))
        return error

    def _parse_all(self, data: bytes) -> list[Any]:
        replies: list[Any] = []
        position = 0
        while position < len(data):
            position = self._parse(data, position, 1, replies)
        return replies

    def _parse(self, data: bytes, position: int, count: int, items: list[Any]) -> int:
        """Append replies, and return the position of their end. Raises IndexError if they are not complete."""
        for _ in range(count):
            end = data.find(b"\r\n", position)
            if end < 0:
                raise IndexError
            kind, value, position = data[position], data[position + 1 : end], end + 2
            if kind == DOLLAR:
                size = int(value)
                if size < 0:
                    items.append(None)
                    continue
                end = position + size
                if end + 2 > len(data):
                    raise IndexError
                items.append(data[position:end])
                position = end + 2
            elif kind == COLON:
                items.append(int(value))
            elif kind == STAR:
                inner: list[Any] | None = None if value[:1] == b"-" else []
                items.append(inner)
                if inner is not None and value != b"0":
                    position = self._parse(data, position, int(value), inner)
            elif kind == MINUS:
                items.append(self._errors.ResponseError(value.decode("utf-8", "replace")))
            else:
                items.append(value)
        return position


class RedisServer:
    """One database of a server, and the connections of this process to it. Thread-safe."""

    def __init__(self, url: str, prefix: str, clock_ms: Callable[[], int] | None) -> None:
        redis = _import_redis()
        self._errors = redis.exceptions
        self.broken = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
        """Errors of a connection that is broken."""
        self.refused = redis.exceptions.ResponseError
        """Error reply of the server."""
        self._options, self._connection_class, self.address = _parse_url(redis, url)
        self.prefix = b"{" + prefix.encode() + b"}:"
        self._clock_ms = clock_ms
        self._library = library()[0].encode()
        self._idle: list[RedisLink] = []
        self._process = os.getpid()
        self._is_checked = False
        self._has_served = False
        """Whether a call has succeeded."""
        self.is_closed = False

    # --- calls

    def call(self, name: bytes, *arguments: bytes) -> Any:
        """Call a function of the library: one atomic step."""
        command = self.command(name, *arguments)
        for _ in range(3):
            try:
                reply = self._request(command)
            except self._errors.ResponseError as error:
                if not has_words(error, "Function not found"):
                    self.refuse(error)
                self._load_library()
            else:
                self._has_served = True
                return reply
        raise AssertionError(f"{self.address} forgets the library of functions as soon as it is loaded")

    def command(self, name: bytes, *arguments: bytes) -> bytes:
        """The call of a function, packed, at the current time of a clock for tests."""
        clock = b"" if self._clock_ms is None else b"%d" % self._clock_ms()
        return pack_command((b"FCALL", self._library + b"_" + name, b"1", self.prefix, clock, *arguments))

    def add_wake_up(self, key: bytes) -> None:
        """Add the member of a sorted set that a worker waits for."""
        try:
            self._request(pack_command((b"ZADD", key, b"NX", b"0", b"")))
        except self._errors.ResponseError as error:
            self.refuse(error)

    def ping(self) -> None:
        """Wait until the server has written the replies of all connections."""
        try:
            self._request(pack_command((b"PING",)))
        except self._errors.ResponseError as error:
            self.refuse(error)

    def _load_library(self) -> None:
        try:
            self._request(pack_command((b"FUNCTION", b"LOAD", library()[1].encode())))
        except self._errors.ResponseError as error:
            if not has_words(error, "already exists"):
                self.refuse(error)

    def _request(self, command: bytes) -> Any:
        """Send a command and read its reply; repeated with a new connection if an old one is broken."""
        while True:
            connection, is_new = self._take()
            try:
                connection.send_packed(command)
                reply = connection.read()
            except self._errors.ResponseError:
                self._give_back(connection)
                raise
            except self._errors.TimeoutError as error:
                connection.disconnect()
                self.fail(error)
            except self._errors.ConnectionError as error:
                connection.disconnect()
                if is_new:
                    self.fail(error)
                self._drop_idle()
            except BaseException:
                connection.disconnect()  # its reply would be read by another call
                raise
            else:
                self._give_back(connection)
                return reply

    # --- connections

    def connect(self) -> RedisLink:
        """A new connection, which the caller owns."""
        connection: Any = self._connection_class(**self._options)
        try:
            connection.connect()
            link = RedisLink(connection, self._errors)
            self._check(link)
        except (self._errors.RedisError, OSError) as error:
            connection.disconnect()
            self.fail(error)
        except BaseException:
            connection.disconnect()
            raise
        return link

    def close(self) -> None:
        self.is_closed = True
        self._drop_idle()

    def _take(self) -> tuple[RedisLink, bool]:
        """A connection, and whether it is new."""
        if self.is_closed:
            raise StoreUnavailableError(Problem("DT660", f"the store at {self.address} was closed by this process"))
        if self._process != os.getpid():  # a fork must not use the sockets of its parent
            self._idle, self._process = [], os.getpid()
        try:
            return self._idle.pop(), False
        except IndexError:
            return self.connect(), True

    def _give_back(self, connection: RedisLink) -> None:
        if self.is_closed:
            connection.disconnect()
        else:
            self._idle.append(connection)

    def _drop_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().disconnect()

    def _check(self, link: RedisLink) -> None:
        """Refuse servers that cannot keep jobs safely; once, and again after the server was away."""
        if self._is_checked:
            return
        link.send(b"INFO")
        try:
            reply = link.read()
        except self._errors.ResponseError as error:
            if not has_words(error, "NOPERM"):
                raise
            self._is_checked = True  # a restricted user: calls show what is wrong
            return
        info = dict(line.split(":", 1) for line in reply.decode("utf-8", "replace").splitlines() if ":" in line)
        problem = self._server_problem(info)
        if problem is not None:
            raise ConfigError(problem)
        self._is_checked = True

    def _server_problem(self, info: dict[str, str]) -> Problem | None:
        version = info.get("redis_version", "")
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < MIN_SERVER_VERSION:
            message = f"the server at {self.address} is Redis {version}; the job store needs Redis 7 or Valkey"
            return Problem("DT665", message, fixes=("upgrade the server, or use a queue in a file: sqlite:///jobs.db",))
        if info.get("redis_mode") == "cluster":
            message = f"the server at {self.address} is a node of a Redis cluster, which the job store does not support"
            return Problem(
                "DT665", message, fixes=("use a single server, with replicas and Sentinel if you need them",)
            )
        policy = info.get("maxmemory_policy", "noeviction")
        if policy.startswith("allkeys") and info.get("maxmemory", "0") != "0":
            message = f"the server at {self.address} would delete jobs when its memory is full"
            return Problem(
                "DT665",
                message,
                evidence=(f"maxmemory-policy is {policy}",),
                fixes=("redis-cli CONFIG SET maxmemory-policy noeviction",),
            )
        return None

    # --- errors

    def fail(self, error: Exception) -> NoReturn:
        """Raise what a broken or refused connection means."""
        if isinstance(
            error, self._errors.ResponseError | self._errors.AuthenticationError | self._errors.BusyLoadingError
        ):
            self.refuse(error)
        self._is_checked = False
        if isinstance(error, self._errors.TimeoutError):
            message, fix = (
                f"the Redis server at {self.address} does not answer",
                f"check it: redis-cli {self._cli} ping",
            )
        else:
            message = f"the Redis server at {self.address} cannot be reached"
            fix = f"start it, or correct its address; check it: redis-cli {self._cli} ping"
        raise StoreUnavailableError(Problem("DT660", message, (str(error),), (fix,))) from error

    def refuse(self, error: Exception) -> NoReturn:
        """Raise what an error reply means."""
        text = str(error)
        raise self._refusal(text) from error

    def _refusal(self, text: str) -> ConfigError | StoreUnavailableError:
        where = f"the Redis server at {self.address}"
        if has_words(text, "DOVETAILVERSION"):
            message = f"the jobs at {self.address} were stored by a newer version of Dovetail"
            evidence = (f"schema {text.split()[-1]}; this version reads schema {SCHEMA_VERSION}",)
            fixes = ("pip install --upgrade dovetail-ml", "use another prefix or database")
            return StoreVersionError(Problem("DT661", message, evidence, fixes))
        if has_words(text, "WRONGTYPE"):
            message = f"the keys of the prefix {self.prefix.decode()} at {self.address} belong to another program"
            return StoreVersionError(Problem("DT661", message, (text,), ("use another prefix or database",)))
        if has_words(text, "WRONGPASS", "NOAUTH", "invalid password", "invalid username", "Authentication"):
            message = f"{where} does not accept the user name or password of the URL"
            fixes = (
                "a server with requirepass: redis://:PASSWORD@HOST:6379/0",
                "a user of an ACL: redis://USER:PASSWORD@HOST:6379/0",
            )
            problem = Problem("DT666", message, (text,), fixes)
            # a password that was right is being changed: jobs continue meanwhile
            return StoreUnavailableError(problem) if self._has_served else ConfigError(problem)
        if has_words(text, "NOPERM", "No permissions", "no permissions"):
            message = f"{where} does not permit this user to use the job store"
            prefix = self.prefix.decode()
            rule = f"redis-cli ACL SETUSER NAME +@all -@dangerous +info +function ~{prefix}* &{prefix}*"
            return ConfigError(Problem("DT666", message, (text,), (rule,)))
        message, fix = f"{where} refuses the operation", "correct the cause, then repeat the operation"
        if has_words(text, "OOM", "used memory"):
            message = f"the memory of {where} is full"
            fix = "raise maxmemory (redis-cli CONFIG SET maxmemory 2gb), or remove finished jobs: dovetail jobs purge"
        elif has_words(text, "LOADING"):
            message, fix = f"{where} is starting", "wait until it has loaded its data"
        elif has_words(text, "READONLY", "read only replica"):
            message, fix = f"{where} is a read-only replica", "use the address of the primary server"
        else:
            assert not has_words(text, "user_function"), f"a function of the job store has failed: {text}"
        return StoreUnavailableError(Problem("DT660", message, (text,), (fix,)))

    @property
    def _cli(self) -> str:
        path = self._options.get("path")
        return (
            f"-s {path}"
            if path
            else f"-h {self._options.get('host', 'localhost')} -p {self._options.get('port', 6379)}"
        )


def has_words(error: object, *words: str) -> bool:
    """Whether an error reply of the server has one of these words; it has no other code."""
    text = str(error)
    return any(word in text for word in words)


def _import_redis() -> Any:
    try:
        import redis
        import redis.connection
        import redis.exceptions
    except ImportError as error:
        message = "a queue on Redis needs the package redis, which is not installed"
        raise ConfigError(Problem("DT667", message, fixes=("pip install 'dovetail-ml[redis]'",))) from error
    return redis


def _parse_url(redis: Any, url: str) -> tuple[dict[str, Any], Any, str]:
    """Options of a connection, its class, and the address without password."""
    try:
        options = redis.connection.parse_url(url)
        reason = _mistake(url, options)
    except (ValueError, TypeError) as error:
        options, reason = {}, str(error)
    if reason:
        message = f"{_without_password(url)} is not the URL of a Redis server"
        fixes = ("redis://localhost:6379/0", "rediss://USER:PASSWORD@HOST:6379/0", "unix:///run/redis/redis.sock?db=0")
        raise ConfigError(Problem("DT666", message, (reason,), fixes))
    connection_class = options.pop("connection_class", redis.connection.Connection)
    options["db"] = int(options.get("db", 0))
    database = options["db"]
    if "path" in options:
        address = f"unix://{options['path']}?db={database}"
    else:
        address = f"{url.partition(':')[0]}://{options.get('host', 'localhost')}:{options.get('port', 6379)}/{database}"
    limits = {"socket_connect_timeout": CONNECT_TIMEOUT_S, "socket_timeout": REPLY_TIMEOUT_S, "protocol": 2}
    options = limits | options
    return options, connection_class, address


def _mistake(url: str, options: dict[str, Any]) -> str:
    """Options of a URL that redis-py silently replaces by defaults."""
    if url.startswith("unix:"):
        return "" if options.get("path") else "it has no path"
    database = url.partition("://")[2].partition("?")[0].partition("/")[2]
    return f"the database {short_repr(database)} is not a number" if database and not database.isdigit() else ""


def _without_password(url: str) -> str:
    before, at, after = url.rpartition("@")
    return f"{before.partition('://')[0]}://...@{after}" if at else url
