"""The text of `dovetail explain actors.yaml ROLE`: what a role needs, where it runs, and which rules decide. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.actors.actor_plan import nodes_text
from dovetail.actors.role_profiles import PROFILES
from dovetail.text_format import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dovetail.actors.actor_plan import ActorPlan
    from dovetail.actors.role import Pool, Role


def explain_role(plan: ActorPlan, role: Role, pools: Mapping[str, Pool]) -> str:
    rows = list(_rows(plan, role, pools))
    width = max(len(label) for label, _ in rows)
    head = f"{role.name}: {format_count(plan.workers[role.name], 'instance')} of {_class_name(role)}"
    return "\n".join([head, *(f"  {label.ljust(width)}  {text}" for label, text in rows)])


def _rows(plan: ActorPlan, role: Role, pools: Mapping[str, Pool]) -> Iterator[tuple[str, str]]:
    yield "needs", f"{role.shape.describe()} each"
    if role.profile is not None:
        yield "profile", f"{role.profile}: {PROFILES[role.profile].meaning}"
    yield "slots", f"{format_count(role.slots or 1, 'call')} at a time per instance"
    if role.ranks > 1:
        yield "gang", f"{role.ranks} processes per instance, started and restarted together"
    template = next(one.template for one in plan.processes if any(name == role.name for name, _ in one.instances))
    if len(template.instances) > 1:
        members = ", ".join(name for name, _ in template.instances)
        yield "process", f"shared by {members}; it needs {template.shape.describe()}"
    elif role.colocation is not None:
        members = ", ".join(other.name for other in plan.roles if other.colocation == role.colocation)
        yield "together", f"on one node: {members}"
    if role.pool is not None:
        yield "pool", f"{role.pool}: {_pool_text(pools[role.pool])}"
    yield "nodes", nodes_text(plan, role.name)
    yield from _placement_rows(role)
    if role.after:
        yield "starts", f"after {', '.join(role.after)}"
    rules = role.restart_rules
    if rules.policy == "always":
        yield "restart", f"at most {rules.limit} times in {rules.window}, after {rules.backoff} at first"
    else:
        yield "restart", "never" if rules.policy == "never" else "never: its death fails the system"
    if role.health is not None:
        limits = role.health
        text = f"checked every {limits.period}, for at most {limits.timeout}"
        yield "health", f"{text}; {limits.failure_threshold} failures in succession restart it"
    if role.scale is not None:
        signal = role.scale.signal if isinstance(role.scale.signal, str) else "a function"
        direction = "fewer" if role.scale.inverse else "more"
        more = plan.room.get(role.name, 0)
        text = f"{role.low} to {role.high} workers; {signal} above {role.scale.target:g} means {direction}"
        yield "scale", f"{text}; {more} more fit now"
    elif role.low != role.high:
        yield "workers", f"{role.low} to {role.high}; as many as fit"


def _placement_rows(role: Role) -> Iterator[tuple[str, str]]:
    if role.spread:
        yield "spread", "one per node" if role.spread == "strict" else "on as many nodes as possible"
    if role.pack:
        yield "pack", "all on one node" if role.pack == "strict" else "on as few nodes as possible"
    if role.affinity is not None:
        labels = [f"nodes with {label}={value}" for label, value in role.affinity.labels.items()]
        near = [f"near {name}" for name in role.near]
        apart = [f"apart from {name}" for name in role.apart]
        yield "affinity", ", ".join([*labels, *near, *apart])


def _pool_text(pool: Pool) -> str:
    labels = ", ".join(f"{label}={value}" for label, value in pool.labels.items())
    limits = {"CPUs": pool.cpus, "GPUs": pool.gpus, "memory": pool.memory}
    quota = ", ".join(f"{value} {name}" for name, value in limits.items() if value is not None)
    return f"{f'nodes with {labels}' if labels else 'all nodes'}{f', at most {quota}' if quota else ''}"


def _class_name(role: Role) -> str:
    return role.cls if isinstance(role.cls, str) else getattr(role.cls, "__qualname__", repr(role.cls))
