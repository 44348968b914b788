"""Admission to a Ray cluster that others use."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.claims.owner import ProcessId, this_process
from dovetail.control.events import CapacityReserved
from dovetail.resources.amounts import cluster_capacity, fits_within, subtract_amounts, sum_seats
from dovetail.resources.seat import Seat
from ray_aids import driver, foreign_actor, until_available_is
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dovetail.control.events import Event
    from dovetail.engines.ray.discovery import DiscoveredCluster
    from dovetail.runtime.admission import Admission
    from ray_aids import FakeCluster

pytestmark = [pytest.mark.ray, pytest.mark.own_attachment]


@pytest.fixture(scope="module", autouse=True)
def _attached(ray_cluster: FakeCluster) -> Iterator[None]:
    import ray

    ray.init(address=ray_cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _everything_is_given_back(ray_cluster: FakeCluster) -> Iterator[None]:
    before = ray_cluster.available()
    yield
    until_available_is(ray_cluster, before)


def does_nothing(items: list[int]) -> list[int]:
    return items


def place(run: str, *stages: dt.Stage, seen: DiscoveredCluster | None = None, **more: Any) -> Admission:
    from dovetail.engines.ray.discovery import discover
    from dovetail.runtime.ray_admission import admit_on_ray
    from dovetail.runtime.ray_site import NodeDiscovery

    seen = seen or discover()
    pipeline = dt.Pipeline(list(stages) or [dt.Stage("x", does_nothing)])

    def planned(cluster: dt.Cluster) -> dt.Plan:
        return dt.plan(pipeline, cluster)

    return admit_on_ray(run, planned(seen.cluster), planned, discovery=NodeDiscovery(seen), **({"wait": True} | more))


def cpus(seats: Any) -> int:
    return sum(seat.cpu_milli for seat in seats)


def limit(found: Admission) -> dict[Any, int]:
    return subtract_amounts(cluster_capacity(found.plan.cluster), sum_seats(found.reserved))


class Kept:
    """A run without workers: it hears what it must leave to others, and leaves it."""

    def __init__(self, found: Admission) -> None:
        self.found = found
        self.reserved = found.reserved
        self._ready = threading.Event()
        [self.keeper] = found.claim_observers(self._post)
        self._ready.set()

    def _post(self, event: Event) -> None:
        assert isinstance(event, CapacityReserved)
        self._ready.wait()
        self.reserved = event.seats
        self.keeper.on_step(0.0, [event], [])

    def end(self) -> None:
        self.keeper.close(0.0)
        self.found.release()
        self.found.release()


def test_a_second_run_gets_half_when_the_first_has_released_it() -> None:
    first = Kept(place("first"))
    try:
        assert cpus(first.reserved) == 0
        second = Kept(place("second"))
        try:
            until(lambda: cpus(first.reserved) == 8000, "the first leaves half of the CPUs")
            until(lambda: cpus(second.reserved) == 8000, "the second has the other half")
            assert second.found.reservation is not None
            assert second.found.reservation.held
            assert fits_within(second.found.reservation.held, limit(second.found))
        finally:
            second.end()
        until(lambda: cpus(first.reserved) == 0, "all is the first's again")
    finally:
        first.end()


def test_a_run_that_must_not_wait_gets_an_error_that_names_the_holders() -> None:
    first = place("holder", dt.Stage("x", does_nothing, dt.Resources(cpus=3), workers=4))
    try:
        with pytest.raises(dt.InfeasibleError) as raised:
            place("next", dt.Stage("y", does_nothing, dt.Resources(cpus=2)), wait=False)
        assert raised.value.codes == ("DT120",)
        assert "run holder (pid " in str(raised.value)
        assert "other runs on this cluster hold too much" in str(raised.value)
    finally:
        first.release()


def test_foreign_usage_is_reported_and_planned_around(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    stage = dt.Stage("x", does_nothing, dt.Resources(cpus=1, gpus=1))
    with foreign_actor(ray_cluster, tmp_path, node="b", num_gpus=2, num_cpus=4):
        found = place("beside", stage)
        try:
            b = ray_cluster.nodes["b"].dovetail_name
            assert {seat.node for seat in found.plan.seats["x"]} == {ray_cluster.nodes["c"].dovetail_name}
            assert {key[2] for key in sum_seats(found.reserved) if key[0] == b} >= {"cpu_milli", "milli"}
        finally:
            found.release()
        with pytest.raises(dt.InfeasibleError, match="programs other than Dovetail hold"):
            place("refused", dt.Stage("x", does_nothing, dt.Resources(cpus=1, gpus=1), workers=4), wait=False)


def test_a_run_alone_on_a_cluster_prints_nothing_about_others() -> None:
    """The cluster may have cards that the run does not request."""
    found = place("alone", dt.Stage("x", does_nothing, workers=1))
    try:
        assert not [warning for warning in found.plan.warnings if "others" in warning]
    finally:
        found.release()


def test_a_share_is_kept_to() -> None:
    found = place("quarter", share=0.25)
    try:
        assert cpus(found.reserved) == 12000
        assert sum(cpus(seats) for seats in found.plan.seats.values()) <= 4000
    finally:
        found.release()


def test_a_worker_larger_than_a_share_of_a_node_fits_into_the_share_of_all() -> None:
    found = place("large", dt.Stage("x", does_nothing, dt.Resources(cpus=3)), share=0.25)
    try:
        assert cpus(found.reserved) == 12000
        assert len(found.plan.seats["x"]) == 1
    finally:
        found.release()


def test_what_does_not_fit_into_its_share_is_refused() -> None:
    with pytest.raises(dt.InfeasibleError) as raised:
        place("little", dt.Stage("x", does_nothing, dt.Resources(cpus=2)), share=0.1)
    assert raised.value.codes == ("DT396",)
    assert raised.value.exit_code == 3


PLACES = """
import os, time, ray
ray.init(address=os.environ["DOVETAIL_TEST_RAY"], log_to_driver=False, logging_level="ERROR")
import dovetail as dt
from dovetail.engines.ray.discovery import discover
from dovetail.runtime.ray_admission import admit_on_ray
from dovetail.runtime.ray_site import NodeDiscovery
def same(items): return items
seen = discover()
pipeline = dt.Pipeline([dt.Stage("x", same, dt.Resources(cpus=3), workers=4)])
place = admit_on_ray("killed", dt.plan(pipeline, seen.cluster), None, wait=True, discovery=NodeDiscovery(seen))
print("PLACED", flush=True)
time.sleep(600)
"""


def test_the_place_of_a_killed_driver_is_free_at_once(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    before = ray_cluster.available()
    stage = dt.Stage("y", does_nothing, dt.Resources(cpus=3), workers=4)
    with driver(ray_cluster, tmp_path, PLACES) as script:
        script.says("PLACED")
        with pytest.raises(dt.InfeasibleError, match="run killed"):
            place("refused", stage, wait=False)
        os.kill(script.process.pid, signal.SIGKILL)
        script.process.wait(60)
        until_available_is(ray_cluster, before)
        began = time.monotonic()
        found = place("next", stage)
        found.release()
        assert time.monotonic() - began < 8.0, "its row is void as soon as Ray knows, not when its heartbeat is old"


# --- what is dealt is where it really sits


def test_the_book_knows_where_the_least_of_a_run_sits(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    """Alone it would sit elsewhere; what Ray gave it there cannot be moved."""
    stage = dt.Stage("x", does_nothing, dt.Resources(cpus=1, gpus=1))
    c = ray_cluster.nodes["c"].dovetail_name
    with foreign_actor(ray_cluster, tmp_path, node="b", num_gpus=2, num_cpus=4):
        found = place("beside", stage)
        try:
            assert found.granted is not None
            book, grant = found.granted
            assert {seat.node for seat in grant.owner.need} == {c}
            [row] = book.owners()
            assert row.need == grant.owner.need
        finally:
            found.release()


def test_two_runs_with_one_card_each_on_one_node_get_one_each_also_when_a_third_was_there() -> None:
    stage = dt.Stage("x", does_nothing, dt.Resources(cpus=1, accelerator="A100", gpus=1))
    first = Kept(place("first", stage))
    second = None
    try:
        second = Kept(place("second", stage))
        first.end()
        third = Kept(place("third", stage))
        cards = [{key[:2] for key in kept.found.reservation.held if key[1] >= 0} for kept in (second, third)]  # type: ignore[union-attr]
        third.end()
        assert [len(each) for each in cards] == [1, 1]
    finally:
        first.end()
        if second is not None:
            second.end()


# --- nodes that come and go while a run claims its place


def ghostly(seen: DiscoveredCluster) -> DiscoveredCluster:
    """Cluster with a node that has just left, the first one and the only one with that label."""
    like = seen.cluster.nodes[0]
    ghost = replace(like, name="a-ghost", labels=(*like.labels, ("alone", "yes")))
    cluster = replace(seen.cluster, nodes=(ghost, *seen.cluster.nodes))
    return replace(seen, cluster=cluster, ids={**seen.ids, "a-ghost": "0f" * 28})


def test_a_node_that_leaves_while_a_run_claims_it_is_planned_around() -> None:
    from dovetail.engines.ray.discovery import discover

    seen = discover()
    stage = dt.Stage("x", does_nothing, dt.Resources(cpus=4), workers=5)
    with pytest.raises(dt.InfeasibleError, match="as infeasible"):
        place("refused", stage, seen=ghostly(seen), wait=False)
    found = place("goes elsewhere", dt.Stage("x", does_nothing, dt.Resources(cpus=4)), seen=ghostly(seen))
    try:
        assert "a-ghost" not in {seat.node for seat in found.plan.seats["x"]}
        assert {node.name for node in found.plan.cluster.nodes} == set(seen.ids)
    finally:
        found.release()


def test_a_waiting_run_plans_again_when_a_node_leaves() -> None:
    """It waits in the book, not for Ray: another program holds all CPUs of the node that leaves."""
    from dovetail.engines.ray.discovery import discover
    from dovetail.runtime.ray_admission import admit_on_ray
    from dovetail.runtime.ray_site import NodeDiscovery

    taken = replace(ghostly(discover()), foreign=(Seat("a-ghost", 4000),))
    labelled = dt.Stage("x", does_nothing, dt.Resources(cpus=4, labels={"alone": "yes"}))
    plain = dt.Stage("x", does_nothing, dt.Resources(cpus=4))
    with pytest.raises(dt.InfeasibleError, match="to begin, but other programs"):
        place("refused", labelled, seen=taken, wait=False)

    node_discovery = NodeDiscovery(taken)

    def planned(cluster: dt.Cluster) -> dt.Plan:
        return dt.plan(dt.Pipeline([labelled if "a-ghost" in node_discovery.latest.ids else plain]), cluster)

    found = admit_on_ray("waits", planned(taken.cluster), planned, wait=True, discovery=node_discovery)
    try:
        assert {node.name for node in found.plan.cluster.nodes} == {node.name for node in discover().cluster.nodes}
    finally:
        found.release()


def test_a_given_plan_for_other_nodes_is_refused(ray_cluster: FakeCluster) -> None:
    pipeline = dt.Pipeline([dt.Stage("x", does_nothing)])
    other = dt.plan(pipeline, dt.Cluster.of("1x(4cpu, 16GB)"))
    with pytest.raises(dt.ConfigError) as raised:
        dt.run(pipeline, range(3), engine=f"ray:{ray_cluster.address}", plan=other)
    assert raised.value.codes == ("DT037",)


def a_site(*, private: bool) -> Any:
    from dovetail.engines.ray.attachment import Attachment
    from dovetail.engines.ray.discovery import discover
    from dovetail.runtime.ray_site import NodeDiscovery, RaySite

    site = RaySite.__new__(RaySite)
    site.attached = Attachment("", private, "", "", is_ours=False)
    site._discovery, site._share = NodeDiscovery(discover()), None
    return site


def test_runs_of_one_program_share_a_ray_of_their_own_too() -> None:
    site = a_site(private=True)
    pipeline = dt.Pipeline([dt.Stage("x", does_nothing)])

    def planned(cluster: dt.Cluster) -> dt.Plan:
        return dt.plan(pipeline, cluster)

    found = site.admit("first", planned(site.cluster("auto")), planned, wait=True)
    try:
        assert found.reservation is not None, "the second one finds it in the book"
    finally:
        found.release()


def test_the_plan_of_an_earlier_run_keeps_its_units_on_the_present_nodes() -> None:
    site = a_site(private=False)
    stages = [dt.Stage("x", does_nothing), dt.Stage("y", does_nothing)]
    before = dt.plan(dt.Pipeline(stages), dt.Cluster.of("7x(2cpu, 16GB)"), "sequential")
    plan, planned = site.adapt_plan(before, earlier=True)
    assert [(unit.name, unit.wave) for unit in plan.units] == [(unit.name, unit.wave) for unit in before.units]
    assert plan.cluster == site.cluster("auto")
    assert {seat.node for seats in plan.seats.values() for seat in seats} <= {node.name for node in plan.cluster.nodes}
    assert planned(plan.cluster) == plan


# --- present runs


@pytest.mark.parametrize(
    ("driver_is_there", "elsewhere", "expected"),
    [(False, False, False), (False, True, False), (True, False, True), (True, True, None), (None, True, None)],
)
def test_a_driver_whose_process_is_invisible_needs_a_heartbeat(
    driver_is_there: bool | None, elsewhere: bool, expected: bool | None
) -> None:
    from dovetail.runtime.ray_admission import is_process_alive

    mine = this_process()
    theirs = ProcessId(mine.pid, mine.born, f"{'another machine' if elsewhere else mine.space}|job")
    assert is_process_alive(lambda job: driver_is_there if job == "job" else True, theirs) is expected
