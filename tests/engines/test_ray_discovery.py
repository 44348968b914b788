"""Discovery of a Ray cluster and of the holders of its resources, from tables of Ray and from a real cluster."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.engines.ray import discovery
from dovetail.engines.ray.cluster_usage import build_usage
from dovetail.engines.ray.discovery import (
    are_cards_unknown,
    build_cluster,
    has_same_nodes,
    held_by_groups,
    merge_probed_cards,
    node_names,
    parse_groups,
    probe_nodes,
    reported_cards,
    used_seat,
)
from dovetail.errors import EngineError
from dovetail.resources.cluster import Cluster, Gpu, Node
from dovetail.resources.seat import CardShare, Seat
from ray_aids import add_node, foreign_actor, patiently
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ray_aids import FakeCluster

GB = 2**30


def row(node: str, host: str = "", labels: dict[str, str] | None = None, **resources: float) -> dict[str, Any]:
    given = {"CPU": 8.0, "memory": 16.0 * GB, "object_store_memory": 2.0 * GB, f"node:{node}": 1.0} | resources
    return {
        "NodeID": node * 10,
        "Alive": True,
        "NodeManagerHostname": host or f"host-{node}",
        "NodeManagerAddress": f"10.0.0.{len(node)}",
        "Resources": {name: amount for name, amount in given.items() if amount},
        "Labels": {"ray.io/node-id": node * 10} | (labels or {}),
    }


pytestmark = pytest.mark.own_attachment

# --- nodes


def test_a_node_is_discovered_with_all_resources_of_a_stage() -> None:
    given = row("aa", labels={"pool": "big", "ray.io/market-type": "spot"}, GPU=2.0, fpga=1.5)
    given["Resources"] |= {"accelerator_type:L40S": 1.0, "CPU_group_0_ff": 2.0, "bundle_group_ff": 1000.0}
    seen = build_cluster([given], {}, {})
    (node,) = seen.cluster.nodes
    assert node == Node(
        "host-aa",
        8000,
        16 * GB,
        (Gpu.of("L40S"),) * 2,
        (("pool", "big"), ("ray.io/market-type", "spot")),
        (("fpga", 1500),),
    )
    assert seen.ids == {"host-aa": "aa" * 10}
    assert seen.object_store_bytes == {"host-aa": 2 * GB}
    assert seen.foreign == ()
    assert Cluster.from_dict(seen.cluster.to_dict()) == seen.cluster


def test_unusable_nodes_are_excluded_with_a_note() -> None:
    seen = build_cluster([row("aa"), row("bb", CPU=0)], {}, {})
    assert [node.name for node in seen.cluster.nodes] == ["host-aa"]
    assert any("host-bb" in note and "no CPU" in note for note in seen.notes)
    assert has_same_nodes(seen, [row("aa"), row("bb")])
    assert not has_same_nodes(seen, [row("aa")])
    with pytest.raises(EngineError) as caught:
        build_cluster([row("bb", CPU=0)], {}, {})
    assert caught.value.codes == ("DT393",)


def test_a_resource_that_no_stage_can_request_is_excluded_with_a_note() -> None:
    given = row("aa")
    given["Resources"]["my resource"] = 1.0
    seen = build_cluster([given], {}, {})
    assert seen.cluster.nodes[0].custom == ()
    assert any("my resource" in note for note in seen.notes)


def test_node_names_are_unique_hostnames_and_stay_the_same() -> None:
    rows = [row("aa", "one"), row("bb", "two"), row("cc", "two")]
    first = node_names(rows, {})
    assert first == {"aa" * 10: "one", "bb" * 10: "node-bbbbbbbb", "cc" * 10: "node-cccccccc"}
    known = {name: node for node, name in first.items()}
    assert node_names([row("aa", "one"), row("dd", "one")], known) == {"aa" * 10: "one", "dd" * 10: "node-dddddddd"}
    assert node_names([row("dd", "one")], known) == {"dd" * 10: "node-dddddddd"}  # a name is never reused
    twins = [{**row("aa", "x"), "NodeID": "a" * 20 + tail} for tail in "12"]
    assert len(set(node_names(twins, {}).values())) == 2


def test_a_machine_that_rejoins_is_a_new_node_with_a_new_name() -> None:
    before = build_cluster([row("aa"), row("bb")], {}, {})
    now = build_cluster([row("bb"), row("cc"), row("dd", "host-aa")], {}, {}, known=before.ids)
    assert set(before.ids) == {"host-aa", "host-bb"}
    assert set(now.ids) == {"host-bb", "host-cc", "node-dddddddd"}


# --- cards


def test_card_models_are_recognised_by_name() -> None:
    assert reported_cards({"GPU": 2.0, "accelerator_type:A100-80G": 1.0}, {}) == (Gpu.of("A100", "80GB"),) * 2
    assert reported_cards({"GPU": 1.0}, {"ray.io/accelerator-type": "L4"}) == (Gpu.of("L4"),)
    assert reported_cards({"CPU": 1.0}, {}) == ()
    reported = reported_cards({"GPU": 1.0, "accelerator_type:A100": 1.0}, {"dovetail.io/gpu-memory": "80GB"})
    assert reported[0].memory_bytes == 80 * GB


def test_unnamed_cards_are_inspected() -> None:
    reported = reported_cards({"GPU": 3.0}, {})
    assert are_cards_unknown(reported)
    assert are_cards_unknown(reported_cards({"GPU": 1.0, "accelerator_type:AMD Instinct": 1.0}, {}))
    assert not are_cards_unknown(reported_cards({"GPU": 1.0, "accelerator_type:T4": 1.0}, {}))
    looked = [{"model": "L4", "memory_bytes": 23 * GB, "nvdecs": 4, "nvencs": 2}] * 2
    assert [card.memory_bytes for card in merge_probed_cards(reported, looked)] == [23 * GB, 23 * GB, 0]
    assert merge_probed_cards(reported, []) == reported
    assert len(merge_probed_cards(reported[:1], looked)) == 1


# --- foreign holders

CARDS = Node("n", 8000, 16 * GB, (Gpu("x", 1000, 2, 1),) * 3, (), (("fpga", 2000),))


def test_cards_held_by_others_are_the_last_ones() -> None:
    seat = used_seat(CARDS, {"CPU": 1.5, "GPU": 1.25, "fpga": 1.0})
    shares = (CardShare(1, 250, 250), CardShare(2, 1000, 1000, 2, 1))
    assert seat == Seat("n", 1500, 0, shares, (("fpga", 1000),))
    assert used_seat(CARDS, {"CPU": 0.0}) is None


def group(name: str, state: str = "CREATED", node: str = "aa", **resources: float) -> dict[str, Any]:
    return {
        "placement_group_id": f"id{name}",
        "name": name,
        "state": state,
        "bundles": {0: resources},
        "bundles_to_node_id": {0: node * 10 if node else ""},
        "stats": {"scheduling_state": "NO_RESOURCES"},
    }


def test_resources_of_our_placement_groups_are_not_foreign() -> None:
    groups = [group("dovetail:r1", CPU=2.0, GPU=1.0), group("theirs", CPU=1.0), group("dovetail:r2", "PENDING", "")]
    ours = held_by_groups(groups, {})
    assert ours == {"aa" * 10: {"CPU": 2.0, "GPU": 1.0}}
    seen = build_cluster([row("aa", GPU=2.0)], {"aa" * 10: {"CPU": 5.0, "GPU": 1.0, "memory": 16.0 * GB}}, ours)
    assert seen.foreign == (Seat("host-aa", 1000),)


def test_a_removed_placement_group_of_ours_is_not_foreign() -> None:
    gone = [group("dovetail:r1", "REMOVED", CPU=2.0)]
    assert held_by_groups(gone, {"aa" * 10: {"bundle_group_iddovetail:r1": 1000.0}}) == {"aa" * 10: {"CPU": 2.0}}
    assert held_by_groups(gone, {"aa" * 10: {"CPU": 8.0}}) == {}
    assert held_by_groups(gone, {}, young={"iddovetail:r1"}) == {"aa" * 10: {"CPU": 2.0}}


def group_row(number: int, state: str, node: str = "aa", **resources: float) -> Any:
    """A row of the placement group table of Ray."""
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData

    made = PlacementGroupTableData(
        placement_group_id=number.to_bytes(4, "big"),
        name="dovetail:r",
        state=PlacementGroupTableData.PlacementGroupState.Value(state),
    )
    bundle = made.bundles.add(node_id=bytes.fromhex(node * 10))
    bundle.unit_resources.update(resources)
    return made


def test_removed_groups_add_little_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    plain = discovery._parse_group

    def counted(row: Any, number: str) -> dict[str, Any]:
        made.append(number)
        return plain(row, number)

    monkeypatch.setattr(discovery, "_parse_group", counted)
    rows = [group_row(number, "REMOVED", CPU=1.0) for number in range(1000)] + [group_row(1000, "CREATED", CPU=2.0)]
    totals = {"aa" * 10: {"CPU": 8.0, "bundle_group_00000007": 1000.0, "bundle_group_0_00000008": 1000.0}}
    found = parse_groups(rows, totals, young={"00000009"})
    assert made == ["00000007", "00000008", "00000009", "000003e8"]
    assert found[-1] == {
        "placement_group_id": "000003e8",
        "name": "dovetail:r",
        "state": "CREATED",
        "bundles": {0: {"CPU": 2.0}},
        "bundles_to_node_id": {0: "aa" * 10},
        "stats": {"scheduling_state": "QUEUED"},
    }
    assert held_by_groups(found, totals, {"00000009"}) == {"aa" * 10: {"CPU": 4.0}}
    assert [one["state"] for one in parse_groups(rows, {})] == ["CREATED"]


# --- description of holders


def test_holders_and_waiting_requests_are_described() -> None:
    actor = {
        "class": "Trainer",
        "name": "",
        "node": "aa" * 10,
        "job": "01000000",
        "pid": 7,
        "state": "ALIVE",
        "resources": {"GPU": 1.0},
        "group": "ff" * 18,
        "gpus": ["0"],
    }
    wants = {**actor, "state": "PENDING_CREATION", "class": "Big", "resources": {"GPU": 9.0}, "node": ""}
    inside = {**actor, "group": "ab" * 18}
    using = build_usage(
        [row("aa", GPU=2.0), row("bb")],
        {
            "aa" * 10: {"CPU": 3.0, "memory": 16.0 * GB, "object_store_memory": 2.0 * GB},
            "bb" * 10: row("bb")["Resources"],
        },
        [group("dovetail:run-7:1", CPU=2.0, GPU=1.0), group("theirs", "PENDING", "", CPU=99.0)],
        [actor, wants, inside],
        {"01000000": "train.py (pid 3)"},
        [({"CPU": 30.0}, 3), ({"GPU": 9.0}, 1)],
        {"aa" * 10: "a", "bb" * 10: "b"},
    )
    lines = using.lines()
    assert "used:     5 of 16 CPUs, 2 of 2 GPUs, 0 of 32GB memory, 0 of 4GB object store" in lines
    assert "  a: Dovetail run run-7 holds 2 CPUs, 1 GPU" in lines
    assert "  a: actor Trainer (pid 7) of train.py (pid 3) holds 1 GPU (GPU 0)" in lines
    assert "  a: tasks, or jobs that just ended, hold 3 CPUs" in lines
    assert "  placement group theirs wants 99 CPUs: does not fit now" in lines
    assert "  actor Big of train.py (pid 3) wants 9 GPUs" in lines
    assert "  3 tasks want 30 CPUs each" in lines
    assert len(using.waiting) == 3
    assert [holder.who for holder in using.others()] == ["actor Trainer (pid 7)", "tasks, or jobs that just ended,"]
    assert using.to_dict()["used"]["a"]["used"]["CPU"] == 5.0


def test_an_empty_cluster_is_described_as_empty() -> None:
    using = build_usage([row("aa")], {}, [], [], {}, [], {"aa" * 10: "a"})
    assert using.lines()[1:] == ["holders:  none", "pending:  none"]


def test_excluded_nodes_have_no_holders_and_actors_without_requests_do_not_wait() -> None:
    agent = {"class": "Agent", "name": "", "node": "", "job": "", "pid": 7, "state": "PENDING_CREATION"}
    agent |= {"resources": {}, "group": "", "gpus": []}
    head = row("bb", CPU=0)
    using = build_usage([row("aa"), head], {}, [], [agent], {}, [], {"aa" * 10: "a", "bb" * 10: "b"}, {head["NodeID"]})
    assert using.lines()[0] == "used:     0 of 8 CPUs, 0 of 16GB memory, 0 of 2GB object store"
    assert using.waiting == ()


# --- a real cluster


@pytest.fixture
def attached(ray_cluster: FakeCluster) -> Iterator[FakeCluster]:
    import ray

    ray.init(address=ray_cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield ray_cluster
    ray.shutdown()


def test_a_cluster_is_discovered_quickly(attached: FakeCluster) -> None:
    from dovetail.engines.ray.discovery import discover

    discover()  # imports
    began = time.monotonic()
    seen = discover()
    assert time.monotonic() - began < patiently(0.5)
    assert seen.ids == {node.dovetail_name: node.node_id for node in attached.nodes.values()}
    nodes = {node.name: node for node in seen.cluster.nodes}
    assert nodes[attached.nodes["b"].dovetail_name].gpus == (Gpu.of("L40S"),) * 2
    assert nodes[attached.nodes["c"].dovetail_name].gpus == (Gpu.of("A100"),) * 2
    assert nodes[attached.nodes["a"].dovetail_name].labels == (("fake", "a"),)
    assert seen.foreign == ()


def test_foreign_holders_are_found_and_named(attached: FakeCluster, tmp_path: Path) -> None:
    from dovetail.engines.ray.cluster_usage import read_cluster_usage
    from dovetail.engines.ray.discovery import discover

    name = attached.nodes["b"].dovetail_name
    with foreign_actor(attached, tmp_path, node="b", num_gpus=1, num_cpus=2):
        until(lambda: discover().foreign, "it is seen")
        seen = discover()
        card = Gpu.of("L40S")
        share = CardShare(1, 1000, card.memory_bytes, card.nvdecs, card.nvencs)
        assert seen.foreign == (Seat(name, 2000, 0, (share,)),)
        using = read_cluster_usage(seen)
        (holder,) = using.holders
        assert (holder.node, holder.resources, holder.gpus) == (name, {"CPU": 2.0, "GPU": 1.0}, ("0",))
        assert "actor Holder" in using.lines()[-2]


def test_our_placement_groups_are_never_reported_as_foreign(attached: FakeCluster) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    from dovetail.engines.ray.discovery import discover

    observations = [("before", discover().foreign)]

    def all_is_back() -> bool:
        observations.append(("removed", discover().foreign))
        return not discover(ours={}).foreign

    for number in range(5):
        made = placement_group([{"CPU": 2}], name=f"dovetail:run-{number}")
        assert made.wait(PATIENCE_S)
        observations += [("made", discover().foreign) for _ in range(20)]
        remove_placement_group(made)
        until(all_is_back, "it is given back")
    assert [look for look in observations if look[1]] == []


def test_joining_and_leaving_nodes_are_detected(attached: FakeCluster) -> None:
    from dovetail.engines.ray.discovery import discover

    before = discover()
    with add_node(attached, num_cpus=1) as node:
        until(lambda: discover(known=before.ids).ids != before.ids, "it has joined")
        now = discover(known=before.ids)
        assert set(now.ids) - set(before.ids) == {node.dovetail_name}
    until(lambda: discover(known=now.ids).ids != now.ids, "it has left")
    assert set(now.ids) - set(discover(known=now.ids).ids) == {node.dovetail_name}


def test_unnamed_cards_are_inspected_once(attached: FakeCluster) -> None:
    from dovetail.engines.ray.discovery import discover

    with add_node(attached, num_cpus=1, num_gpus=1) as node:
        until(lambda: node.dovetail_name in discover().ids, "it has joined")
        began = time.monotonic()
        seen = discover()
        assert time.monotonic() - began < patiently(0.5)  # cached in the cluster
        (found,) = [one for one in seen.cluster.nodes if one.name == node.dovetail_name]
        assert len(found.gpus) == 1


def test_a_node_whose_cards_cannot_be_inspected_is_asked_once(
    attached: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attached.address
    unknown_node = "ab" * 28
    found, (note,) = probe_nodes([unknown_node])
    assert found == {}
    assert "could not be probed" in note
    monkeypatch.setattr(discovery, "_probe_task", lambda node: pytest.fail(f"{node} was asked again"))
    assert probe_nodes([unknown_node]) == ({}, [note])


def test_the_group_table_matches_the_one_of_ray(attached: FakeCluster) -> None:
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    assert attached.address
    made = placement_group([{"CPU": 1}, {"CPU": 2}], name="somebody")
    try:
        assert made.wait(PATIENCE_S)
        (ours,) = [one for one in discovery.current_placement_groups() if one["name"] == "somebody"]
        theirs = placement_group_table()[ours["placement_group_id"]]
        assert {key: theirs[key] for key in ours if key != "stats"} == {k: v for k, v in ours.items() if k != "stats"}
        assert ours["stats"]["scheduling_state"] == theirs["stats"]["scheduling_state"]
    finally:
        remove_placement_group(made)
