"""Is as much on its way between nodes as their object stores bear, and does nobody wait for ever?"""

from __future__ import annotations

from typing import Any

from dovetail.engines.ray.transfers import OBJECT_STORE_DIVISOR, TransferQueue

MB = 2**20
STORE = 80 * MB


class FakeLink:
    def __init__(self, node: str) -> None:
        self.node = node
        self.dead = ""
        self.gave: list[list[int]] = []
        self.told: list[tuple[Any, ...]] = []

    def flush(self) -> None: ...

    def give(self, keys: list[int]) -> object:
        self.gave.append(keys)
        return object()

    def beside(self, what: object) -> int:
        return 0

    def tell(self, op: tuple[Any, ...], size: int = 0) -> None:
        self.told.append(op)

    def ops(self, kind: str) -> int:
        return sum(op[0] == kind for op in self.told)


class FakeRef:
    def __init__(self, key: int, copies: list[Any]) -> None:
        self.key, self.copy_key, self.copies = key, -key, copies


def ask(flights: TransferQueue, source: FakeLink, target: FakeLink, key: int, size: int = 10 * MB) -> FakeRef:
    ref = FakeRef(key, [target])
    flights.request(source, target, [(ref, (-key, 1, (size,)))])  # type: ignore[arg-type, list-item]
    return ref


def test_as_much_flies_as_the_stores_bear_and_the_rest_follows() -> None:
    flights, a, b = TransferQueue({"a": STORE, "b": STORE}), FakeLink("a"), FakeLink("b")
    for key in range(1, 9):
        ask(flights, a, b, key)
    at_once = STORE // OBJECT_STORE_DIVISOR // (10 * MB)
    assert a.gave == [[key] for key in range(1, at_once + 1)]
    for key in range(1, 9):
        flights.on_over(b, key)  # type: ignore[arg-type]
    assert a.gave == [[key] for key in range(1, 9)], "in order"
    assert not any(flights._bytes.values())


def test_what_is_larger_than_the_share_flies_alone() -> None:
    flights, a, b = TransferQueue({"a": STORE, "b": STORE}), FakeLink("a"), FakeLink("b")
    ask(flights, a, b, 1, size=STORE)
    ask(flights, a, b, 2, size=1)
    assert a.gave == [[1]]
    flights.on_over(b, 1)  # type: ignore[arg-type]
    assert a.gave == [[1], [2]]


def test_a_full_node_holds_up_nobody_else() -> None:
    flights, links = TransferQueue(dict.fromkeys("abc", STORE)), {name: FakeLink(name) for name in "abc"}
    ask(flights, links["a"], links["b"], 1, size=STORE)
    ask(flights, links["a"], links["b"], 2)
    ask(flights, links["b"], links["c"], 3)
    ask(flights, links["c"], links["a"], 4)
    assert [links[name].gave for name in "abc"] == [[[1]], [[3]], [[4]]]


def test_the_loss_of_a_node_frees_what_waited_for_it() -> None:
    flights, links = TransferQueue(dict.fromkeys("abc", STORE)), {name: FakeLink(name) for name in "abc"}
    a, b, c = links.values()
    ask(flights, a, b, 1, size=STORE)
    ask(flights, a, c, 2)
    ask(flights, c, b, 3)
    b.dead = "gone"
    flights.start_ready()
    assert a.gave == [[1], [2]], "who was to take it is gone"
    assert not c.gave
    ask(flights, a, c, 4, size=STORE)
    a.dead = "gone"
    flights.start_ready()
    assert c.ops("lost") == 2, "who waits for it is told, whether it had begun to come or not"


def test_a_store_of_which_nothing_is_known_bears_all() -> None:
    flights, a, b = TransferQueue({}), FakeLink("a"), FakeLink("b")
    for key in range(1, 20):
        ask(flights, a, b, key)
    assert len(a.gave) == 19


def test_what_did_not_come_is_asked_for_again() -> None:
    flights, a, b = TransferQueue({}), FakeLink("a"), FakeLink("b")
    ref, other = ask(flights, a, b, 1), ask(flights, a, b, 2)
    flights.on_missing(b, [-1])  # type: ignore[arg-type]
    assert (ref.copies, other.copies) == ([], [b])
    a.dead = "gone"
    flights.start_ready()
    assert other.copies == []


def test_a_flight_whose_payloads_were_freed_ends_all_the_same() -> None:
    flights, a, b = TransferQueue({"a": STORE, "b": STORE}), FakeLink("a"), FakeLink("b")
    ask(flights, a, b, 1, size=STORE)
    ask(flights, a, b, 2, size=STORE)
    flights.on_over(b, 1)  # type: ignore[arg-type]
    flights.on_over(b, 1)  # type: ignore[arg-type]
    assert a.gave == [[1], [2]]
    flights.on_over(b, 2)  # type: ignore[arg-type]
    assert not any(flights._bytes.values())
