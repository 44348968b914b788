"""Cycles of calls that wait for each other."""

from __future__ import annotations

import pytest

from dovetail.engines.call_cycles import CallCycle, WaitingSlot, find_cycle

Graph = dict[str, list[str]]
"""Slot -> slots that may free the call that it waits for; a slot that is missing is at work."""


def waiting(name: str, depth: int = 0) -> WaitingSlot:
    number = ord(name)
    return WaitingSlot((number, 0, 0), name, depth, (0, 0), (number, 0, 1))


def cycle_of(origin: str, graph: Graph, depths: dict[str, int] | None = None) -> CallCycle | None:
    def slots_behind(slot: WaitingSlot) -> list[WaitingSlot]:
        behind = graph[slot.name]
        return [waiting(name, (depths or {}).get(name, 0)) for name in behind] if set(behind) <= set(graph) else []

    return find_cycle(waiting(origin, (depths or {}).get(origin, 0)), slots_behind)


@pytest.mark.parametrize(
    ("origin", "graph", "names"),
    [
        ("a", {"a": ["a"]}, "a -> a"),
        ("a", {"a": ["b"], "b": ["a"]}, "a -> b -> a"),
        ("b", {"a": ["b"], "b": ["c"], "c": ["a"]}, "b -> c -> a -> b"),
        ("a", {"a": ["b", "c"], "b": ["a"], "c": ["a"]}, "a -> b -> a"),
        ("a", {"a": ["b", "c"], "b": ["c"], "c": ["a"]}, "a -> c -> a"),
    ],
)
def test_slots_that_only_each_other_can_free_are_a_cycle(origin: str, graph: Graph, names: str) -> None:
    assert str(cycle_of(origin, graph)) == names


@pytest.mark.parametrize(
    ("origin", "graph"),
    [
        ("a", {"a": ["b"]}),
        ("a", {"a": []}),
        ("a", {"a": ["b", "c"], "b": ["a"]}),
        ("a", {"a": ["b"], "b": ["a", "c"]}),
        ("a", {"a": ["b"], "b": ["a", "c"], "c": ["d"]}),
    ],
    ids=["at work", "answered", "another slot is at work", "one slot further", "two slots further"],
)
def test_calls_that_will_be_answered_are_no_cycle(origin: str, graph: Graph) -> None:
    assert cycle_of(origin, graph) is None


def test_a_slot_behind_a_cycle_is_not_part_of_it() -> None:
    assert cycle_of("c", {"a": ["b"], "b": ["a"], "c": ["a"]}) is None


def test_the_last_call_of_a_chain_is_the_one_to_fail() -> None:
    graph, depths = {"a": ["b"], "b": ["a"]}, {"a": 0, "b": 1}
    first, last = cycle_of("a", graph, depths), cycle_of("b", graph, depths)
    assert first is not None
    assert last is not None
    assert (first.is_deepest, last.is_deepest) == (False, True)
    assert first.slots == last.slots


def test_a_slot_that_continues_during_the_search_ends_it() -> None:
    found = iter([[waiting("b")], [waiting("a")._replace(call=(97, 0, 2))]])
    assert find_cycle(waiting("a"), lambda _: next(found)) is None
