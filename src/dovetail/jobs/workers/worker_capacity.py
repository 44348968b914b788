"""Capacity of a worker: slots, resources, and the seats of its running jobs.

The resources are those that the worker was granted by the claims of its machine, which it shares with runs and actor
systems, or those that it was given. Slots limit the number of jobs. With `auto`, jobs that declare no resources are
limited by a table of sizes, and all others by what they request.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from dovetail.claims.store import ClaimRequest
from dovetail.claims.wait import wait_for_claim
from dovetail.engines.local.worker_environment import INSIDE_WORKER_VARIABLE, seat_environment
from dovetail.errors import DovetailError, InfeasibleError
from dovetail.jobs.job import NO_RESOURCES
from dovetail.machine.job_seat import SEAT_VARIABLE, JobSeat
from dovetail.resources.amounts import (
    CARD_FIELDS,
    CPU,
    CUSTOM_PREFIX,
    HOST,
    MEMORY,
    add_amounts,
    cluster_capacity,
    max_amounts,
    subtract_amounts,
    sum_seats,
)
from dovetail.resources.fit import Fit
from dovetail.resources.free_resources import WHOLE_CARD_MILLI, FreeCard, FreeResources, NodeKind
from dovetail.resources.seat import CardShare, Seat
from dovetail.runtime.admission import machine_claims, print_stderr

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.claims.owner import Owner
    from dovetail.claims.store import ClaimStore, Grant
    from dovetail.resources.amounts import Amounts
    from dovetail.resources.cluster import Cluster, Gpu, Node
    from dovetail.resources.shape import Shape

CPU_TABLE = ((8, 4), (4, 2), (0, 1))
"""(minimum of CPUs, jobs at once) of a worker without GPUs."""
GPU_TABLE = ((16 << 30, 2), (0, 1))
"""(minimum memory of a card, jobs at once on it)."""
CARD_TOLERANCE = 0.94
"""Tolerance of these limits: a card of 16 GB reports a little less."""
AUTO_LIMIT = 256
"""Maximum number of jobs at once with `auto` slots, however little each of them requests."""
CLAIM_UPDATE_S = 1.0
MIN_CLAIM_MILLI = 1000
"""CPUs that a worker needs to start, in thousandths."""


def auto_slots(cpu_milli: int, cards: Sequence[Gpu]) -> int:
    """Number of jobs without declared resources that run at once, by the tables above."""
    if not cards:
        return next(jobs for least, jobs in CPU_TABLE if cpu_milli >= 1000 * least)
    return sum(next(jobs for least, jobs in GPU_TABLE if card.memory_bytes >= CARD_TOLERANCE * least) for card in cards)


class ReclaimableModels(Protocol):
    """The port to cached models, whose memory can be given to jobs."""

    def idle_bytes(self) -> Mapping[int, int]:
        """Bytes by device of models that no job uses; none while models are being evicted."""

    def evict(self, sizes: Mapping[int, int]) -> None:
        """Begin to evict at least this many bytes by device."""


class _NoModels:
    def idle_bytes(self) -> Mapping[int, int]:
        return {}

    def evict(self, sizes: Mapping[int, int]) -> None:
        pass


NO_MODELS = _NoModels()


class WorkerCapacity:
    """Slots and free resources. Thread: the loop, except `release`, `set_limit` and the memory of models."""

    def __init__(
        self, node: Node, slots: int | None, plain_cards: Sequence[int] = (), kind: NodeKind | None = None
    ) -> None:
        """`slots`: None for `auto`. `plain_cards`: positions of the cards that jobs without declared resources see.
        `kind`: that of the node, if equal workers of one process share it."""
        self.node = node
        self._slots = slots
        self.plain_cards = tuple(plain_cards)
        self.models: ReclaimableModels = NO_MODELS
        """Cached models that can be evicted if a job needs their memory."""
        self.devices: Mapping[int, str] = {index: card.uuid for index, card in enumerate(node.gpus) if card.uuid}
        self._kind = kind or NodeKind(node)
        self._fits: dict[Shape, Fit] = {}
        self._limit: Amounts = {}
        self._held: Amounts = {}
        self._models: Amounts = {}
        """Memory of cached models."""
        self._free = self._kind.untouched()
        self._is_outdated = True
        self._released: deque[Seat | None] = deque()
        self._lock = threading.RLock()
        self.running = 0
        """Number of jobs that hold a slot."""
        self._running_plain = 0

    # --- any thread

    def set_limit(self, limit: Amounts) -> None:
        """Set the resources that the worker may use. Running jobs keep theirs."""
        with self._lock:
            self._limit = limit
            self._is_outdated = True

    def release(self, seat: Seat | None) -> None:
        """Release the slot and the seat of a job; None: a job without declared resources."""
        self._released.append(seat)

    def usage(self) -> tuple[Amounts, Amounts]:
        """(amounts that jobs and cached models hold, limit)."""
        with self._lock:
            return add_amounts(self._held, self._models), self._limit

    def try_reserve_model(self, device: int, size: int) -> int:
        """Take memory of a card, or of the machine (HOST), for a cached model. Returns the missing bytes, 0 if it was
        taken."""
        with self._lock:
            missing = size - self._free_bytes(device)
            if missing <= 0:
                self._add_model(device, size)
            return max(0, missing)

    def release_model(self, device: int, size: int) -> None:
        with self._lock:
            self._add_model(device, -size)

    def excess_bytes(self, device: int) -> int:
        """Bytes of a device that jobs and models hold above the limit, which may have become smaller."""
        with self._lock:
            return max(0, -self._free_bytes(device))

    def memory_limit(self, device: int) -> int:
        """Bytes of a device that the worker may use."""
        with self._lock:
            return self._limit.get((self.node.name, device, MEMORY), 0)

    def _free_bytes(self, device: int) -> int:
        self._apply_releases_locked()
        key = (self.node.name, device, MEMORY)
        return self._limit.get(key, 0) - self._held.get(key, 0) - self._models.get(key, 0)

    def _add_model(self, device: int, size: int) -> None:
        key = (self.node.name, device, MEMORY)
        after = self._models.get(key, 0) + size
        assert after >= 0, (device, size, self._models)
        self._models = {name: amount for name, amount in (self._models | {key: after}).items() if amount}
        self._is_outdated = True

    # --- loop

    @property
    def plain_slots(self) -> int:
        """Number of jobs without declared resources that may run at once."""
        if self._slots is not None:
            return self._slots
        cards = [self.node.gpus[card] for card in self.plain_cards]
        return auto_slots(self._limit.get((self.node.name, HOST, CPU), 0), cards)

    def free_slots(self) -> int:
        """Number of jobs to claim now."""
        self._apply_releases()
        if self._slots is not None:
            return max(0, self._slots - self.running)
        return max(0, min(self.plain_slots - self._running_plain, AUTO_LIMIT - self.running))

    def free(self) -> FreeResources:
        """Free resources."""
        with self._lock:
            self._apply_releases_locked()
            if self._is_outdated:
                self._is_outdated = False
                left = subtract_amounts(self._limit, add_amounts(self._held, self._models))
                self._free = _free_resources(self._kind, self.node.name, left)
            return self._free

    def claimable(self) -> FreeResources:
        """Free resources for a claim: memory of cached models that no job uses counts as free. While models are being
        evicted it does not, so that the job for which they are is claimed when they have gone."""
        idle = self.models.idle_bytes()
        if not idle:
            return self.free()
        with self._lock:
            self._apply_releases_locked()
            return _free_resources(self._kind, self.node.name, self._left_without(idle))

    def _left_without(self, idle: Mapping[int, int]) -> Amounts:
        """The free resources without these bytes of models."""
        name = self.node.name
        gone = {(name, device, MEMORY): size for device, size in idle.items()}
        return subtract_amounts(self._limit, add_amounts(self._held, subtract_amounts(self._models, gone)))

    def make_room(self, shape: Shape) -> None:
        """Evict cached models if a job of this shape would then fit."""
        free = self.claimable()
        ways = Fit(shape).assignments(free)
        if not ways:
            return
        with self._lock:
            left = _bytes_by_device(subtract_amounts(self._limit, add_amounts(self._held, self._models)))
            needed = _bytes_by_device(sum_seats((Fit(shape).seat(self.node.name, ways[0]),)))
        missing = {device: size - left.get(device, 0) for device, size in needed.items()}
        self.models.evict({device: size for device, size in missing.items() if size > 0})

    def try_take(self, shape: Shape) -> tuple[bool, Seat | None]:
        """Take a slot and a seat for a claimed job, in the order of the reply. Returns False if it no longer fits."""
        if shape is NO_RESOURCES or shape == NO_RESOURCES:
            with self._lock:
                self.running += 1
                self._running_plain += 1
            return True, None
        fit = self._fits.get(shape)
        if fit is None:
            fit = self._fits[shape] = Fit(shape)
        with self._lock:
            free = self.free()
            ways = fit.assignments(free)
            if not ways:
                return False, None
            seat = fit.seat(self.node.name, ways[0])
            after = free.taken(seat)
            if after is None:
                return False, None
            self._free = after
            self._held = add_amounts(self._held, sum_seats((seat,)))
            self.running += 1
        return True, seat

    def slots_of(self, seat: Seat | None) -> int:
        """Increase of `free_slots` when a job with this seat ends."""
        return 1 if self._slots is not None or seat is None else 0

    def _apply_releases(self) -> None:
        if self._released:
            with self._lock:
                self._apply_releases_locked()

    def _apply_releases_locked(self) -> None:
        released = self._released
        while released:
            seat = released.popleft()
            self.running -= 1
            if seat is None:
                self._running_plain -= 1
            else:
                self._held = subtract_amounts(self._held, sum_seats((seat,)))
                self._is_outdated = True

    # --- cards and environment of jobs

    def cards_of(self, seat: Seat | None) -> tuple[int, ...]:
        """Positions of the cards that a job sees, in its order."""
        return self.plain_cards if seat is None else seat.gpus

    def device_of(self, seat: Seat | None, number: int | None) -> int | None:
        """HOST, or the position of the card that a job in a process of its own knows by this number; None if it has no
        such card. Without a number its first card, if it has one."""
        cards = self.cards_of(seat)
        if number == HOST or (number is None and not cards):
            return HOST
        return cards[number or 0] if (number or 0) < len(cards) else None

    def plain_threads(self) -> int:
        """Number of library threads of a job without declared resources: its part of the CPUs."""
        return max(1, self._limit.get((self.node.name, HOST, CPU), 0) // 1000 // max(1, self.plain_slots))

    def environment(self, inherited: Mapping[str, str], seat: Seat | None) -> dict[str, str]:
        """Variables of a process with this seat. A job that declares no resources has its part of the worker's."""
        return self.rank_environment(inherited, (seat,), 0)

    def rank_environment(self, inherited: Mapping[str, str], seats: Sequence[Seat | None], rank: int) -> dict[str, str]:
        """The same of one of the ranks of a gang on this worker. It sees the cards of all of them, in the order of
        `seat_environment`."""
        given = [self._plain_seat() if seat is None else seat for seat in seats]
        seat = given[rank]
        cards = tuple(share[1:] for share in seat.cards)
        part = JobSeat(seat.cpu_milli, seat.memory_bytes, cards, seat.custom)
        return seat_environment(inherited, given, rank, devices=self.devices) | {SEAT_VARIABLE: part.to_text()}

    def _plain_seat(self) -> Seat:
        jobs = max(1, self.plain_slots)
        shares = tuple(
            CardShare(card, WHOLE_CARD_MILLI // jobs, self.node.gpus[card].memory_bytes // jobs)
            for card in self.plain_cards
        )
        memory_bytes = self._limit.get((self.node.name, HOST, MEMORY), 0) // jobs
        return Seat(self.node.name, 1000 * self.plain_threads(), memory_bytes, shares)


def _bytes_by_device(amounts: Amounts) -> dict[int, int]:
    return {card: amount for (_, card, what), amount in amounts.items() if what == MEMORY}


def _free_resources(kind: NodeKind, node: str, amounts: Amounts) -> FreeResources:
    cards = tuple(
        FreeCard(*(amounts.get((node, card, name), 0) for name in CARD_FIELDS)) for card in range(len(kind.gpus))
    )
    custom = tuple((name, amounts.get((node, HOST, CUSTOM_PREFIX + name), 0)) for name, _ in kind.custom)
    return FreeResources(
        amounts.get((node, HOST, CPU), 0), amounts.get((node, HOST, MEMORY), 0), kind.cards(cards), custom
    )


# --- the claim of the machine


class FixedLimit:
    """Limit of a worker with given resources, without a claim."""

    def __init__(self, amounts: Amounts) -> None:
        self._amounts = amounts

    def acquire(self, capacity: WorkerCapacity, stop: threading.Event) -> bool:  # noqa: ARG002 - as MachineClaim
        capacity.set_limit(self._amounts)
        return True

    def release(self) -> None:
        pass


class MachineClaim:
    """Claim of a worker in the ledger of its machine. Its share follows the number of runs and workers on the machine.

    It waits for a CPU, and for the cards that it is to use. Without a choice of cards, it takes part in the sharing of
    GPUs if one is free at its start. Once per second, the worker reports what its jobs hold and adopts its present
    limit. A smaller limit takes effect as jobs end.
    """

    def __init__(self, worker: str, cluster: Cluster, cards: Sequence[int] | None) -> None:
        """`cards`: positions of the cards that it uses, none of which it begins without; None: those that are free."""
        self._worker = worker
        self._cluster = cluster
        node = cluster.nodes[0]
        self._node = node
        allowed = range(len(node.gpus)) if cards is None else cards
        self._cap = {
            key: amount for key, amount in cluster_capacity(cluster).items() if key[1] == HOST or key[1] in allowed
        }
        self._needed_cards = tuple(cards or ())
        self._wants_card = cards is None and bool(node.gpus)
        self._store: ClaimStore | None = None
        self._owner_id = ""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, capacity: WorkerCapacity, stop: threading.Event) -> bool:
        """Wait for a share; False: stopped before. Inside a worker of a run, the resources of that are shared."""
        if os.environ.get(INSIDE_WORKER_VARIABLE):
            capacity.set_limit(self._cap)
            return True
        store = machine_claims(self._cluster)
        grant = self._request(store, stop)
        if grant is None:
            return False
        self._store, self._owner_id = store, grant.owner.id
        capacity.set_limit(grant.owner.limit)
        self._thread = threading.Thread(
            target=self._update, args=(store, grant.owner, capacity), name="dovetail-job-claim", daemon=True
        )
        self._thread.start()
        return True

    def _request(self, store: ClaimStore, stop: threading.Event) -> Grant | None:
        about = ClaimRequest(self._worker, cap=self._cap)
        if self._wants_card:
            with suppress(InfeasibleError):
                return wait_for_claim(store, about, self._need((0,)), say=print_stderr, stop=stop, no_wait=True)
        return wait_for_claim(store, about, self._need(self._needed_cards), say=print_stderr, stop=stop)

    def _need(self, cards: Sequence[int]) -> tuple[Seat, ...]:
        node = self._node
        shares = tuple(CardShare(card, WHOLE_CARD_MILLI, node.gpus[card].memory_bytes) for card in cards)
        return (Seat(node.name, min(MIN_CLAIM_MILLI, node.usable_cpu_milli), cards=shares),)

    def _update(self, store: ClaimStore, owner: Owner, capacity: WorkerCapacity) -> None:
        has_failed = False
        while not self._closing.wait(CLAIM_UPDATE_S):
            held, limit = capacity.usage()
            try:
                owner = store.update(owner, held, max_amounts(held, limit))
                has_failed = False
            except Exception as error:  # the worker continues with its current share
                if not has_failed:
                    print_stderr(f"{error}\nthe worker continues with its current share of the machine")
                has_failed = True
                continue
            if owner.limit != limit:
                capacity.set_limit(owner.limit)

    def release(self) -> None:
        """Never raises: a claim ends with its process anyway."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLAIM_UPDATE_S)
        if self._store is not None:
            try:
                self._store.release(self._owner_id)
            except DovetailError as error:
                print_stderr(f"cannot release the claim of worker {self._worker}: {error.problems[0].message}")


def node_amounts(node: Node) -> Amounts:
    """All resources of a node."""
    from dovetail.resources.cluster import Cluster

    return cluster_capacity(Cluster((node,)))
