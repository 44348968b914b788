"""Why does it not fit, and what can be done about it? Counted over nodes, every problem at once."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dovetail.errors import InfeasibleError, Problem
from dovetail.resources.cards import cards_with
from dovetail.resources.cluster import Cluster
from dovetail.resources.fit import Fit
from dovetail.resources.ledger import Ledger
from dovetail.resources.shape import ShapeKind
from dovetail.resources.sizes import about_size, milli
from dovetail.resources.totals import totals_of
from dovetail.scheduling.changes import changes_that_fit, fits, node_that_fits
from dovetail.scheduling.fragmentation import Workload
from dovetail.scheduling.placement import Placer
from dovetail.scheduling.reasons import reasons
from dovetail.scheduling.scores import FragmentationScore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.resources.cluster import Node
    from dovetail.resources.shape import Shape

PIECES_SHOWN = 6
GANGS_LIMIT = 10_000
MORE_NODES_LIMIT = 64


class Wish(NamedTuple):
    """So many workers of one shape, under a name that its author knows: "stage 'caption'"."""

    name: str
    shape: Shape
    workers: int = 1


def require(wishes: Sequence[Wish], ledger: Ledger) -> None:
    """An InfeasibleError that lists everything in the way of seating all of these now; nothing is taken."""
    problems = problems_of(wishes, ledger)
    if problems:
        raise InfeasibleError(problems)


def problems_of(wishes: Sequence[Wish], ledger: Ledger) -> list[Problem]:
    """Everything in the way of seating all of these at once on what is free now."""
    problems = [problem for wish in wishes if (problem := misfit(wish, ledger)) is not None]
    able = [wish for wish in wishes if largest_count(wish.shape, ledger)]
    together = _sums_short(able, ledger)
    if together is None and not problems:
        together = _do_not_fit_together(wishes, ledger)
    return problems if together is None else [*problems, together]


def misfit(wish: Wish, ledger: Ledger) -> Problem | None:
    """Why these workers, alone, do not fit on what is free now; None if they do."""
    largest = largest_count(wish.shape, ledger)
    if largest >= wish.workers:
        return None
    if largest:
        return _too_many(wish, largest, ledger)
    if fits(wish.shape, ledger):
        return _gang_too_large(wish, ledger)
    return _no_place(wish, ledger)


def largest_count(shape: Shape, ledger: Ledger) -> int:
    """How many such workers would fit on what is free now, if nothing else came."""
    if shape.ranks > 1:
        return len(Placer(ledger.copy(), FragmentationScore(Workload({shape: 1}))).fill(shape, GANGS_LIMIT))
    fit = Fit(shape)
    return sum(fit.room(free) * nodes for free, nodes in Counter(ledger.free).items())


def _no_place(wish: Wish, ledger: Ledger) -> Problem:
    """One worker fits on no node."""
    shape = wish.shape.rank
    fit = Fit(shape)
    states = Counter(ledger.free)
    nodes = len(ledger.free)
    counted: Counter[str] = Counter()
    for free, count in states.items():
        counted["; ".join(reasons(fit, free))] += count
    evidence = [
        f"{count} of {nodes} nodes: {why}" for why, count in sorted(counted.items(), key=lambda x: (-x[1], x[0]))
    ]
    evidence += _in_pieces(shape, ledger)
    empty = Ledger(ledger.cluster)
    code, hint = _code_and_hint(shape, empty)
    if code == "DT110":
        hint = "stop other workers: it fits on an empty node"
    fixes = changes_that_fit(shape, ledger)
    fixes += [hint] if hint else []
    node = node_that_fits(shape)
    fixes += [f"add a node like {node}"] if node else []
    message = f"{wish.name} ({shape.describe()}) fits on 0 of {nodes} nodes"
    return Problem(code, message, tuple(evidence), _alternatives(fixes or ["ask for less per worker"]))


def _code_and_hint(shape: Shape, empty: Ledger) -> tuple[str, str]:
    """What kind of misfit it is; DT110 is one that an empty cluster would not have."""
    if fits(shape, empty):
        return "DT110", ""
    gpus = {gpu for node in empty.cluster.nodes for gpu in node.gpus}
    labels = dict(shape.labels)
    if any(
        not any(dict(node.labels).get(name) in values for node in empty.cluster.nodes)
        for name, values in labels.items()
    ):
        return "DT114", ""
    if shape.cards and gpus:
        keys = {gpu.key for gpu in gpus}
        if shape.accelerators and not keys & set(shape.accelerators):
            return "DT113", ""
        if shape.gpu_memory_bytes > max(gpu.memory_bytes for gpu in gpus):
            return "DT111", ""
        if any(need > max(getattr(gpu, f"nv{which}s") for gpu in gpus) * shape.cards for which, need in _codecs(shape)):
            having = cards_with(nvdecs=min(1, shape.nvdecs), nvencs=min(1, shape.nvencs))
            names = " and ".join(f"NV{which.upper()}" for which, _ in _codecs(shape))
            return "DT112", f"use a card that has {names}: {', '.join(having[:8])}"
    return "DT115", ""


def _codecs(shape: Shape) -> list[tuple[str, int]]:
    return [(which, need) for which, need in (("dec", shape.nvdecs), ("enc", shape.nvencs)) if need]


def _in_pieces(shape: Shape, ledger: Ledger) -> list[str]:
    """Enough in total, but split: '1.2 GPUs are free, but as 0.6 + 0.6'."""
    lines = []
    milli_needed = shape.cards * shape.gpu_milli if shape.computes_on_gpu else 0
    cards = [card for free in ledger.free for card in free.cards.free]
    pieces = [
        ("GPUs", milli_needed, [card.milli for card in cards], milli, "cards"),
        (
            "of GPU memory",
            shape.cards * shape.gpu_memory_bytes,
            [card.memory_bytes for card in cards],
            about_size,
            "cards",
        ),
        ("CPUs", shape.cpu_milli, [free.cpu_milli for free in ledger.free], milli, "nodes"),
        ("of memory", shape.memory_bytes, [free.memory_bytes for free in ledger.free], about_size, "nodes"),
    ]
    for what, needed, amounts, text, where in pieces:
        each = needed // max(1, shape.cards) if where == "cards" else needed
        able = sum(amount >= each for amount in amounts)
        if needed and sum(amounts) >= needed and able < (shape.cards if where == "cards" else 1):
            largest = sorted(filter(None, amounts), reverse=True)
            shown = " + ".join(text(amount) for amount in largest[:PIECES_SHOWN])
            more = f" + ... ({len(largest)} {where})" if len(largest) > PIECES_SHOWN else ""
            lines.append(f"{text(sum(amounts))} {what} are free, but as {shown}{more}")
    return lines


def _too_many(wish: Wish, largest: int, ledger: Ledger) -> Problem:
    message = f"{wish.name}: {wish.workers} workers ({wish.shape.describe()}) are asked for, {largest} fit"
    fixes = [f"workers={largest}", *_smaller_workers(wish, ledger), *_more_nodes([wish], ledger)]
    return Problem("DT103", message, (f"{largest} of {wish.workers} fit on what is free now",), _alternatives(fixes))


def _gang_too_large(wish: Wish, ledger: Ledger) -> Problem:
    shape = wish.shape
    fit = Fit(shape.rank)
    on_one = max(fit.room(free) for free in ledger.free)
    message = f"{wish.name} ({shape.describe()}) fits on no node and on no set of whole nodes"
    whole = "nobody computes on their cards" if shape.computes_on_gpu else "nobody sits there"
    evidence = (f"{on_one} of {shape.ranks} ranks fit on one node", f"else it needs whole nodes, where {whole}")
    fixes = [f"ranks={on_one}", *_more_nodes([wish], ledger)]
    return Problem("DT116", message, evidence, _alternatives(fixes))


def _sums_short(wishes: Sequence[Wish], ledger: Ledger) -> Problem | None:
    """More is asked for in total than there is."""
    asked, free = _totals(wishes), totals_of(Counter(ledger.free))
    short = [name for name, amount in asked.items() if amount > free.get(name, 0)]
    if not short or len(wishes) < 2:
        return None
    text = {name: about_size if name == "memory" else milli for name in asked}
    needs = " and ".join(f"{text[name](asked[name])} {name}" for name in short)
    has = " and ".join(text[name](free.get(name, 0)) for name in short)
    message = f"{len(wishes)} kinds of workers need {needs} at once; {has} {'is' if len(short) == 1 else 'are'} free"
    evidence = [f"{wish.name}: {wish.workers} x ({wish.shape.describe()})" for wish in wishes]
    fixes = ["ask for fewer workers, or for less per worker", *_more_nodes(wishes, ledger)]
    return Problem("DT101", message, tuple(evidence), _alternatives(fixes))


def _totals(wishes: Sequence[Wish]) -> dict[str, int]:
    """What is asked for in all; a GPU sized by memory alone counts from its card, so not here."""
    totals: Counter[str] = Counter()
    for wish in wishes:
        shape, processes = wish.shape, wish.workers * wish.shape.ranks
        totals["GPUs"] += processes * shape.cards * shape.gpu_milli
        totals["CPUs"] += processes * shape.cpu_milli
        totals["memory"] += processes * shape.memory_bytes
        for name, amount in shape.custom:
            totals[name] += processes * amount
    return {name: amount for name, amount in totals.items() if amount}


def _do_not_fit_together(wishes: Sequence[Wish], ledger: Ledger) -> Problem | None:
    """Enough in total, and each alone fits, but not all of them together."""
    left = _left_over(wishes, ledger)
    if not left:
        return None
    message = f"{len(wishes)} kinds of workers fit one by one, but not together"
    evidence = [f"{wish.name}: {wish.workers} of {wish.workers + placed} workers find no seat" for wish, placed in left]
    kept = [f"{wish.name} with workers={placed}" for wish, placed in left if placed]
    return Problem("DT102", message, tuple(evidence), _alternatives([*kept, *_more_nodes(wishes, ledger)]))


def _left_over(wishes: Sequence[Wish], ledger: Ledger) -> list[tuple[Wish, int]]:
    """Wishes that find no seat when all are placed, large ones first: (what is left of it, how many were seated)."""
    trial = Placer(ledger.copy(), FragmentationScore(Workload((wish.shape, wish.workers) for wish in wishes)))
    left = []
    for wish in sorted(wishes, key=_size, reverse=True):
        placed = len(trial.fill(wish.shape, wish.workers))
        if placed < wish.workers:
            left.append((wish._replace(workers=wish.workers - placed), placed))
    return left


def _size(wish: Wish) -> tuple[bool, int, int, int, int]:
    shape = wish.shape
    exclusive = shape.kind in (ShapeKind.ENTIRE_GPU, ShapeKind.WHOLE_NUMBERED_GPU)
    return exclusive, shape.ranks * shape.cards, shape.gpu_milli, shape.gpu_memory_bytes, shape.cpu_milli


def _smaller_workers(wish: Wish, ledger: Ledger) -> list[str]:
    """The largest share of a card at which all the workers would fit."""
    shape = wish.shape
    if shape.kind is not ShapeKind.FRACTIONAL_GPU or not shape.gpu_milli:
        return []

    def too_large(share_milli: int) -> bool:
        return largest_count(replace(shape, gpu_milli=share_milli), ledger) < wish.workers

    largest = bisect_left(range(1, shape.gpu_milli), True, key=too_large)
    return [f"gpus={milli(largest)}"] if largest else []


def _more_nodes(wishes: Sequence[Wish], ledger: Ledger) -> list[str]:
    """How many more nodes like the largest one would do; tried."""
    largest = max(ledger.cluster.nodes, key=lambda node: (len(node.gpus), node.usable_cpu_milli, node.memory_bytes))

    def enough(more: int) -> bool:
        extra = tuple(replace(largest, name=f"one more: {number}") for number in range(more))
        return not _left_over(wishes, Ledger(Cluster((*ledger.cluster.nodes, *extra)), ledger.seats()))

    return more_nodes_text(largest, enough)


def more_nodes_text(node: Node, enough: Callable[[int], bool]) -> list[str]:
    """'add 6 nodes like ...' for the fewest that are enough; nothing if no reasonable number is."""
    more = next((2**power for power in range(MORE_NODES_LIMIT.bit_length()) if enough(2**power)), 0)
    if not more:
        return []
    fewest = more // 2 + 1 + bisect_left(range(more // 2 + 1, more), True, key=enough)
    return [f"add {fewest} node{'s' if fewest > 1 else ''} like 1x{node.spec()}"]


def _alternatives(fixes: list[str]) -> tuple[str, ...]:
    once = list(dict.fromkeys(fixes))
    return tuple(fix if number == 0 else f"or {fix}" for number, fix in enumerate(once))
