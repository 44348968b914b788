"""Profiles of roles in reinforcement learning: the resources and slots that such roles usually need. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dovetail.actors.role import DEFAULT_POOL
from dovetail.resources.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Container

    from dovetail.actors.role import Role


class RoleProfile(NamedTuple):
    """Defaults of a role."""

    resources: Resources
    slots: int
    meaning: str


ONE_CPU = Resources(cpus=1)
PROFILES = {
    "rollout": RoleProfile(ONE_CPU, 100, "Generates trajectories; waits for an inference service most of the time."),
    "trainer": RoleProfile(Resources(cpus=4, gpus=1), 1, "Trains on its own GPU, one step at a time."),
    "remote_trainer": RoleProfile(ONE_CPU, 10, "Trains through a remote service."),
    "trajectory_pool": RoleProfile(ONE_CPU, 100, "Stores trajectories of many rollout workers."),
    "data_loader": RoleProfile(ONE_CPU, 10, "Reads and prepares batches."),
    "weight_sync": RoleProfile(ONE_CPU, 10, "Copies weights from the trainer to the inference service."),
    "validator": RoleProfile(ONE_CPU, 10, "Computes metrics from time to time."),
}


def with_profile(role: Role) -> Role:
    """The role with resources and slots: its own, else those of its profile, else one CPU and one slot."""
    defaults = PROFILES[role.profile] if role.profile is not None else RoleProfile(ONE_CPU, 1, "")
    resources = defaults.resources if role.resources is None else role.resources
    return replace(role, resources=resources, slots=role.slots or defaults.slots)


def complete_role(role: Role, pools: Container[str]) -> Role:
    """The role with the values that it leaves to its profile and to the pools of its system."""
    pool = DEFAULT_POOL if role.pool is None and DEFAULT_POOL in pools else role.pool
    return replace(with_profile(role), pool=pool)
