"""Reasons why one worker does not fit on a node, and changes to its resources that would make it fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.errors import UNSET, Change
from dovetail.resources.cluster import Cluster, Gpu, Node
from dovetail.resources.fit import Fit, card_accepts
from dovetail.resources.free_resources import WHOLE_CARD_MILLI
from dovetail.resources.gpu_models import KNOWN_CARDS, card_model, model_name, models_with_memory
from dovetail.resources.ledger import Ledger
from dovetail.resources.shape import ShapeKind
from dovetail.resources.sizes import format_milli, format_size, format_size_below, from_milli

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.resources.free_resources import FreeCards, FreeResources
    from dovetail.resources.shape import Shape

Values = dict[str, object]
"""New values of settings of `Resources`."""

UNKNOWN_CARD_BYTES = 24 << 30
"""Memory of a card of an unknown model that a fix adds; a spec must state it."""


def misfit_reasons(fit: Fit, free: FreeResources) -> list[str]:
    """Reasons why no worker fits, each with the amount available and the amount needed."""
    if fit.assignments(free):
        return []
    found = [*_label_reasons(fit.shape, free), *_card_reasons(fit, free.cards), *_host_reasons(fit.shape, free)]
    assert found, f"{fit.shape} does not fit on {free}, for an unknown reason"
    return found


def _label_reasons(shape: Shape, free: FreeResources) -> list[str]:
    labels = free.cards.kind.labels
    return [
        f"label {name} is {labels.get(name, 'not set')}, {'|'.join(values)} needed"
        for name, values in shape.labels
        if labels.get(name) not in values
    ]


def _host_reasons(shape: Shape, free: FreeResources) -> list[str]:
    kind = free.cards.kind
    found = []
    if free.cpu_milli < shape.cpu_milli:
        have = "in all" if kind.cpu_milli < shape.cpu_milli else "free"
        amount = kind.cpu_milli if have == "in all" else free.cpu_milli
        found.append(f"{format_milli(amount)} CPUs {have}, {format_milli(shape.cpu_milli)} needed")
    if free.memory_bytes < shape.memory_bytes:
        if not kind.memory_bytes:
            found.append("its memory is not given in the cluster's description")
        else:
            have = "in all" if kind.memory_bytes < shape.memory_bytes else "free"
            amount = kind.memory_bytes if have == "in all" else free.memory_bytes
            found.append(f"{format_size(amount)} memory {have}, {format_size(shape.memory_bytes)} needed")
    have_custom = dict(free.custom)
    for name, amount in shape.custom:
        if have_custom.get(name, 0) < amount:
            found.append(f"{format_milli(have_custom.get(name, 0))} {name} free, {format_milli(amount)} needed")
    return found


def _card_reasons(fit: Fit, cards: FreeCards) -> list[str]:
    """Reasons of the cards: first permanent ones, then cards in use."""
    shape, gpus = fit.shape, cards.kind.gpus
    if not shape.cards:
        return []
    if not gpus:
        return ["no GPU"]
    allowed = [gpu for gpu, key in zip(gpus, cards.kind.keys, strict=True) if _is_accepted_model(key, shape)]
    if not allowed:
        return [f"{_models_text(gpus)} here, {'|'.join(map(model_name, shape.accelerators))} needed"]
    if len(allowed) < shape.cards:
        return [f"{len(allowed)} GPU{'s' if len(allowed) != 1 else ''} in all, {shape.cards} needed"]
    if sum(gpu.memory_bytes >= shape.gpu_memory_bytes for gpu in allowed) < shape.cards:
        largest = max(gpu.memory_bytes for gpu in allowed)
        if not largest:
            return [f"the memory of {_models_text(gpus)} is not given in the cluster's description"]
        return [
            f"{_models_text(allowed)} has {format_size(largest)} per card, {format_size(shape.gpu_memory_bytes)} needed"
        ]
    if missing := _codec_reasons(shape, allowed):
        return missing
    if sum(share is not None for share in fit.shares(cards.kind) or ()) < shape.cards and not _is_excluded_by_labels(
        fit, cards
    ):
        return [f"no card of {_models_text(allowed)} has the memory and the codecs that are needed at once"]
    return _in_use_reasons(fit, cards)


def _is_excluded_by_labels(fit: Fit, cards: FreeCards) -> bool:
    return fit.shares(cards.kind) is None


def _codec_reasons(shape: Shape, allowed: list[Gpu]) -> list[str]:
    found = []
    for name, need, have in (
        ("NVDEC", shape.nvdecs, sorted((gpu.nvdecs for gpu in allowed), reverse=True)),
        ("NVENC", shape.nvencs, sorted((gpu.nvencs for gpu in allowed), reverse=True)),
    ):
        most = sum(have[: shape.cards])
        if need > most:
            where = "a card" if shape.cards == 1 else f"on {shape.cards} cards"
            has = f"has no {name}" if not most else f"has {most} {name}s {where}"
            found.append(f"{_models_text(allowed)} {has}, {need} needed")
    return found


def _in_use_reasons(fit: Fit, cards: FreeCards) -> list[str]:
    shape = fit.shape
    shares = [share for share in fit.shares(cards.kind) or () if share is not None]
    able = [share for share in shares if card_accepts(shape, share, cards)]
    if shape.kind in (ShapeKind.WHOLE_NUMBERED_GPU, ShapeKind.ENTIRE_GPU):
        word = "whole" if shape.kind is ShapeKind.WHOLE_NUMBERED_GPU else "entire"
        if len(able) < shape.cards:
            return [f"{len(able)} {word} GPU{'s' if len(able) != 1 else ''} free, {shape.cards} needed"]
        return [] if fit.card_assignments(cards) else ["its whole GPUs have too few codecs free"]
    if able or not shares:
        return []
    found = []
    needed = shares[0]
    for name, text, index in (
        ("GPU", format_milli, 0),
        ("GPU memory", format_size, 1),
        ("NVDECs", str, 2),
        ("NVENCs", str, 3),
    ):
        most = max(cards.free[share.card][index] for share in shares)
        need = min(share[index + 1] for share in shares)
        if most < need:
            found.append(f"at most {text(most)} {name} free on one card, {text(need)} needed")
    return found or [f"no card has {format_milli(needed.milli)} GPU, its memory and its codecs free at once"]


def _is_accepted_model(key: str, shape: Shape) -> bool:
    return not shape.accelerators or key in shape.accelerators


def _models_text(gpus: tuple[Gpu, ...] | list[Gpu]) -> str:
    return "|".join(dict.fromkeys(gpu.model for gpu in gpus))


def fits_on_some_node(shape: Shape, ledger: Ledger) -> bool:
    """Whether one process of this shape fits on some node now."""
    fit = Fit(shape.rank)
    return any(fit.assignments(free) for free in set(ledger.free))


def find_request_changes(shape: Shape, ledger: Ledger) -> list[Change]:
    """Changes of settings, each of which lets one worker fit now. Where no single setting is enough, the fewest
    settings together."""
    states = set(ledger.free)
    single = [
        Change(values)
        for changed, values in _single_changes(shape, states)
        if _is_not_empty(changed) and fits_on_some_node(changed, ledger)
    ]
    return single or _combined_changes(shape, states)


def _is_not_empty(shape: Shape) -> bool:
    return bool(shape.cpu_milli or shape.memory_bytes or shape.cards or shape.custom)


def _single_changes(shape: Shape, states: set[FreeResources]) -> Iterator[tuple[Shape, Values]]:
    yield from _host_changes(shape, states)
    if shape.cards:
        yield from _card_changes(shape, states)
        yield from _codec_changes(shape, states)
    if shape.accelerators:
        here = sorted({gpu.model for free in states for gpu in free.cards.kind.gpus})
        for model in here:
            yield replace(shape, accelerators=(Gpu(model).key,)), {"accelerator": model}
    for name, _values in shape.labels:
        others = tuple((key, values) for key, values in shape.labels if key != name)
        for value in sorted({free.cards.kind.labels[name] for free in states if name in free.cards.kind.labels}):
            changed = replace(shape, labels=tuple(sorted((*others, (name, (value,))))))
            yield changed, {"labels": _label_values(changed)}
        without = replace(shape, labels=others)
        yield without, {"labels": _label_values(without) or UNSET}


def _combined_changes(shape: Shape, states: set[FreeResources]) -> list[Change]:
    """The request reduced to the resources of one node: the node with the fewest reductions, then the largest rest."""
    found: list[tuple[int, int, int, Values]] = []
    for free in states:
        whole = sum(free.cards.is_whole(index) for index in range(len(free.cards.free)))
        changed = replace(
            shape,
            cpu_milli=min(shape.cpu_milli, free.cpu_milli),
            memory_bytes=min(shape.memory_bytes, free.memory_bytes),
            cards=min(shape.cards, whole) if shape.cards > 1 else shape.cards,
        )
        values: Values = {}
        if changed.cards != shape.cards:
            values["gpus"] = changed.cards
        if changed.cpu_milli != shape.cpu_milli:
            values["cpus"] = from_milli(changed.cpu_milli)
        if changed.memory_bytes != shape.memory_bytes:
            left = changed.memory_bytes
            values["memory"] = format_size_below(left) if left else UNSET
        if changed.cards >= min(1, shape.cards) and _is_not_empty(changed) and Fit(changed.rank).assignments(free):
            found.append((len(values), -changed.cards, -changed.cpu_milli, values))
    return [Change(min(found, key=lambda one: (one[:-1], str(one[-1])))[-1])] if found else []


def _host_changes(shape: Shape, states: set[FreeResources]) -> Iterator[tuple[Shape, Values]]:
    def most(without: Shape, amounts: dict[FreeResources, int]) -> int:
        fit = Fit(without.rank)
        return max((amount for free, amount in amounts.items() if fit.assignments(free)), default=0)

    if shape.cpu_milli:
        cpus = most(replace(shape, cpu_milli=0), {free: free.cpu_milli for free in states})
        if 0 < cpus < shape.cpu_milli:
            yield replace(shape, cpu_milli=cpus), {"cpus": from_milli(cpus)}
    if shape.memory_bytes:
        memory = most(replace(shape, memory_bytes=0), {free: free.memory_bytes for free in states})
        if 0 < memory < shape.memory_bytes:
            yield replace(shape, memory_bytes=memory), {"memory": format_size_below(memory)}
        elif not memory:
            yield replace(shape, memory_bytes=0), {"memory": UNSET}
    for name, amount in shape.custom:
        others = tuple(item for item in shape.custom if item[0] != name)
        most_custom = most(replace(shape, custom=others), {free: dict(free.custom).get(name, 0) for free in states})
        if 0 < most_custom < amount:
            changed = replace(shape, custom=tuple(sorted((*others, (name, most_custom)))))
            yield changed, {"custom": _custom_values(changed)}
        elif not most_custom:
            without = replace(shape, custom=others)
            yield without, {"custom": _custom_values(without) or UNSET}


def _card_changes(shape: Shape, states: set[FreeResources]) -> Iterator[tuple[Shape, Values]]:
    frees = [card for free in states for card in free.cards.free]
    shared = replace(shape, kind=ShapeKind.FRACTIONAL_GPU, cards=1)
    if shape.gpu_milli and shape.kind is not ShapeKind.ENTIRE_GPU:
        for share in sorted({card.milli for card in frees if 0 < card.milli < shape.gpu_milli}, reverse=True)[:1]:
            yield replace(shared, gpu_milli=share), {"gpus": from_milli(share)}
    if shape.cards > 1:
        most = max((len(free.cards.free) for free in states), default=0)
        for cards in range(min(most, shape.cards - 1), 0, -1):
            yield replace(shape, cards=cards), {"gpus": cards}
    if shape.gpu_memory_bytes:
        for size in sorted({card.memory_bytes for card in frees}, reverse=True):
            if 0 < size < shape.gpu_memory_bytes:
                yield replace(shape, gpu_memory_bytes=size), {"gpu_memory": format_size_below(size)}
                break
        if shape.kind is ShapeKind.FRACTIONAL_GPU and not shape.gpu_milli:
            whole = replace(shape, kind=ShapeKind.WHOLE_NUMBERED_GPU, gpu_milli=WHOLE_CARD_MILLI, gpu_memory_bytes=0)
            yield whole, {"gpus": 1, "gpu_memory": UNSET}


def _codec_changes(shape: Shape, states: set[FreeResources]) -> Iterator[tuple[Shape, Values]]:
    if shape.nvdecs:
        for nvdecs in range(min(shape.nvdecs - 1, _max_codecs(states, "nvdecs")), 0, -1):
            yield replace(shape, nvdecs=nvdecs), {"nvdecs": nvdecs}
        if shape.kind is not ShapeKind.CODEC:
            yield replace(shape, nvdecs=0), {"nvdecs": UNSET}
    if shape.nvencs:
        for nvencs in range(min(shape.nvencs - 1, _max_codecs(states, "nvencs")), 0, -1):
            yield replace(shape, nvencs=nvencs), {"nvencs": nvencs}
        if shape.kind is not ShapeKind.CODEC:
            yield replace(shape, nvencs=0), {"nvencs": UNSET}


def _label_values(shape: Shape) -> dict[str, str]:
    return {name: "|".join(values) for name, values in shape.labels}


def _custom_values(shape: Shape) -> dict[str, int | float]:
    return {name: from_milli(amount) for name, amount in shape.custom}


def _max_codecs(states: set[FreeResources], which: str) -> int:
    return max((sum(getattr(card, which) for card in free.cards.free) for free in states), default=0)


def smallest_fitting_node(shape: Shape) -> str:
    """Spec of the smallest node on which one worker of this shape fits; empty if no known card is sufficient."""
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
    return node.spec() if fits_on_some_node(shape, Ledger(Cluster((node,)))) else ""


def _card_for(shape: Shape) -> Gpu | None:
    each_nvdecs, each_nvencs = -(-shape.nvdecs // shape.cards), -(-shape.nvencs // shape.cards)
    names = [name for name in models_with_memory(nvdecs=each_nvdecs, nvencs=each_nvencs) if _is_allowed(name, shape)]
    if shape.accelerators and not names and not (shape.nvdecs or shape.nvencs):
        return Gpu(shape.accelerators[0], max(shape.gpu_memory_bytes, UNKNOWN_CARD_BYTES))
    sized = [(KNOWN_CARDS[name].memory_gb, name) for name in names]
    needed_gb = -(-shape.gpu_memory_bytes // (1 << 30))
    enough = [name for memory_gb, name in sized if memory_gb >= needed_gb]
    if enough:
        return Gpu.of(enough[-1] if shape.accelerators else _common_card(enough))
    plain = not (shape.nvdecs or shape.nvencs)
    return Gpu(shape.accelerators[0] if shape.accelerators else "gpu", shape.gpu_memory_bytes) if plain else None


def _is_allowed(name: str, shape: Shape) -> bool:
    return not shape.accelerators or Gpu(name).key in shape.accelerators


def _common_card(names: list[str]) -> str:
    """A widely available card; the table lists the largest first."""
    for usual in ("L40S", "A100", "H100", "H200"):
        if usual in names and card_model(usual) is not None:
            return usual
    return names[0]
