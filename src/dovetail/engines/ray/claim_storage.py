"""Rows of the claim store in the key-value store of Ray's head, with a lock; liveness of other drivers.

Each writes only its own row, and only with the lock in its hand. Nothing is enforced by this: what a run really gets
are Ray's placement groups, so that a lock that is broken at a bad moment costs fairness for a moment and no more.
"""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from dovetail.engines.ray import ray_private
from dovetail.errors import EngineError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
Row = tuple[Any, ...]
KV_NAMESPACE = b"dovetail"
SCHEMA_VERSION = "1"
LOCK_EXPIRY_S = 2.0
"""A lock that is the same for so long is that of somebody who is gone, or sleeps: it is broken. A change takes 5 ms."""
LOCK_TIMEOUT_S = 30.0
"""Who gets no lock for so long gives up."""
LOCK_RETRY_S = 0.003
RPC_TIMEOUT_S = 10.0
DRIVER_CHECK_S = 1.0
"""Between two questions after the same driver."""


class KvClaimRows:
    """Rows by the id of their owner, a lock, and a stamp that is new after every change."""

    def __init__(self, book: str = "claims", *, lock_s: float = LOCK_EXPIRY_S) -> None:
        prefix = f"{book}/{SCHEMA_VERSION}/"
        self._prefix = f"{prefix}row/".encode()
        self._lock, self._stamp = f"{prefix}lock".encode(), f"{prefix}stamp".encode()
        self._lock_s = lock_s
        self._seen: bytes | None = b""

    def read(self) -> list[Row]:
        """All of them, the first to come first."""
        with _rpc_errors():
            client = _client()
            keys = client.internal_kv_keys(self._prefix, KV_NAMESPACE, RPC_TIMEOUT_S)
            found = client.internal_kv_multi_get(keys, KV_NAMESPACE, RPC_TIMEOUT_S) if keys else {}
        rows = [self._row(text) for text in found.values()]
        return sorted(rows, key=lambda row: (row[6], row[0]))

    def _row(self, text: bytes) -> Row:
        try:
            row = tuple(json.loads(text))
            assert len(row) > 6
        except (ValueError, TypeError, AssertionError) as error:
            raise self.damaged_error(f"{text!r:.200}: {error!r}") from None
        return row

    def transact(self, decide: Callable[[list[Row]], tuple[list[str], Row | None, T]]) -> T:
        """Nobody else changes anything from the reading of the rows until those it names are gone and the one it
        returns is written. Whoever loses the lock meanwhile starts again."""
        until = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            with self._locked(until) as token:
                void, row, answer = decide(self.read())
                if _get(self._lock) != token:
                    continue
                for owner in void:
                    _delete(self._key(owner))
                if row is not None:
                    _put(self._key(row[0]), json.dumps(row).encode())
                if void or row is not None:
                    _put(self._stamp, os.urandom(8))
                return answer

    def delete(self, owner: str) -> None:
        _delete(self._key(owner))
        _put(self._stamp, os.urandom(8))

    def has_changed(self) -> bool:
        """Whether somebody wrote since this was last asked."""
        before, self._seen = self._seen, _get(self._stamp)
        return before != self._seen

    def damaged_error(self, reason: str) -> EngineError:
        message = "what runs of this cluster wrote down for each other cannot be read"
        fixes = ("use the same version of Dovetail in all runs of this cluster", "restart the cluster")
        return EngineError(Problem("DT397", message, (reason,), fixes))

    def _key(self, owner: str) -> bytes:
        return self._prefix + owner.encode()

    # --- the lock

    @contextmanager
    def _locked(self, until: float) -> Iterator[bytes]:
        token = f"{os.getpid()} {time.time():.3f} {os.urandom(8).hex()}".encode()
        self._acquire_lock(token, until)
        try:
            yield token
        finally:
            with suppress(EngineError):
                if _get(self._lock) == token:
                    _delete(self._lock)

    def _acquire_lock(self, token: bytes, until: float) -> None:
        """How old a lock is, is measured by our own clock: those of other machines may be wrong."""
        seen: bytes | None = None
        since = 0.0
        while not _put(self._lock, token, overwrite=False):
            holder, now = _get(self._lock), time.monotonic()
            if holder != seen:
                seen, since = holder, now
            elif holder is not None and now >= since + self._lock_s and _get(self._lock) == holder:
                _delete(self._lock)
            if now >= until:
                raise _unusable_error(f"the lock is held by {(holder or b'nobody').decode()}")
            time.sleep(LOCK_RETRY_S * (0.5 + random.random()))  # noqa: S311 - no secret


class DriverLiveness:
    """Which drivers of this cluster are still there? Ray knows at once when one is gone."""

    def __init__(self, *, again_s: float = DRIVER_CHECK_S) -> None:
        self._again_s = again_s
        self._known: dict[str, tuple[float, bool | None]] = {}

    @staticmethod
    def current_job() -> str:
        return str(ray.get_runtime_context().get_job_id())

    def is_alive(self, job: str) -> bool | None:
        """None: Ray does not know it."""
        now = time.monotonic()
        at, known = self._known.get(job, (float("-inf"), None))
        if known is not False and now >= at + self._again_s:
            known = _is_driver_alive(job)
            self._known[job] = now, known
        return known


def _is_driver_alive(job: str) -> bool | None:
    with _rpc_errors():
        client = _client()
        found = client.get_all_job_info(
            job_or_submission_id=job,
            skip_submission_job_info_field=True,
            skip_is_running_tasks_field=True,
            timeout=RPC_TIMEOUT_S,
        )
    states = [not info.is_dead for info in found.values()]
    return states[0] if states else None


def _client() -> Any:
    client = ray_private.kv_client()
    if client is None:
        raise _unusable_error(f"Ray {ray.__version__} has no key-value store that Dovetail knows")
    return client


def _put(key: bytes, value: bytes, *, overwrite: bool = True) -> bool:
    """Whether it is there now: not if somebody was faster and nothing is to be overwritten."""
    with _rpc_errors():
        added = _client().internal_kv_put(key, value, overwrite, KV_NAMESPACE, RPC_TIMEOUT_S)
    return overwrite or bool(added)


def _get(key: bytes) -> bytes | None:
    with _rpc_errors():
        found = _client().internal_kv_get(key, KV_NAMESPACE, RPC_TIMEOUT_S)
    return None if found is None else bytes(found)


def _delete(key: bytes) -> None:
    with _rpc_errors():
        _client().internal_kv_del(key, False, KV_NAMESPACE, RPC_TIMEOUT_S)


@contextmanager
def _rpc_errors() -> Iterator[None]:
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # Ray has no common kind for this
        raise _unusable_error(f"{type(error).__name__}: {error}") from error


def _unusable_error(reason: str) -> EngineError:
    fixes = ("ray status: is the cluster still there?", "then go on: dovetail run --resume last")
    return EngineError(Problem("DT397", "the book of this cluster's runs cannot be used", (reason,), fixes))
