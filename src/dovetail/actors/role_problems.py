"""Mistakes in the roles of a system: names, references, cycles, and calls that would deadlock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.actors.role import Pool, Role
from dovetail.actors.role_fields import BAD_ROLE, POOL, role_problems
from dovetail.documents.fields import Located, setting_problem
from dovetail.errors import UNSET, Change, Problem, Subject, did_you_mean, short_repr
from dovetail.pipeline.graph import find_cycles
from dovetail.pipeline.stage_fields import NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

UNKNOWN_NAME, CYCLE, DEADLOCK = "DT502", "DT503", "DT506"
ROLES_EXAMPLE = 'dt.ActorSystem([dt.Role("trainer", "my_package.my_module:Trainer")])'
REFERENCES = ("after", "near", "apart", "calls")


def system_problems(roles: Sequence[object], pools: Mapping[str, object], name: object) -> list[Located]:
    """All problems of these roles as a system, with their paths in a file."""
    found: list[Located] = [
        (("name",), setting_problem("name", mistake, BAD_ROLE, "actor system")) for mistake in NAME.check(name)
    ]
    if not roles:
        fixes = (f"write at least one: {ROLES_EXAMPLE}",)
        found.append((("roles",), Problem(BAD_ROLE, "an actor system without roles does nothing", fixes=fixes)))
    found += _pool_problems(pools)
    known = [(number, role) for number, role in enumerate(roles) if isinstance(role, Role)]
    for number, role in enumerate(roles):
        if not isinstance(role, Role):
            message = f"role {number + 1}: {short_repr(role)} is not a dt.Role"
            found.append((("roles", number), Problem(BAD_ROLE, message, fixes=(ROLES_EXAMPLE,))))
    wrong = [
        (("roles", number, field), problem)
        for number, role in known
        for field, problem in role_problems(role, f"role {short_repr(role.name)}")
    ]
    found += wrong
    if wrong:
        return found  # the values below must be of the right type
    return [
        *found,
        *_duplicate_names(known),
        *_placement_problems(known),
        *_reference_problems(known, pools),
        *_cycle_problems(known),
        *_deadlock_problems(known),
    ]


def _pool_problems(pools: Mapping[str, object]) -> Iterator[Located]:
    for name, pool in pools.items():
        if not isinstance(pool, Pool):
            message = f"pool {name!r}: {short_repr(pool)} is not a dt.Pool"
            yield ("pools", name), Problem(BAD_ROLE, message, fixes=('dt.Pool({"pool": "gpu"})',))
            continue
        values = {field: value for field in POOL.names if (value := getattr(pool, field)) is not None}
        for field, mistake in POOL.value_mistakes(values):
            yield ("pools", name, field), setting_problem(field, mistake, BAD_ROLE, f"pool {name!r}")


def _duplicate_names(roles: Sequence[tuple[int, Role]]) -> Iterator[Located]:
    first: dict[str, int] = {}
    for number, role in roles:
        if role.name in first:
            message = f"roles {first[role.name] + 1} and {number + 1} are both called {role.name!r}"
            yield ("roles", number, "name"), Problem(BAD_ROLE, message, fixes=(Change({"name": f"{role.name}_2"}),))
        first.setdefault(role.name, number)


def _placement_problems(roles: Sequence[tuple[int, Role]]) -> Iterator[Located]:
    for number, role in roles:
        if role.spread and role.pack:
            message = f"role {role.name!r}: spread and pack contradict each other: set only one of them"
            fixes = (Change({"spread": UNSET}), Change({"pack": UNSET}))
            yield ("roles", number, "spread"), Problem(BAD_ROLE, message, fixes=fixes, subject=_role(role))
        if role.scale is not None and role.low == role.high:
            message = f"role {role.name!r} has scale, but always {role.low} workers"
            fixes = (Change({"workers": (role.low, 4 * role.low)}), Change({"scale": UNSET}))
            yield ("roles", number, "scale"), Problem(BAD_ROLE, message, fixes=fixes, subject=_role(role))


def _reference_problems(roles: Sequence[tuple[int, Role]], pools: Mapping[str, object]) -> Iterator[Located]:
    names = list(dict.fromkeys(role.name for _, role in roles))
    for number, role in roles:
        if role.pool is not None and role.pool not in pools:
            near = did_you_mean(role.pool, pools)
            message = f"role {role.name!r}: there is no pool {role.pool!r}{near}"
            evidence = (f"pools: {', '.join(pools) or 'none'}",)
            fixes = (Change({"pool": near.split("'")[1]}) if near else Change({"pool": UNSET}),)
            yield ("roles", number, "pool"), Problem(UNKNOWN_NAME, message, evidence, fixes, subject=_role(role))
        for field in REFERENCES:
            given = list(getattr(role, field))
            for entry, name in enumerate(given):
                others = [other for other in names if other != role.name]
                if name in others or (name == role.name and field == "calls"):
                    continue
                near = did_you_mean(name, others)
                rest = [other for other in given if other != name] + ([near.split("'")[1]] if near else [])
                message = f"role {role.name!r}: {field} names {name!r}, which is not another role{near}"
                evidence = (f"roles: {', '.join(names)}",)
                fixes = (Change({field: rest or UNSET}),)
                yield (
                    ("roles", number, field, entry),
                    Problem(UNKNOWN_NAME, message, evidence, fixes, subject=_role(role)),
                )


def _cycle_problems(roles: Sequence[tuple[int, Role]]) -> Iterator[Located]:
    names = {role.name for _, role in roles}
    for field in ("after", "near"):
        edges = {
            role.name: tuple(name for name in dict.fromkeys(getattr(role, field)) if name in names - {role.name})
            for _, role in roles
        }
        for cycle in find_cycles(edges):
            number, role = next((number, role) for number, role in roles if role.name == cycle[0])
            rest = [name for name in getattr(role, field) if name != cycle[-1]]
            message = f"the roles wait for each other ({field}): {' -> '.join([*cycle, cycle[0]])}"
            fixes = (Change({field: rest or UNSET}),)
            yield ("roles", number, field), Problem(CYCLE, message, fixes=fixes, subject=_role(role))


def _deadlock_problems(roles: Sequence[tuple[int, Role]]) -> Iterator[Located]:
    """A cycle of calls in which every role executes one call at a time waits for itself."""
    by_name = {role.name: role for _, role in roles}
    single = {name for name, role in by_name.items() if (role.slots or 1) == 1 and role.profile is None}
    single |= {name for name, role in by_name.items() if role.profile == "trainer" and role.slots in (None, 1)}
    edges = {
        role.name: tuple(name for name in role.calls if name in single) for _, role in roles if role.name in single
    }
    for name, called in edges.items():
        if name in called:
            yield _deadlock(roles, by_name[name], [name])
    without_self = {name: tuple(other for other in called if other != name) for name, called in edges.items()}
    for cycle in find_cycles(without_self):
        yield _deadlock(roles, by_name[cycle[0]], cycle)


def _deadlock(roles: Sequence[tuple[int, Role]], role: Role, cycle: Sequence[str]) -> Located:
    number = next(number for number, one in roles if one is role)
    message = f"the calls of these roles wait for each other: {' -> '.join([*cycle, cycle[0]])}"
    evidence = ("each of them executes one call at a time (slots=1)",)
    problem = Problem(DEADLOCK, message, evidence, (Change({"slots": 2}),), subject=_role(role))
    return ("roles", number, "calls"), problem


def _role(role: Role) -> Subject:
    return Subject("role", role.name)
