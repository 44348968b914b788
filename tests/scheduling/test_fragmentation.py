"""The fragmentation score F is exactly the value of its definition."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.resources.cluster import Cluster, Gpu, Node
from dovetail.resources.ledger import Ledger
from dovetail.resources.resources import Resources
from dovetail.resources.seat import CardShare, Seat
from dovetail.scheduling.fragmentation import Fragmentation, Workload
from scheduling import naive, strategies

if TYPE_CHECKING:
    from dovetail.resources.shape import Shape

GB = 1 << 30
ONE = Resources(cpus=1, gpus=1).shape()
TWO = Resources(cpus=1, gpus=2).shape()
HALF = Resources(cpus=1, gpus=0.5).shape()


def node_with(*gpus: Gpu, cpus: int = 8) -> Cluster:
    return Cluster((Node("only", cpus * 1000, 64 * GB, gpus),))


def f_of(cluster: Cluster, workload: Workload, *seats: Seat) -> Fraction:
    return Fraction(Fragmentation(workload).of_free(Ledger(cluster, seats).free[0]), workload.weight or 1)


@st.composite
def some_seats(draw: st.DrawFn, cluster: Cluster) -> list[Seat]:
    """Workers anywhere they fit, not where a placer would put them."""
    seats: list[Seat] = []
    for shape in draw(st.lists(strategies.shapes(), max_size=8)):
        states = naive.states_of(cluster, seats)
        open_to_it = [(state.node.name, way) for state in states for way in naive.ways(shape, state)]
        if open_to_it:
            node, way = draw(st.sampled_from(open_to_it))
            seats.append(naive.seat_of(shape, node, way))
    return seats


@strategies.often
@given(data=st.data(), cluster=strategies.clusters(most_nodes=3), expected=strategies.expected())
def test_f_equals_its_definition_on_every_node_in_any_state(
    data: st.DataObject, cluster: Cluster, expected: list[tuple[Shape, int]]
) -> None:
    seats = data.draw(some_seats(cluster))
    workload = Workload(expected)
    classes = naive.classes_of(expected)
    assert workload.weight == sum(count for _, count in classes)
    fragmentation = Fragmentation(workload)
    ledger = Ledger(cluster, seats)
    for state, free in zip(naive.states_of(cluster, seats), ledger.free, strict=True):
        assert fragmentation.of_free(free) == workload.weight * naive.fragments(state, classes)
        for shape, _ in classes:
            assert Fragmentation(Workload({shape: 1})).of_free(free) == naive.fragments(state, ((shape, 1),))


CODEC_CARDS = [Gpu("L4", 24 * GB, nvdecs, nvencs) for nvdecs in range(3) for nvencs in range(2)]


@given(
    cards=st.lists(st.sampled_from(CODEC_CARDS), min_size=1, max_size=4),
    decoding=st.sets(st.integers(0, 3)),
    gpus=st.integers(1, 3),
    nvdecs=st.integers(0, 4),
    nvencs=st.integers(0, 2),
    entire=st.booleans(),
)
def test_f_of_work_on_whole_cards_knows_which_cards_have_the_codecs(
    cards: list[Gpu], decoding: set[int], gpus: int, nvdecs: int, nvencs: int, entire: bool
) -> None:
    cluster = node_with(*cards)
    shape = Resources(gpus=gpus, nvdecs=nvdecs, nvencs=nvencs, entire_gpu=entire).shape()
    busy = [index for index in decoding if index < len(cards) and cards[index].nvdecs]
    seats = [Seat("only", 0, 0, (CardShare(index, 0, 0, 1),)) for index in busy]
    state = naive.states_of(cluster, seats)[0]
    assert f_of(cluster, Workload({shape: 1}), *seats) == naive.fragments(state, ((shape, 1),))


@given(data=st.data(), cluster=strategies.clusters(most_nodes=3), expected=strategies.expected())
def test_f_lies_between_nothing_and_all_that_is_idle(
    data: st.DataObject, cluster: Cluster, expected: list[tuple[Shape, int]]
) -> None:
    workload = Workload(expected)
    fragmentation = Fragmentation(workload)
    for free in Ledger(cluster, data.draw(some_seats(cluster))).free:
        assert 0 <= fragmentation.of_free(free) <= workload.weight * sum(card.milli for card in free.cards.free)


def test_f_of_the_published_example_by_hand() -> None:
    """Two cards, 700 and 1000 milli left: half a card uses both, one card one of them, two cards neither."""
    cluster = node_with(Gpu("A100"), Gpu("A100"))
    seat = Seat("only", 1000, 0, (CardShare(0, 300),))
    assert f_of(cluster, Workload({HALF: 1}), seat) == 0
    assert f_of(cluster, Workload({ONE: 1}), seat) == 700
    assert f_of(cluster, Workload({TWO: 1}), seat) == 1700
    assert f_of(cluster, Workload({HALF: 2, ONE: 1, TWO: 1}), seat) == Fraction(700 + 1700, 4)


def test_work_without_gpus_counts_all_that_is_idle_whether_or_not_it_fits() -> None:
    cluster = node_with(Gpu("A100"), cpus=2)
    for cpus in (1, 64):
        assert f_of(cluster, Workload({Resources(cpus=cpus).shape(): 1})) == 1000
    assert f_of(cluster, Workload({Resources(nvdecs=1).shape(): 1})) == 1000


@pytest.mark.parametrize(
    "asked",
    [
        Resources(gpus=0.5, cpus=9),
        Resources(gpus=0.5, memory="65GB"),
        Resources(gpus=0.5, custom={"licence": 1}),
        Resources(gpus=0.5, labels={"pool": "red"}),
        Resources(gpus=0.5, accelerator="H100"),
        Resources(gpu_memory="41GB"),
        Resources(gpus=0.5, nvencs=1),
        Resources(gpus=3),
    ],
    ids=repr,
)
def test_work_that_cannot_sit_there_can_use_nothing_of_it(asked: Resources) -> None:
    cluster = node_with(Gpu("A100", 40 * GB, 5, 0), Gpu("A100", 40 * GB, 5, 0))
    assert f_of(cluster, Workload({asked.shape(): 3})) == 2000


def test_a_gang_counts_once_per_rank() -> None:
    assert Workload({Resources(gpus=1).shape(ranks=4): 2, Resources(gpus=1).shape(): 1}).classes == (
        (Resources(gpus=1).shape(), 9),
    )
    assert Workload({Resources(gpus=1).shape(ranks=4): 2}).weight == 8


def test_one_card_with_codecs_cannot_use_a_card_whose_codecs_are_taken() -> None:
    """Both cards are idle, one without a decoder: a worker that needs a card with a decoder can use only the other."""
    cluster = node_with(Gpu("L4", 24 * GB, 1, 0), Gpu("L4", 24 * GB, 1, 0))
    decoding = Seat("only", 0, 0, (CardShare(0, 0, 0, 1),))
    assert f_of(cluster, Workload({Resources(gpus=1, nvdecs=1).shape(): 1}), decoding) == 1000


def test_codecs_are_counted_on_the_cards_a_worker_would_get_not_on_all_cards() -> None:
    """Three cards with a decoder each: no two of them have the three decoders that are asked for."""
    cluster = node_with(*[Gpu("L4", 24 * GB, 1, 0)] * 3)
    assert f_of(cluster, Workload({Resources(gpus=2, nvdecs=3).shape(): 1})) == 3000


def test_one_card_with_more_codecs_than_any_card_has_can_use_nothing() -> None:
    cluster = node_with(*[Gpu("L4", 24 * GB, 1, 0)] * 2)
    assert f_of(cluster, Workload({Resources(gpus=1, nvdecs=2).shape(): 1})) == 2000


def test_an_entire_card_whose_codecs_do_not_suffice_cannot_be_used() -> None:
    cluster = node_with(Gpu("L4", 24 * GB, 1, 0), Gpu("A100", 40 * GB, 5, 0))
    assert f_of(cluster, Workload({Resources(entire_gpu=True, nvdecs=3).shape(): 1})) == 1000


def test_nothing_expected_is_no_fragmentation() -> None:
    cluster = node_with(Gpu("A100"))
    assert f_of(cluster, Workload()) == 0
    assert f_of(cluster, Workload({ONE: 0})) == 0
