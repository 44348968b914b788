"""Cache of models in a process that runs jobs: `dt.current_job().models` and `worker.models`.

A model is loaded once per process, however many jobs ask for it at the same time. Its bytes are reserved in the worker
before the load (`model_ledger.py`), which also decides what is evicted. A model is in use until the jobs that asked for
it end or release it. A model that is evicted is closed by its method `close` or `teardown`, if it has one, and dropped.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from dovetail.errors import Change, ConfigError, Given, InfeasibleError, Problem, Text
from dovetail.resources.amounts import HOST
from dovetail.resources.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

BAD_MODEL = "DT630"
NO_MEMORY = "DT631"
KEY_LIMIT_CHARS = 500


class ModelPort(Protocol):
    """The port of a cache to the model ledger of the worker. All methods except `reserve` return at once."""

    def reserve(self, key: str, device: int | None, size: int, *, can_wait: bool) -> str:
        """Block until the memory is reserved or refused. Returns "" or the reason of the refusal."""

    def on_loaded(self, key: str, load_s: float) -> None: ...

    def on_failed(self, key: str) -> None: ...

    def on_used(self, key: str) -> None: ...

    def on_unpinned(self, keys: Sequence[str]) -> None: ...

    def on_evicted(self, key: str) -> None: ...

    def on_kept(self, key: str) -> None: ...


class _Entry:
    """A model, or the load of one."""

    __slots__ = ("done", "error", "is_refused", "pins", "value")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_refused = False
        """Whether its memory was refused because of the job that requested it first; others may still get it."""
        self.pins = 1


class ModelCache:
    """The models of one process, by key. Thread-safe."""

    def __init__(self, port: ModelPort) -> None:
        self._port = port
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    def get(self, key: str, load: Callable[[], T], size: int, device: int | None, *, can_wait: bool) -> T:
        """Return the model, pinned: each call needs an `unpin`."""
        while True:
            with self._lock:
                entry = self._entries.get(key)
                if entry is None:
                    entry = self._entries[key] = _Entry()
                    break
                entry.pins += 1
                if entry.done.is_set():
                    self._port.on_used(key)
                    return cast("T", entry.value)
            entry.done.wait()
            if entry.error is None:
                self._port.on_used(key)
                return cast("T", entry.value)
            if not entry.is_refused:
                raise entry.error
        return self._load(key, entry, load, size, device, can_wait=can_wait)

    def _load(
        self, key: str, entry: _Entry, load: Callable[[], T], size: int, device: int | None, *, can_wait: bool
    ) -> T:
        is_reserved = False
        try:
            reason = self._port.reserve(key, device, size, can_wait=can_wait)
            if reason:
                entry.is_refused = True
                raise InfeasibleError(_no_memory(key, reason))  # noqa: TRY301 - waiting jobs see it, too
            is_reserved = True
            began = time.monotonic()
            entry.value = load()
            self._port.on_loaded(key, time.monotonic() - began)
        except BaseException as error:
            with self._lock:
                del self._entries[key]
            entry.error = error
            if is_reserved:
                self._port.on_failed(key)
            raise
        finally:
            entry.done.set()
        return cast("T", entry.value)

    def unpin(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._entries[key].pins -= 1
            self._port.on_unpinned(keys)

    def evict(self, keys: Sequence[str]) -> None:
        """Close these models, except those that a job uses. Never raises."""
        for key in keys:
            with self._lock:
                entry = self._entries.get(key)
                if entry is None or entry.pins:
                    self._port.on_kept(key)
                    continue
                del self._entries[key]
            _close(key, entry)
            self._port.on_evicted(key)

    def close(self) -> None:
        """Close all models that no job uses, at the end of the process."""
        with self._lock:
            ended = [key for key, entry in self._entries.items() if not entry.pins]
        self.evict(ended)


class JobModels:
    """Models for the code of a job: loaded once per process and kept for later jobs. Thread-safe."""

    def __init__(
        self, cache: ModelCache, find_device: Callable[[int | None], int | None] = lambda device: device
    ) -> None:
        """`find_device`: maps a device number of the job to the card, for processes shared by jobs on several cards."""
        self._cache = cache
        self._find_device = find_device
        self._pins: Counter[str] = Counter()
        self._is_over = False
        self._lock = threading.Lock()

    def get(self, key: str, load: Callable[[], T], *, bytes: str | int, device: object = None) -> T:  # noqa: A002
        """Return the model with this key. If the process does not have it, `bytes` are reserved, other models are
        evicted if necessary, and `load()` is called; jobs that ask for the same key meanwhile wait for this load.

        The model stays until the job has ended, or releases it. `device`: the number of a card that the job sees,
        such as 1 or "cuda:1", or "cpu" for the memory of the machine; by default the first card of the job, and the
        memory of the machine for a job without cards. If `load()` raises, nothing is kept, and the jobs that wait for
        it get the same exception.
        """
        if _is_in_event_loop():
            message = "models.get() would block the event loop while a model is loaded"
            raise ConfigError(Problem(BAD_MODEL, message, fixes=("await dt.current_job().models.get_async(...)",)))
        return self._get(key, load, bytes, device)

    async def get_async(self, key: str, load: Callable[[], T], *, bytes: str | int, device: object = None) -> T:  # noqa: A002
        """`get` for coroutines: `load()` runs in a thread."""
        return await asyncio.to_thread(self._get, key, load, bytes, device)

    def release(self, key: str, device: object = None) -> None:
        """End the use of a model that one `get` began, before the end of the job."""
        name = _name(key, self._find_device(_device(device)))
        with self._lock:
            is_pinned = self._pins[name] > 0
            self._pins[name] -= is_pinned
        if is_pinned:
            self._cache.unpin([name])

    def release_all(self) -> None:
        """End all uses, at the end of the job."""
        with self._lock:
            self._is_over = True
            names = list(self._pins.elements())
            self._pins.clear()
        if names:
            self._cache.unpin(names)

    @contextmanager
    def using(self, key: str, load: Callable[[], T], *, bytes: str | int, device: object = None) -> Iterator[T]:  # noqa: A002
        """Context manager: `get`, then `release` at the end of the block."""
        try:
            yield self.get(key, load, bytes=bytes, device=device)
        finally:
            self.release(key, device)

    def _get(self, key: str, load: Callable[[], T], size: str | int, device: object) -> T:
        number = self._find_device(_device(device))
        name = _name(key, number)
        with self._lock:
            can_wait = not self._pins.total()
        found = self._cache.get(name, load, _size(key, size), number, can_wait=can_wait)
        with self._lock:
            is_over = self._is_over
            self._pins[name] += not is_over
        if is_over:  # the job was cancelled meanwhile
            self._cache.unpin([name])
        return found


class NoModels(JobModels):
    """The cache of jobs with isolation "process", which refuses: a model would be dropped at the end of its job."""

    def __init__(self) -> None:
        pass

    def get(self, key: str, load: Callable[[], T], *, bytes: str | int, device: object = None) -> T:  # noqa: A002, ARG002
        message = f"{key!r} cannot be cached: this job runs in a process of its own, which ends with it"
        fixes = (Change({"isolation": "warm_process"}), Change({"isolation": "thread"}))
        raise ConfigError(Problem(BAD_MODEL, message, fixes=fixes))

    async def get_async(self, key: str, load: Callable[[], T], *, bytes: str | int, device: object = None) -> T:  # noqa: A002
        return self.get(key, load, bytes=bytes, device=device)

    def release(self, key: str, device: object = None) -> None:
        pass

    def release_all(self) -> None:
        pass


def _close(key: str, entry: _Entry) -> None:
    """Close a model and release its memory."""
    for name in ("close", "teardown"):
        method = getattr(entry.value, name, None)
        if callable(method):
            try:
                method()
            except Exception:
                print(f"{name}() of the model {key!r} failed", file=sys.stderr)  # noqa: T201
                traceback.print_exc()
            break
    entry.value = None
    gc.collect()  # models have reference cycles
    torch = sys.modules.get("torch")
    if torch is not None:
        with suppress(Exception):
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # otherwise only this process could use the memory


# --- arguments


def _size(key: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        with suppress(ValueError):
            size = parse_size(value)
            if size > 0:
                return size
    text = Text(Given("bytes", value), f" is not the size of the model {key!r}")
    raise ConfigError(Problem(BAD_MODEL, text, fixes=(Change({"bytes": "4GB"}),)))


def _device(value: object) -> int | None:
    """The number of a card that the job sees, or HOST for the memory of the machine; None if no device is given."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    text = str(value)
    if text in ("cpu", "host"):
        return HOST
    kind, _, number = text.partition(":")
    if kind == "cuda" and (not number or number.isdecimal()):
        return int(number or 0)
    wrong = Text(Given("device", value), " is not a device")
    raise ConfigError(Problem(BAD_MODEL, wrong, fixes=(Change({"device": "cuda:0"}), Change({"device": "cpu"}))))


def _name(key: object, device: int | None) -> str:
    """Key of a model on a device."""
    if not isinstance(key, str) or not 0 < len(key) <= KEY_LIMIT_CHARS:
        wrong = Text(Given("key", key), f" is not a text of 1 to {KEY_LIMIT_CHARS} characters")
        raise ConfigError(Problem(BAD_MODEL, wrong, fixes=('models.get("resnet50", load, bytes="1GB")',)))
    if device is None:
        return key
    return f"{key} on {'cpu' if device == HOST else f'cuda:{device}'}"


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _no_memory(key: str, reason: str) -> Problem:
    fixes = ("let a job use fewer models at once: models.release(key)", "start the worker with more memory")
    return Problem(NO_MEMORY, f"there is no memory for the model {key!r}: {reason}", fixes=fixes)


__all__ = ["JobModels", "ModelCache", "ModelPort", "NoModels"]
