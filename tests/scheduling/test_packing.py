"""Packing seats what it says, where there is room, and says no only when it found none."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import dovetail as dt
from dovetail.scheduling.packing import (
    NODE_ORDERS,
    NodeFiller,
    Packing,
    PackingOrder,
    add_up_to,
    group_nodes,
    pack,
    seats_by_unit,
)
from scheduling.pipelines import any_clusters, light_resources
from scheduling.strategies import clusters, gangs, resources, shapes


def positions_in(packing: Packing) -> list[int]:
    return sorted(position for positions in packing.groups.values() for position in positions)


@given(clusters(), shapes(), st.integers(0, 12))
def test_filling_a_node_gives_the_state_after_its_seats_are_taken(
    cluster: dt.Cluster, shape: dt.Shape, count: int
) -> None:
    ledger = dt.Ledger(cluster)
    filler = NodeFiller(shape)
    free = ledger.free[0]
    count = min(count, filler.capacity(free))
    assume(count)
    filled = filler.fill(free, count)
    assert sum(times for _, times in filled.assignments) == count
    for way, times in filled.assignments:
        for _ in range(times):
            ledger.take(filler.fit.seat(cluster.nodes[0].name, way))
    assert ledger.free[0] == filled.free


@given(clusters(), st.lists(st.one_of(shapes(), gangs(most_ranks=3)), min_size=1, max_size=4), st.data())
def test_a_packing_places_every_worker_and_its_rest_equals_the_ledger(
    cluster: dt.Cluster, kinds: list[dt.Shape], data: st.DataObject
) -> None:
    ledger = dt.Ledger(cluster)
    fillers = [NodeFiller(shape) for shape in kinds]
    counts = data.draw(st.lists(st.integers(0, 3), min_size=len(kinds), max_size=len(kinds)))
    order = tuple(data.draw(st.permutations(range(len(kinds)))))
    strategy = PackingOrder(order, data.draw(st.sampled_from(NODE_ORDERS)), data.draw(st.integers(1, 3)))
    packing = pack(Packing([], group_nodes(ledger)), fillers, counts, strategy)
    assume(packing is not None)
    assert packing is not None
    workers = seats_by_unit(packing, ledger, fillers)
    assert [len(found) for found in workers] == counts
    for shape, found in zip(kinds, workers, strict=True):
        assert all(len(seats) == shape.ranks for seats in found)
        for seat in (seat for seats in found for seat in seats):
            ledger.take(seat)
    assert positions_in(packing) == list(range(len(cluster.nodes)))
    left = {position: free for free, positions in packing.groups.items() for position in positions}
    assert [left[position] for position in range(len(cluster.nodes))] == list(ledger.free)


@given(any_clusters(), light_resources(), st.integers(1, 40), st.sampled_from(NODE_ORDERS))
def test_workers_of_one_shape_are_packed_exactly_if_they_fit(
    cluster: dt.Cluster, asked: dt.Resources, count: int, nodes_first: str
) -> None:
    ledger = dt.Ledger(cluster)
    filler = NodeFiller(asked.shape())
    room = sum(filler.capacity(free) for free in ledger.free)
    packing = pack(Packing([], group_nodes(ledger)), [filler], [count], PackingOrder((0,), nodes_first))
    assert (packing is not None) == (count <= room)


def test_packing_leaves_the_packing_it_starts_from_as_it_was() -> None:
    ledger = dt.Ledger(dt.Cluster.parse("3x(8cpu, 2xgpu:20GB)"))
    start = Packing([], group_nodes(ledger))
    before = {free: list(positions) for free, positions in start.groups.items()}
    fillers = [NodeFiller(dt.Resources(cpus=1, gpus=1).shape()), NodeFiller(dt.Resources(cpus=2).shape())]
    assert pack(start, fillers, [3, 4], PackingOrder((0, 1))) is not None
    assert start.fills == []
    assert start.groups == before


@given(clusters(), resources(), st.integers(0, 50))
def test_as_many_as_fit_are_added_and_no_more(cluster: dt.Cluster, asked: dt.Resources, count: int) -> None:
    ledger = dt.Ledger(cluster)
    filler = NodeFiller(asked.shape())
    room = sum(filler.capacity(free) for free in ledger.free)
    packing = Packing([], group_nodes(ledger))
    assert add_up_to(packing, 0, filler, count) == min(count, room)
    assert len(seats_by_unit(packing, ledger, [filler])[0]) == min(count, room)


def test_a_gang_that_fits_on_no_node_takes_whole_nodes() -> None:
    ledger = dt.Ledger(dt.Cluster.parse("3x(8cpu, 2xgpu:20GB)"))
    filler = NodeFiller(dt.Resources(cpus=1, gpus=1).shape(ranks=4))
    packing = pack(Packing([], group_nodes(ledger)), [filler], [1], PackingOrder((0,)))
    assert packing is not None
    (worker,) = seats_by_unit(packing, ledger, [filler])[0]
    assert Counter(seat.node for seat in worker) == {"node-0": 2, "node-1": 2}
    assert pack(Packing([], group_nodes(ledger)), [filler], [2], PackingOrder((0,))) is None


def test_shares_go_to_the_card_that_has_the_least_left() -> None:
    ledger = dt.Ledger(dt.Cluster.parse("1x(8cpu, 2xgpu:20GB)"))
    fillers = [NodeFiller(dt.Resources(cpus=1, gpus=share).shape()) for share in (0.5, 0.25)]
    packing = pack(Packing([], group_nodes(ledger)), fillers, [1, 2], PackingOrder((0, 1)))
    assert packing is not None
    seats = [worker[0] for workers in seats_by_unit(packing, ledger, fillers) for worker in workers]
    assert [seat.gpus for seat in seats] == [(0,), (0,), (0,)]


@pytest.mark.parametrize("nodes_first", NODE_ORDERS)
def test_alike_nodes_are_packed_as_one_group(nodes_first: str) -> None:
    ledger = dt.Ledger(dt.Cluster.parse("500x(8cpu, 2xgpu:20GB)"))
    filler = NodeFiller(dt.Resources(cpus=4).shape())
    packing = pack(Packing([], group_nodes(ledger)), [filler], [999], PackingOrder((0,), nodes_first))
    assert packing is not None
    assert len(packing.groups) == 2
    assert len(packing.fills) <= 2
