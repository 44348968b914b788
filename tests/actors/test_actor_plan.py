"""Plans of actor systems: counts, nodes, pools, colocation, and what does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail as dt
from dovetail.actors.actor_system import ActorSystem
from dovetail.actors.role import Pool, Role, Scale, Together
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
    apart = ActorSystem([role("a", workers=2), role("b", workers=4, apart=["a"])]).plan(cluster)
    assert not apart.nodes_of("a").keys() & apart.nodes_of("b").keys()
    near = ActorSystem([role("b", workers=2, near=["a"]), role("a", resources=dt.Resources(cpus=2))]).plan(cluster)
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
        ([role("a", after=["b"]), role("b", after=["a"])], "wait for each other (after): a -> b -> a"),
        ([role("a", calls=["b"]), role("b", calls=["a"])], "calls of these roles wait for each other: a -> b -> a"),
        ([role("a", calls=["a"])], "calls of these roles wait for each other: a -> a"),
        ([role("a", after=["c"]), role("b")], "which is not another role"),
        ([role("a", pool="gpus")], "there is no pool 'gpus'"),
        ([role("a"), role("a")], "are both called 'a'"),
        ([role("a", workers=2, together="x"), role("b", workers=3, together="x")], "different numbers of workers"),
        ([role("a", spread=True, pack=True)], "spread and pack contradict each other"),
        ([role("a", workers=0)], "workers=0 is not a whole number from 1"),
        ([role("a", scale=Scale(target=4))], "has scale, but always 1 workers"),
        ([role("a", slots="many")], "slots='many'"),
        ([role("a", ranks=2, together="x"), role("b", together="x")], "needs several processes (ranks)"),
    ],
)
def test_mistakes_are_reported_before_anything_is_planned(roles: list[Role], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ActorSystem(roles)
    assert expected in str(caught.value)
    assert all(problem.fixes for problem in caught.value.problems)


def test_calls_in_a_circle_are_allowed_where_a_role_has_several_slots() -> None:
    ActorSystem([role("a", calls=["b"]), role("b", calls=["a"], slots=2)])


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
    except InfeasibleError as error:
        assert error.problems
        return
    Ledger(cluster, (seat for process in plan.processes for seat in process.seats))  # raises if a seat is taken twice
    assert plan.workers == {one.name: one.workers for one in roles}
    if spread == "strict":
        assert all(set(plan.nodes_of(one.name).values()) == {1} for one in roles)
