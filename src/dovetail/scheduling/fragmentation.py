"""GPU fragmentation of a node: the free GPU share that the expected workload cannot use.

The measure of "Beware of Fragmentation" (ATC'23) over all our dimensions. For a node n and a class m of work, the
GPU share that m cannot use is

    all idle GPU                 if m uses no GPU, may not run on n, or does not fit on n now
    the idle GPU of the cards    that do not accept m, otherwise

Codecs that are summed over several cards decide whether m fits on n, not on which cards. F(n) is the mean over the
expected classes, weighted by how often each is expected. Everything is an integer: F is multiplied by the total
weight.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from dovetail.resources.fit import Fit, card_accepts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dovetail.resources.free_resources import FreeCards, FreeResources, NodeKind
    from dovetail.resources.shape import Shape

MAX_CACHED_STATES = 1_000_000


class Workload:
    """Expected shapes and the number of workers of each. A gang counts once per rank."""

    __slots__ = ("classes", "weight")

    def __init__(self, expected: Mapping[Shape, int] | Iterable[tuple[Shape, int]] = ()) -> None:
        items = expected.items() if hasattr(expected, "items") else expected
        counts: dict[Shape, int] = {}
        for shape, count in items:
            assert count >= 0, f"{count} workers of {shape}"
            counts[shape.rank] = counts.get(shape.rank, 0) + count * shape.ranks
        self.weight = sum(counts.values())
        self.classes = tuple((shape, count) for shape, count in counts.items() if count)


class Fragmentation:
    """F of any state of a node under one workload.

    Of CPUs, memory and custom resources only the set of classes that still fit matters, as a bit mask. So nodes with
    different free amounts share their results, and nearly every look-up is a hit.
    """

    __slots__ = ("_by_kind", "_fits", "_fragments", "_usable", "host", "weight")

    def __init__(self, workload: Workload) -> None:
        self.weight = workload.weight
        on_gpu = [(shape, count) for shape, count in workload.classes if shape.computes_on_gpu]
        self.host = HostMasks([shape for shape, _ in on_gpu])
        self._fits = [(Fit(shape), count) for shape, count in on_gpu]
        self._by_kind: dict[NodeKind, list[tuple[Fit, list[tuple[int, int]]]]] = {}
        self._usable: dict[FreeCards, list[tuple[int, list[tuple[int, int]]]]] = {}
        self._fragments: dict[tuple[FreeCards, int], int] = {}

    def of(self, cards: FreeCards, mask: int) -> int:
        """F times the total weight, in milli-GPUs, for cards in this state on a host on which these classes fit."""
        key = (cards, mask)
        found = self._fragments.get(key)
        if found is None:
            if len(self._fragments) >= MAX_CACHED_STATES:
                self._fragments.clear()
                self._usable.clear()
            found = self.weight * cards.idle_milli
            for usable_milli, classes in self._usable_by(cards):
                found -= usable_milli * sum([count for bit, count in classes if mask & bit])
            self._fragments[key] = found
        return found

    def of_free(self, free: FreeResources) -> int:
        return self.of(free.cards, self.host.mask(free.cpu_milli, free.memory_bytes, free.custom))

    def _usable_by(self, cards: FreeCards) -> list[tuple[int, list[tuple[int, int]]]]:
        """(Milli-GPUs, classes that can use them: bit and weight)."""
        usable = self._usable.get(cards)
        if usable is None:
            needs = self._needs_on(cards.kind)
            usable = [(milli, classes) for fit, classes in needs if (milli := _usable_milli(fit, cards))]
            self._usable[cards] = usable
        return usable

    def _needs_on(self, kind: NodeKind) -> list[tuple[Fit, list[tuple[int, int]]]]:
        """Classes that may run on such nodes; classes with the same GPU request share an entry."""
        needs = self._by_kind.get(kind)
        if needs is None:
            alike: dict[object, tuple[Fit, list[tuple[int, int]]]] = {}
            for number, (fit, count) in enumerate(self._fits):
                shares, shape = fit.shares(kind), fit.shape
                if shares is not None and any(shares):
                    want = (shares, shape.kind, shape.cards, shape.nvdecs, shape.nvencs)
                    alike.setdefault(want, (fit, []))[1].append((1 << number, count))
            needs = self._by_kind[kind] = list(alike.values())
        return needs


def _usable_milli(fit: Fit, cards: FreeCards) -> int:
    """Idle milli-GPUs of the cards that accept this class, if there are enough of them."""
    shape = fit.shape
    shares = fit.shares(cards.kind)
    if shares is None:
        return 0
    able = [share.card for share in shares if share is not None and card_accepts(shape, share, cards)]
    if len(able) < shape.cards:
        return 0
    if shape.cards > 1 and (shape.nvdecs or shape.nvencs) and not fit.card_assignments(cards):
        return 0
    return sum(cards.free[index].milli for index in able)


class HostMasks:
    """Bit masks of the classes that fit into given CPUs, memory and custom resources.

    If `only_cpus`, the classes differ in CPUs alone and `by_cpus` is sufficient.
    """

    __slots__ = ("by_cpus", "by_custom", "by_memory", "only_cpus")

    def __init__(self, shapes: list[Shape]) -> None:
        self.by_cpus = _MaskByAmount([shape.cpu_milli for shape in shapes])
        self.by_memory = _MaskByAmount([shape.memory_bytes for shape in shapes])
        names = sorted({name for shape in shapes for name, _ in shape.custom})
        self.by_custom = [
            (name, _MaskByAmount([dict(shape.custom).get(name, 0) for shape in shapes])) for name in names
        ]
        self.only_cpus = not names and not any(shape.memory_bytes for shape in shapes)

    def mask(self, cpu_milli: int, memory_bytes: int, custom: tuple[tuple[str, int], ...]) -> int:
        mask = self.by_cpus[cpu_milli]
        if not self.only_cpus:
            mask &= self.by_memory[memory_bytes]
            have = dict(custom)
            for name, steps in self.by_custom:
                mask &= steps[have.get(name, 0)]
        return mask


class _MaskByAmount(dict[int, int]):
    """Amount -> mask of the classes that need no more; cached."""

    def __init__(self, needs: list[int]) -> None:
        super().__init__()
        self.amounts = sorted(set(needs))
        masks = [sum(1 << bit for bit, need in enumerate(needs) if need <= amount) for amount in self.amounts]
        self.masks = [0, *masks]

    def __missing__(self, amount: int) -> int:
        if len(self) >= MAX_CACHED_STATES:
            self.clear()
        found = self[amount] = self.masks[bisect_right(self.amounts, amount)]
        return found
