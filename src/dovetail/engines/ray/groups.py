"""How are placement groups asked for, looked at and removed? Every call into Ray that concerns them."""

from __future__ import annotations

import functools
import itertools
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dovetail.engines.ray.bundles import bundle_of
from dovetail.errors import EngineError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from concurrent.futures import Future

    from dovetail.engines.ray.bundles import Host

PREFIX = "dovetail:"
"""What the names of all our groups begin with; then the run, a colon, and a number: Ray has no name twice."""
NODE_ID = "ray.io/node-id"
_NUMBERS = itertools.count(1)


class Taken(Enum):
    """What Ray says to a group, in its own words."""

    GRANTED = "FINISHED"
    NOT_NOW = "NO_RESOURCES"
    NEVER = "INFEASIBLE"
    UNDECIDED = "PENDING"


DECIDED = frozenset(taken.value for taken in (Taken.GRANTED, Taken.NOT_NOW, Taken.NEVER))


@dataclass(eq=False)
class Group:
    """One placement group. `parts` is what it has of each node, cards apart."""

    handle: Any
    parts: dict[str, Host]
    bundles: tuple[str, ...]
    """The node of each bundle."""
    granted: bool = False
    replaces: bool = False
    """It stands for a part of one that was granted and is gone."""
    asked: dict[str, Future[list[str]]] = field(default_factory=dict)
    """Node -> the question which cards it has there."""


def ask_group(run: str, ids: Mapping[str, str], hosts: Mapping[str, Host], cards: Mapping[str, int]) -> Group | None:
    """All of it or nothing, one bundle per node; None: one of the nodes is not there."""
    nodes = tuple(sorted({*hosts, *cards}))
    if not all(node in ids for node in nodes):
        return None
    with calling():
        handle = placement_group(
            [bundle_of(hosts.get(node, {}), cards.get(node, 0)) for node in nodes],
            name=f"{PREFIX}{run}:{os.getpid()}.{next(_NUMBERS)}",
            bundle_label_selector=[{NODE_ID: ids[node]} for node in nodes],
        )
    return Group(handle, {node: dict(hosts.get(node, {})) for node in nodes}, nodes)


def state_of(group: Group) -> str:
    with calling():
        return str(placement_group_table(group.handle)["stats"]["scheduling_state"])


def remove(group: Group) -> None:
    with calling():
        remove_placement_group(group.handle)


def remove_all(groups: Iterable[Group]) -> None:
    """As many as can be."""
    for group in groups:
        with suppress(Exception):
            remove_placement_group(group.handle)


def ask_which(group: Group, node: str, count: int) -> None:
    """Which cards it owns there is asked, from inside: nothing else knows."""
    inside = PlacementGroupSchedulingStrategy(group.handle, placement_group_bundle_index=group.bundles.index(node))
    with calling():
        answer = _question().options(num_gpus=count, scheduling_strategy=inside).remote()
        group.asked[node] = answer.future()  # which takes errors, too: of a group that is removed nobody asks for them


def answer_of(group: Group, node: str) -> list[str] | None:
    """None: not yet. An exception: whoever was asked has died."""
    return list(group.asked.pop(node).result()) if group.asked[node].done() else None


@functools.cache
def _question() -> Any:
    return ray.remote(num_cpus=0, max_retries=0)(_own_cards)


def _own_cards() -> list[str]:
    return [str(card) for card in ray.get_gpu_ids()]


@contextmanager
def calling() -> Iterator[None]:
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # Ray has no common kind for this
        raise no_answer(f"{type(error).__name__}: {error}") from error


def no_answer(reason: str) -> EngineError:
    fixes = ("ray status: is the cluster still there?", "then go on: dovetail run --resume last")
    return EngineError(Problem("DT397", "Ray does not answer where a run asks for what it may use", (reason,), fixes))
