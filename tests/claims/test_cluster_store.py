"""Claim store of a cluster: nodes that join and leave, fair shares card by card, foreign usage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from claims.memory_rows import MemoryRows
from claims.test_fair_share import L40S, cards_of, cpus_of, owner
from dovetail.claims.cluster_store import ClusterClaimStore, ClusterView
from dovetail.claims.foreign_usage import UsageDebouncer, place_foreign_usage
from dovetail.claims.share_cap import capped_cards, even_cap, packed_cap, round_amounts_to_cards, round_seats_to_cards
from dovetail.claims.store import ClaimRequest, Grant, Wait
from dovetail.claims.updater import LimitTracker
from dovetail.claims.wait import WaitReport
from dovetail.resources.amounts import (
    Amounts,
    add_amounts,
    cluster_capacity,
    fits_within,
    subtract_amounts,
    sum_seats,
)
from dovetail.resources.seat import CardShare, Seat

CLUSTER = dt.Cluster.of("2x(8cpu, 64GB, 2xL40S:48GB) + 2x(8cpu, 64GB)")
IDS = {node.name: f"id-{node.name}" for node in CLUSTER.nodes}
CAPACITY = cluster_capacity(CLUSTER)


def cpu(node: int, count: float) -> Seat:
    return Seat(f"node-{node}", int(1000 * count))


def gpu(node: int, card: int, milli: int = 1000) -> Seat:
    return Seat(f"node-{node}", 1000, cards=(CardShare(card, milli, L40S * milli // 1000),))


def a_book(rows: MemoryRows, *foreign: Seat, cluster: dt.Cluster = CLUSTER, **more: object) -> ClusterClaimStore:
    return ClusterClaimStore(rows, ClusterView(cluster, IDS, foreign), steady_s=0.0, **more)  # type: ignore[arg-type]


def hosts(amounts: Amounts) -> Amounts:
    """Amounts without cards, which are dealt only to owners that use cards."""
    return {key: amount for key, amount in amounts.items() if key[1] < 0}


def granted(answer: Grant | Wait) -> Grant:
    assert isinstance(answer, Grant)
    return answer


# --- whole cards


def test_seats_that_share_a_card_become_one_with_all_of_it() -> None:
    found = round_seats_to_cards((gpu(0, 1, 250), cpu(0, 1), gpu(0, 1, 500), gpu(1, 1, 100)), CLUSTER)
    assert [(seat.node, seat.cpu_milli, seat.gpus) for seat in found] == [
        ("node-0", 1000, ()),
        ("node-0", 2000, (1,)),
        ("node-1", 1000, (1,)),
    ]
    assert sum_seats(found[1:2])["node-0", 1, "milli"] == 1000
    assert sum_seats(found[1:2])["node-0", 1, "memory_bytes"] == L40S


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(1, 500)), max_size=8))
def test_whole_seats_take_just_the_cards_that_were_touched(touched: list[tuple[int, int, int]]) -> None:
    seats = tuple(gpu(node, card, milli) for node, card, milli in touched)
    found = sum_seats(round_seats_to_cards(seats, CLUSTER))
    assert found == round_amounts_to_cards(sum_seats(seats), CAPACITY)
    assert fits_within({key: amount for key, amount in found.items() if key[1] >= 0}, CAPACITY)


def test_two_runs_never_share_a_card() -> None:
    rows = MemoryRows()
    first = granted(a_book(rows).request(ClaimRequest("a"), (gpu(0, 0, 100), gpu(0, 0, 100)))).owner
    book = a_book(rows)
    second = ClaimRequest("b")
    assert isinstance(book.request(second, (gpu(0, 0, 100),)), Wait)
    row = a_book(rows).update(first, sum_seats([gpu(0, 0, 100)]), sum_seats([gpu(0, 0, 100)]))
    assert row.granted["node-0", 0, "milli"] == 1000, "what is touched is held whole"
    grant = granted(book.request(second, (gpu(0, 0, 100),)))
    both = [{key[:2] for key in each.limit if key[1] >= 0} for each in (row, grant.owner)]
    assert both[0].isdisjoint(both[1])
    assert [len(cards) for cards in both] == [2, 2]


# --- what others hold


def test_foreign_usage_is_reserved_and_not_shared() -> None:
    book = a_book(MemoryRows(), Seat("node-0", 3000, 0, (CardShare(1, 500),)))
    grant = granted(book.request(ClaimRequest("a"), (gpu(0, 0),)))
    theirs = round_amounts_to_cards(sum_seats([Seat("node-0", 3000, 0, (CardShare(1, 500),))]), CAPACITY)
    assert grant.owner.limit == subtract_amounts(CAPACITY, theirs)
    assert sum_seats(grant.reserved)["node-0", 1, "milli"] == 1000
    assert sum_seats(grant.reserved)["node-0", -1, "cpu_milli"] == 3000


def test_a_run_that_waits_for_foreign_usage_prints_it() -> None:
    book = a_book(MemoryRows(), *(Seat(node.name, 8000) for node in CLUSTER.nodes))
    wait = book.request(ClaimRequest("a"), (cpu(0, 2),))
    assert isinstance(wait, Wait)
    report = WaitReport(wait, sum_seats([cpu(0, 2)]), book.capacity)
    assert report.text(0.0) == (
        "waiting for 2 CPUs: programs other than Dovetail hold 32 of 32 CPUs; "
        "this run begins when enough of that is free"
    )
    assert report.holders == ("programs other than Dovetail hold 32 of 32 CPUs",)


def test_which_card_others_have_is_one_that_none_of_us_has() -> None:
    foreign = sum_seats([gpu(0, 1), cpu(0, 1)])
    mine = owner("a", granted=round_amounts_to_cards(sum_seats([gpu(0, 1)]), CAPACITY))
    found = place_foreign_usage(CLUSTER, foreign, [mine])
    assert cards_of(found) == [0]
    assert cpus_of(found) == 2000
    both = replace(mine, granted=CAPACITY, held=sum_seats([gpu(0, 1)]))
    assert cards_of(place_foreign_usage(CLUSTER, foreign, [both])) == [0], "else one that none of us holds"


def test_more_counts_when_it_stays_and_less_at_once() -> None:
    steady = UsageDebouncer(3.0)
    one, two = sum_seats([cpu(0, 1)]), sum_seats([cpu(0, 2)])
    assert steady.update(0.0, one) == one
    assert steady.update(1.0, two) == one
    assert steady.update(2.0, one) == one
    assert steady.update(3.0, two) == one
    assert steady.update(4.0, two) == one
    assert steady.update(6.0, two) == two
    assert steady.update(6.1, {}) == {}
    assert steady.update(7.0, two) == {}


def test_a_run_gives_back_what_others_took_meanwhile() -> None:
    now = [0.0]
    seen = [ClusterView(CLUSTER, IDS)]
    book = ClusterClaimStore(MemoryRows(), seen[0], lambda: seen[0], clock=lambda: now[0], steady_s=3.0)
    row = granted(book.request(ClaimRequest("a"), (cpu(0, 1),))).owner
    seen[0] = ClusterView(CLUSTER, IDS, (Seat("node-1", 5000),))
    for _ in range(3):
        now[0] += 1.0
        row = book.update(row, {}, row.limit)
        assert row.limit == hosts(CAPACITY), "one of our runs may have started or ended"
    for _ in range(2):
        now[0] += 1.0
        row = book.update(row, {}, row.limit)
    assert row.limit == subtract_amounts(hosts(CAPACITY), sum_seats([cpu(1, 5)]))


# --- nodes come and go


def test_a_node_that_joins_is_shared_and_one_that_leaves_is_forgotten() -> None:
    now = [0.0]
    less = CLUSTER.without(["node-3"])
    seen = [ClusterView(less, IDS)]
    rows = MemoryRows()
    book = ClusterClaimStore(rows, seen[0], lambda: seen[0], clock=lambda: now[0], steady_s=0.0)
    row = granted(book.request(ClaimRequest("a"), (cpu(2, 1),))).owner
    account = LimitTracker(book.capacity, row.limit)
    assert account.next_limit_event(row.limit, book.capacity) is None
    seen[0] = ClusterView(CLUSTER, IDS)
    now[0] += 1.0
    row = book.update(row, {}, row.limit)
    assert row.limit == hosts(CAPACITY)
    event = account.next_limit_event(row.limit, book.capacity)
    assert event is not None
    assert sum_seats(event.seats) == subtract_amounts(CAPACITY, hosts(CAPACITY))
    left = CLUSTER.without(["node-2"])
    seen[0] = ClusterView(left, IDS)
    now[0] += 1.0
    row = book.update(row, sum_seats([cpu(2, 1)]), row.limit)
    assert row.limit == hosts(cluster_capacity(left)), "its need is somewhere else now"
    assert {seat.node for seat in row.need} == {"node-3"}


def test_nodes_are_known_by_their_ids_whatever_they_are_called() -> None:
    rows = MemoryRows()
    granted(a_book(rows).request(ClaimRequest("a"), (cpu(0, 1), cpu(1, 1))))
    other = dt.Cluster(tuple(replace(node, name=node.name.replace("node", "host")) for node in CLUSTER.nodes))
    ids = {name.replace("node", "host"): number for name, number in IDS.items()}
    [seen] = ClusterClaimStore(rows, ClusterView(other, ids)).owners()
    assert {seat.node for seat in seen.need} == {"host-0", "host-1"}
    assert seen.granted == hosts(cluster_capacity(other))


# --- a share


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("portion", [even_cap, packed_cap])
def test_a_share_is_never_more_than_that(portion: object, share: float) -> None:
    cap: Amounts = portion(CLUSTER, share, {("node-1", 1)})  # type: ignore[operator]
    assert fits_within(cap, CAPACITY)
    for what in ("cpu_milli", "memory_bytes"):
        total = sum(amount for (_, card, name), amount in CAPACITY.items() if card == -1 and name == what)
        assert sum(amount for (_, card, name), amount in cap.items() if card == -1 and name == what) <= share * total
    assert len({key[:2] for key in cap if key[1] >= 0}) == max(1, int(4 * share))
    assert ("node-1", 1, "milli") in cap, "the card that it likes"


def test_without_a_wish_a_small_share_has_no_card() -> None:
    assert capped_cards(CLUSTER, 0.2) == set()


def test_a_capped_run_leaves_the_rest_to_others_from_the_start() -> None:
    rows = MemoryRows()
    cap = even_cap(CLUSTER, 0.25)
    first = granted(a_book(rows, share=0.25).request(ClaimRequest("a", cap=cap), (cpu(0, 1),))).owner
    assert first.limit == hosts(cap)
    [seen] = a_book(rows).owners()
    assert seen == first, "others know of it"
    grant = granted(a_book(rows).request(ClaimRequest("b"), (cpu(0, 5),)))
    assert cpus_of(grant.owner.limit) == 24000
    assert add_amounts(grant.owner.limit, first.limit) == hosts(CAPACITY)
    row = a_book(rows, share=0.25).update(first, {}, first.limit)
    assert row.limit == hosts(cap)


def test_a_need_beyond_the_share_is_not_granted() -> None:
    cap = even_cap(CLUSTER, 0.25)
    assert isinstance(a_book(MemoryRows()).request(ClaimRequest("a", cap=cap), (cpu(0, 3),), accept_minimum=True), Wait)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), min_size=1, max_size=4), st.integers(0, 8))
def test_grants_and_what_others_hold_fit_together(needs: list[tuple[int, int]], taken: int) -> None:
    rows = MemoryRows()
    foreign = (Seat("node-0", 1000 * taken),) if taken else ()
    for number, (node, count) in enumerate(needs):
        a_book(rows, *foreign).request(ClaimRequest(f"run-{number}"), (cpu(node, count),), accept_minimum=True)
    total = sum_seats(foreign)
    for each in a_book(rows).owners():
        total = add_amounts(total, each.granted)
    assert fits_within(total, CAPACITY)


# --- cards that a run cannot change


def test_the_planned_card_is_kept_and_another_is_released() -> None:
    """On Ray a run cannot change which card it holds: if it were dealt to another run, both would wait without end."""
    rows = MemoryRows()
    one = dt.Cluster.of("1x(8cpu, 64GB, 2xL40S:48GB)")
    book, other = a_book(rows, cluster=one), a_book(rows, cluster=one)
    row = granted(book.request(ClaimRequest("a"), (gpu(0, 1),))).owner
    assert cards_of(row.limit) == [0, 1]
    for_good = round_amounts_to_cards(sum_seats([gpu(0, 1)]), cluster_capacity(one))
    newcomer = ClaimRequest("b")
    assert isinstance(other.request(newcomer, (gpu(0, 0),)), Wait)
    row = book.update(row, for_good, for_good)
    assert cards_of(row.granted) == [1]
    assert cards_of(granted(other.request(newcomer, (gpu(0, 0),), accept_minimum=True)).owner.limit) == [0]


# --- labels


LABELLED = dt.Cluster.of("1x(8cpu, 64GB){zone=a, rack=1} + 1x(8cpu, 64GB){zone=a, rack=2} + 1x(8cpu, 64GB){zone=b}")


@pytest.mark.parametrize(("asks", "moves"), [((), True), (("zone",), True), (("rack",), False), (None, False)])
def test_only_requested_labels_tie_a_need_to_its_nodes(asks: tuple[str, ...] | None, moves: bool) -> None:
    rows = MemoryRows()
    book = a_book(rows, Seat("node-0", 8000), cluster=LABELLED)
    answer = book.request(ClaimRequest("a", required_labels=asks), (cpu(0, 2),), accept_minimum=True)
    assert isinstance(answer, Grant) is moves
    [seen] = a_book(rows, cluster=LABELLED).owners()
    assert seen.required_labels == asks, "others know of it"


@pytest.mark.parametrize(("asks", "node"), [((), "node-1"), (("zone",), "node-1"), (("rack",), "node-0")])
def test_a_need_on_a_node_that_left_moves_by_the_labels_that_are_asked_for(asks: tuple[str, ...], node: str) -> None:
    now, seen = [0.0], [ClusterView(LABELLED, IDS)]
    book = ClusterClaimStore(MemoryRows(), seen[0], lambda: seen[0], clock=lambda: now[0], steady_s=0.0)
    row = granted(book.request(ClaimRequest("a", required_labels=asks), (cpu(0, 1),))).owner
    seen[0], now[0] = ClusterView(LABELLED.without(["node-0"]), IDS), 1.0
    assert {seat.node for seat in book.update(row, {}, row.limit).need} == {node}


# --- a share of nodes that leave


def test_a_share_on_few_nodes_is_recomputed_when_a_node_leaves() -> None:
    now, plain = [0.0], dt.Cluster.of("4x(4cpu, 16GB)")
    seen = [ClusterView(plain, IDS)]
    book = ClusterClaimStore(MemoryRows(), seen[0], lambda: seen[0], share=0.25, clock=lambda: now[0], steady_s=0.0)
    cap = packed_cap(plain, 0.25)
    row = granted(book.request(ClaimRequest("a", cap=cap), (cpu(0, 3),))).owner
    assert {key[0] for key in row.limit} == {"node-0"}
    seen[0], now[0] = ClusterView(plain.without(["node-0"]), IDS), 1.0
    row = book.update(row, {}, {})
    assert cpus_of(row.limit) == 3000, "a quarter of what is left, on one node"
    assert {key[0] for key in row.limit} == {"node-1"}
    seen[0], now[0] = ClusterView(plain, IDS), 2.0
    row = book.update(row, {}, row.limit)
    assert cpus_of(row.limit) == 4000, "and its share of one that joins"


# --- present runs and their start times


def test_a_remote_owner_is_alive_while_its_heartbeat_changes_whatever_its_clock() -> None:
    rows, now, theirs = MemoryRows(), [0.0], [-1e6]
    unseen: dict[str, Any] = {"clock": lambda: now[0], "alive": lambda _: None}
    running = a_book(rows, wall=lambda: theirs[0], **unseen)
    row = granted(running.request(ClaimRequest("a"), (cpu(0, 1),))).owner
    looker = a_book(rows, **unseen)
    for _ in range(5):
        now[0] += 20.0
        theirs[0] += 20.0
        row = running.update(row, {}, row.limit)
        assert [owner.name for owner in looker.owners()] == ["a"]
    now[0] += 29.0
    assert looker.owners()
    now[0] += 2.0
    assert looker.owners() == []


def test_a_repeated_request_keeps_its_position() -> None:
    rows, now = MemoryRows(), [100.0]
    first = ClaimRequest("a", since=90.0)
    for about in (first, ClaimRequest("b")):
        a_book(rows, wall=lambda: now[0]).request(about, (cpu(0, 8),))
    a_book(rows).release(first.id)
    now[0] = 200.0
    a_book(rows, wall=lambda: now[0]).request(first, (cpu(0, 8),))
    assert [owner.name for owner in a_book(rows).owners()] == ["a", "b"]
