"""Reservations by placement groups on the test cluster: all or nothing, with known cards, and released."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.errors import EngineError
from dovetail.resources.amounts import sum_seats
from dovetail.resources.seat import CardShare, Seat
from ray_aids import add_node, driver, foreign_actor, patiently, until_available_is
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dovetail.engines.ray.placement_groups import GroupReservation
    from ray_aids import FakeCluster

pytestmark = [pytest.mark.ray, pytest.mark.own_attachment]


@pytest.fixture(scope="module", autouse=True)
def _attached(ray_cluster: FakeCluster) -> Iterator[None]:
    import ray

    ray.init(address=ray_cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture
def held(ray_cluster: FakeCluster) -> Iterator[GroupReservation]:
    from dovetail.engines.ray.placement_groups import GroupReservation

    before = ray_cluster.available()
    holdings = GroupReservation("test", {name: node.node_id for name, node in ray_cluster.nodes.items()}, spare_s=0.0)
    yield holdings
    holdings.close()
    holdings.close()
    until_available_is(ray_cluster, before)
    assert not [row for row in ray_cluster.groups() if row["name"].startswith("dovetail:")]


def cpu(node: str, count: float) -> Seat:
    return Seat(node, int(1000 * count))


def gpu(node: str, *cards: int, milli: int = 1000) -> Seat:
    return Seat(node, 0, cards=tuple(CardShare(card, milli, 0) for card in cards))


def get(held: GroupReservation, *seats: Seat) -> None:
    """Reserve exactly these amounts and wait for them."""
    held.set_wanted(sum_seats(seats), time.monotonic())
    until_held(held, *seats)


def until_held(held: GroupReservation, *seats: Seat) -> None:
    until(lambda: (held.poll(), held.covers(sum_seats(seats)))[1], "Ray gives what is wanted")


def free(cluster: FakeCluster, node: str, what: str = "CPU") -> float:
    return cluster.available()[node].get(what, 0.0)


# --- minimum


def test_all_resources_are_reserved_at_once_with_known_cards(ray_cluster: FakeCluster, held: GroupReservation) -> None:
    from dovetail.engines.ray.placement_groups import GroupState

    need = (Seat("b", 1500, 1 << 30, (CardShare(1, 250),)), cpu("d", 0.25), cpu("b", 0.001))
    began = time.monotonic()
    assert held.try_acquire(need) is GroupState.GRANTED
    assert time.monotonic() - began < patiently(2.0)
    until_held(held, *need)
    assert set(held.devices("b")) == {1}
    assert held.devices("b")[1] in ("0", "1")
    assert held.devices("d") == {}
    until(lambda: free(ray_cluster, "b") == 2.5, "Ray has taken the CPUs of one node")
    until(lambda: free(ray_cluster, "d") == 3.75, "and those of the other")
    assert free(ray_cluster, "b", "GPU") == 1.0
    assert held.held["b", 1, "milli"] == 1000
    assert held.held["b", -1, "cpu_milli"] == 1500


def test_busy_and_impossible_requests_are_distinguished_at_once(
    ray_cluster: FakeCluster, held: GroupReservation
) -> None:
    from dovetail.engines.ray.placement_groups import GroupReservation, GroupState

    assert held.try_acquire((cpu("a", 3), gpu("c", 0, 1))) is GroupState.GRANTED
    other = GroupReservation("other", held.ids)
    began = time.monotonic()
    assert other.try_acquire((cpu("d", 1), cpu("a", 2))) is GroupState.NOT_NOW
    assert other.try_acquire((cpu("d", 1), gpu("c", 0))) is GroupState.NOT_NOW
    assert other.try_acquire((cpu("d", 5),)) is GroupState.NEVER
    assert other.try_acquire((cpu("nowhere", 1),)) is GroupState.NEVER
    assert time.monotonic() - began < patiently(5.0)
    until(lambda: free(ray_cluster, "d") == 4.0, "nothing is kept of what was not granted")
    assert other.held == {}
    assert other.try_acquire(()) is GroupState.GRANTED
    other.close()


def test_a_waiting_reservation_gets_released_resources(held: GroupReservation) -> None:
    import threading

    from dovetail.engines.ray.placement_groups import GroupReservation, GroupState

    first = GroupReservation("first", held.ids)
    assert first.try_acquire((cpu("a", 3),)) is GroupState.GRANTED
    threading.Timer(0.3, first.close).start()
    assert held.try_acquire((cpu("a", 3),), 30.0) is GroupState.GRANTED


# --- growth and surplus


def test_a_reservation_grows_and_shrinks_and_keeps_its_first_group(
    ray_cluster: FakeCluster, held: GroupReservation
) -> None:
    held.try_acquire((cpu("a", 1),))
    get(held, cpu("a", 3), cpu("d", 1))
    until(lambda: (free(ray_cluster, "a"), free(ray_cluster, "d")) == (1.0, 3.0), "grown")
    assert held.pending() == {}
    held.set_wanted(sum_seats([cpu("a", 4.5)]), time.monotonic())
    assert held.pending()["a", -1, "cpu_milli"] == 1500
    assert not held.covers(sum_seats([cpu("a", 4.5)]))
    get(held, cpu("a", 2))
    until(lambda: (free(ray_cluster, "a"), free(ray_cluster, "d")) == (2.0, 4.0), "shrunk, by a smaller group")
    held.set_wanted({}, time.monotonic())
    until(lambda: free(ray_cluster, "a") == 3.0, "what it cannot do without stays")
    assert held.held == {("a", -1, "cpu_milli"): 1000}


def test_surplus_resources_are_kept_for_a_while_unless_released(
    ray_cluster: FakeCluster, held: GroupReservation
) -> None:
    from dovetail.engines.ray.placement_groups import GroupReservation

    slow = GroupReservation("slow", held.ids, spare_s=1000.0)
    try:
        get(slow, cpu("a", 2), gpu("b", 0), gpu("b", 1))
        slow.set_wanted({}, time.monotonic())
        assert slow.covers(sum_seats([cpu("a", 2), gpu("b", 0, 1)]))
        slow.set_wanted({}, time.monotonic() + 999.0)
        assert slow.covers(sum_seats([cpu("a", 2)]))
        get(slow, cpu("a", 2), gpu("b", 0), gpu("b", 1))
        slow.release(sum_seats([cpu("a", 0.5), gpu("b", 1)]))
        until_held(slow, cpu("a", 1.5))
        until(lambda: free(ray_cluster, "a") == 2.5, "CPUs are back")
        until(lambda: free(ray_cluster, "b", "GPU") == 1.0, "the card is back")
        assert set(slow.devices("b")) == {0}
        slow.set_wanted({}, time.monotonic())
        slow.set_wanted({}, time.monotonic() + 1001.0)
        until(lambda: free(ray_cluster, "a") == 4.0, "after its time all is back")
    finally:
        slow.close()


def test_a_card_in_use_keeps_its_name_and_idle_cards_are_used_first(
    ray_cluster: FakeCluster, held: GroupReservation
) -> None:
    held.try_acquire((gpu("b", 0),))
    get(held, gpu("b", 0, milli=500), gpu("b", 1, milli=250))
    before = held.devices("b")
    assert sorted(before.values()) == ["0", "1"]
    get(held, gpu("b", 1))
    assert held.devices("b")[1] == before[1]
    held.set_wanted(sum_seats([gpu("b", 1), gpu("b", 0)]), time.monotonic())
    assert held.devices("b") == before
    held.set_wanted({}, time.monotonic())
    until(lambda: free(ray_cluster, "b", "GPU") == 1.0, "only the first is kept")
    [kept] = held.devices("b").values()
    get(held, gpu("b", 1))
    assert held.devices("b") == {1: kept}, "the card that is there gets the position that is wanted"


def test_no_reserved_card_belongs_to_a_foreign_holder(
    ray_cluster: FakeCluster, held: GroupReservation, tmp_path: Path
) -> None:
    with foreign_actor(ray_cluster, tmp_path, node="b", num_gpus=1) as theirs:
        get(held, gpu("b", 0))
        assert held.devices("b")[0] not in [str(card) for card in theirs]
        held.set_wanted(sum_seats([gpu("b", 0, 1)]), time.monotonic())
        held.poll()
        assert set(held.pending()) == {("b", 1, "milli")}
        held.close()


def test_a_request_that_is_no_longer_wanted_is_withdrawn(ray_cluster: FakeCluster, held: GroupReservation) -> None:
    held.set_wanted(sum_seats([cpu("a", 40), gpu("b", 0, 1), gpu("b", 2)]), time.monotonic())
    held.set_wanted(sum_seats([cpu("a", 1)]), time.monotonic())
    until_held(held, cpu("a", 1))
    assert held.pending() == {}
    ours = [row["bundles"] for row in ray_cluster.groups() if row["name"].startswith("dovetail:test")]
    assert len(ours) == 1


# --- nodes that do not answer


def test_no_group_is_requested_on_a_node_that_does_not_answer(ray_cluster: FakeCluster) -> None:
    """Ray would wait for it, and block the groups of all jobs meanwhile."""
    from dovetail.engines.ray.placement_groups import GroupReservation, GroupState

    ids = {name: node.node_id for name, node in ray_cluster.nodes.items()}
    silent = {ids["d"]}
    with closing(GroupReservation("test", ids, spare_s=0.0, find_silent=lambda ids, _: silent & set(ids))) as held:
        assert held.try_acquire((cpu("a", 1), cpu("d", 1))) is GroupState.UNDECIDED
        assert held.silent == {"d"}
        assert not ours(ray_cluster)
        wanted = sum_seats([cpu("a", 1), cpu("d", 1)])
        held.set_wanted(wanted, time.monotonic())
        until_held(held, cpu("a", 1))
        assert len(ours(ray_cluster)) == 1
        silent.clear()  # it answers again, and is asked when `set_wanted` is called next

        def answers() -> bool:
            held.set_wanted(wanted, time.monotonic())
            return not held.silent

        until(answers)
        until_held(held, cpu("a", 1), cpu("d", 1))


def ours(cluster: FakeCluster) -> list[Any]:
    return [row for row in cluster.groups() if row["name"].startswith("dovetail:test")]


def test_a_stopped_raylet_does_not_answer_and_others_do(ray_cluster: FakeCluster) -> None:
    from dovetail.engines.ray.raylet_probe import find_silent_nodes

    with add_node(ray_cluster, num_cpus=1) as node:
        ids = {node.node_id, ray_cluster.nodes["a"].node_id, ray_cluster.nodes["d"].node_id}
        assert find_silent_nodes(ids, PATIENCE_S) == set()
        node.kill(signal.SIGSTOP)
        assert find_silent_nodes(ids, 3.0) == {node.node_id}


# --- release


def test_a_lost_node_is_dropped_and_the_rest_is_kept(ray_cluster: FakeCluster, held: GroupReservation) -> None:
    with add_node(ray_cluster, num_cpus=4, num_gpus=1) as node:
        held.on_node_joined(node.name, node.node_id)
        held.try_acquire((cpu(node.name, 1), cpu("a", 1)))
        get(held, cpu(node.name, 2), cpu("a", 2), gpu(node.name, 0))
        node.kill(signal.SIGTERM)
        until(lambda: node.node_id not in ray_cluster.alive(), "Ray sees that the node is gone", 120)
        held.on_node_left(node.name)
        assert held.covers(sum_seats([cpu("a", 2)]))
        assert not held.covers(sum_seats([cpu(node.name, 1)]))
        assert held.held == {("a", -1, "cpu_milli"): 2000}
        assert free(ray_cluster, "a") == 2.0
        held.set_wanted(sum_seats([cpu("a", 2), cpu(node.name, 1)]), time.monotonic())
        assert held.pending() == {}, "what is not there is not wanted"
    held.close()


HOLDS = """
import os, time, ray
from dovetail.engines.ray.placement_groups import GroupReservation
from dovetail.resources.amounts import sum_seats
from dovetail.resources.seat import CardShare, Seat
ray.init(address=os.environ["DOVETAIL_TEST_RAY"], log_to_driver=False, logging_level="ERROR")
ids = {row["Labels"]["fake"]: row["NodeID"] for row in ray.nodes() if row["Alive"]}
held = GroupReservation("killed", ids)
held.try_acquire((Seat("a", 2000), Seat("c", 1000, cards=(CardShare(0, 1000),))))
wanted = sum_seats([Seat("a", 3000), Seat("c", 1000, cards=(CardShare(0, 1000), CardShare(1, 1000)))])
held.set_wanted(wanted, 0.0)
while not held.covers(wanted):
    held.poll()
    time.sleep(0.01)
print("HELD", flush=True)
{then}
"""


@pytest.mark.parametrize("way", ["kill", *(pytest.param(way, marks=pytest.mark.long) for way in ("error", "exit"))])
def test_all_resources_are_free_soon_after_a_driver_ends_in_any_way(
    ray_cluster: FakeCluster, tmp_path: Path, way: str
) -> None:
    before = ray_cluster.available()
    then = {"kill": "time.sleep(600)", "error": "raise ValueError('on purpose')", "exit": "os._exit(3)"}[way]
    with driver(ray_cluster, tmp_path, HOLDS.replace("{then}", then)) as script:
        script.says("HELD")
        if way == "kill":
            os.kill(script.process.pid, signal.SIGKILL)
        script.process.wait(60)
        until_available_is(ray_cluster, before)


def test_a_granted_group_is_released_if_its_cards_cannot_be_read(
    ray_cluster: FakeCluster, held: GroupReservation, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.engines.ray import placement_groups
    from dovetail.engines.ray.placement_groups import GroupState, no_answer_error

    def refuses(*_: object) -> None:
        raise no_answer_error("the head is gone")

    before = ray_cluster.available()
    monkeypatch.setattr(placement_groups, "request_card_ids", refuses)
    with pytest.raises(EngineError, match="did not answer"):
        held.try_acquire((gpu("b", 0),))
    assert held.held == {}
    until_available_is(ray_cluster, before)
    monkeypatch.undo()
    assert held.try_acquire((gpu("b", 0),)) is GroupState.GRANTED, "and can be asked for again"


def test_an_undecided_request_is_distinguished_from_a_refused_one(
    ray_cluster: FakeCluster, held: GroupReservation, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.engines.ray import placement_groups
    from dovetail.engines.ray.placement_groups import GroupState

    before = ray_cluster.available()
    monkeypatch.setattr(placement_groups, "DECISION_TIMEOUT_S", 0.05)
    monkeypatch.setattr(placement_groups, "group_state", lambda _: "PENDING")
    assert held.try_acquire((cpu("a", 1),)) is GroupState.UNDECIDED
    until_available_is(ray_cluster, before)
