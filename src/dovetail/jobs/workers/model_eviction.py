"""Models in the caches of a worker: their bytes per device, their pins, and which of them are evicted. Pure: time is an
argument.

The policy is GreedyDual-Size-Frequency: a model has the priority `clock + uses x load seconds / bytes`, renewed at each
use, and the model with the smallest priority is evicted. The clock is the largest priority that was evicted, so a model
that is not used any more falls behind. A model that is loaded again keeps half of its uses.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RELOAD_WINDOW_S = 60.0
"""A load within this time after the model's eviction counts as a reload: the memory for models is too small."""
FORGOTTEN_AFTER = 1_000
"""Maximum number of evicted models whose uses are remembered."""
MIN_LOAD_S = 0.001
"""Minimum load time in priorities, so that the priority of fast models still depends on their uses."""


class ModelState(Enum):
    LOADING = "loading"
    LOADED = "loaded"
    EVICTING = "evicting"
    """Its process was asked to close it; its bytes are not free yet."""


@dataclass(slots=True, eq=False)
class Model:
    """A model in one process."""

    host: int
    """Number of the process that holds the model."""
    key: str
    device: int
    """Position of the card; HOST (-1) is the memory of the machine."""
    size: int
    """Size in bytes."""
    state: ModelState = ModelState.LOADING
    pins: int = 1
    """Number of uses by running jobs."""
    uses: int = 1
    load_s: float = MIN_LOAD_S
    priority: float = 0.0
    used_at: int = 0
    """Number of its latest use, to decide between equal priorities."""

    @property
    def can_be_evicted(self) -> bool:
        return self.state is ModelState.LOADED and not self.pins


@dataclass(slots=True)
class ModelTotals:
    """Counts since the start of the worker."""

    hits: int = 0
    """Uses of a model that was loaded, or was being loaded for another job."""
    misses: int = 0
    """Uses that began a load."""
    loads: int = 0
    load_s: float = 0.0
    failures: int = 0
    evictions: int = 0
    lost: int = 0
    """Models that were lost with their process."""
    reloads: int = 0
    """Loads of a model within `RELOAD_WINDOW_S` after its eviction."""


@dataclass(slots=True)
class _Evicted:
    uses: int
    at_s: float


@dataclass(slots=True)
class ModelTable:
    """Rows by process and key. Not thread-safe."""

    totals: ModelTotals = field(default_factory=ModelTotals)
    _models: dict[tuple[int, str], Model] = field(default_factory=dict)
    _evicted: OrderedDict[str, _Evicted] = field(default_factory=OrderedDict)
    _clock: float = 0.0
    _uses: int = 0

    def get(self, host: int, key: str) -> Model | None:
        return self._models.get((host, key))

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    def of_host(self, host: int) -> list[Model]:
        return [model for model in self._models.values() if model.host == host]

    # --- the life of a model

    def add(self, host: int, key: str, device: int, size: int) -> None:
        """Add a model whose bytes were reserved and whose load begins, pinned by the job that requested it."""
        assert (host, key) not in self._models
        self._models[host, key] = Model(host, key, device, size)
        self.totals.misses += 1

    def on_loaded(self, host: int, key: str, load_s: float, now_s: float) -> None:
        model = self._models[host, key]
        model.state = ModelState.LOADED
        model.load_s = max(MIN_LOAD_S, load_s)
        self.totals.loads += 1
        self.totals.load_s += load_s
        before = self._evicted.pop(key, None)
        if before is not None:
            model.uses += before.uses // 2
            if now_s - before.at_s <= RELOAD_WINDOW_S:
                self.totals.reloads += 1
        self._renew(model)

    def on_used(self, host: int, key: str) -> None:
        """Count a use and pin the model. If its eviction was requested already, its process keeps it."""
        model = self._models[host, key]
        model.pins += 1
        model.uses += 1
        self.totals.hits += 1
        self._renew(model)

    def on_unpinned(self, host: int, keys: Iterable[str]) -> None:
        for key in keys:
            model = self._models.get((host, key))
            if model is not None:
                model.pins = max(0, model.pins - 1)

    def on_kept(self, host: int, key: str) -> None:
        """Handle a model that its process did not evict, because a job began to use it meanwhile."""
        model = self._models.get((host, key))
        if model is not None and model.state is ModelState.EVICTING:
            model.state = ModelState.LOADED

    def on_evicted(self, host: int, key: str, now_s: float) -> Model | None:
        model = self._models.pop((host, key), None)
        if model is not None:
            self.totals.evictions += 1
            self._evicted[key] = _Evicted(model.uses, now_s)
            self._evicted.move_to_end(key)
            if len(self._evicted) > FORGOTTEN_AFTER:
                self._evicted.popitem(last=False)
        return model

    def on_failed(self, host: int, key: str) -> Model | None:
        """Remove a model whose load has failed."""
        model = self._models.pop((host, key), None)
        if model is not None:
            self.totals.failures += 1
        return model

    def remove_host(self, host: int) -> list[Model]:
        """Remove all models of a process that has ended."""
        ended = self.of_host(host)
        for model in ended:
            del self._models[host, model.key]
        self.totals.lost += len(ended)
        return ended

    # --- eviction

    def choose_victims(self, device: int, size: int) -> list[Model]:
        """The models to evict so that at least this many bytes of a device become free, now in state EVICTING. Empty if
        those that are not in use are too small together."""
        chosen: list[Model] = []
        found = 0
        for model in sorted(self._idle(device), key=_order):
            if found >= size:
                break
            chosen.append(model)
            found += model.size
        if found < size:
            return []
        # a large model at the end may make earlier ones unnecessary
        for model in list(chosen):
            if found - model.size >= size:
                chosen.remove(model)
                found -= model.size
        for model in chosen:
            model.state = ModelState.EVICTING
            self._clock = max(self._clock, model.priority)
        return chosen

    def idle_bytes(self) -> dict[int, int]:
        """Bytes per device of models that can be evicted."""
        found: Counter[int] = Counter()
        for model in self._models.values():
            if model.can_be_evicted:
                found[model.device] += model.size
        return dict(found)

    def evicting_bytes(self, device: int) -> int:
        """Bytes of a device that become free when the evictions that have begun are over."""
        return sum(
            model.size
            for model in self._models.values()
            if model.device == device and model.state is ModelState.EVICTING
        )

    @property
    def is_evicting(self) -> bool:
        return any(model.state is ModelState.EVICTING for model in self._models.values())

    def _idle(self, device: int) -> list[Model]:
        return [model for model in self._models.values() if model.device == device and model.can_be_evicted]

    def _renew(self, model: Model) -> None:
        self._uses += 1
        model.used_at = self._uses
        model.priority = self._clock + model.uses * model.load_s / max(1, model.size)


def _order(model: Model) -> tuple[float, int]:
    return model.priority, model.used_at


__all__ = ["RELOAD_WINDOW_S", "Model", "ModelState", "ModelTable", "ModelTotals"]
