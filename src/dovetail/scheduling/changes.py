"""Which one change to a request would make it fit? Every answer was tried."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.resources.cards import KNOWN_CARDS, card_model, cards_with
from dovetail.resources.cluster import Cluster, Gpu, Node
from dovetail.resources.fit import Fit
from dovetail.resources.free import WHOLE_CARD_MILLI
from dovetail.resources.ledger import Ledger
from dovetail.resources.shape import ShapeKind
from dovetail.resources.sizes import exact_size, milli

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.resources.free import Free
    from dovetail.resources.shape import Shape


def fits(shape: Shape, ledger: Ledger) -> bool:
    """Whether one process of this shape could sit somewhere now."""
    fit = Fit(shape.rank)
    return any(fit.ways(free) for free in set(ledger.free))


def changes_that_fit(shape: Shape, ledger: Ledger) -> list[str]:
    """Texts such as 'cpus=8' or 'leave memory out', each of which lets one worker sit there now. Where no single change
    does, the fewest changes together."""
    states = set(ledger.free)
    single = [
        text for changed, text in _single_changes(shape, states) if _asks_something(changed) and fits(changed, ledger)
    ]
    return single or _together(shape, states)


def _asks_something(shape: Shape) -> bool:
    return bool(shape.cpu_milli or shape.memory_bytes or shape.cards or shape.custom)


def _single_changes(shape: Shape, states: set[Free]) -> Iterator[tuple[Shape, str]]:
    yield from _host_changes(shape, states)
    if shape.cards:
        yield from _card_changes(shape, states)
        yield from _codec_changes(shape, states)
    if shape.accelerators:
        here = sorted({gpu.model for free in states for gpu in free.cards.kind.gpus})
        for model in here:
            yield replace(shape, accelerators=(Gpu(model).key,)), f'accelerator="{model}"'
    for name, _values in shape.labels:
        others = tuple((key, values) for key, values in shape.labels if key != name)
        for value in sorted({free.cards.kind.labels[name] for free in states if name in free.cards.kind.labels}):
            changed = replace(shape, labels=tuple(sorted((*others, (name, (value,))))))
            yield changed, f'labels={{"{name}": "{value}"}}'
        yield replace(shape, labels=others), f"leave the label {name!r} out"


def _together(shape: Shape, states: set[Free]) -> list[str]:
    """The request cut down to what one node has; of several nodes the one with the fewest cuts, then the most left."""
    found: list[tuple[int, int, int, str]] = []
    for free in states:
        whole = sum(free.cards.is_whole(index) for index in range(len(free.cards.free)))
        changed = replace(
            shape,
            cpu_milli=min(shape.cpu_milli, free.cpu_milli),
            memory_bytes=min(shape.memory_bytes, free.memory_bytes),
            cards=min(shape.cards, whole) if shape.cards > 1 else shape.cards,
        )
        texts = []
        if changed.cards != shape.cards:
            texts.append(f"gpus={changed.cards}")
        if changed.cpu_milli != shape.cpu_milli:
            texts.append(f"cpus={milli(changed.cpu_milli)}")
        if changed.memory_bytes != shape.memory_bytes:
            left = changed.memory_bytes
            texts.append(f'memory="{exact_size(left)}"' if left else "no memory asked for")
        if changed.cards >= min(1, shape.cards) and _asks_something(changed) and Fit(changed.rank).ways(free):
            found.append((len(texts), -changed.cards, -changed.cpu_milli, ", ".join(texts)))
    return [min(found)[-1]] if found else []


def _host_changes(shape: Shape, states: set[Free]) -> Iterator[tuple[Shape, str]]:
    def most(without: Shape, amounts: dict[Free, int]) -> int:
        fit = Fit(without.rank)
        return max((amount for free, amount in amounts.items() if fit.ways(free)), default=0)

    if shape.cpu_milli:
        cpus = most(replace(shape, cpu_milli=0), {free: free.cpu_milli for free in states})
        if 0 < cpus < shape.cpu_milli:
            yield replace(shape, cpu_milli=cpus), f"cpus={milli(cpus)}"
    if shape.memory_bytes:
        memory = most(replace(shape, memory_bytes=0), {free: free.memory_bytes for free in states})
        if 0 < memory < shape.memory_bytes:
            yield replace(shape, memory_bytes=memory), f'memory="{exact_size(memory)}"'
        elif not memory:
            yield replace(shape, memory_bytes=0), "leave memory out"
    for name, amount in shape.custom:
        others = tuple(item for item in shape.custom if item[0] != name)
        most_custom = most(replace(shape, custom=others), {free: dict(free.custom).get(name, 0) for free in states})
        if 0 < most_custom < amount:
            changed = replace(shape, custom=tuple(sorted((*others, (name, most_custom)))))
            yield changed, f'custom={{"{name}": {milli(most_custom)}}}'
        elif not most_custom:
            yield replace(shape, custom=others), f"leave custom {name!r} out"


def _card_changes(shape: Shape, states: set[Free]) -> Iterator[tuple[Shape, str]]:
    frees = [card for free in states for card in free.cards.free]
    shared = replace(shape, kind=ShapeKind.FRACTIONAL_GPU, cards=1)
    if shape.gpu_milli and shape.kind is not ShapeKind.ENTIRE_GPU:
        for share in sorted({card.milli for card in frees if 0 < card.milli < shape.gpu_milli}, reverse=True)[:1]:
            yield replace(shared, gpu_milli=share), f"gpus={milli(share)}"
    if shape.cards > 1:
        most = max((len(free.cards.free) for free in states), default=0)
        for cards in range(min(most, shape.cards - 1), 0, -1):
            yield replace(shape, cards=cards), f"gpus={cards}"
    if shape.gpu_memory_bytes:
        for size in sorted({card.memory_bytes for card in frees}, reverse=True):
            if 0 < size < shape.gpu_memory_bytes:
                yield replace(shape, gpu_memory_bytes=size), f'gpu_memory="{exact_size(size)}"'
                break
        if shape.kind is ShapeKind.FRACTIONAL_GPU and not shape.gpu_milli:
            whole = replace(shape, kind=ShapeKind.WHOLE_NUMBERED_GPU, gpu_milli=WHOLE_CARD_MILLI, gpu_memory_bytes=0)
            yield whole, "gpus=1 instead of gpu_memory"


def _codec_changes(shape: Shape, states: set[Free]) -> Iterator[tuple[Shape, str]]:
    if shape.nvdecs:
        for nvdecs in range(min(shape.nvdecs - 1, _most_codecs(states, "nvdecs")), 0, -1):
            yield replace(shape, nvdecs=nvdecs), f"nvdecs={nvdecs}"
        if shape.kind is not ShapeKind.CODEC:
            yield replace(shape, nvdecs=0), "leave nvdecs out"
    if shape.nvencs:
        for nvencs in range(min(shape.nvencs - 1, _most_codecs(states, "nvencs")), 0, -1):
            yield replace(shape, nvencs=nvencs), f"nvencs={nvencs}"
        if shape.kind is not ShapeKind.CODEC:
            yield replace(shape, nvencs=0), "leave nvencs out"


def _most_codecs(states: set[Free], which: str) -> int:
    return max((sum(getattr(card, which) for card in free.cards.free) for free in states), default=0)


def node_that_fits(shape: Shape) -> str:
    """The spec of a smallest node on which one worker of this shape fits, or nothing if no known card would do."""
    gpus: tuple[Gpu, ...] = ()
    if shape.cards:
        card = _card_for(shape)
        if card is None:
            return ""
        gpus = (card,) * shape.cards
    node = Node(
        name="node-0",
        cpu_milli=max(1000, -(-shape.cpu_milli // 1000) * 1000),
        memory_bytes=shape.memory_bytes,
        gpus=gpus,
        labels=tuple((name, values[0]) for name, values in shape.labels),
        custom=shape.custom,
    )
    return f"1x{node.spec()}" if fits(shape, Ledger(Cluster((node,)))) else ""


def _card_for(shape: Shape) -> Gpu | None:
    each_nvdecs, each_nvencs = -(-shape.nvdecs // shape.cards), -(-shape.nvencs // shape.cards)
    names = [name for name in cards_with(nvdecs=each_nvdecs, nvencs=each_nvencs) if _is_allowed(name, shape)]
    if shape.accelerators and not names and not (shape.nvdecs or shape.nvencs):
        names = [shape.accelerators[0]]
    sized = [(KNOWN_CARDS[name].memory_gb if name in KNOWN_CARDS else 0, name) for name in names]
    needed_gb = -(-shape.gpu_memory_bytes // (1 << 30))
    enough = [name for memory_gb, name in sized if memory_gb >= needed_gb]
    if enough:
        return Gpu.of(enough[-1] if shape.accelerators else _usual(enough))
    plain = not (shape.nvdecs or shape.nvencs)
    return Gpu(shape.accelerators[0] if shape.accelerators else "gpu", shape.gpu_memory_bytes) if plain else None


def _is_allowed(name: str, shape: Shape) -> bool:
    return not shape.accelerators or Gpu(name).key in shape.accelerators


def _usual(names: list[str]) -> str:
    """A card people can get; the table lists the largest first."""
    for usual in ("L40S", "A100", "H100", "H200"):
        if usual in names and card_model(usual) is not None:
            return usual
    return names[0]
