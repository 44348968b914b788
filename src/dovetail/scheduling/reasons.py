"""Why does one worker not fit on one node now? Empty if it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.resources.cards import model_name
from dovetail.resources.fit import seats
from dovetail.resources.shape import ShapeKind
from dovetail.resources.sizes import about_size, milli

if TYPE_CHECKING:
    from dovetail.resources.cluster import Gpu
    from dovetail.resources.fit import Fit
    from dovetail.resources.free import Cards, Free
    from dovetail.resources.shape import Shape


def reasons(fit: Fit, free: Free) -> list[str]:
    """Each with the two numbers behind it: what is there and what is needed."""
    if fit.ways(free):
        return []
    found = [*_labels(fit.shape, free), *_cards(fit, free.cards), *_host(fit.shape, free)]
    assert found, f"{fit.shape} does not fit on {free}, and nobody knows why"
    return found


def _labels(shape: Shape, free: Free) -> list[str]:
    labels = free.cards.kind.labels
    return [
        f"label {name} is {labels.get(name, 'not set')}, {'|'.join(values)} needed"
        for name, values in shape.labels
        if labels.get(name) not in values
    ]


def _host(shape: Shape, free: Free) -> list[str]:
    kind = free.cards.kind
    found = []
    if free.cpu_milli < shape.cpu_milli:
        have = "in all" if kind.cpu_milli < shape.cpu_milli else "free"
        amount = kind.cpu_milli if have == "in all" else free.cpu_milli
        found.append(f"{milli(amount)} CPUs {have}, {milli(shape.cpu_milli)} needed")
    if free.memory_bytes < shape.memory_bytes:
        if not kind.memory_bytes:
            found.append("its memory is not given in the cluster's description")
        else:
            have = "in all" if kind.memory_bytes < shape.memory_bytes else "free"
            amount = kind.memory_bytes if have == "in all" else free.memory_bytes
            found.append(f"{about_size(amount)} memory {have}, {about_size(shape.memory_bytes)} needed")
    have_custom = dict(free.custom)
    for name, amount in shape.custom:
        if have_custom.get(name, 0) < amount:
            found.append(f"{milli(have_custom.get(name, 0))} {name} free, {milli(amount)} needed")
    return found


def _cards(fit: Fit, cards: Cards) -> list[str]:
    """What is wrong with the cards: first what can never do, then what is in use."""
    shape, gpus = fit.shape, cards.kind.gpus
    if not shape.cards:
        return []
    if not gpus:
        return ["no GPU"]
    allowed = [gpu for gpu, key in zip(gpus, cards.kind.keys, strict=True) if _is_model(key, shape)]
    if not allowed:
        return [f"{_models(gpus)} here, {'|'.join(map(model_name, shape.accelerators))} needed"]
    if len(allowed) < shape.cards:
        return [f"{len(allowed)} GPU{'s' if len(allowed) != 1 else ''} in all, {shape.cards} needed"]
    if sum(gpu.memory_bytes >= shape.gpu_memory_bytes for gpu in allowed) < shape.cards:
        largest = max(gpu.memory_bytes for gpu in allowed)
        if not largest:
            return [f"the memory of {_models(gpus)} is not given in the cluster's description"]
        return [
            f"{_models(allowed)} has {about_size(largest)} a card, {about_size(shape.gpu_memory_bytes)} needed of one"
        ]
    if missing := _codecs_missing(shape, allowed):
        return missing
    if sum(share is not None for share in fit.shares(cards.kind) or ()) < shape.cards and not _labels_forbid(
        fit, cards
    ):
        return [f"no card of {_models(allowed)} has the memory and the codecs that are needed at once"]
    return _in_use(fit, cards)


def _labels_forbid(fit: Fit, cards: Cards) -> bool:
    return fit.shares(cards.kind) is None


def _codecs_missing(shape: Shape, allowed: list[Gpu]) -> list[str]:
    found = []
    for name, need, have in (
        ("NVDEC", shape.nvdecs, sorted((gpu.nvdecs for gpu in allowed), reverse=True)),
        ("NVENC", shape.nvencs, sorted((gpu.nvencs for gpu in allowed), reverse=True)),
    ):
        most = sum(have[: shape.cards])
        if need > most:
            where = "a card" if shape.cards == 1 else f"on {shape.cards} cards"
            has = f"has no {name}" if not most else f"has {most} {name}s {where}"
            found.append(f"{_models(allowed)} {has}, {need} needed")
    return found


def _in_use(fit: Fit, cards: Cards) -> list[str]:
    shape = fit.shape
    shares = [share for share in fit.shares(cards.kind) or () if share is not None]
    able = [share for share in shares if seats(shape, share, cards)]
    if shape.kind in (ShapeKind.WHOLE_NUMBERED_GPU, ShapeKind.ENTIRE_GPU):
        word = "whole" if shape.kind is ShapeKind.WHOLE_NUMBERED_GPU else "entire"
        if len(able) < shape.cards:
            return [f"{len(able)} {word} GPU{'s' if len(able) != 1 else ''} free, {shape.cards} needed"]
        return [] if fit.ways_on_cards(cards) else ["its whole GPUs have too few codecs free"]
    if able or not shares:
        return []
    found = []
    needed = shares[0]
    for name, text, index in (("GPU", milli, 0), ("GPU memory", about_size, 1), ("NVDECs", str, 2), ("NVENCs", str, 3)):
        most = max(cards.free[share.card][index] for share in shares)
        need = min(share[index + 1] for share in shares)
        if most < need:
            found.append(f"at most {text(most)} {name} free on one card, {text(need)} needed")
    return found or [f"no card has {milli(needed.milli)} GPU, its memory and its codecs free at once"]


def _is_model(key: str, shape: Shape) -> bool:
    return not shape.accelerators or key in shape.accelerators


def _models(gpus: tuple[Gpu, ...] | list[Gpu]) -> str:
    return "|".join(dict.fromkeys(gpu.model for gpu in gpus))
