"""Reference placement that computes everything again at each step. Written from the definitions in plain loops,
without the code under test: only its values (Cluster, Shape, Seat) are shared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from dovetail.resources.seat import CardShare, Seat
from dovetail.resources.shape import Shape, ShapeKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dovetail.resources.cluster import Cluster, Node
    from dovetail.resources.free_resources import FreeResources

Way = tuple[CardShare, ...]
Classes = tuple[tuple[Shape, int], ...]


class CardState(NamedTuple):
    milli: int
    memory_bytes: int
    nvdecs: int
    nvencs: int


class State(NamedTuple):
    """A node and what is free on it."""

    node: Node
    cpu_milli: int
    memory_bytes: int
    custom: tuple[tuple[str, int], ...]
    cards: tuple[CardState, ...]

    @property
    def without_name(self) -> State:
        return self._replace(node=replace(self.node, name=""))

    @property
    def is_untouched(self) -> bool:
        return self == untouched(self.node)

    @property
    def computes_nothing(self) -> bool:
        return all(card[:2] == full[:2] for card, full in zip(self.cards, untouched(self.node).cards, strict=True))


def untouched(node: Node) -> State:
    cards = tuple(CardState(1000, gpu.memory_bytes, gpu.nvdecs, gpu.nvencs) for gpu in node.gpus)
    return State(node, node.cpu_milli - node.kept_back_milli, node.memory_bytes, tuple(sorted(node.custom)), cards)


def minus(state: State, seat: Seat) -> State:
    """State with this seat taken; fails where a resource would become negative."""
    custom = dict(state.custom)
    for name, amount in seat.custom:
        custom[name] = custom.get(name, 0) - amount
    cards = list(state.cards)
    for share in seat.cards:
        assert 0 <= share.card < len(cards), seat
        have = cards[share.card]
        cards[share.card] = CardState(
            have.milli - share.milli,
            have.memory_bytes - share.memory_bytes,
            have.nvdecs - share.nvdecs,
            have.nvencs - share.nvencs,
        )
    cpu_milli, memory_bytes = state.cpu_milli - seat.cpu_milli, state.memory_bytes - seat.memory_bytes
    left = State(state.node, cpu_milli, memory_bytes, tuple(sorted(custom.items())), tuple(cards))
    amounts = [cpu_milli, memory_bytes, *custom.values(), *(amount for card in cards for amount in card)]
    assert min(amounts) >= 0, f"over-committed by {seat}: {left}"
    return left


def states_of(cluster: Cluster, seats: Iterable[Seat]) -> list[State]:
    """The cluster node by node with these seats taken, counted from the beginning."""
    states = {node.name: untouched(node) for node in cluster.nodes}
    for seat in seats:
        states[seat.node] = minus(states[seat.node], seat)
    return [states[node.name] for node in cluster.nodes]


def states_of_ledger(cluster: Cluster, free: Sequence[FreeResources]) -> list[State]:
    """States of a ledger as plain values."""
    return [
        State(
            node,
            there.cpu_milli,
            there.memory_bytes,
            tuple(sorted(there.custom)),
            tuple(CardState(*card) for card in there.cards.free),
        )
        for node, there in zip(cluster.nodes, free, strict=True)
    ]


def host_has_room(shape: Shape, state: State) -> bool:
    labels, custom = dict(state.node.labels), dict(state.custom)
    return (
        state.cpu_milli >= shape.cpu_milli
        and state.memory_bytes >= shape.memory_bytes
        and all(custom.get(name, 0) >= amount for name, amount in shape.custom)
        and all(name in labels and labels[name] in values for name, values in shape.labels)
    )


@lru_cache(maxsize=10_000)
def ways(shape: Shape, state: State) -> tuple[Way, ...]:
    """Every set of cards on which one rank of the shape can sit now, lowest cards first."""
    if not host_has_room(shape, state):
        return ()
    if shape.kind is ShapeKind.CPU_ONLY:
        return ((),)
    found = (_dealt(shape, state, chosen) for chosen in combinations(range(len(state.cards)), shape.cards))
    return tuple(way for way in found if way is not None)


def _dealt(shape: Shape, state: State, chosen: tuple[int, ...]) -> Way | None:
    """Shares of these cards for a shape; codecs are dealt from the first card on. None: it does not fit."""
    nvdecs, nvencs, shares = shape.nvdecs, shape.nvencs, []
    for index in chosen:
        share = _share(shape, state, index, nvdecs, nvencs)
        if share is None:
            return None
        nvdecs, nvencs = max(0, nvdecs - share.nvdecs), max(0, nvencs - share.nvencs)
        shares.append(share)
    return tuple(shares) if not nvdecs and not nvencs else None


def _share(shape: Shape, state: State, index: int, nvdecs: int, nvencs: int) -> CardShare | None:
    gpu, card = state.node.gpus[index], state.cards[index]
    if shape.accelerators and gpu.model.lower() not in shape.accelerators:
        return None
    if gpu.memory_bytes < shape.gpu_memory_bytes:
        return None
    computes_nothing = card.milli == 1000 and card.memory_bytes == gpu.memory_bytes
    match shape.kind:
        case ShapeKind.CODEC:
            return CardShare(index, 0, 0, min(nvdecs, card.nvdecs), min(nvencs, card.nvencs))
        case ShapeKind.FRACTIONAL_GPU:
            milli, memory_bytes = _share_of_a_card(shape, gpu.memory_bytes)
            if milli > card.milli or memory_bytes > card.memory_bytes:
                return None
            return CardShare(index, milli, memory_bytes, min(nvdecs, card.nvdecs), min(nvencs, card.nvencs))
        case ShapeKind.WHOLE_NUMBERED_GPU if computes_nothing:
            return CardShare(index, 1000, gpu.memory_bytes, min(nvdecs, card.nvdecs), min(nvencs, card.nvencs))
        case ShapeKind.ENTIRE_GPU if computes_nothing and (card.nvdecs, card.nvencs) == (gpu.nvdecs, gpu.nvencs):
            return CardShare(index, 1000, gpu.memory_bytes, gpu.nvdecs, gpu.nvencs)
    return None


def _share_of_a_card(shape: Shape, card_bytes: int) -> tuple[int, int]:
    """`gpus=f`: f of the milli and, without `gpu_memory`, f of the bytes; `gpu_memory=b`: exactly b bytes and, without
    `gpus`, floor(1000 b / card) milli."""
    if not shape.gpu_memory_bytes:
        return shape.gpu_milli, math.floor(Fraction(shape.gpu_milli, 1000) * card_bytes)
    if not shape.gpu_milli:
        return math.floor(Fraction(1000 * shape.gpu_memory_bytes, card_bytes)), shape.gpu_memory_bytes
    return shape.gpu_milli, shape.gpu_memory_bytes


def seat_of(shape: Shape, node: str, way: Way) -> Seat:
    return Seat(node, shape.cpu_milli, shape.memory_bytes, way, shape.custom)


def classes_of(expected: Iterable[tuple[Shape, int]]) -> Classes:
    """Classes with their counts; a gang counts once per rank."""
    counts: Counter[Shape] = Counter()
    for shape, count in expected:
        counts[replace(shape, ranks=1)] += count * shape.ranks
    return tuple(counts.items())


@lru_cache(maxsize=10_000)
def fragments(state: State, classes: Classes) -> Fraction:
    """F: the mean over the expected classes of what each cannot use, in milli-GPUs."""
    total = sum(count for _, count in classes)
    if not total:
        return Fraction(0)
    return sum((Fraction(count, total) * _unusable(state, shape) for shape, count in classes), Fraction(0))


def _unusable(state: State, shape: Shape) -> int:
    idle = sum(card.milli for card in state.cards)
    if shape.kind in (ShapeKind.CPU_ONLY, ShapeKind.CODEC):
        return idle
    if not ways(shape, state):
        return idle
    # codecs of several cards are counted together, so they decide for the node and not for a card
    on_one_card = replace(shape, cards=1, nvdecs=0, nvencs=0) if adds_up_codecs(shape) else replace(shape, cards=1)
    unable = [card.milli for index, card in enumerate(state.cards) if _dealt(on_one_card, state, (index,)) is None]
    return sum(unable)


def adds_up_codecs(shape: Shape) -> bool:
    """Several cards that together must have some codecs: then there is more than one way to choose the cards."""
    return shape.cards > 1 and bool(shape.nvdecs or shape.nvencs)


class Pick(NamedTuple):
    score: int
    position: int
    way: Way


Rule = Callable[[Shape, State], tuple[int, Way] | None]
"""For a shape and a node in some state: how good it is, and where to sit there; None if it does not fit."""


def fragmentation_rule(classes: Classes) -> Rule:
    def rule(shape: Shape, state: State) -> tuple[int, Way] | None:
        best: tuple[int, Way] | None = None
        for way in _ways_to_try(shape, state):
            after = minus(state, seat_of(shape, state.node.name, way))
            d = float((fragments(state, classes) - fragments(after, classes)) / 1000)
            score = int(100 / (1 + math.exp(-d)))
            if best is None or score > best[0]:
                best = score, way
        return best

    return rule


def _ways_to_try(shape: Shape, state: State) -> tuple[Way, ...]:
    """A share tries every card with room; whole cards are the lowest that will do."""
    assert not adds_up_codecs(shape), "only Fit decides which cards that takes"
    found = ways(shape, state)
    return found if shape.kind in (ShapeKind.FRACTIONAL_GPU, ShapeKind.CODEC) else found[:1]


def leftover_rule(cluster: Cluster, *, packs: bool) -> Rule:
    """BestFit (`packs`) and its opposite, with the biggest node of this cluster instead of 128 CPUs and 8 GPUs."""
    most_cpu = max(untouched(node).cpu_milli for node in cluster.nodes) or 1
    most_gpu = max(1000 * len(node.gpus) for node in cluster.nodes) or 1

    def rule(shape: Shape, state: State) -> tuple[int, Way] | None:
        tried = _ways_to_try(shape, state)
        if not tried:
            return None
        idle_there = [sum(state.cards[share.card].milli for share in way) for way in tried]
        wanted = min(idle_there) if packs else max(idle_there)
        way = next(way for way, idle in zip(tried, idle_there, strict=True) if idle == wanted)
        gpu_left = sum(card.milli for card in state.cards) - sum(share.milli for share in way)
        left = 0.5 * ((state.cpu_milli - shape.cpu_milli) / most_cpu) + 0.5 * (gpu_left / most_gpu)
        return int(100 * (1 - left)) if packs else int(100 * left), way

    return rule


def pick(shape: Shape, states: Sequence[State], rule: Rule) -> Pick | None:
    """A rescan of every node: the highest score wins, the first node on ties."""
    best: Pick | None = None
    for position, state in enumerate(states):
        found = rule(shape, state)
        if found is not None and (best is None or found[0] > best.score):
            best = Pick(found[0], position, found[1])
    return best


def seats_of(shape: Shape, states: Sequence[State], rule: Rule) -> tuple[Seat, ...] | None:
    """Seats that a rescan chooses for one more worker that is no gang."""
    found = pick(shape, states, rule)
    return None if found is None else (seat_of(shape, states[found.position].node.name, found.way),)


@lru_cache(maxsize=10_000)
def room_for(shape: Shape, state: State, most: int) -> int:
    """How many ranks sit on this node at once if every arrangement is tried, up to `most`."""
    rank = replace(shape, ranks=1)
    room = 0
    for way in ways(rank, state) if most else ():
        room = max(room, 1 + room_for(rank, minus(state, seat_of(rank, state.node.name, way)), most - 1))
        if room == most:
            break
    return room


def gang_on_one_node(shape: Shape, states: Sequence[State], rule: Rule) -> tuple[Seat, ...] | None:
    """Seats that a rescan chooses for all ranks on one node, each in the best place after the ranks before it: the
    highest mean score (rounded down) wins, the first node on ties."""
    rank = replace(shape, ranks=1)
    best: tuple[int, tuple[Seat, ...]] | None = None
    for state in states:
        left, seats, scores = state, list[Seat](), list[int]()
        while len(seats) < shape.ranks and (found := rule(rank, left)) is not None:
            seats.append(seat_of(rank, state.node.name, found[1]))
            scores.append(found[0])
            left = minus(left, seats[-1])
        if len(seats) == shape.ranks and (best is None or sum(scores) // shape.ranks > best[0]):
            best = sum(scores) // shape.ranks, tuple(seats)
    return None if best is None else best[1]
