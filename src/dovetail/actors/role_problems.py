"""Mistakes in the roles of a system: names, references, cycles, and calls that would deadlock. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.actors.role import DEFAULT_POOL, Affinity, Pool, Role
from dovetail.actors.role_fields import BAD_ROLE, POOL, object_source, role_problems
from dovetail.actors.role_profiles import with_profile
from dovetail.actors.scale_signal import signal_parts
from dovetail.documents.fields import Located, setting_problem
from dovetail.errors import UNSET, Change, Problem, Subject, did_you_mean, nearest_word, short_repr
from dovetail.pipeline.graph import find_cycles
from dovetail.pipeline.stage_fields import NAME
from dovetail.text_format import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

UNKNOWN_NAME, CYCLE, DEADLOCK = "DT502", "DT503", "DT506"
ROLES_EXAMPLE = 'dt.ActorSystem([dt.Role("trainer", "my_package.my_module:Trainer")])'
AFFINITY_REFERENCES = ("near", "apart")
REFERENCES = ("after", "calls", *AFFINITY_REFERENCES)
RESERVED_NAMES = frozenset({"name", "roles", "scale", "status", "stop", "wait"})
"""Methods and attributes of a running system, which has its roles as attributes too."""


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
        for field, problem in role_problems(role, _label(role.name, number))
    ]
    found += wrong
    if wrong:
        return found  # the values below must be of the right type
    return [
        *found,
        *_name_problems(known),
        *_placement_problems(known),
        *_label_problems(known, pools),
        *_reference_problems(known, pools),
        *_cycle_problems(known),
        *_deadlock_problems(known),
    ]


def _label(name: object, number: int) -> str:
    return f"role {short_repr(name) if isinstance(name, str) else number + 1}"


def _pool_problems(pools: Mapping[str, object]) -> Iterator[Located]:
    for name, pool in pools.items():
        if not isinstance(pool, Pool):
            message = f"pool {name!r}: {short_repr(pool)} is not a dt.Pool"
            yield ("pools", name), Problem(BAD_ROLE, message, fixes=('dt.Pool({"pool": "gpu"})',))
            continue
        values = {field: value for field in POOL.names if (value := getattr(pool, field)) is not None}
        for field, mistake in POOL.value_mistakes(values):
            yield ("pools", name, field), setting_problem(field, mistake, BAD_ROLE, f"pool {name!r}")


def _name_problems(roles: Sequence[tuple[int, Role]]) -> Iterator[Located]:
    first: dict[str, int] = {}
    for number, role in roles:
        if role.name in first:
            message = f"roles {first[role.name] + 1} and {number + 1} are both called {role.name!r}"
            yield ("roles", number, "name"), Problem(BAD_ROLE, message, fixes=(Change({"name": f"{role.name}_2"}),))
        first.setdefault(role.name, number)
        if role.name in RESERVED_NAMES:
            message = f"role {role.name!r}: a running system has an attribute of this name"
            yield ("roles", number, "name"), Problem(BAD_ROLE, message, fixes=(Change({"name": f"{role.name}_role"}),))


def _placement_problems(roles: Sequence[tuple[int, Role]]) -> Iterator[Located]:
    for number, role in roles:
        if role.spread and role.pack:
            message = f"role {role.name!r}: spread and pack contradict each other: set only one of them"
            fixes = (Change({"spread": UNSET}), Change({"pack": UNSET}))
            yield ("roles", number, "spread"), Problem(BAD_ROLE, message, fixes=fixes, subject=_role(role))
        if role.pack == "strict" and role.low != role.high:
            message = f'role {role.name!r}: pack="strict" places all workers at once, but their number varies'
            fixes = (Change({"pack": True}), Change({"workers": role.high}))
            yield ("roles", number, "pack"), Problem(BAD_ROLE, message, fixes=fixes, subject=_role(role))
        if role.scale is not None and role.low == role.high:
            message = f"role {role.name!r} has scale, but always {format_count(role.low, 'worker')}"
            fixes = (Change({"workers": (role.low, 4 * role.low)}), Change({"scale": UNSET}))
            yield ("roles", number, "scale"), Problem(BAD_ROLE, message, fixes=fixes, subject=_role(role))


def _label_problems(roles: Sequence[tuple[int, Role]], pools: Mapping[str, object]) -> Iterator[Located]:
    """Labels for which a role, its resources and its pool have different values."""
    for number, role in roles:
        pool = pools.get(role.pool or DEFAULT_POOL)
        sources = {
            "its pool": pool.labels if isinstance(pool, Pool) else {},
            "resources": {} if role.resources is None else role.resources.labels,
            "affinity": {} if role.affinity is None else role.affinity.labels,
        }
        for label in dict.fromkeys(label for labels in sources.values() for label in labels):
            given = {source: labels[label] for source, labels in sources.items() if label in labels}
            if len(set(given.values())) > 1:
                shown = ", ".join(f"{value!r} in {source}" for source, value in given.items())
                message = f"role {role.name!r}: no node has two values of the label {label!r}: {shown}"
                fixes = (f"remove the label {label!r} from all but one of them",)
                yield ("roles", number), Problem(BAD_ROLE, message, fixes=fixes, subject=_role(role))


def _reference_problems(roles: Sequence[tuple[int, Role]], pools: Mapping[str, object]) -> Iterator[Located]:
    names = list(dict.fromkeys(role.name for _, role in roles))
    for number, role in roles:
        if role.pool is not None and role.pool not in pools:
            near = nearest_word(role.pool, pools)
            message = f"role {role.name!r}: there is no pool {role.pool!r}{did_you_mean(role.pool, pools)}"
            evidence = (f"pools: {', '.join(pools) or 'none'}",)
            fixes = (Change({"pool": UNSET if near is None else near}),)
            yield ("roles", number, "pool"), Problem(UNKNOWN_NAME, message, evidence, fixes, subject=_role(role))
        if role.scale is not None and (of := signal_parts(role)[0]) not in names:
            message = f"role {role.name!r}: its signal is of {of!r}, which is not a role{did_you_mean(of, names)}"
            evidence = (f"roles: {', '.join(names)}",)
            problem = Problem(UNKNOWN_NAME, message, evidence, ("correct the name in signal",), subject=_role(role))
            yield ("roles", number, "scale", "signal"), problem
        for field in REFERENCES:
            for entry, name in enumerate(getattr(role, field)):
                others = [other for other in names if other != role.name]
                if name not in others and not (name == role.name and field == "calls"):
                    yield _unknown_role((number, role), field, entry, others)


def _unknown_role(at: tuple[int, Role], field: str, entry: int, others: Sequence[str]) -> Located:
    number, role = at
    given = list(getattr(role, field))
    near = nearest_word(given[entry], others)
    corrected = [*given[:entry], *([] if near is None else [near]), *given[entry + 1 :]]
    is_itself = given[entry] == role.name
    reason = "which is the role itself" if is_itself else f"which is not a role{did_you_mean(given[entry], others)}"
    message = f"role {role.name!r}: {field} names {given[entry]!r}, {reason}"
    evidence = (f"other roles: {', '.join(others) or 'none'}",)
    problem = Problem(UNKNOWN_NAME, message, evidence, (_change_of(role, field, corrected),), subject=_role(role))
    return ("roles", number, *_path_of(field), entry), problem


def _path_of(field: str) -> tuple[str, ...]:
    return ("affinity", field) if field in AFFINITY_REFERENCES else (field,)


def _change_of(role: Role, field: str, names: Sequence[str]) -> Change:
    """Other names in a list of roles."""
    if field not in AFFINITY_REFERENCES:
        return Change({field: list(names) or UNSET})
    changed = replace(role.affinity or Affinity(), **{field: tuple(names)})  # type: ignore[arg-type]
    return Change({"affinity": UNSET if changed == Affinity() else object_source(changed)})


def _cycle_problems(roles: Sequence[tuple[int, Role]]) -> Iterator[Located]:
    by_name = {role.name: (number, role) for number, role in roles}
    for field, text in (("after", "start after"), ("near", "must be near")):
        edges = {
            name: tuple(dict.fromkeys(other for other in getattr(role, field) if other in by_name and other != name))
            for name, (_, role) in by_name.items()
        }
        for cycle in find_cycles(edges):
            number, role = by_name[cycle[0]]
            rest = [name for name in getattr(role, field) if name != cycle[-1]]
            message = f"these roles {text} each other ({field}): {' -> '.join([*cycle, cycle[0]])}"
            fixes = (_change_of(role, field, rest),)
            yield ("roles", number, *_path_of(field)), Problem(CYCLE, message, fixes=fixes, subject=_role(role))


def _deadlock_problems(roles: Sequence[tuple[int, Role]]) -> Iterator[Located]:
    """Calls that come back to a role while its only slot waits for them."""
    calls = {role.name: tuple(dict.fromkeys(role.calls)) for _, role in roles}
    reported: set[frozenset[str]] = set()
    for number, role in roles:
        if with_profile(role).slots != 1:
            continue
        cycle = _shortest_cycle(role.name, calls)
        if not cycle or frozenset(cycle) in reported:
            continue
        reported.add(frozenset(cycle))
        message = f"calls of {role.name!r} can wait for themselves: {' -> '.join([*cycle, role.name])}"
        evidence = (f"{role.name!r} executes one call at a time (slots=1), and its calls lead back to it",)
        others = [name for name in role.calls if name != cycle[1 % len(cycle)]]
        fixes = (Change({"slots": 2}), Change({"calls": others or UNSET}))
        yield ("roles", number, "calls"), Problem(DEADLOCK, message, evidence, fixes, subject=_role(role))


def _shortest_cycle(start: str, calls: Mapping[str, Sequence[str]]) -> list[str]:
    """The roles on the shortest way from a role back to itself; empty if there is none."""
    waiting, seen = [[start]], {start}
    for path in waiting:  # grows while it is read
        for name in calls.get(path[-1], ()):
            if name == start:
                return path
            if name not in seen:
                seen.add(name)
                waiting.append([*path, name])
    return []


def _role(role: Role) -> Subject:
    return Subject("role", role.name)
