"""Memory of cached models within a worker: it is reserved before a load, and freed by evictions.

The caches are those of the warm processes, and that of the worker process, for jobs in threads and in the event loop.
Each is a host with a number. The memory of cached models that no job uses counts as free when the worker claims jobs.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.jobs.workers.model_cache import ModelCache
from dovetail.jobs.workers.model_eviction import ModelTable
from dovetail.resources.amounts import HOST
from dovetail.resources.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dovetail.jobs.workers.worker_capacity import WorkerCapacity

    Actions = list[Callable[[], None]]

GRANTED = ""
"""Reply to a reservation that was granted; any other text is the reason of a refusal."""


class ModelHost(Protocol):
    """The port of the ledger to a cache."""

    @property
    def pid(self) -> int | None: ...

    def evict(self, keys: Sequence[str]) -> None:
        """Begin to evict models; for each of them `on_evicted` or `on_kept` follows. Thread: any."""


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    host: int
    key: str
    device: int
    size: int
    can_wait: bool
    answer: Callable[[str], None]


class ModelLedger:
    """All methods may be called by any thread. Hosts and answers are called without the lock."""

    def __init__(self, capacity: WorkerCapacity, on_room: Callable[[], None] = lambda: None) -> None:
        """`on_room`: called when memory has become free for a job that needs it."""
        self._capacity = capacity
        self._on_room = on_room
        self._table = ModelTable()
        self._hosts: dict[int, ModelHost] = {}
        self._requests: list[_Request] = []
        self._last_host = 0
        self._makes_room = False
        """Whether models are being evicted for a job."""
        self._lock = threading.RLock()

    # --- hosts

    def add_host(self, host: ModelHost) -> int:
        with self._lock:
            self._last_host += 1
            self._hosts[self._last_host] = host
            return self._last_host

    def remove_host(self, number: int) -> None:
        """Release the bytes of a host whose process has ended."""
        with self._lock:
            self._hosts.pop(number, None)
            self._requests = [request for request in self._requests if request.host != number]
            for model in self._table.remove_host(number):
                self._capacity.release_model(model.device, model.size)
            actions = self._advance()
        _run(actions)

    def keys_of(self, number: int) -> dict[str, int]:
        """Bytes of the models of a host, by key."""
        with self._lock:
            return {model.key: model.size for model in self._table.of_host(number)}

    def host_bytes(self, number: int) -> int:
        """Bytes of the memory of the machine that models of a host may use."""
        with self._lock:
            return sum(model.size for model in self._table.of_host(number) if model.device == HOST)

    # --- reservations

    def reserve(
        self, host: int, key: str, device: int, size: int, *, can_wait: bool, answer: Callable[[str], None]
    ) -> None:
        """Request memory for a load. `can_wait`: until other jobs end; a job that holds other models must not, because
        two such jobs could wait for each other. It always waits for evictions."""
        with self._lock:
            self._requests.append(_Request(host, key, device, size, can_wait, answer))
            actions = self._advance()
        _run(actions)

    def on_loaded(self, host: int, key: str, load_s: float) -> None:
        with self._lock:
            if self._table.get(host, key) is not None:
                self._table.on_loaded(host, key, load_s, time.monotonic())

    def on_used(self, host: int, key: str) -> None:
        with self._lock:
            if self._table.get(host, key) is not None:
                self._table.on_used(host, key)

    def on_unpinned(self, host: int, keys: Iterable[str]) -> None:
        with self._lock:
            self._table.on_unpinned(host, keys)
            actions = self._advance()
        _run(actions)

    def on_kept(self, host: int, key: str) -> None:
        with self._lock:
            self._table.on_kept(host, key)
            actions = self._advance()
        _run(actions)

    def on_failed(self, host: int, key: str) -> None:
        """Release the memory of a model whose load has failed."""
        with self._lock:
            model = self._table.on_failed(host, key)
            if model is not None:
                self._capacity.release_model(model.device, model.size)
            actions = self._advance()
        _run(actions)

    def on_evicted(self, host: int, key: str) -> None:
        with self._lock:
            model = self._table.on_evicted(host, key, time.monotonic())
            if model is not None:
                self._capacity.release_model(model.device, model.size)
            actions = self._advance()
        _run(actions)

    def on_job_ended(self) -> None:
        """Handle resources of a job that became free."""
        if self._requests:
            with self._lock:
                actions = self._advance()
            _run(actions)

    def trim(self) -> None:
        """Evict models above the limit of the worker, which depends on the number of runs on the machine."""
        with self._lock:
            devices = {model.device for model in self._table}
            over = {device: self._capacity.excess_bytes(device) for device in devices}
            actions = self._evict_idle({device: size for device, size in over.items() if size})
        _run(actions)

    # --- memory for jobs

    def idle_bytes(self) -> Mapping[int, int]:
        with self._lock:
            return {} if self._table.is_evicting else self._table.idle_bytes()

    def evict(self, sizes: Mapping[int, int]) -> None:
        with self._lock:
            actions = self._evict_idle(sizes)
            self._makes_room = self._makes_room or bool(actions)
        _run(actions)

    # --- state

    def status(self) -> dict[str, Any]:
        """Counts, bytes by device and the models, as plain JSON data."""
        with self._lock:
            models = list(self._table)
            sizes: Counter[str] = Counter()
            for model in models:
                sizes[device_name(model.device)] += model.size
            totals = asdict(self._table.totals)
            return totals | {
                "load_s": round(totals["load_s"], 3),
                "bytes": dict(sorted(sizes.items())),
                "waiting": len(self._requests),
                "models": [
                    {
                        "key": model.key,
                        "bytes": model.size,
                        "device": device_name(model.device),
                        "state": model.state.value,
                        "jobs": model.pins,
                        "uses": model.uses,
                        "load_s": round(model.load_s, 3),
                        "pid": self._hosts[model.host].pid,
                    }
                    for model in models
                ],
            }

    # --- with the lock

    def _advance(self) -> Actions:
        """Decide all requests that can be decided now: first those that cannot wait for jobs, then the others in their
        order, in which none of a device overtakes an earlier one."""
        actions: Actions = []
        blocked: set[int] = set()
        for request in sorted(self._requests, key=lambda one: one.can_wait):
            if request.can_wait and request.device in blocked:
                continue
            reason = self._decide(request, actions)
            if reason is None:
                blocked.add(request.device)
            else:
                self._requests.remove(request)
                actions.append(_answer(request, reason))
        if self._makes_room and not self._table.is_evicting:
            self._makes_room = False
            actions.append(self._on_room)
        return actions

    def _decide(self, request: _Request, actions: Actions) -> str | None:
        """The reply to a request; None if it has to wait."""
        if self._table.get(request.host, request.key) is not None:
            return None  # it is being evicted from this process
        limit = self._capacity.memory_limit(request.device)
        if request.size > limit:
            what = f"it needs {format_size(request.size)} {_memory_of(request.device)}"
            return f"{what}, and the worker may use {format_size(limit) if limit else 'none'}"
        missing = self._capacity.try_reserve_model(request.device, request.size)
        if not missing:
            self._table.add(request.host, request.key, request.device, request.size)
            return GRANTED
        missing -= self._table.evicting_bytes(request.device)
        if missing <= 0:
            return None
        victims = self._evict_idle({request.device: missing})
        actions += victims
        if victims or request.can_wait:
            return None
        return (
            f"{format_size(missing)} {_memory_of(request.device)} are missing: jobs and the models that they use hold "
            "the rest, and this job uses other models, so it does not wait for them"
        )

    def _evict_idle(self, sizes: Mapping[int, int]) -> Actions:
        chosen: dict[int, list[str]] = {}
        for device, size in sizes.items():
            for victim in self._table.choose_victims(device, size):
                chosen.setdefault(victim.host, []).append(victim.key)
        return [_eviction(self._hosts[host], keys) for host, keys in chosen.items()]


class LocalPort:
    """The port of the cache in the worker process, which serves jobs in threads and in the event loop."""

    def __init__(self, ledger: ModelLedger) -> None:
        self._ledger = ledger
        self.pid = os.getpid()
        self.cache = ModelCache(self)
        self._number = ledger.add_host(self)

    def evict(self, keys: Sequence[str]) -> None:
        """In a thread of its own: closing a model may take long."""
        threading.Thread(target=self.cache.evict, args=(keys,), name="dovetail-model-eviction", daemon=True).start()

    def reserve(self, key: str, device: int | None, size: int, *, can_wait: bool) -> str:
        answer: SimpleQueue[str] = SimpleQueue()
        position = HOST if device is None else device
        self._ledger.reserve(self._number, key, position, size, can_wait=can_wait, answer=answer.put)
        return answer.get()

    def on_loaded(self, key: str, load_s: float) -> None:
        self._ledger.on_loaded(self._number, key, load_s)

    def on_failed(self, key: str) -> None:
        self._ledger.on_failed(self._number, key)

    def on_used(self, key: str) -> None:
        self._ledger.on_used(self._number, key)

    def on_unpinned(self, keys: Sequence[str]) -> None:
        self._ledger.on_unpinned(self._number, keys)

    def on_evicted(self, key: str) -> None:
        self._ledger.on_evicted(self._number, key)

    def on_kept(self, key: str) -> None:
        self._ledger.on_kept(self._number, key)


def device_name(device: int) -> str:
    return "host" if device == HOST else f"gpu{device}"


def _memory_of(device: int) -> str:
    return "of memory" if device == HOST else f"of the memory of GPU {device}"


def _answer(request: _Request, reason: str) -> Callable[[], None]:
    return lambda: request.answer(reason)


def _eviction(host: ModelHost, keys: Sequence[str]) -> Callable[[], None]:
    return lambda: host.evict(keys)


def _run(actions: Actions) -> None:
    for act in actions:
        act()
