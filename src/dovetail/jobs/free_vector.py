"""Free vector of a worker: its free resources as a text, for stores, and as an object that is shared by equal states.

Each worker describes its node with an object of its own. Placement caches its results per object, so stores replace
it by one that all workers with equal nodes share.

The text has two lines of JSON: the state, which changes with each job, and the node, which does not.

    [cpu_milli, memory_bytes, [amount of each custom resource], [[milli, memory_bytes, nvdecs, nvencs] of each card]]
    [cpu_milli, memory_bytes, [[custom name, amount], ...], [[label, value], ...],
     [[model, memory_bytes, nvdecs, nvencs] of each card]]
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from dovetail.resources.cluster import Gpu, Node
from dovetail.resources.free_resources import FreeCard, FreeResources, NodeKind

STATES_CACHED = 10_000
NODES_CACHED = 10_000
_dumps = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False).encode


def shared_free(free: FreeResources) -> FreeResources:
    """The same free resources, as the object of all equal nodes."""
    kind = free.cards.kind
    shared = _shared_kinds.get(kind)
    if shared is None:
        shared = _shared_kinds[kind] = _kind_from_text(_kind_text(kind))
    return _free(shared, free.cpu_milli, free.memory_bytes, dict(free.custom), free.cards.free)


@lru_cache(STATES_CACHED)
def free_to_text(free: FreeResources) -> str:
    kind, have = free.cards.kind, dict(free.custom)
    amounts = [have.get(name, 0) for name, _ in kind.custom]
    state = _dumps([free.cpu_milli, free.memory_bytes, amounts, free.cards.free])
    return f"{state}\n{_kind_text(kind)}"


def free_from_text(text: str) -> FreeResources:
    """The inverse of `free_to_text`, as a shared object."""
    state, _, kind_text = text.partition("\n")
    kind = _kind_from_text(kind_text)
    cpu_milli, memory_bytes, amounts, cards = json.loads(state)
    custom = dict(zip((name for name, _ in kind.custom), amounts, strict=True))
    return _free(kind, cpu_milli, memory_bytes, custom, tuple(FreeCard(*card) for card in cards))


_shared_kinds: WeakKeyDictionary[NodeKind, NodeKind] = WeakKeyDictionary()


def _kind_text(kind: NodeKind) -> str:
    found = _kind_texts.get(kind)
    if found is None:
        cards = [(key, gpu.memory_bytes, gpu.nvdecs, gpu.nvencs) for key, gpu in zip(kind.keys, kind.gpus, strict=True)]
        data = [kind.cpu_milli, kind.memory_bytes, kind.custom, sorted(kind.labels.items()), cards]
        found = _kind_texts[kind] = _dumps(data)
    return found


_kind_texts: WeakKeyDictionary[NodeKind, str] = WeakKeyDictionary()


@lru_cache(NODES_CACHED)
def _kind_from_text(text: str) -> NodeKind:
    cpu_milli, memory_bytes, custom, labels, cards = json.loads(text)
    return NodeKind(
        Node(
            "",
            cpu_milli,
            memory_bytes,
            tuple(Gpu(*card) for card in cards),
            tuple((name, value) for name, value in labels),
            tuple((name, amount) for name, amount in custom),
        )
    )


def _free(
    kind: NodeKind, cpu_milli: int, memory_bytes: int, custom: dict[str, Any], cards: tuple[FreeCard, ...]
) -> FreeResources:
    amounts = tuple((name, custom.get(name, 0)) for name, _ in kind.custom)
    return FreeResources(cpu_milli, memory_bytes, kind.cards(cards), amounts)
