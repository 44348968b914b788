"""Small random pipelines, and their optimal plans by exhaustive search."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

import dovetail as dt
from dovetail.resources.fit import Fit
from scheduling.strategies import clusters, mostly, resources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.shape import Shape
    from dovetail.scheduling.demand import Demand

RATES = (0.5, 1, 1, 2, 3.5, 7)
RETURNS = (0.5, 1, 2, 3)


def work(items: Any) -> Any:
    return items


def stage(name: str, *, rate: float | None = 1, **asked: Any) -> dt.Stage:
    """A stage from what one worker asks for (cpus, gpus, ...) and its own settings (workers, after, ...)."""
    settings = ("workers", "workers_per_node", "returns", "ranks", "after", "fuse", "barrier", "batch_size")
    own = {key: asked.pop(key) for key in settings if key in asked}
    return dt.Stage(name, work, dt.Resources(**asked), rate=rate, **{"fuse": False, **own})


def pipeline(*stages: dt.Stage) -> dt.Pipeline:
    return dt.Pipeline(stages, "made")


@st.composite
def light_resources(draw: st.DrawFn) -> dt.Resources:
    """Workers of which several fit on a usual node."""
    gpus = draw(st.sampled_from((0, 0, 0, 0.25, 0.4, 0.5, 0.7, 1, 2)))
    return dt.Resources(cpus=draw(st.sampled_from((0.5, 1, 1, 2))), gpus=gpus)


@st.composite
def counted(draw: st.DrawFn, *, per_node: bool) -> dict[str, Any]:
    """How an author says how many workers: not at all, exactly, from to, or on every node."""
    kinds = ("auto", "auto", "auto", "exact", "range", *(("per node",) if per_node else ()))
    kind = draw(st.sampled_from(kinds))
    if kind == "exact":
        return {"workers": draw(st.integers(1, 3))}
    if kind == "range":
        low = draw(st.integers(1, 2))
        return {"workers": (low, low + draw(st.integers(0, 2)))}
    return {"workers_per_node": draw(st.integers(1, 2))} if kind == "per node" else {}


@st.composite
def pipelines(
    draw: st.DrawFn, *, most: int = 5, per_node: bool = True, barriers: bool = True, gangs: bool = True
) -> dt.Pipeline:
    """Lines and graphs of 1 to 5 stages, mostly light."""
    count = draw(st.integers(1, most))
    line = draw(st.booleans())
    stages: list[dt.Stage] = []
    for number in range(count):
        after = None
        if not line and number:
            names = [other.name for other in stages]
            after = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
        asked = draw(light_resources() if draw(st.integers(0, 4)) else resources())
        stages.append(
            dt.Stage(
                f"s{number}",
                work,
                asked,
                rate=draw(st.sampled_from((None, *RATES))),
                returns=draw(st.sampled_from((None, None, *RETURNS))),
                ranks=draw(mostly(1, 2, 3)) if gangs else 1,
                after=after,
                fuse=draw(st.booleans()),
                barrier=draw(mostly(False, True)) if barriers else False,
                **draw(counted(per_node=per_node)),
            )
        )
    return dt.Pipeline(stages, "random")


CARD_TYPES = ("gpu:20GB", "L40S", "H100")


@st.composite
def usual_clusters(draw: st.DrawFn, most_nodes: int = 3) -> dt.Cluster:
    """1 to 3 nodes with CPUs to spare, with or without cards, all of a node's cards alike."""
    parts = []
    for _ in range(draw(st.integers(1, most_nodes))):
        cards = draw(st.integers(0, 4))
        gpus = f", {cards}x{draw(st.sampled_from(CARD_TYPES))}" if cards else ""
        parts.append(f"1x({draw(st.integers(4, 32))}cpu, 64GB{gpus})")
    return dt.Cluster.parse(" + ".join(parts))


def any_clusters() -> st.SearchStrategy[dt.Cluster]:
    return st.one_of(usual_clusters(), usual_clusters(), clusters(most_nodes=4))


@st.composite
def tiny_clusters(draw: st.DrawFn) -> dt.Cluster:
    """1 or 2 nodes with so little that everything can be tried."""
    nodes = [
        f"1x({draw(st.integers(1, 6))}cpu, 8GB" + (f", {cards}xgpu:20GB)" if cards else ")")
        for cards in draw(st.lists(st.integers(0, 2), min_size=1, max_size=2))
    ]
    return dt.Cluster.parse(" + ".join(nodes))


@st.composite
def tiny_pipelines(draw: st.DrawFn, *, single: bool = False) -> dt.Pipeline:
    """2 or 3 units that ask for CPUs and shares of cards, whole cards or two cards; `single`: one worker of each."""
    stages = []
    for number in range(draw(st.integers(2, 3))):
        asked = {
            "cpus": draw(st.sampled_from((1, 1, 2, 3))),
            "gpus": draw(st.sampled_from((0, 0.25, 0.4, 0.5, 0.7, 1, 2))),
        }
        rate = draw(st.sampled_from((0.7, 1, 1.3, 2)))
        stages.append(stage(f"s{number}", rate=rate, **asked, **({"workers": 1} if single else {})))
    return pipeline(*stages)


def all_fit(shapes: Sequence[Shape], counts: Sequence[int], cluster: dt.Cluster) -> bool:
    """Whether these numbers of workers fit together: tries every assignment, on nodes with equal cards."""
    fits = [Fit(shape) for shape in shapes]

    @cache
    def rest_fits(states: tuple[FreeResources, ...], left: tuple[int, ...]) -> bool:
        unit = next((number for number, count in enumerate(left) if count), None)
        if unit is None:
            return True
        fewer = tuple(count - (number == unit) for number, count in enumerate(left))
        for position, free in enumerate(states):
            for way in fits[unit].assignments(free) if free not in states[:position] else ():
                then = free.taken(fits[unit].seat("", way))
                assert then is not None
                if rest_fits((*states[:position], then, *states[position + 1 :]), fewer):
                    return True
        return False

    return rest_fits(tuple(dt.Ledger(cluster).free), tuple(counts))


def best_rate(demands: Sequence[Demand], cluster: dt.Cluster) -> float:
    """The highest rate there is; 0 if one worker of each does not fit."""
    shapes = [demand.shape for demand in demands]
    most = 40
    rates = sorted({count * demand.speed for demand in demands for count in range(1, most)})
    best = 0.0
    low, high = 0, len(rates)
    while low < high:
        middle = (low + high) // 2
        counts = [max(1, math.ceil(rates[middle] / demand.speed - 1e-9)) for demand in demands]
        if sum(counts) < most and all_fit(shapes, counts, cluster):
            best, low = rates[middle], middle + 1
        else:
            high = middle
    return best
