"""Which cards does a node of a Ray cluster have? From what Ray says of it, our table, and, if need be, a look there."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from dovetail.engines.ray.library import import_ray, module, quiet
from dovetail.errors import ConfigError
from dovetail.resources.cluster import Cluster, Gpu
from dovetail.resources.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ACCELERATOR = "accelerator_type:"
ACCELERATOR_LABEL = "ray.io/accelerator-type"
MEMORY_LABEL = "dovetail.io/gpu-memory"
"""Says how much memory each card has, for those that are sold with more than one size: 80GB."""
UNKNOWN = "gpu"
LOOK_S = 10.0
NAMESPACE = b"dovetail"
KEY = "cards:"
VISIBLE = "CUDA_VISIBLE_DEVICES"

Looked = list[dict[str, Any]]
"""The cards that were seen on a node, plain."""

_LOOKING = Lock()
_FAILED: dict[str, str] = {}
"""Ray's ids of nodes whose cards could not be looked at, and why: nobody in this process tries that again."""


def cards_said(resources: Mapping[str, float], labels: Mapping[str, str]) -> tuple[Gpu, ...]:
    """By what Ray says: the model's name, its memory and codecs from the table, unknown where it is not there."""
    count = int(resources.get("GPU", 0))
    named = sorted(name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR))
    model = (named or [labels.get(ACCELERATOR_LABEL, "")])[0] or UNKNOWN
    gpu = Gpu.of(model)
    gpu = replace(gpu, model=re.sub(r"[^\w.+-]+", "-", gpu.model).strip("-") or UNKNOWN)
    with contextlib.suppress(KeyError, ConfigError):
        gpu = replace(gpu, memory_bytes=parse_size(labels[MEMORY_LABEL]))
    return (gpu,) * count


def is_unknown(cards: tuple[Gpu, ...]) -> bool:
    return bool(cards) and (cards[0].model == UNKNOWN or not cards[0].memory_bytes)


def cards_looked(said: tuple[Gpu, ...], looked: Looked) -> tuple[Gpu, ...]:
    """Ray's number of cards, each with what was seen there of it."""
    seen = [Gpu(card["model"], card["memory_bytes"], card["nvdecs"], card["nvencs"]) for card in looked]
    return (*seen[: len(said)], *said[len(seen) :])


def look_on(ids: Iterable[str]) -> tuple[dict[str, Looked], list[str]]:
    """What a task on each node sees there, remembered in the cluster for who asks next; and notes."""
    with _LOOKING:  # who comes at the same time finds what the first one saw
        wanted = list(ids)
        found = _found([node for node in wanted if node not in _FAILED])
    return found, [_FAILED[node] for node in wanted if node in _FAILED]


def _found(wanted: list[str]) -> dict[str, Looked]:
    found: dict[str, Looked] = {}
    asked: dict[Any, str] = {}
    for node in wanted:
        known = _kv("get")(f"{KEY}{node}".encode(), namespace=NAMESPACE)
        if known is not None:
            found[node] = json.loads(known)
        else:
            asked[_task(node)] = node
    ray = import_ray()
    ready = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_S)[0] if asked else []
    for task in ready:
        try:
            found[asked[task]] = ray.get(task)
        except ray.exceptions.RayError as error:
            reason = (str(error).strip().splitlines() or [""])[-1][:120]
            _FAILED[asked[task]] = (
                f"node {asked[task][:8]}: its GPUs could not be looked at ({reason}): their memory is not known"
            )
        else:
            _kv("put")(f"{KEY}{asked[task]}".encode(), json.dumps(found[asked[task]]).encode(), namespace=NAMESPACE)
    for task in asked.keys() - set(ready):
        ray.cancel(task, force=True)
        _FAILED[asked[task]] = f"node {asked[task][:8]}: no look at its GPUs in {LOOK_S:g} s: their memory is not known"
    return found


def _kv(what: str) -> Any:
    return getattr(module("ray.experimental.internal_kv"), f"_internal_kv_{what}")


def _task(node: str) -> Any:
    ray = import_ray()
    there = module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(node, soft=False)
    with quiet():
        return ray.remote(look_here).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote()


def look_here() -> Looked:
    """All cards of the machine that this runs on; Ray hides them from a task that asked for none."""
    hidden = os.environ.pop(VISIBLE, None)
    try:
        gpus = Cluster.local().nodes[0].gpus
    finally:
        if hidden is not None:
            os.environ[VISIBLE] = hidden
    return [
        {"model": gpu.model, "memory_bytes": gpu.memory_bytes, "nvdecs": gpu.nvdecs, "nvencs": gpu.nvencs}
        for gpu in gpus
    ]
