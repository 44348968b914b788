"""Declaration of the key `simulate` of an actors file: who calls which method, and how long calls take. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dovetail.actors.scale_signal import OUTSTANDING, signal_parts
from dovetail.documents.fields import (
    Field,
    Mistake,
    Record,
    Type,
    WrongValue,
    list_of,
    mapping_of,
    number,
    record_type,
    whole,
)
from dovetail.errors import Problem, did_you_mean
from dovetail.pipeline.durations import DURATION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dovetail.actors.role import Role
    from dovetail.documents.fields import Located

BAD_ACTOR_SIMULATION = "DT507"
METHOD_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\.[A-Za-z_]\w*$"
QUEUE_DEPTH, IS_FULL, FILL = "queue_depth", "is_full", "fill"
STORE_SIGNALS = (IS_FULL, FILL)


def _method_mistakes(value: object) -> Iterator[Mistake]:
    if not isinstance(value, str) or not re.fullmatch(METHOD_PATTERN, value):
        yield WrongValue(value, "a role and a method, such as pool.put", instead=("pool.put",))


METHOD_NAME = Type("role.method", "pool.put", {"type": "string", "pattern": METHOD_PATTERN}, _method_mistakes)
_IS_METHOD = re.compile(METHOD_PATTERN)
CLIENT = Record(
    "Client",
    "Calls from outside the system: at a rate, or by a number of callers that each wait for their result.",
    (
        Field("call", METHOD_NAME, "The method that is called.", required=True),
        Field("rate", number(1e-6, 1e6), "Calls per second; instead of callers."),
        Field("callers", whole(1, 100_000), "Callers, each with one call at a time; instead of rate."),
        Field("pause", DURATION, "Time between a result and the next call of a caller; none if left out."),
        Field("start", DURATION, "Time of the first call; the beginning if left out."),
        Field("end", DURATION, "Time of the last call; the end of the simulation if left out."),
    ),
)
METHOD = Record(
    "Method",
    "How a method spends its time.",
    (
        Field("time", DURATION, "Mean time of its own work; none if left out."),
        Field("variation", number(0.0, 5.0), "Sigma of the lognormal distribution of the time.", 0.3),
        Field("calls", list_of(METHOD_NAME, "a list of methods"), "Methods that it calls and waits for, in order."),
    ),
)
_AMOUNTS = mapping_of(
    whole(1, 1_000_000_000),
    "a mapping of methods to numbers of items",
    {"pool.put": 1},
    key=lambda name: bool(_IS_METHOD.match(name)),
    key_text="a role and a method",
)
STORE = Record(
    "Store",
    "Items that instances of a role keep, such as the trajectories of a pool; signals: ROLE.is_full and ROLE.fill.",
    (
        Field("capacity", whole(1, 1_000_000_000_000), "Items that fit; further ones are dropped.", required=True),
        Field("adds", _AMOUNTS, "Items that a call of a method adds."),
        Field("takes", _AMOUNTS, "Items that a call of a method takes out, if there are as many."),
    ),
)
EXAMPLE_CLIENT = {"call": "rollout.generate", "callers": 64}
EXAMPLE_METHODS = {"rollout.generate": {"time": "500ms", "calls": ["pool.put"]}}
EXAMPLE_STORES = {"pool": {"capacity": 1000, "adds": {"pool.put": 1}, "takes": {"pool.take": 32}}}
EXAMPLE_SIMULATION = {"clients": [EXAMPLE_CLIENT], "methods": EXAMPLE_METHODS}
SIMULATION = Record(
    "Simulate",
    "The call pattern and the service times for `dovetail simulate`.",
    (
        Field("duration", DURATION, "Time to simulate.", "10m"),
        Field("setup", DURATION, "Time until an instance that starts is ready.", "1s"),
        Field(
            "clients", list_of(record_type(CLIENT, EXAMPLE_CLIENT), "a list of [clients](#client)"), "", required=True
        ),
        Field("methods", mapping_of(record_type(METHOD), "[methods](#method) by name", EXAMPLE_METHODS), ""),
        Field("stores", mapping_of(record_type(STORE), "[stores](#store) by role", EXAMPLE_STORES), ""),
    ),
)
SIMULATION_VALUE = Type(
    "[simulate](#simulate)", EXAMPLE_SIMULATION, SIMULATION.schema(), record_type(SIMULATION, EXAMPLE_SIMULATION).check
)


def simulation_problems(data: Mapping[str, Any], roles: Sequence[Role]) -> Iterator[Located]:
    """Problems across the values of a call pattern, with their paths; each value by itself was checked before."""
    names = [role.name for role in roles]
    methods = data.get("methods") or {}
    for path, method in _methods_in(data):
        role = method.rpartition(".")[0]
        if role not in names:
            message = f"{method!r}: there is no role {role!r}{did_you_mean(role, names)}"
            yield path, Problem(BAD_ACTOR_SIMULATION, message, (f"roles: {', '.join(names)}",), ("correct the name",))
        elif method not in methods:
            message = f"{method!r} has no service time"
            yield path, Problem(BAD_ACTOR_SIMULATION, message, fixes=(f"{method}: {{time: 100ms}}   # under methods:",))
    for number_, client in enumerate(data.get("clients") or ()):
        if ("rate" in client) == ("callers" in client):
            message = f"client {number_ + 1}: set either rate or callers"
            yield ("clients", number_), Problem(BAD_ACTOR_SIMULATION, message, fixes=("callers: 64", "rate: 10"))
    for store in data.get("stores") or {}:
        if store not in names:
            message = f"store {store!r}: there is no role of this name{did_you_mean(store, names)}"
            yield ("stores", store), Problem(BAD_ACTOR_SIMULATION, message, fixes=("correct the name",))
    yield from _signal_problems(data, roles)


def _methods_in(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Every method that the pattern names, with its path."""
    for number_, client in enumerate(data.get("clients") or ()):
        yield ("clients", number_, "call"), client["call"]
    for name, method in (data.get("methods") or {}).items():
        yield ("methods", name), name
        for entry, called in enumerate((method or {}).get("calls") or ()):
            yield ("methods", name, "calls", entry), called
    for store, entry_ in (data.get("stores") or {}).items():
        for key in ("adds", "takes"):
            for method_name in entry_.get(key) or {}:
                yield ("stores", store, key, method_name), method_name


def _signal_problems(data: Mapping[str, Any], roles: Sequence[Role]) -> Iterator[Located]:
    for role in roles:
        if role.scale is None:
            continue
        of, signal = signal_parts(role)
        known = [OUTSTANDING, QUEUE_DEPTH] + [
            f"{one}.{name}" for one in data.get("stores") or {} for name in STORE_SIGNALS
        ]
        if signal in (OUTSTANDING, QUEUE_DEPTH) or f"{of}.{signal}" in known:
            continue
        message = f"role {role.name!r} is scaled by {signal!r} of {of!r}, which a simulation does not have"
        fixes = (f"stores: {{{of}: {{capacity: 1000}}}}",) if signal in STORE_SIGNALS else ("signal: outstanding",)
        yield ("clients",), Problem(BAD_ACTOR_SIMULATION, message, (f"signals: {', '.join(known)}",), fixes)
