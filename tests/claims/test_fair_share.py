"""Fair shares of a machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from dovetail.claims.fair_share import fair_shares, split_evenly
from dovetail.claims.owner import Owner, ProcessId
from dovetail.resources.amounts import HOST, Amounts, add_amounts, cluster_capacity, fits_within, sum_seats
from dovetail.resources.ledger import Ledger
from dovetail.resources.seat import CardShare, Seat

MACHINE = dt.Cluster.of("1x(8cpu, 64GB, 4xL40S:48GB)")
L40S = 48 << 30
ME = ProcessId(1, "1")


def cpu(count: float, node: str = "node-0") -> Seat:
    return Seat(node, int(1000 * count))


def gpu(share: int, card: int = 0, cpus: int = 1000) -> Seat:
    return Seat("node-0", cpus, cards=(CardShare(card, share, L40S * share // 1000),))


def owner(name: str, *need: Seat, since: float = 0.0, **more: object) -> Owner:
    made = Owner(name, name, ME, since, need or (cpu(1),))
    return replace(made, **more)  # type: ignore[arg-type]


def cpus_of(amounts: Amounts) -> int:
    return sum(amount for (_, _, what), amount in amounts.items() if what == "cpu_milli")


def cards_of(amounts: Amounts) -> list[int]:
    return sorted({card for _, card, _ in amounts} - {HOST})


# --- splitting one thing


@given(
    st.integers(0, 10_000),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9_000)), min_size=1, max_size=6),
    st.sampled_from([1, 7, 1000]),
)
def test_a_split_obeys_all_bounds_and_leaves_nothing_that_is_wanted(
    total: int, wishes: list[tuple[int, int]], granule: int
) -> None:
    total += sum(low for low, _ in wishes)
    got = split_evenly(total, wishes, granule)
    bounds = [(low, max(low, high)) for low, high in wishes]
    assert all(low <= amount <= high for amount, (low, high) in zip(got, bounds, strict=True))
    assert sum(got) == min(total, sum(high for _, high in bounds))


@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([1, 1000]))
def test_equal_wants_get_equal_shares_except_for_rounding(total: int, count: int, granule: int) -> None:
    got = split_evenly(total, [(0, total)] * count, granule)
    assert max(got) - min(got) <= granule
    assert got == sorted(got, reverse=True)


@pytest.mark.parametrize(
    ("total", "wishes", "expected"),
    [
        (8000, [(0, 8000)] * 2, [4000, 4000]),
        (8000, [(0, 8000)] * 3, [3000, 3000, 2000]),
        (8000, [(0, 1000), (0, 8000), (0, 8000)], [1000, 4000, 3000]),
        (8000, [(6000, 8000), (1000, 8000)], [6000, 2000]),
        (8000, [(0, 2000)], [2000]),
        (7500, [(500, 8000), (0, 8000)], [4000, 3500]),
    ],
)
def test_some_splits(total: int, wishes: list[tuple[int, int]], expected: list[int]) -> None:
    assert split_evenly(total, wishes, 1000) == expected


# --- whole machines


def test_a_single_run_can_use_everything() -> None:
    share = fair_shares(MACHINE, [owner("a", gpu(250))])["a"]
    assert share.amounts == cluster_capacity(MACHINE)


def test_two_alike_get_half_each_and_cards_whole() -> None:
    shares = fair_shares(MACHINE, [owner("a", gpu(250)), owner("b", gpu(250), since=1.0)])
    assert [cpus_of(share.amounts) for share in shares.values()] == [4000, 4000]
    assert [len(cards_of(share.amounts)) for share in shares.values()] == [2, 2]
    assert set(cards_of(shares["a"].amounts)).isdisjoint(cards_of(shares["b"].amounts))


def test_cards_are_shared_among_runs_that_use_cards() -> None:
    shares = fair_shares(MACHINE, [owner("a", gpu(250)), owner("b", cpu(1))])
    assert cards_of(shares["a"].amounts) == [0, 1, 2, 3]
    assert cards_of(shares["b"].amounts) == []
    assert cpus_of(shares["b"].amounts) == 4000


def test_a_card_is_shared_only_if_owners_outnumber_cards() -> None:
    machine = dt.Cluster.of("1x(8cpu, 64GB, 1xL40S:48GB)")
    shares = fair_shares(machine, [owner("a", gpu(250)), owner("b", gpu(300), since=1.0)])
    for share in shares.values():
        assert share.amounts["node-0", 0, "milli"] == 500
        assert share.amounts["node-0", 0, "memory_bytes"] == L40S // 2


def test_a_need_for_a_whole_card_waits_while_another_run_needs_part_of_it() -> None:
    machine = dt.Cluster.of("1x(8cpu, 64GB, 1xL40S:48GB)")
    shares = fair_shares(machine, [owner("a", gpu(250), waiting=False), owner("b", gpu(1000), since=1.0)])
    assert list(shares) == ["a"]
    assert shares["a"].amounts == cluster_capacity(machine)


def test_needs_are_met_before_anything_is_shared() -> None:
    shares = fair_shares(MACHINE, [owner("a", cpu(1)), owner("b", cpu(6), since=1.0)])
    assert [cpus_of(share.amounts) for share in shares.values()] == [2000, 6000]


def test_a_started_run_has_priority_over_waiting_runs() -> None:
    owners = [owner("late", cpu(5), since=0.0), owner("runs", cpu(4), since=9.0, waiting=False)]
    assert list(fair_shares(MACHINE, owners)) == ["runs"]


def test_what_one_does_not_want_goes_to_the_other() -> None:
    owners = [owner("a", gpu(250), ideal=(gpu(250, cpus=2000),)), owner("b", gpu(250), since=1.0)]
    shares = fair_shares(MACHINE, owners)
    assert [cpus_of(shares[name].amounts) for name in "ab"] == [2000, 6000]
    assert [len(cards_of(shares[name].amounts)) for name in "ab"] == [1, 3]


def test_cards_stay_with_the_runs_that_hold_them() -> None:
    has = {("node-0", card, "milli"): 1000 for card in (2, 3)}
    owners = [owner("a", gpu(250), since=5.0, waiting=False, limit=has, granted=has), owner("b", gpu(250), since=6.0)]
    shares = fair_shares(MACHINE, owners)
    assert cards_of(shares["a"].amounts) == [2, 3]
    assert cards_of(shares["b"].amounts) == [0, 1]


def test_cards_that_no_run_requested_by_model_are_shared_among_runs_that_use_cards() -> None:
    cluster = dt.Cluster.of("1x(8cpu, 64GB, 2xL40S:48GB) + 1x(8cpu, 64GB, 2xA100:40GB)")
    alone = fair_shares(cluster, [owner("a", gpu(1000)), owner("b", cpu(1))])
    assert {card[:2] for card in alone["a"].amounts if card[1] != HOST} == {
        (node, card) for node in ("node-0", "node-1") for card in (0, 1)
    }
    assert cards_of(alone["b"].amounts) == []
    other = Seat("node-1", 1000, cards=(CardShare(0, 1000, 40 << 30),))
    two = fair_shares(cluster, [owner("a", gpu(1000)), owner("b", other, since=1.0)])
    assert {name: {node for node, card, _ in share.amounts if card != HOST} for name, share in two.items()} == {
        "a": {"node-0"},
        "b": {"node-1"},
    }


def test_a_need_moves_to_cards_of_the_same_kind_only() -> None:
    machine = dt.Cluster.of("1x(8cpu, 64GB, 1xL40S:48GB, 1xT4)")
    shares = fair_shares(machine, [owner("a", gpu(1000)), owner("b", gpu(1000), since=1.0)])
    assert list(shares) == ["a"]


def fitting_seats(seats: list[Seat]) -> tuple[Seat, ...]:
    """The first of these seats that fit together."""
    ledger = Ledger(MACHINE)
    return tuple(seat for seat in seats if ledger.try_take(seat))


NEEDS = st.lists(
    st.one_of(
        st.integers(1, 30).map(lambda tenth: cpu(tenth / 10)),
        st.tuples(st.sampled_from([250, 500, 1000]), st.integers(0, 3)).map(lambda it: gpu(*it)),
        st.just(Seat("node-0", 500, 4 << 30, tuple(CardShare(card, 1000, L40S) for card in (0, 1)))),
    ),
    min_size=1,
    max_size=3,
).map(fitting_seats)


@st.composite
def some_owners(draw: st.DrawFn) -> list[Owner]:
    count = draw(st.integers(1, 5))
    return [
        owner(
            f"o{number}",
            *draw(NEEDS),
            since=float(draw(st.integers(0, 3))),
            waiting=draw(st.booleans()),
            ideal=draw(st.none() | NEEDS),
        )
        for number in range(count)
    ]


@given(some_owners())
def test_shares_never_exceed_the_machine_and_never_fall_below_a_need(owners: list[Owner]) -> None:
    shares = fair_shares(MACHINE, owners)
    total: Amounts = {}
    for share in shares.values():
        total = add_amounts(total, share.amounts)
        assert fits_within(share.need, share.amounts)
    assert fits_within(total, cluster_capacity(MACHINE))
    assert shares, "one of them can begin"


@given(some_owners(), st.randoms())
def test_the_same_owners_get_the_same_and_what_they_have_changes_nothing(owners: list[Owner], random: object) -> None:
    shares = fair_shares(MACHINE, owners)
    shuffled = list(owners)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert fair_shares(MACHINE, shuffled) == shares
    settled = [
        replace(it, granted=shares[it.id].amounts, limit=shares[it.id].amounts) if it.id in shares else it
        for it in owners
    ]
    again = fair_shares(MACHINE, settled)
    assert {name: share.amounts for name, share in again.items() if share.need} == {
        name: share.amounts for name, share in shares.items() if share.need
    }


@given(NEEDS, st.integers(2, 4))
def test_equal_needs_get_equal_shares_except_for_rounding(need: tuple[Seat, ...], count: int) -> None:
    shares = fair_shares(MACHINE, [owner(f"o{number}", *need, since=float(number)) for number in range(count)])
    found = [cpus_of(share.amounts) for share in shares.values()]
    assert max(found) - min(found) <= 1000
    if all(len(cards_of(share.need)) <= 1 for share in shares.values()):
        cards = [len(cards_of(share.amounts)) for share in shares.values()]
        assert max(cards) - min(cards) <= 1


def test_amounts_of_nodes_add_up() -> None:
    two = dt.Cluster.of("2x(8cpu, 64GB)")
    shares = fair_shares(two, [owner("a", cpu(6)), owner("b", cpu(6), since=1.0)])
    assert {node for node, _, _ in shares["b"].need} == {"node-1"}
    assert sum_seats(()) == {}
