"""Transfers of payloads between nodes, limited by their object stores."""

from __future__ import annotations

from typing import Any

from dovetail.engines.ray.transfers import TRANSFER_STORE_DIVISOR, TransferQueue

MB = 2**20
STORE = 80 * MB


class FakeLink:
    def __init__(self, node: str) -> None:
        self.node = node
        self.lost_reason = ""
        self.gave: list[list[int]] = []
        self.sent: list[tuple[Any, ...]] = []

    def flush(self) -> None: ...

    def read_payloads(self, keys: list[int]) -> object:
        self.gave.append(keys)
        return object()

    def attach_object(self, ray_object: object) -> int:
        return 0

    def send(self, op: tuple[Any, ...], size: int = 0) -> None:
        self.sent.append(op)

    def ops(self, kind: str) -> int:
        return sum(op[0] == kind for op in self.sent)


class FakeRef:
    def __init__(self, key: int, copies: list[Any]) -> None:
        self.key, self.copy_key, self.copies = key, -key, copies


def request(transfers: TransferQueue, source: FakeLink, target: FakeLink, key: int, size: int = 10 * MB) -> FakeRef:
    ref = FakeRef(key, [target])
    transfers.request(source, target, [(ref, (-key, 1, (size,)))])  # type: ignore[arg-type, list-item]
    return ref


def test_transfers_up_to_the_store_limit_start_and_the_rest_follow() -> None:
    transfers, a, b = TransferQueue({"a": STORE, "b": STORE}), FakeLink("a"), FakeLink("b")
    for key in range(1, 9):
        request(transfers, a, b, key)
    at_once = STORE // TRANSFER_STORE_DIVISOR // (10 * MB)
    assert a.gave == [[key] for key in range(1, at_once + 1)]
    for key in range(1, 9):
        transfers.on_ended(b, key)  # type: ignore[arg-type]
    assert a.gave == [[key] for key in range(1, 9)], "in order"
    assert not any(transfers._bytes.values())


def test_a_transfer_larger_than_the_limit_runs_alone() -> None:
    transfers, a, b = TransferQueue({"a": STORE, "b": STORE}), FakeLink("a"), FakeLink("b")
    request(transfers, a, b, 1, size=STORE)
    request(transfers, a, b, 2, size=1)
    assert a.gave == [[1]]
    transfers.on_ended(b, 1)  # type: ignore[arg-type]
    assert a.gave == [[1], [2]]


def test_a_full_node_does_not_delay_other_nodes() -> None:
    transfers, links = TransferQueue(dict.fromkeys("abc", STORE)), {name: FakeLink(name) for name in "abc"}
    request(transfers, links["a"], links["b"], 1, size=STORE)
    request(transfers, links["a"], links["b"], 2)
    request(transfers, links["b"], links["c"], 3)
    request(transfers, links["c"], links["a"], 4)
    assert [links[name].gave for name in "abc"] == [[[1]], [[3]], [[4]]]


def test_the_loss_of_a_node_starts_the_transfers_that_waited_for_it() -> None:
    transfers, links = TransferQueue(dict.fromkeys("abc", STORE)), {name: FakeLink(name) for name in "abc"}
    a, b, c = links.values()
    request(transfers, a, b, 1, size=STORE)
    request(transfers, a, c, 2)
    request(transfers, c, b, 3)
    b.lost_reason = "gone"
    transfers.start_ready()
    assert a.gave == [[1], [2]], "the receiving agent is lost"
    assert not c.gave
    request(transfers, a, c, 4, size=STORE)
    a.lost_reason = "gone"
    transfers.start_ready()
    assert c.ops("lost") == 2, "the waiting agent is notified, whether the transfer had begun or not"


def test_a_store_of_unknown_size_has_no_limit() -> None:
    transfers, a, b = TransferQueue({}), FakeLink("a"), FakeLink("b")
    for key in range(1, 20):
        request(transfers, a, b, key)
    assert len(a.gave) == 19


def test_a_payload_that_did_not_arrive_is_requested_again() -> None:
    transfers, a, b = TransferQueue({}), FakeLink("a"), FakeLink("b")
    ref, other = request(transfers, a, b, 1), request(transfers, a, b, 2)
    transfers.on_missing(b, [-1])  # type: ignore[arg-type]
    assert (ref.copies, other.copies) == ([], [b])
    a.lost_reason = "gone"
    transfers.start_ready()
    assert other.copies == []


def test_a_transfer_whose_payloads_were_freed_ends() -> None:
    transfers, a, b = TransferQueue({"a": STORE, "b": STORE}), FakeLink("a"), FakeLink("b")
    request(transfers, a, b, 1, size=STORE)
    request(transfers, a, b, 2, size=STORE)
    transfers.on_ended(b, 1)  # type: ignore[arg-type]
    transfers.on_ended(b, 1)  # type: ignore[arg-type]
    assert a.gave == [[1], [2]]
    transfers.on_ended(b, 2)  # type: ignore[arg-type]
    assert not any(transfers._bytes.values())
