"""A gang is placed completely, on the fewest nodes, or not at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from dovetail.resources import free_resources as free_module
from dovetail.resources.cluster import Cluster, Gpu, Node
from dovetail.resources.ledger import Ledger
from dovetail.resources.resources import Resources
from dovetail.resources.seat import CardShare, Seat
from dovetail.scheduling.fragmentation import Workload
from dovetail.scheduling.placement import FragmentationScore, Placer, Score
from scheduling import naive, strategies
from scheduling.leftover_scores import BestFit, Spread

if TYPE_CHECKING:
    from dovetail.resources.seat import Seats
    from dovetail.resources.shape import Shape

GB = 1 << 30
PLAIN_GANGS = strategies.gangs(strategies.plain_resources())


@st.composite
def scenes(draw: st.DrawFn, of: st.SearchStrategy[Shape] = PLAIN_GANGS) -> tuple[Cluster, list[Seat], Shape]:
    """A cluster on which some others sit, and a gang that comes."""
    cluster = draw(strategies.clusters())
    others: list[Seat] = []
    for shape in draw(st.lists(strategies.shapes(), max_size=4)):
        states = naive.states_of(cluster, others)
        ways = [(state.node.name, way) for state in states for way in naive.ways(shape, state)]
        if ways:
            others.append(naive.seat_of(shape, *draw(st.sampled_from(ways))))
    return cluster, others, draw(of)


def place(cluster: Cluster, others: list[Seat], gang: Shape) -> Seats | None:
    return Placer(Ledger(cluster, others), FragmentationScore(Workload({gang: 1}))).place(gang)


def ranks_per_node(seats: Seats) -> list[int]:
    return sorted(Counter(seat.node for seat in seats).values())


def whole_for(gang: Shape, state: naive.State) -> bool:
    return state.computes_nothing if gang.computes_on_gpu else state.is_untouched


@strategies.often
@given(scene=scenes(strategies.gangs()))
def test_a_gang_is_placed_with_all_its_ranks_or_nothing_changes(scene: tuple[Cluster, list[Seat], Shape]) -> None:
    cluster, others, gang = scene
    ledger = Ledger(cluster, others)
    free, changes = list(ledger.free), list(ledger.changes)
    seats = Placer(ledger, FragmentationScore(Workload({gang: 1}))).place(gang)
    if seats is None:
        assert (list(ledger.free), list(ledger.changes)) == (free, changes)
        assert Counter(ledger.seats()) == Counter(others)
    else:
        assert len(seats) == gang.ranks
        assert Counter(ledger.seats()) == Counter(others) + Counter(seats)


@strategies.often
@given(scene=scenes(strategies.gangs()))
def test_every_rank_sits_where_one_worker_of_its_shape_may_sit(scene: tuple[Cluster, list[Seat], Shape]) -> None:
    cluster, others, gang = scene
    rank = replace(gang, ranks=1)
    seated = list(others)
    for seat in place(cluster, others, gang) or ():
        states = {state.node.name: state for state in naive.states_of(cluster, seated)}
        assert seat in [naive.seat_of(rank, seat.node, way) for way in naive.ways(rank, states[seat.node])]
        seated.append(seat)


@strategies.often
@given(scene=scenes())
def test_a_gang_sits_on_one_node_exactly_when_some_arrangement_fits_there(
    scene: tuple[Cluster, list[Seat], Shape],
) -> None:
    cluster, others, gang = scene
    states = naive.states_of(cluster, others)
    fits = [position for position, state in enumerate(states) if naive.room_for(gang, state, gang.ranks) == gang.ranks]
    placer = Placer(Ledger(cluster, others), BestFit(cluster))
    assert placer.fitting_positions(gang) == fits
    seats = placer.place(gang)
    event(f"on {len({seat.node for seat in seats or ()})} nodes")
    assert (seats is not None and len({seat.node for seat in seats}) == 1) == bool(fits)
    if fits and seats:
        assert seats[0].node in {cluster.nodes[position].name for position in fits}


def pair_of(by: str, cluster: Cluster, expected: list[tuple[Shape, int]]) -> tuple[Score, naive.Rule]:
    match by:
        case "fragmentation":
            return FragmentationScore(Workload(expected)), naive.fragmentation_rule(naive.classes_of(expected))
        case "best fit":
            return BestFit(cluster), naive.leftover_rule(cluster, packs=True)
        case _:
            return Spread(cluster), naive.leftover_rule(cluster, packs=False)


@pytest.mark.parametrize("by", ["fragmentation", "best fit", "spread"])
@strategies.often
@given(scene=scenes(), expected=strategies.expected())
def test_of_several_nodes_a_gang_takes_the_one_with_the_best_mean_score(
    by: str, scene: tuple[Cluster, list[Seat], Shape], expected: list[tuple[Shape, int]]
) -> None:
    cluster, others, gang = scene
    score, rule = pair_of(by, cluster, expected)
    wanted = naive.gang_on_one_node(gang, naive.states_of(cluster, others), rule)
    if wanted is not None:
        assert Placer(Ledger(cluster, others), score).place(gang) == wanted


def test_a_gang_is_judged_by_all_its_ranks_not_by_the_first() -> None:
    """On the first node only the first rank finds a half card in use, on the second node both do."""
    cluster = Cluster.parse("2x(8cpu, 2xA100:40GB)")
    half = [CardShare(card, 500, 20 * GB) for card in (0, 1)]
    others = [Seat("node-0", 0, 0, (half[0],)), Seat("node-1", 0, 0, (half[0],)), Seat("node-1", 0, 0, (half[1],))]
    score = FragmentationScore(Workload({Resources(gpus=1).shape(): 1}))
    seats = Placer(Ledger(cluster, others), score).place(Resources(gpus=0.5).shape(2))
    assert seats is not None
    assert [(seat.node, seat.cards[0].card) for seat in seats] == [("node-1", 0), ("node-1", 1)]


@strategies.often
@given(scene=scenes())
def test_a_gang_that_fits_on_no_node_takes_the_fewest_whole_nodes(scene: tuple[Cluster, list[Seat], Shape]) -> None:
    cluster, others, gang = scene
    states = naive.states_of(cluster, others)
    if any(naive.room_for(gang, state, gang.ranks) == gang.ranks for state in states):
        return
    rooms = {
        state.node.name: naive.room_for(gang, state, gang.ranks)
        for state in states
        if whole_for(gang, state) and naive.room_for(gang, state, 1)
    }
    seats = place(cluster, others, gang)
    sets = [
        chosen
        for size in range(1, len(rooms) + 1)
        for chosen in combinations(rooms, size)
        if sum(rooms[name] for name in chosen) >= gang.ranks
    ]
    event("nowhere" if seats is None else f"on {len({seat.node for seat in seats})} nodes")
    if not sets:
        assert seats is None
        return
    assert seats is not None
    used = Counter(seat.node for seat in seats)
    assert set(used) <= set(rooms), "a node was in use before"
    assert len(used) == min(len(chosen) for chosen in sets)
    each, rest = divmod(gang.ranks, len(used))
    if not rest and any(len(chosen) == len(used) and min(rooms[name] for name in chosen) >= each for chosen in sets):
        assert set(used.values()) == {each}, "ranks could be dealt evenly"


def test_ranks_are_dealt_evenly_over_the_fewest_nodes() -> None:
    cluster = Cluster.parse("3x(16cpu, 4xA100:40GB)")
    rank = Resources(cpus=1, gpus=1)
    assert [ranks_per_node(place(cluster, [], rank.shape(ranks)) or ()) for ranks in (4, 6, 8, 9, 12, 13)] == [
        [4],
        [3, 3],
        [4, 4],
        [3, 3, 3],
        [4, 4, 4],
        [],
    ]


def test_ranks_that_do_not_divide_fill_the_first_nodes() -> None:
    cluster = Cluster.parse("3x(16cpu, 4xA100:40GB)")
    seats = place(cluster, [], Resources(cpus=1, gpus=1).shape(7))
    assert seats is not None
    assert [seat.node for seat in seats] == ["node-0"] * 4 + ["node-1"] * 3


def test_a_small_node_is_not_dealt_more_than_it_can_take() -> None:
    """6 ranks on 4 + 2 cards: an even 3 + 3 does not fit."""
    cluster = Cluster.parse("1x(16cpu, 2xA100:40GB) + 1x(16cpu, 4xA100:40GB)")
    seats = place(cluster, [], Resources(cpus=1, gpus=1).shape(6))
    assert seats is not None
    assert Counter(seat.node for seat in seats) == {"node-0": 2, "node-1": 4}


def test_the_biggest_whole_nodes_come_first_because_they_are_fewer() -> None:
    cluster = Cluster.parse("4x(16cpu, 1xA100:40GB) + 2x(16cpu, 4xA100:40GB)")
    seats = place(cluster, [], Resources(cpus=1, gpus=1).shape(8))
    assert seats is not None
    assert Counter(seat.node for seat in seats) == {"node-4": 4, "node-5": 4}


def test_a_gang_on_gpus_does_not_spread_over_a_node_whose_gpus_are_in_use() -> None:
    cluster = Cluster.parse("3x(16cpu, 2xA100:40GB)")
    share = Seat("node-1", 1000, 0, (CardShare(1, 1, 1),))
    seats = place(cluster, [share], Resources(cpus=1, gpus=1).shape(4))
    assert seats is not None
    assert Counter(seat.node for seat in seats) == {"node-0": 2, "node-2": 2}
    assert place(cluster, [share], Resources(cpus=1, gpus=1).shape(5)) is None


@pytest.mark.parametrize(
    "other", [Seat("node-1", 4000, 0), Seat("node-1", 0, 0, (CardShare(0, 0, 0, 1),))], ids=["cpus", "codec"]
)
def test_a_gang_on_gpus_may_spread_over_a_node_whose_gpus_are_idle(other: Seat) -> None:
    cluster = Cluster.parse("2x(16cpu, 2xL4:24GB)")
    seats = place(cluster, [other], Resources(cpus=1, gpus=1).shape(4))
    assert seats is not None
    assert Counter(seat.node for seat in seats) == {"node-0": 2, "node-1": 2}


@pytest.mark.parametrize(
    "other", [Seat("node-1", 1), Seat("node-1", 0, 0, (CardShare(0, 0, 0, 1),))], ids=["cpus", "codec"]
)
def test_a_gang_on_cpus_spreads_only_over_empty_nodes(other: Seat) -> None:
    cluster = Cluster.parse("3x(4cpu, 1xL4:24GB)")
    gang = Resources(cpus=1).shape(8)
    seats = place(cluster, [other], gang)
    assert seats is not None
    assert Counter(seat.node for seat in seats) == {"node-0": 4, "node-2": 4}
    assert place(cluster, [other, other._replace(node="node-2")], gang) is None


def test_a_gang_that_fits_on_one_node_sits_there_beside_others() -> None:
    cluster = Cluster.parse("2x(16cpu, 4xA100:40GB)")
    busy = [Seat(f"node-{number}", 1000, 0, (CardShare(0, 500, 20 * GB),)) for number in range(2)]
    seats = place(cluster, busy, Resources(cpus=1, gpus=1).shape(3))
    assert seats is not None
    assert ranks_per_node(seats) == [3]
    assert place(cluster, busy, Resources(cpus=1, gpus=1).shape(4)) is None


def test_a_gang_given_back_leaves_its_nodes_whole_again() -> None:
    cluster = Cluster.parse("2x(8cpu, 16GB, 2xL4:24GB, licence=4)")
    placer = Placer(Ledger(cluster), BestFit(cluster))
    for asked, on_each in (
        (Resources(cpus=4, memory="1GB", custom={"licence": 0.5}), [2, 2]),
        (Resources(cpus=1, gpus=1, nvdecs=1), [2, 2]),
        (Resources(cpus=0, nvdecs=3), [2, 2]),
    ):
        for _ in range(2):
            seats = placer.place(asked.shape(4))
            assert seats is not None, asked
            assert ranks_per_node(seats) == on_each
            placer.give_back(seats)


@pytest.mark.parametrize("states_limit", [1, 2, 200_000])
def test_a_gang_on_cpus_finds_whole_nodes_also_after_their_states_were_forgotten(states_limit: int) -> None:
    """Cards are compared by identity; a state that was dropped and created again is another object."""
    cluster = Cluster.parse("2x(4cpu, 2xL4:24GB)")
    with patch.object(free_module, "TRANSITION_CACHE_LIMIT", states_limit):
        placer = Placer(Ledger(cluster), BestFit(cluster))
        for _ in range(2):
            placed = placer.fill(Resources(cpus=1, gpus=0.5).shape(), 3)
            assert len(placed) == 3
            for seats in placed:
                placer.give_back(seats)
            gang = placer.place(Resources(cpus=1).shape(8))
            assert gang is not None
            placer.give_back(gang)


def test_ranks_of_two_cards_with_a_decoder_share_out_the_cards_that_have_one() -> None:
    """Decoders on cards 0 and 1 only: a rank that took both would leave none for the other rank."""
    with_one, without = Gpu("L4", 24 * GB, 1, 0), Gpu("A30", 24 * GB, 0, 0)
    cluster = Cluster((Node("only", 8000, 0, (with_one, with_one, without, without)),))
    gang = Resources(cpus=1, gpus=2, nvdecs=1).shape(2)
    assert naive.room_for(gang, naive.untouched(cluster.nodes[0]), 2) == 2
    seats = place(cluster, [], gang)
    assert seats is not None
    assert sorted(share.card for seat in seats for share in seat.cards) == [0, 1, 2, 3]
