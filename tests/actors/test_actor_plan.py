"""Plans of actor systems: counts, nodes, pools, colocation, and what does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from dovetail.actors.actor_system import ActorSystem
from dovetail.actors.role import Affinity, Pool, Restart, Role, Scale, Together
from dovetail.documents.yaml_writer import YAML
from dovetail.errors import ConfigError, InfeasibleError
from dovetail.resources.ledger import Ledger


class Actor:
    """Any actor."""


def role(name: str, **settings: object) -> Role:
    return Role(name, Actor, **settings)  # type: ignore[arg-type]


SMALL = [
    role("rollout", profile="rollout", workers=8),
    role("trainer", profile="trainer", together="train"),
    role("pool", profile="trajectory_pool", together="train"),
    role("loader", profile="data_loader"),
    role("sync", profile="weight_sync", together="train"),
    role("validator", profile="validator"),
]


def test_the_small_example_of_the_guide_needs_sixteen_cpus_and_one_gpu() -> None:
    plan = ActorSystem(SMALL).plan("1x(16cpu, 64GB, 1xA100)")
    assert plan.workers == {"rollout": 8, "trainer": 1, "pool": 1, "loader": 1, "sync": 1, "validator": 1}
    assert (plan.free_cpu_milli, plan.idle_gpus) == (0, 0)
    assert len(plan.processes) == 11


def test_the_large_example_of_the_guide_leaves_56_gpus_idle_and_a_warning_says_so() -> None:
    pools = {"gpu": Pool({"pool": "gpu"}), "cpu": Pool({"pool": "cpu"})}
    roles = [
        role("rollout", profile="rollout", workers=256, pool="cpu"),
        role("trainer", profile="trainer", workers=8, together="train", pool="gpu"),
        role("trajectories", profile="trajectory_pool", workers=8, together="train", pool="gpu"),
        role("sync", profile="weight_sync", workers=8, together="train", pool="gpu"),
        role("loader", profile="data_loader", workers=8, pool="gpu", spread=True),
        role("validator", profile="validator", workers=8, pool="cpu"),
    ]
    cluster = "8x(32cpu, 256GB, 8xA100){pool=gpu} + 16x(32cpu, 128GB){pool=cpu}"
    plan = ActorSystem(roles, pools).plan(cluster)
    assert plan.idle_gpus == 56
    assert any("56 of 64 GPUs stay idle" in line for line in plan.warnings)
    assert set(plan.nodes_of("loader").values()) == {1}
    assert len(plan.nodes_of("loader")) == 8


def test_roles_in_one_process_need_the_sum_or_the_maximum_of_their_resources() -> None:
    def cpus(share: str) -> float:
        together = Together("train", share=share)  # type: ignore[arg-type]
        members = [role("a", resources=dt.Resources(cpus=4), together=together), role("b", together=together)]
        plan = ActorSystem(members).plan("1x(8cpu, 16GB)")
        return 8 - plan.free_cpu_milli / 1000

    assert (cpus("sum"), cpus("max")) == (5, 4)


def test_a_role_with_twice_the_instances_has_two_in_each_process() -> None:
    plan = ActorSystem([role("a", workers=2, together="x"), role("b", workers=4, together="x")]).plan("1x(8cpu)")
    assert [process.instances for process in plan.processes] == [
        (("a", 0), ("b", 0), ("b", 1)),
        (("a", 1), ("b", 2), ("b", 3)),
    ]


def test_processes_of_a_group_on_one_node_are_on_one_node_each() -> None:
    near = Together("pair", "node")
    system = ActorSystem([role("a", workers=3, together=near, spread=True), role("b", workers=6, together=near)])
    plan = system.plan("4x(4cpu, 8GB)")
    assert plan.workers == {"a": 3, "b": 6}
    assert plan.nodes_of("b") == {node: 2 * count for node, count in plan.nodes_of("a").items()}


def test_strict_spreading_packing_and_affinity() -> None:
    cluster = "3x(4cpu, 8GB)"
    assert set(ActorSystem([role("a", workers=3, spread="strict")]).plan(cluster).nodes_of("a").values()) == {1}
    assert len(ActorSystem([role("a", workers=4, pack="strict")]).plan(cluster).nodes_of("a")) == 1
    apart = ActorSystem([role("a", workers=2), role("b", workers=4, affinity=Affinity(apart=["a"]))]).plan(cluster)
    assert not apart.nodes_of("a").keys() & apart.nodes_of("b").keys()
    near = ActorSystem(
        [role("b", workers=2, affinity=Affinity(near=["a"])), role("a", resources=dt.Resources(cpus=2))]
    ).plan(cluster)
    assert near.nodes_of("b").keys() == near.nodes_of("a").keys()
    with pytest.raises(InfeasibleError) as caught:
        ActorSystem([role("a", workers=4, spread="strict")]).plan(cluster)
    assert 'spread="strict"' in str(caught.value)


def test_a_pool_has_a_quota() -> None:
    pools = {"part": Pool(cpus=4)}
    plan = ActorSystem([role("a", workers=(1, 8), pool="part")], pools).plan("1x(16cpu)")
    assert plan.workers == {"a": 4}
    with pytest.raises(InfeasibleError) as caught:
        ActorSystem([role("a", workers=5, pool="part")], pools).plan("1x(16cpu)")
    assert "quota" in str(caught.value)


def test_a_scaled_role_starts_with_its_minimum_and_the_plan_says_how_far_it_can_grow() -> None:
    scaled = role("a", workers=(2, 64), scale=Scale(target=4))
    plan = ActorSystem([scaled, role("b", workers=4)]).plan("1x(16cpu)")
    assert plan.workers == {"a": 2, "b": 4}
    assert plan.room == {"a": 10}


def test_a_system_that_does_not_fit_names_the_role_its_need_and_what_is_free() -> None:
    system = ActorSystem([role("a", workers=2), role("trainer", profile="trainer", workers=3)])
    with pytest.raises(InfeasibleError) as caught:
        system.plan("2x(8cpu, 16GB, 1xA100)")
    text = str(caught.value)
    assert "trainer" in text
    assert "1 GPU" in text
    assert [problem.code for problem in system.validate("2x(8cpu, 16GB, 1xA100)")] == list(caught.value.codes)
    assert system.validate("3x(8cpu, 16GB, 1xA100)") == []


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ([role("a", after=["b"]), role("b", after=["a"])], "start after each other (after): a -> b -> a"),
        ([role("a", calls=["b"]), role("b", calls=["a"])], "calls of 'a' can wait for themselves: a -> b -> a"),
        ([role("a", calls=["a"])], "calls of 'a' can wait for themselves: a -> a"),
        ([role("a", after=["c"]), role("b")], "which is not a role"),
        ([role("a", pool="gpus")], "there is no pool 'gpus'"),
        ([role("a"), role("a")], "are both called 'a'"),
        ([role("a", workers=2, together="x"), role("b", workers=3, together="x")], "different numbers of workers"),
        ([role("a", spread=True, pack=True)], "spread and pack contradict each other"),
        ([role("a", workers=0)], "workers=0 is not a whole number from 1"),
        ([role("a", scale=Scale(target=4))], "has scale, but always 1 worker"),
        ([role("a", slots="many")], "slots='many'"),
        ([role("a", after=["a"])], "which is the role itself"),
        ([role("trainer"), role("b", affinity=Affinity(near=["trianer"]))], "did you mean 'trainer'?"),
        ([role("status")], "a running system has an attribute of this name"),
        ([role("a", workers=(1, 2), pack="strict")], "their number varies"),
        ([role("a", workers=(1, 2), scale=Scale(target=-1))], "has target=-1"),
        ([role("a", restart=Restart(limit=0))], "has limit=0"),
        ([role("a", affinity={"near": ["b"]})], "is not a dt.Affinity"),
        ([role("a", env_from="HOME")], "is not a list of variables"),
        (
            [role("a", affinity=Affinity({"zone": "1"}), resources=dt.Resources(cpus=1, labels={"zone": "2"}))],
            "no node has two values of the label 'zone'",
        ),
        (
            [role("a", together="x"), role("b", together="x", after=["c"]), role("c", after=["a"])],
            "the processes start after each other",
        ),
        ([role("a", ranks=2, together="x"), role("b", together="x")], "needs several processes (ranks)"),
    ],
)
def test_mistakes_are_reported_before_anything_is_planned(roles: list[Role], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ActorSystem(roles)
    assert expected in str(caught.value)
    assert all(problem.fixes for problem in caught.value.problems)


def test_calls_in_a_circle_are_allowed_where_every_role_has_several_slots() -> None:
    ActorSystem([role("a", calls=["b"], slots=2), role("b", calls=["a"], profile="weight_sync")])
    with pytest.raises(ConfigError, match="can wait for themselves: t -> b -> t"):
        ActorSystem([role("t", calls=["b"], profile="trainer"), role("b", calls=["t"], slots=100)])


def test_a_fix_of_an_object_can_be_pasted_into_python_and_into_a_file() -> None:
    with pytest.raises(ConfigError) as caught:
        ActorSystem([role("a", workers=(1, 2), scale=Scale(target=4, tolerance=7))])
    (problem,) = caught.value.problems
    assert problem.fix_texts == ("scale=dt.Scale(target=4, tolerance=1)",)
    assert YAML.fixes(problem) == ("scale: {target: 4, tolerance: 1}",)


def test_roles_without_gpus_take_nodes_without_gpus_first_and_a_warning_counts_the_others() -> None:
    system = ActorSystem([role("rollout", workers=40), role("trainer", profile="trainer")])
    plan = system.plan("2x(16cpu, 64GB, 4xA100) + 2x(16cpu, 64GB)")
    assert sum(count for node, count in plan.nodes_of("rollout").items() if node in ("node-2", "node-3")) == 32
    assert plan.warnings == (
        "7 of 8 GPUs stay idle",
        "8 of 40 'rollout' run on GPU nodes without a GPU and take 8 CPUs there",
    )
    assert ActorSystem([role("a")]).plan("1x(4cpu, 8GB, 1xA100)").warnings == (
        "no role requests a GPU: 1 of 1 GPU stay idle",
    )


def test_labels_of_an_affinity_select_nodes() -> None:
    near_data = role("a", workers=2, affinity=Affinity({"disk": "nvme"}))
    plan = ActorSystem([near_data]).plan("2x(4cpu, 8GB) + 1x(4cpu, 8GB){disk=nvme}")
    assert plan.nodes_of("a") == {"node-2": 2}


def test_a_role_without_a_pool_is_in_the_pool_default_if_there_is_one() -> None:
    plan = ActorSystem([role("a", workers=(1, 8))], {"default": Pool(cpus=3)}).plan("1x(16cpu)")
    assert plan.workers == {"a": 3}


def test_the_colocation_of_the_guide_needs_one_cpu_instead_of_three() -> None:
    together = Together("training", share="max")
    names = ("trainer", "trajectory_pool", "weight_sync")
    plan = ActorSystem([role(name, together=together) for name in names]).plan("1x(4cpu)")
    assert plan.free_cpu_milli == 3000
    (note,) = plan.notes
    assert "share one process instead of 3: 3 CPUs apart, 1 together" in note


def test_a_fragmented_cluster_is_named_as_the_reason() -> None:
    roles = [role("a", resources=dt.Resources(cpus=6), workers=3), role("b", resources=dt.Resources(cpus=3), workers=2)]
    with pytest.raises(InfeasibleError) as caught:
        ActorSystem(roles).plan("3x(8cpu, 64GB)")
    assert "6 CPUs are free, but as 2 + 2 + 2" in str(caught.value)


def test_an_unknown_role_is_a_key_error_with_the_nearest_name() -> None:
    with pytest.raises(KeyError, match="did you mean 'trainer'"):
        ActorSystem([role("trainer")]).role("trianer")


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from((0.0, 0.5, 1.0)), st.integers(1, 5)), min_size=1, max_size=4),
    st.sampled_from((False, True, "strict")),
)
def test_a_plan_never_takes_more_than_there_is_and_has_all_instances(
    wanted: list[tuple[int, float, int]], spread: bool | str
) -> None:
    cluster = dt.Cluster.parse("3x(8cpu, 16GB, 2xA100) + 2x(8cpu, 16GB)")
    roles = [
        role(f"r{number}", resources=dt.Resources(cpus=cpus, gpus=gpus), workers=workers, spread=spread)
        for number, (cpus, gpus, workers) in enumerate(wanted)
    ]
    system = ActorSystem(roles)
    try:
        plan = system.plan(cluster)
    except InfeasibleError:
        return
    Ledger(cluster, (seat for process in plan.processes for seat in process.seats))  # raises if a seat is taken twice
    assert plan.workers == {one.name: one.workers for one in roles}
    if spread == "strict":
        assert all(set(plan.nodes_of(one.name).values()) == {1} for one in roles)
