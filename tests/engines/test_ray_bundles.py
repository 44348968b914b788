"""Bundles of placement groups for amounts, and the groups to release. No Ray is started."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.engines.ray.bundles import (
    add,
    amounts_per_node,
    cards_per_node,
    removable_groups,
    shrinkable_group,
    subtract,
    to_bundle,
)
from dovetail.resources.amounts import sum_seats
from dovetail.resources.seat import CardShare, Seat

HOST = st.dictionaries(st.sampled_from(["cpu_milli", "memory_bytes", "custom x"]), st.integers(1, 50), max_size=3)


def test_amounts_become_bundles_of_ray() -> None:
    seats = [
        Seat("n", 1500, 2 << 30, (CardShare(1, 250), CardShare(3, 1000)), (("licence", 500),)),
        Seat("m", 1),
        Seat("o", 1501, 5),
    ]
    amounts = sum_seats(seats)
    assert cards_per_node(amounts) == {"n": [1, 3]}
    hosts = amounts_per_node(amounts)
    assert to_bundle(hosts["n"], 2) == {"CPU": 1.5, "memory": float(2 << 30), "licence": 0.5, "GPU": 2.0}
    assert to_bundle(hosts["m"]) == {"CPU": 0.125}
    assert to_bundle(hosts["o"]) == {"CPU": 1.5, "memory": float(1 << 20)}


@given(st.integers(1, 10**7), st.sampled_from(["cpu_milli", "custom x"]))
def test_ray_counts_the_requested_amounts_exactly(amount: int, what: str) -> None:
    [asked] = to_bundle(amounts_per_node({("n", -1, what): amount})["n"]).values()
    assert int(int(asked * 10_000) / 10_000 * 10_000) / 10_000 == asked
    assert 0 < asked <= max(amount / 1000, 0.125)


@given(st.lists(HOST.filter(bool), max_size=5), HOST)
def test_never_more_than_the_surplus_is_released(groups: list[dict[str, int]], surplus: dict[str, int]) -> None:
    gone: dict[str, int] = {}
    for number in removable_groups(groups, surplus):
        gone = add(gone, groups[number])
    assert not subtract(gone, surplus)


@given(st.lists(HOST.filter(bool), max_size=5), HOST)
def test_shrinking_ends_with_exactly_the_wanted_amounts(groups: list[dict[str, int]], wanted: dict[str, int]) -> None:
    def total() -> dict[str, int]:
        found: dict[str, int] = {}
        for group in groups:
            found = add(found, group)
        return found

    expected = {what: min(amount, wanted.get(what, 0)) for what, amount in total().items() if what in wanted}
    for number in sorted(removable_groups(groups, subtract(total(), wanted)), reverse=True):
        del groups[number]
    steps = 0
    while (found := shrinkable_group(groups, subtract(total(), wanted))) is not None:
        number, left = found
        groups[number] = left
        steps += 1
        assert steps < 50
    assert {what: amount for what, amount in total().items() if amount} == expected


@pytest.mark.parametrize(
    ("groups", "surplus", "expected"),
    [([4, 2, 1], 4, [0]), ([4, 2, 1], 3, [1, 2]), ([4, 2, 1], 7, [0, 1, 2]), ([4], 3, []), ([4, 2], 0, [])],
)
def test_whole_groups_are_released_where_possible(groups: list[int], surplus: int, expected: list[int]) -> None:
    hosts = [{"cpu_milli": amount} for amount in groups]
    assert removable_groups(hosts, {"cpu_milli": surplus} if surplus else {}) == expected
