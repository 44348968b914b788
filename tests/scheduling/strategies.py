"""Which small clusters, workers and gangs are worth trying? Few distinct amounts, so that things collide."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dovetail.resources.cluster import Cluster, Gpu, Node
from dovetail.resources.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dovetail.resources.shape import Shape

often = settings(max_examples=max(40, settings().max_examples), suppress_health_check=[HealthCheck.too_slow])
"""For properties on which much depends: more examples also in the short profile."""

T = TypeVar("T")
GB = 1 << 30

CARDS = (
    Gpu("A100", 40 * GB, 5, 0),
    Gpu("A100", 80 * GB, 5, 0),
    Gpu("L4", 24 * GB, 2, 2),
    Gpu("L4", 24 * GB, 1, 0),
    Gpu("T4", 16 * GB, 1, 1),
    Gpu("mystery", 0, 0, 0),
)
POOLS = ("red", "blue")


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    """One machine without a name; half of them have cards of one kind only."""
    count = draw(st.sampled_from((0, 1, 2, 2, 3, 3, 4)))
    alike = draw(st.booleans())
    card = st.sampled_from(CARDS)
    gpus = (draw(card),) * count if alike else tuple(draw(card) for _ in range(count))
    pool = draw(st.sampled_from((None, *POOLS)))
    licences = draw(st.integers(0, 3))
    return Node(
        name="",
        cpu_milli=draw(st.integers(2, 24)) * 500,  # more than is kept back
        memory_bytes=draw(st.sampled_from((0, 8, 16, 32, 64))) * GB,
        gpus=gpus,
        labels=() if pool is None else (("pool", pool),),
        custom=(("licence", licences * 1000),) if licences else (),
        kept_back_milli=draw(st.sampled_from((0, 0, 500))),
    )


@st.composite
def clusters(draw: st.DrawFn, most_nodes: int = 6) -> Cluster:
    """1 to 6 nodes of 1 to 3 kinds, in any order."""
    kinds = draw(st.lists(nodes(), min_size=1, max_size=3))
    order = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most_nodes))
    return Cluster(tuple(replace(node, name=f"node-{position}") for position, node in enumerate(order)))


NO_TEXTS: Mapping[str, str] = {}
NO_AMOUNTS: Mapping[str, float] = {}


def mostly(usual: T, *others: T) -> st.SearchStrategy[T]:
    """Three times in four the usual, so that workers ask for something special but seldom for everything at once."""
    return st.sampled_from((usual,) * 3 * len(others) + others)


_cpus: st.SearchStrategy[float] = st.sampled_from((0.25, 0.5, 1, 1, 2, 3))
_cpus_or_none: st.SearchStrategy[float] = st.sampled_from((0, 0, 0.5, 0.5, 1, 2))
_memories = mostly(None, "1GB", "4GB", "8GB")
_accelerators = mostly(None, "a100", "L4|T4", "H100")
_labels = mostly(NO_TEXTS, {"pool": "red"}, {"pool": "red|blue"})
_customs = mostly(NO_AMOUNTS, {"licence": 1}, {"licence": 0.5})
_codecs = st.sampled_from((0, 0, 0, 1, 1, 2))


@st.composite
def cpu_resources(draw: st.DrawFn) -> Resources:
    return Resources(cpus=draw(_cpus), memory=draw(_memories), labels=draw(_labels), custom=draw(_customs))


@st.composite
def codec_resources(draw: st.DrawFn) -> Resources:
    nvdecs = draw(st.integers(0, 2))
    return Resources(
        cpus=draw(_cpus_or_none),
        memory=draw(_memories),
        nvdecs=nvdecs,
        nvencs=draw(st.integers(0 if nvdecs else 1, 2)),
        accelerator=draw(_accelerators),
        labels=draw(_labels),
        custom=draw(_customs),
    )


@st.composite
def share_resources(draw: st.DrawFn) -> Resources:
    gpus = draw(st.sampled_from((0, 0.1, 0.25, 0.3, 0.5, 0.5, 0.7, 0.999)))
    sizes: tuple[str | None, ...] = ("1MB", "1500MB", "4GB", "8GB", "20GB", "24GB")
    gpu_memory = draw(st.sampled_from((None, None, *sizes) if gpus else sizes))
    return Resources(
        cpus=draw(_cpus_or_none),
        gpus=gpus,
        gpu_memory=gpu_memory,
        memory=draw(_memories),
        nvdecs=draw(_codecs),
        nvencs=draw(_codecs),
        accelerator=draw(_accelerators),
        labels=draw(_labels),
        custom=draw(_customs),
    )


@st.composite
def whole_resources(draw: st.DrawFn, *, adding_up_codecs: bool = True) -> Resources:
    """Whole-numbered and entire cards; several cards with codecs only where those may be added up."""
    gpus = draw(st.sampled_from((1, 1, 2, 2, 3, 4)))
    codecs = _codecs if gpus == 1 or adding_up_codecs else st.just(0)
    return Resources(
        cpus=draw(_cpus_or_none),
        gpus=gpus,
        gpu_memory=draw(st.sampled_from((None, None, "20GB"))),
        memory=draw(_memories),
        nvdecs=draw(codecs),
        nvencs=draw(codecs),
        entire_gpu=draw(st.booleans()),
        accelerator=draw(_accelerators),
        labels=draw(_labels),
        custom=draw(_customs),
    )


def resources() -> st.SearchStrategy[Resources]:
    """Every kind of worker."""
    return st.one_of(cpu_resources(), share_resources(), whole_resources(), codec_resources())


def shapes() -> st.SearchStrategy[Shape]:
    return resources().map(lambda asked: asked.shape())


def plain_resources() -> st.SearchStrategy[Resources]:
    """Every kind, but several cards without codecs: then it is clear which cards are the first that will do, and one
    rank after the other finds all the room there is."""
    whole = whole_resources(adding_up_codecs=False)
    return st.one_of(cpu_resources(), share_resources(), whole, codec_resources())


def plain_shapes() -> st.SearchStrategy[Shape]:
    return plain_resources().map(lambda asked: asked.shape())


def gangs(of: st.SearchStrategy[Resources] | None = None, most_ranks: int = 8) -> st.SearchStrategy[Shape]:
    build: Callable[[Resources, int], Shape] = Resources.shape
    return st.builds(build, resources() if of is None else of, st.integers(2, most_ranks))


def expected(of: st.SearchStrategy[Shape] | None = None) -> st.SearchStrategy[list[tuple[Shape, int]]]:
    """Input of a Workload: shapes and their expected numbers."""
    shape = st.one_of(shapes(), shapes(), gangs(most_ranks=3)) if of is None else of
    return st.lists(st.tuples(shape, st.integers(0, 5)), max_size=6)


VERBS = ("place", "place", "place", "find", "give back", "take behind its back", "give back behind its back")
Step = tuple[str, int]


def steps(most: int = 30) -> st.SearchStrategy[list[Step]]:
    """Steps of a placer: a verb, and a number that selects the shape, worker or seat."""
    return st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 999)), max_size=most)
