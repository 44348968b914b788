"""Ingestion of jobs that foreign programs push as JSON to a Redis list, so that old producers keep working.

    --ingest ai:gpu:queue=tasks:infer     every message of the list becomes a job tasks:infer(message)

Messages are taken from the right end of the list, for producers that LPUSH. `requires_gpu` and `priority` of a message
are honoured. What is not JSON, or cannot be a job, goes to the list `LIST:rejected` with the reason.

No message is lost or doubled:

- If the queue is in the same Redis, one step of its store takes messages from the list and submits their jobs
  (`RedisStore.ingest`).
- Otherwise a message is moved in one atomic step to a list of its batch, `LIST:ingesting:TOKEN`, which never changes
  afterwards. Its place there is the idempotency key of its job, so a batch whose worker died is submitted again by
  another one, with the same jobs. The batch is deleted when the store has all of its jobs.

The wait for messages blocks in Redis; nothing is polled.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from dovetail.errors import ConfigError, DovetailError, Problem
from dovetail.jobs.job import DEFAULT_QUEUE, JobSpec
from dovetail.jobs.payload_codec import PayloadCodec
from dovetail.jobs.submission import prepare
from dovetail.resources.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dovetail.jobs.application import Application
    from dovetail.jobs.job_function import JobFunction
    from dovetail.jobs.store import Store
    from dovetail.jobs.stores.redis_store import RedisStore

BAD_ROUTE = "DT645"
ROUTE_EXAMPLE = "--ingest ai:gpu:queue=pkg.module:handler"
LIST_LIMIT_CHARS = 300
BATCH = 100
"""Messages that are moved and submitted together."""
BLOCK_S = 5.0
"""Longest wait of one blocking call, shorter than the timeout of the connection."""
SOCKET_TIMEOUT_S = 15.0
RETRY_S = (0.2, 10.0)
"""First and longest pause after an error of Redis or the store."""
RECOVERY_S = 60.0
"""Batches of ingesters that died are looked for at the start, and then this often while the list is empty."""
STOP_POLL_S = 0.05

_TAKE = """
local items = redis.call('LRANGE', KEYS[1], -tonumber(ARGV[1]), -1)
local count = #items
if count == 0 then return items end
redis.call('LTRIM', KEYS[1], 0, -(count + 1))
local taken = {}
for i = count, 1, -1 do
    taken[#taken + 1] = items[i]
    redis.call('RPUSH', KEYS[2], items[i])
end
return taken
"""
"""Move messages from the right end of a list to a batch, the oldest first."""
_FINISH = """
if redis.call('DEL', KEYS[1]) == 1 then
    for _, item in ipairs(ARGV) do redis.call('LPUSH', KEYS[2], item) end
end
return 1
"""
"""Delete a batch, and record its rejected messages unless another ingester has done so."""


@dataclass(frozen=True, slots=True)
class Route:
    """A list, and the function that its messages are for."""

    list_name: str
    function: JobFunction


def parse_routes(texts: Sequence[str], application: Application) -> list[Route]:
    """Routes of LIST=pkg.module:handler; one ConfigError names everything that is wrong."""
    problems: list[Problem] = []
    routes: list[Route] = []
    for text in texts:
        name, equals, reference = text.rpartition("=")
        if not equals or not name or ":" not in reference or len(name) > LIST_LIMIT_CHARS:
            message = f"--ingest {text}: not LIST=MODULE:FUNCTION"
            problems.append(Problem(BAD_ROUTE, message, fixes=(ROUTE_EXAMPLE,)))
            continue
        try:
            routes.append(Route(name, application.find(reference)))
        except ConfigError as error:
            problems += error.problems
    names = [route.list_name for route in routes]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        message = f"--ingest: the list {name!r} is given twice"
        problems.append(Problem(BAD_ROUTE, message, fixes=("remove one of the two",)))
    if problems:
        raise ConfigError(problems)
    return routes


# --- from messages to jobs


@dataclass(frozen=True, slots=True)
class Rejected:
    """A message that cannot be a job."""

    data: bytes
    reason: str

    def to_json(self) -> str:
        """Entry of the list `:rejected`: the reason, and the message as text, or in base 64 if it is not UTF-8."""
        try:
            message = {"message": self.data.decode()}
        except UnicodeDecodeError:
            message = {"message_base64": base64.b64encode(self.data).decode()}
        return json.dumps({"reason": self.reason, **message}, ensure_ascii=False)


def job_of_message(
    data: bytes, route: Route, key: str | None, codec: PayloadCodec, queue: str = DEFAULT_QUEUE
) -> JobSpec | Rejected:
    """The job of a message: the function of the route is called with the message as its argument."""
    try:
        message = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return Rejected(data, f"not JSON: {error}")
    about: Mapping[str, Any] = message if isinstance(message, dict) else {}
    needs_gpu = about.get("requires_gpu")
    if needs_gpu not in (True, False, None):  # 0 and 1 are equal to False and True
        return Rejected(data, f"requires_gpu is {json.dumps(needs_gpu)}, not true or false")
    options: dict[str, Any] = {} if key is None else {"key": key}
    if needs_gpu:
        options["resources"] = _with_gpu(route.function.defaults.given.get("resources"))
    if about.get("priority") is not None:
        options["priority"] = about["priority"]
    try:
        submission, _ = prepare(route.function, options, {}, queue)
        return submission.spec([message], {}, codec)
    except ConfigError as error:
        return Rejected(data, "; ".join(problem.message for problem in error.problems))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _with_gpu(declared: Any) -> Resources:
    """What the function declares, with a whole GPU if it declares none."""
    if declared is None:
        return Resources(gpus=1)
    found = declared if isinstance(declared, Resources) else Resources(**declared)
    return found if found.shape().computes_on_gpu else replace(found, gpus=1)


# --- from the list to the queue


class Ingester:
    """A thread that moves the messages of one list into a queue."""

    def __init__(
        self,
        url: str,
        route: Route,
        store: Store,
        codec: PayloadCodec | None = None,
        report: Callable[[str], None] = lambda _text: None,
        *,
        is_same_redis: bool = False,
    ) -> None:
        """`url`: the Redis that has the list. `is_same_redis`: it is also that of the store. `report` gets one line
        when an error begins or ends, and for rejected messages."""
        self.route = route
        self._url = url
        self._store = store
        self._codec = codec or PayloadCodec()
        self._report = report
        self._list_store: RedisStore | None = cast("RedisStore", store) if is_same_redis else None
        self._redis = _connected(url)
        self._stopping = threading.Event()
        self._blocked_client: int | None = None
        self._error = ""
        self._submitted = self._rejected = 0
        self._recovered_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name=f"ingest {route.list_name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the batch in progress and end the thread."""
        self._stopping.set()
        while self._thread.is_alive():
            self._unblock()
            self._thread.join(STOP_POLL_S)
        self._redis.close()

    def get_status(self) -> dict[str, Any]:
        return {
            "list": self.route.list_name,
            "function": self.route.function.reference,
            "submitted": self._submitted,
            "rejected": self._rejected,
            "error": self._error,
        }

    def _run(self) -> None:
        pause_s = RETRY_S[0]
        expected: tuple[type[Exception], ...] = (DovetailError, *_redis_errors())
        while not self._stopping.is_set():
            try:
                self._step()
            except expected as error:
                self._on_error(error)
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, RETRY_S[1])
            else:
                self._on_success()
                pause_s = RETRY_S[0]

    def _step(self) -> None:
        """Submit one batch; without messages, wait for one."""
        if time.monotonic() - self._recovered_at > RECOVERY_S:
            self._recover()
            self._recovered_at = time.monotonic()
        if self._list_store is not None:
            self._step_in_same_redis(self._list_store)
            return
        batch = self._batch_name()
        messages = self._redis.eval(_TAKE, 2, self.route.list_name, batch, BATCH)
        if not messages:
            message = self._wait_for_message(batch)
            if message is None:
                return
            messages = [message]
        self._submit(batch, messages)

    def _step_in_same_redis(self, store: RedisStore) -> None:
        messages = self._redis.lrange(self.route.list_name, -BATCH, -1)
        if not messages:
            # taken from the right end and put back there: the list does not change
            self._wait_for_message(self.route.list_name)
            return
        made = [job_of_message(data, self.route, None, self._codec) for data in reversed(messages)]
        specs = [one for one in made if isinstance(one, JobSpec)]
        rejected = [one for one in made if isinstance(one, Rejected)]
        entries = [one.to_json().encode() for one in rejected]
        if store.ingest(self.route.list_name, self._rejected_list, messages, entries, specs):
            self._count(len(specs), rejected)

    @property
    def _rejected_list(self) -> str:
        return f"{self.route.list_name}:rejected"

    def _wait_for_message(self, batch: str) -> bytes | None:
        """Block until there is a message, and move it to a batch."""
        self._blocked_client = int(self._redis.client_id())
        try:
            if self._stopping.is_set():
                return None
            found = self._redis.blmove(self.route.list_name, batch, BLOCK_S, "RIGHT", "RIGHT")
            assert found is None or isinstance(found, bytes)
            return found
        finally:
            self._blocked_client = None

    def _submit(self, batch: str, messages: Sequence[bytes]) -> None:
        token = batch.rpartition(":")[2]
        prefix = f"ingest:{self.route.list_name}:{token}"
        made = [
            job_of_message(data, self.route, f"{prefix}:{place}", self._codec) for place, data in enumerate(messages)
        ]
        specs = [one for one in made if isinstance(one, JobSpec)]
        rejected = [one for one in made if isinstance(one, Rejected)]
        created = sum(receipt.created for receipt in self._store.submit(specs)) if specs else 0
        self._redis.eval(_FINISH, 2, batch, self._rejected_list, *(one.to_json() for one in rejected))
        self._count(created, rejected)

    def _count(self, submitted: int, rejected: Sequence[Rejected]) -> None:
        self._on_success()
        self._submitted += submitted
        self._rejected += len(rejected)
        for one in rejected:
            self._report(f"{self.route.list_name}: message rejected: {one.reason}")

    def _recover(self) -> None:
        """Submit batches whose ingester died. One that is alive submits the same jobs: each counts once."""
        pattern = re.sub(r"([*?[^\\])", r"\\\1", self.route.list_name) + ":ingesting:*"
        for name in list(self._redis.scan_iter(match=pattern, count=1_000)):
            messages = self._redis.lrange(name, 0, -1)
            if messages:
                self._submit(name.decode(), messages)

    def _batch_name(self) -> str:
        return f"{self.route.list_name}:ingesting:{secrets.token_hex(8)}"

    def _unblock(self) -> None:
        """End the blocking call of the thread, without losing a message that it is moving."""
        client = self._blocked_client
        if client is None:
            return
        other = _connected(self._url)
        try:
            other.client_unblock(client)
        except _redis_errors():
            pass  # the call has a timeout
        finally:
            other.close()

    def _on_success(self) -> None:
        if self._error:
            self._error = ""
            self._report(f"ingestion of {self.route.list_name} continues")

    def _on_error(self, error: Exception) -> None:
        self._recovered_at = float("-inf")  # the batch in progress is submitted again
        text = error.problems[0].message if isinstance(error, DovetailError) else f"{type(error).__name__}: {error}"
        if text != self._error:
            self._error = text
            self._report(f"ingestion of {self.route.list_name} waits: {text}")


def _connected(url: str) -> Any:
    """A client with one connection, so that its id is known."""
    import redis

    return redis.Redis.from_url(url, socket_timeout=SOCKET_TIMEOUT_S, single_connection_client=True)


def _redis_errors() -> tuple[type[Exception], ...]:
    import redis

    return (redis.exceptions.RedisError, OSError)
