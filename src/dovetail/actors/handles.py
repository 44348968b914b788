"""Handles of roles: `live.trainer.one.step(batch)`, on the driver and within actors."""

from __future__ import annotations

from collections import deque
from functools import cached_property, partial
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from dovetail.actors.call_router import ActorCall, CallFutures, CallSettings
from dovetail.errors import did_you_mean
from dovetail.pipeline.durations import checked_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dovetail.actors.call_router import ActorCallRouter, CallFuture

    Splitter = Callable[[Sequence[Any], int], Sequence[Any]]

BAD_ROLE = "DT501"
DEFAULT_WINDOW = 64
DEFAULT_SETTINGS = CallSettings()


class ActorHandles:
    """Handles of all roles of a system: `worker.actors.pool`, `worker.actors["pool"]`."""

    def __init__(self, router: ActorCallRouter) -> None:
        self._router = router

    def __getattr__(self, name: str) -> RoleHandle:
        if name.startswith("_"):
            raise AttributeError(name)
        self._check(name, AttributeError)
        found = self.__dict__[name] = RoleHandle(self._router, name)  # found there from now on
        return found

    def __getitem__(self, name: str) -> RoleHandle:
        self._check(name, KeyError)
        found: RoleHandle = getattr(self, name)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._router.roles

    def __iter__(self) -> Iterator[str]:
        return iter(self._router.roles)

    def _check(self, name: str, error: type[Exception]) -> None:
        roles = self._router.roles
        if name not in roles:
            raise error(f"there is no role {name!r}{did_you_mean(name, roles)}; roles: {', '.join(roles)}")


class RoleHandle:
    """The instances of one role. Every way of calling is explicit: one, next, [i], all, shard, keyed, map."""

    def __init__(self, router: ActorCallRouter, role: str, settings: CallSettings = DEFAULT_SETTINGS) -> None:
        self._router = router
        self.role = role
        self._settings = settings

    def __repr__(self) -> str:
        return f"<RoleHandle {self.role}: {len(self)} instances>"

    def __len__(self) -> int:
        return len(self._router.indices(self.role))

    def options(self, *, deadline: float | str | None = None, retries: int | None = None) -> RoleHandle:
        """The same handle with other settings: a deadline of each call, and how often an idempotent method is called
        again after its instance died."""
        deadline_s = self._settings.deadline_s
        if deadline is not None:
            deadline_s = checked_duration("deadline", deadline, BAD_ROLE, "5s")
        settings = CallSettings(deadline_s, self._settings.retries if retries is None else retries)
        return RoleHandle(self._router, self.role, settings)

    @cached_property
    def one(self) -> Methods:
        """The instance with the fewest calls outstanding, for each call."""
        return Methods(self, partial(self._router.least_loaded, self.role))

    @cached_property
    def next(self) -> Methods:
        """Each instance in turn."""
        return Methods(self, partial(self._router.next_in_turn, self.role))

    def __getitem__(self, index: int) -> InstanceHandle:
        count = len(self._router.entry(self.role).instances)
        if not -count <= index < count:
            raise IndexError(f"role {self.role!r} has {count} instances; there is no instance {index}")
        return InstanceHandle(self, index % count)

    def __iter__(self) -> Iterator[InstanceHandle]:
        return (InstanceHandle(self, index) for index in self._router.indices(self.role))

    @property
    def all(self) -> AllMethods:
        """All instances: the result is a list, in their order."""
        return AllMethods(self, [(index, 0) for index in self._router.indices(self.role)])

    def keyed(self, key: object) -> Methods:
        """The same instance for the same key, as long as it is part of the system (rendezvous hashing)."""
        indices = self._router.indices(self.role)
        index = max(indices, key=lambda index: _key_weight(key, index), default=0)
        return Methods(self, lambda: index, may_move=False)

    def shard(self, items: Sequence[Any], split: str | Splitter = "even") -> ShardedMethods:
        """One part of the items for each instance, as first argument. `split`: "even" (consecutive parts whose sizes
        differ by at most one), "round_robin", or a function (items, n) -> n parts."""
        indices = self._router.indices(self.role)
        return ShardedMethods(self, indices, split_items(items, len(indices), split))

    def map(self, method: str, items: Iterable[Any], *, window: int = DEFAULT_WINDOW) -> Iterator[Any]:
        """Call the method for each item, on the least loaded instances; yields results in the order of the items, with
        at most `window` calls outstanding. An error is raised in the place of its result."""
        if window < 1:
            raise ValueError(f"window={window} is not at least 1")
        call = getattr(self.one, method)
        return _map(call, items, window)

    # --- for the other handles

    def check_method(self, name: str) -> None:
        """AttributeError, at the caller and at once, if the class has no such method; ValueError if it is to be retried
        and may not be."""
        if name.startswith("_"):
            raise AttributeError(f"{self.role}.{name}: names that begin with _ are not methods of a role")
        known = self._router.entry(self.role).methods.names
        if known is not None and name not in known:
            raise AttributeError(f"role {self.role!r} has no method {name!r}{did_you_mean(name, known)}")
        if self._settings.retries and name not in self._router.entry(self.role).methods.idempotent:
            raise ValueError(f"retries={self._settings.retries}: {self.role}.{name} is not marked with @dt.idempotent")

    def call(
        self,
        index: int,
        rank: int,
        method: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
        choose: Callable[[], int] | None = None,
    ) -> CallFuture:
        if self._settings.deadline_s is None:
            direct = self._router.call_directly(self.role, index, rank, method, args, named)
            if direct is not None:
                return cast("CallFuture", direct)  # futures of workers have the same methods
        return self._router.submit(ActorCall(self.role, index, rank, method, args, named, self._settings, choose))

    @property
    def ranks(self) -> int:
        return self._router.entry(self.role).ranks


def _key_weight(key: object, index: int) -> bytes:
    return blake2b(f"{key!r}/{index}".encode(), digest_size=8).digest()


def _map(call: Callable[[Any], CallFuture], items: Iterable[Any], window: int) -> Iterator[Any]:
    waiting: deque[CallFuture] = deque()
    try:
        for item in items:
            waiting.append(call(item))
            if len(waiting) >= window:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def split_items(items: Sequence[Any], count: int, split: str | Splitter) -> list[Any]:
    """One part of the items for each of `count` instances."""
    if callable(split):
        parts = list(split(items, count))
        if len(parts) != count:
            raise ValueError(f"the splitter returned {len(parts)} parts for {count} instances")
        return parts
    if split == "round_robin":
        return [items[start::count] for start in range(count)]
    if split == "even":
        size, more = divmod(len(items), count) if count else (0, 0)
        starts = [number * size + min(number, more) for number in range(count + 1)]
        return [items[start:stop] for start, stop in pairwise(starts)]
    raise ValueError(f"split={split!r} is not 'even', 'round_robin' or a function (items, n) -> n parts")


class _ByName:
    """Methods by name, checked at the caller."""

    _handle: RoleHandle

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        self._handle.check_method(name)
        found = self.__dict__[name] = partial(self._call, name)  # found there from now on
        return found

    def _call(self, method: str, /, *args: Any, **named: Any) -> Any:
        raise NotImplementedError


class Methods(_ByName):
    """Methods of one instance, which is chosen for each call."""

    def __init__(self, handle: RoleHandle, choose: Callable[[], int], *, may_move: bool = True) -> None:
        self._handle, self._choose, self._may_move = handle, choose, may_move

    def _call(self, method: str, /, *args: Any, **named: Any) -> CallFuture:
        again = self._choose if self._may_move else None
        return self._handle.call(self._choose(), 0, method, args, named, again)


class RankMethods(_ByName):
    """Methods of one rank of one instance."""

    def __init__(self, handle: RoleHandle, index: int, rank: int) -> None:
        self._handle, self._index, self._rank = handle, index, rank

    def _call(self, method: str, /, *args: Any, **named: Any) -> CallFuture:
        return self._handle.call(self._index, self._rank, method, args, named)


class InstanceHandle(RankMethods):
    """One instance: `live.trainer[0].step(batch)`. Of a gang, rank 0; `rank(1)` is another rank, `ranks` are all."""

    def __init__(self, handle: RoleHandle, index: int) -> None:
        super().__init__(handle, index, 0)

    def __repr__(self) -> str:
        return f"<{self._handle.role}[{self._index}]>"

    def rank(self, rank: int) -> RankMethods:
        if not 0 <= rank < self._handle.ranks:
            raise IndexError(f"{self._handle.role!r} has {self._handle.ranks} ranks; there is no rank {rank}")
        return RankMethods(self._handle, self._index, rank)

    @property
    def ranks(self) -> AllMethods:
        return AllMethods(self._handle, [(self._index, rank) for rank in range(self._handle.ranks)])


class AllMethods(_ByName):
    """Methods of several instances or ranks, called on all of them."""

    def __init__(self, handle: RoleHandle, targets: Sequence[tuple[int, int]]) -> None:
        self._handle, self._targets = handle, targets

    def __len__(self) -> int:
        return len(self._targets)

    def _call(self, method: str, /, *args: Any, **named: Any) -> CallFutures:
        return CallFutures([self._handle.call(index, rank, method, args, named) for index, rank in self._targets])


class ShardedMethods(_ByName):
    """Methods that get one part of the items in each instance."""

    def __init__(self, handle: RoleHandle, indices: Sequence[int], parts: Sequence[Any]) -> None:
        self._handle, self._indices, self._parts = handle, indices, parts

    def _call(self, method: str, /, *args: Any, **named: Any) -> CallFutures:
        return CallFutures(
            [
                self._handle.call(index, 0, method, (part, *args), named)
                for index, part in zip(self._indices, self._parts, strict=True)
            ]
        )
