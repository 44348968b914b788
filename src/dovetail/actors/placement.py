"""Placement of bundles on nodes: fragmentation decides, within pools, spreading, packing and affinity. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from dovetail.resources.free_resources import WHOLE_CARD_MILLI
from dovetail.resources.sizes import parse_milli, parse_size
from dovetail.scheduling.fragmentation import Workload
from dovetail.scheduling.placement import FragmentationScore, Placer, seats_for_choice, worker_ranker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.actors.colocation import Bundle
    from dovetail.actors.role import Pool
    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.ledger import Ledger
    from dovetail.resources.seat import Seats
    from dovetail.resources.shape import Shape
    from dovetail.scheduling.placement import Ranker, SeatChoice


class PlacedBundle(NamedTuple):
    """The seats of the processes of one bundle, in the order of the bundle."""

    bundle: Bundle
    seats: tuple[Seats, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(seat.node for process in self.seats for seat in process))


class Quota(NamedTuple):
    """An amount of a pool: CPUs and cards in thousandths, memory in bytes; None: not limited."""

    cpu_milli: int | None
    gpu_milli: int | None
    memory_bytes: int | None


def pool_quota(pool: Pool) -> Quota:
    return Quota(
        None if pool.cpus is None else parse_milli(pool.cpus),
        None if pool.gpus is None else parse_milli(pool.gpus),
        None if pool.memory is None else parse_size(pool.memory),
    )


class _GpuNodesLast:
    """The score of placement for roles without GPUs: nodes with GPUs come after all others."""

    def __init__(self, score: FragmentationScore) -> None:
        self._score = score

    def ranker(self, shape: Shape) -> Ranker:
        ranker = self._score.ranker(shape)
        return ranker if shape.computes_on_gpu else _GpuNodesLastRanker(ranker, self._score.levels)


class _GpuNodesLastRanker:
    __slots__ = ("_levels", "_ranker", "fit")

    def __init__(self, ranker: Ranker, levels: int) -> None:
        self._ranker = ranker
        self._levels = levels
        self.fit = ranker.fit

    def best(self, free: FreeResources) -> SeatChoice | None:
        choice = self._ranker.best(free)
        if choice is None or free.cards.free:
            return choice
        return choice._replace(score=choice.score + self._levels)


class BundlePlacer:
    """Places bundles one by one on a ledger. Deterministic: equal ledgers and calls give equal seats."""

    def __init__(self, ledger: Ledger, bundles: Sequence[Bundle], pools: Mapping[str, Pool]) -> None:
        self.ledger = ledger
        self._bundles = bundles
        self._pools = pools
        workload = Workload((shape, bundle.high) for bundle in bundles for shape in bundle_shapes(bundle))
        self._score = _GpuNodesLast(FragmentationScore(workload))
        self._placer = Placer(ledger, self._score)
        self._quotas = {name: pool_quota(pool) for name, pool in pools.items()}
        self.used: dict[str, list[int]] = {name: [0, 0, 0] for name in pools}
        """Pool -> CPUs, cards and memory that bundles take."""
        self._instances: dict[str, Counter[str]] = {}
        """Role -> node -> instances."""

    def copy(self) -> BundlePlacer:
        """An independent placer in the same state, to try what fits."""
        other = BundlePlacer(self.ledger.copy(), self._bundles, self._pools)
        other.used = {name: list(used) for name, used in self.used.items()}
        other._instances = {role: Counter(nodes) for role, nodes in self._instances.items()}
        return other

    def place(self, bundle: Bundle) -> PlacedBundle | None:
        """Place one more bundle; None if it does not fit."""
        if not self._is_within_quota(bundle):
            return None
        if self._is_free_to_choose(bundle):
            seats = self._placer.place(bundle.processes[0][0].shape)
            placed = None if seats is None else PlacedBundle(bundle, (seats,))
        else:
            placed = self._place_on_one_node(bundle)
        if placed is not None:
            self._count(placed)
        return placed

    def adopt(self, placed: PlacedBundle) -> None:
        """Take the seats of a bundle that is placed already."""
        for process in placed.seats:
            for seat in process:
                self.ledger.take(seat)
        self._count(placed)

    def _is_free_to_choose(self, bundle: Bundle) -> bool:
        """Whether only resources decide on which node a bundle goes."""
        is_single = len(bundle.processes) == 1 and bundle.processes[0][1] == 1
        return is_single and not (bundle.spread or bundle.pack or bundle.near or bundle.apart)

    def _place_on_one_node(self, bundle: Bundle) -> PlacedBundle | None:
        shapes = bundle_shapes(bundle)
        choices: dict[FreeResources, tuple[int, tuple[Seats, ...]] | None] = {}
        best: tuple[tuple[int, int, int], int] | None = None
        own = self._count_by_node(bundle.roles)
        near = [self._instances.get(name, Counter()) for name in bundle.near]
        apart = self._count_by_node(bundle.apart)
        sign = 1 if bundle.spread else -1 if bundle.pack else 0
        states = self.ledger.free
        for position, node in enumerate(self.ledger.cluster.nodes):
            name = node.name
            here = own.get(name, 0)
            if (here and bundle.spread == "strict") or name in apart or not all(name in nodes for nodes in near):
                continue
            free = states[position]
            if free not in choices:
                choices[free] = self._seats_in(free, shapes)
            choice = choices[free]
            if choice is not None:
                key = (sign * here, -choice[0], position)
                if best is None or key < best[0]:
                    best = key, position
        if best is None:
            return None
        chosen_node = self.ledger.cluster.nodes[best[1]].name
        chosen = choices[self.ledger.free[best[1]]]
        assert chosen is not None
        seats = tuple(tuple(seat._replace(node=chosen_node) for seat in process) for process in chosen[1])
        for process in seats:
            for seat in process:
                self.ledger.take(seat)
        return PlacedBundle(bundle, seats)

    def _seats_in(self, free: FreeResources, shapes: Sequence[Shape]) -> tuple[int, tuple[Seats, ...]] | None:
        """(score, seats without a node) of processes on one node in this state; None if they do not all fit."""
        score, found = 0, []
        for shape in shapes:
            ranker = worker_ranker(self._score, shape)
            choice = ranker.best(free)
            if choice is None:
                return None
            seats = seats_for_choice(ranker, "", choice)
            for seat in seats:
                then = free.taken(seat)
                assert then is not None, (shape, free)
                free = then
            score += choice.score
            found.append(seats)
        return score, tuple(found)

    def _count_by_node(self, roles: Sequence[str]) -> Mapping[str, int]:
        """Instances of these roles on each node that has any."""
        found: Counter[str] = Counter()
        for role in roles:
            found.update(self._instances.get(role, {}))
        return found

    def _is_within_quota(self, bundle: Bundle) -> bool:
        quota = self._quotas.get(bundle.pool or "")
        if quota is None:
            return True
        used = self.used[bundle.pool or ""]
        return all(
            limit is None or taken + more <= limit
            for limit, taken, more in zip(quota, used, bundle_amounts(bundle), strict=True)
        )

    def _count(self, placed: PlacedBundle) -> None:
        if placed.bundle.pool in self.used:
            used = self.used[placed.bundle.pool]
            for index, amount in enumerate(bundle_amounts(placed.bundle)):
                used[index] += amount
        templates = [template for template, count in placed.bundle.processes for _ in range(count)]
        for template, seats in zip(templates, placed.seats, strict=True):
            for role, count in template.instances:
                on_node = self._instances.setdefault(role, Counter())
                for node in dict.fromkeys(seat.node for seat in seats):
                    on_node[node] += count


def bundle_shapes(bundle: Bundle) -> list[Shape]:
    """The shape of every process."""
    return [template.shape for template, count in bundle.processes for _ in range(count)]


def bundle_amounts(bundle: Bundle) -> tuple[int, int, int]:
    """CPUs and cards in thousandths, and memory, of all processes and ranks."""
    cpus = gpus = memory = 0
    for shape in bundle_shapes(bundle):
        cpus += shape.cpu_milli * shape.ranks
        memory += shape.memory_bytes * shape.ranks
        if shape.computes_on_gpu:
            gpus += (shape.gpu_milli or WHOLE_CARD_MILLI) * shape.cards * shape.ranks
    return cpus, gpus, memory
