"""Rows of the claim store in the key-value store of Ray's head, with a lock; liveness of other drivers.

`runtime` creates a `claims.cluster_store.ClusterClaimStore` with these rows. A run writes only its own row, and only
while it holds the lock. The rows decide fairness, not ownership: a run gets its resources by Ray's placement groups. If
a lock is broken at a bad moment, shares are unfair for a moment.
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
from dovetail.engines.ray.ray_import import ray_error, ray_errors
from dovetail.errors import EngineError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
Row = tuple[Any, ...]
KV_NAMESPACE = b"dovetail"
SCHEMA_VERSION = "2"
UNUSABLE = "the claims of this cluster's runs cannot be used"
LOCK_EXPIRY_S = 2.0
"""A lock that did not change for this long belongs to a dead or stopped process, and is broken. A transaction takes
5 ms."""
LOCK_TIMEOUT_S = 30.0
"""Limit for acquiring the lock."""
LOCK_RETRY_S = 0.003
RPC_TIMEOUT_S = 10.0
DRIVER_CHECK_S = 1.0
"""Minimum interval for asking Ray about the same driver."""


class KvClaimRows:
    """Rows by the id of their owner, a lock, and a stamp that changes with every transaction."""

    def __init__(self, book: str = "claims", *, lock_s: float = LOCK_EXPIRY_S) -> None:
        prefix = f"{book}/{SCHEMA_VERSION}/"
        self._prefix = f"{prefix}row/".encode()
        self._lock, self._stamp = f"{prefix}lock".encode(), f"{prefix}stamp".encode()
        self._lock_s = lock_s
        self._seen: bytes | None = b""

    def read(self) -> list[Row]:
        """All rows, in the order of arrival of their owners."""
        with ray_errors(UNUSABLE):
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
        """Pass all rows to `decide`, then delete the rows of the owners it returns and write the row it returns, under
        the lock. Start again if the lock was lost meanwhile."""
        until = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            with self._locked(until) as token:
                dead, row, answer = decide(self.read())
                if _get(self._lock) != token:
                    continue
                for owner in dead:
                    _delete(self._key(owner))
                if row is not None:
                    _put(self._key(row[0]), json.dumps(row).encode())
                if dead or row is not None:
                    _put(self._stamp, os.urandom(8))
                return answer

    def delete(self, owner: str) -> None:
        _delete(self._key(owner))
        _put(self._stamp, os.urandom(8))

    def has_changed(self) -> bool:
        """Whether a row was written since the last call."""
        before, self._seen = self._seen, _get(self._stamp)
        return before != self._seen

    def damaged_error(self, reason: str) -> EngineError:
        message = "the claims of this cluster's runs cannot be read"
        fixes = ("use the same version of Dovetail for all runs on this cluster", "restart the cluster")
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
        """The age of a lock is measured by the local clock: clocks of other machines may differ."""
        seen: bytes | None = None
        since = 0.0
        while not _put(self._lock, token, overwrite=False):
            holder, now = _get(self._lock), time.monotonic()
            if holder != seen:
                seen, since = holder, now
            elif holder is not None and now >= since + self._lock_s and _get(self._lock) == holder:
                _delete(self._lock)
            if now >= until:
                raise ray_error(UNUSABLE, f"the lock is held by {(holder or b'no process').decode()}")
            time.sleep(LOCK_RETRY_S * (0.5 + random.random()))  # noqa: S311 - no secret


class DriverLiveness:
    """Liveness of the drivers of this cluster, as Ray knows it."""

    def __init__(self, *, again_s: float = DRIVER_CHECK_S) -> None:
        self._again_s = again_s
        self._known: dict[str, tuple[float, bool | None]] = {}

    @staticmethod
    def current_job() -> str:
        return str(ray.get_runtime_context().get_job_id())

    def is_alive(self, job: str) -> bool | None:
        """None: Ray does not know this job."""
        now = time.monotonic()
        at, known = self._known.get(job, (float("-inf"), None))
        if known is not False and now >= at + self._again_s:
            known = _is_driver_alive(job)
            self._known[job] = now, known
        return known


def _is_driver_alive(job: str) -> bool | None:
    with ray_errors(UNUSABLE):
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
        raise ray_error(UNUSABLE, f"Ray {ray.__version__} has no key-value store that Dovetail knows")
    return client


def _put(key: bytes, value: bytes, *, overwrite: bool = True) -> bool:
    """Whether the value was written; without `overwrite`, false if the key exists."""
    with ray_errors(UNUSABLE):
        added = _client().internal_kv_put(key, value, overwrite, KV_NAMESPACE, RPC_TIMEOUT_S)
    return overwrite or bool(added)


def _get(key: bytes) -> bytes | None:
    with ray_errors(UNUSABLE):
        found = _client().internal_kv_get(key, KV_NAMESPACE, RPC_TIMEOUT_S)
    return None if found is None else bytes(found)


def _delete(key: bytes) -> None:
    with ray_errors(UNUSABLE):
        _client().internal_kv_del(key, False, KV_NAMESPACE, RPC_TIMEOUT_S)
