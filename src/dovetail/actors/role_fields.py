"""Declaration of the fields of roles, pools, colocation, scaling and restarts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.actors.role import Affinity, Health, Pool, Restart, Role, Scale, Together
from dovetail.actors.role_profiles import PROFILES
from dovetail.documents.fields import (
    TEXT,
    Field,
    Mistake,
    Record,
    Type,
    WrongValue,
    choice,
    flag,
    is_int,
    list_of,
    mapping_of,
    number,
    predicate,
    record_of,
    setting_problem,
    whole,
)
from dovetail.errors import Expression, ObjectSource, nearest_word, python_literal
from dovetail.pipeline.durations import DURATION
from dovetail.pipeline.stage_fields import (
    ENV,
    NAME,
    RESOURCES_VALUE,
    RUN_PATTERN,
    RUNTIME_ENV,
    SLOTS_LIMIT,
    WORKERS_LIMIT,
)
from dovetail.resources.resources import CPUS_LIMIT, GPUS_LIMIT, RANKS_LIMIT, amount, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.documents.fields import Schema
    from dovetail.errors import Problem

BAD_ROLE = "DT501"
CLASS_TEXT = "`package.module:name`; in Python also a class or a function that returns an object"
CLASS_EXAMPLE = "my_package.my_module:Trainer"
WORKERS_TEXT = "a number, or [minimum, maximum]"
PLACEMENT_TEXT = "true, false or strict"
SIGNAL_PATTERN = r"^([A-Za-z0-9_][A-Za-z0-9_.-]*\.)?[A-Za-z_]\w*$"
RESTART_POLICIES = ("always", "never", "fail")


def _class_mistakes(value: object) -> Iterator[Mistake]:
    if isinstance(value, str):
        if not re.fullmatch(RUN_PATTERN, value):
            yield WrongValue(value, CLASS_TEXT, "is not the module and name of a class", (CLASS_EXAMPLE,))
    elif not callable(value):
        yield WrongValue(value, CLASS_TEXT, "is not a class, a function or a string", (CLASS_EXAMPLE,))


def _workers_mistakes(workers: object) -> Iterator[Mistake]:
    if isinstance(workers, tuple | list) and len(workers) == 2 and all(map(is_int, workers)):
        low, high = (min(max(1, count), WORKERS_LIMIT) for count in sorted(workers))
        if tuple(workers) != (low, high):
            reason = f"is not (minimum, maximum) with 1 <= minimum <= maximum <= {WORKERS_LIMIT}"
            yield WrongValue(workers, WORKERS_TEXT, reason, ((low, high),))
    elif is_int(workers):
        yield from WORKER_COUNT.check(workers)
    else:
        yield WrongValue(workers, WORKERS_TEXT, "is not a whole number, or (minimum, maximum)", (1, (1, 4)))


def _object_type(
    kind: type,
    example: object,
    words: tuple[str, ...] | None = (),
    words_text: str = "",
    words_schema: Schema | None = None,
) -> Type:
    """Type of a value that is an object of this class in Python and its mapping in a file, or one of some words (None:
    any text)."""
    record = RECORDS[kind]
    name = record.title.lower()
    prefix = f"{words_text}, or " if words_text else ""
    defaults = {one.name: one.default for one in record.fields}
    shown = _constructor(record, {**defaults, **example}) if isinstance(example, Mapping) else example

    def mistakes(value: object) -> Iterator[Mistake]:
        if isinstance(value, kind):
            yield from _inner_mistakes(value)
        elif not isinstance(value, str) or not value or (words is not None and value not in words):
            near = nearest_word(value, words) if isinstance(value, str) and words else None
            yield WrongValue(value, f"{prefix}a dt.{record.title}", instead=(near or shown,))

    text = f"{prefix}{'an' if name[0] in 'aeiou' else 'a'} [{name}](#{name})"
    schema = {"anyOf": [words_schema, record.schema()]} if words_schema else record.schema()
    return Type(text, example, schema, mistakes)


def _inner_mistakes(value: object) -> Iterator[Mistake]:
    record = RECORDS[type(value)]
    values = {name: getattr(value, name) for name in record.names}
    for name, mistake in record.value_mistakes(values):
        assert isinstance(mistake, WrongValue)
        reason = f"has {name}={mistake.value!r}, which is not {mistake.expected}"
        instead = tuple(_constructor(record, {**values, name: valid}) for valid in mistake.instead)
        yield WrongValue(Expression(f"dt.{record.title}(...)"), mistake.expected, reason, instead[:1])


def _constructor(record: Record, values: Mapping[str, object]) -> ObjectSource:
    """The call that makes an object with these values, and its data in a file."""
    given = {name: values[name] for name, field in record.by_name.items() if values[name] != field.default}
    arguments = ", ".join(f"{name}={python_literal(value)}" for name, value in given.items())
    return ObjectSource(f"dt.{record.title}({arguments})", given)


def object_source(value: Affinity | Together) -> ObjectSource:
    """An object as the value of a fix."""
    record = RECORDS[type(value)]
    return _constructor(record, {name: getattr(value, name) for name in record.names})


def _is_signal(value: object) -> bool:
    return callable(value) or (isinstance(value, str) and re.fullmatch(SIGNAL_PATTERN, value) is not None)


def _is_placement(value: object) -> bool:
    return isinstance(value, bool) or value == "strict"


def _is_arguments(value: object) -> bool:
    return isinstance(value, list | tuple)


def _is_keywords(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) and name.isidentifier() for name in value)


WORKER_COUNT = whole(1, WORKERS_LIMIT)
_RANGE_SCHEMA = {"type": "array", "items": WORKER_COUNT.schema, "minItems": 2, "maxItems": 2}
CLASS = Type(CLASS_TEXT, CLASS_EXAMPLE, {"type": "string", "pattern": RUN_PATTERN}, _class_mistakes)
WORKERS = Type(WORKERS_TEXT, 1, {"anyOf": [WORKER_COUNT.schema, _RANGE_SCHEMA]}, _workers_mistakes)
PLACEMENT = predicate(PLACEMENT_TEXT, True, {"enum": [True, False, "strict"]}, _is_placement)
NAMES = list_of(NAME, "a list of names")
ARGUMENTS = predicate("a list", [], {"type": "array"}, _is_arguments)
KEYWORDS = predicate("a mapping with names for keys", {}, {"type": "object"}, _is_keywords)
VARIABLES = list_of(replace(NAME, example="WANDB_API_KEY"), "a list of variables")
LABELS = mapping_of(TEXT, "a mapping of labels to values", {"pool": "gpu"})
SIGNAL = predicate(
    "outstanding, a method, or role.method",
    "outstanding",
    {"type": "string", "pattern": SIGNAL_PATTERN},
    _is_signal,
)

TOGETHER = record_of(
    Together,
    "Together",
    "Colocation of roles.",
    (
        Field("group", NAME, "Name of the group."),
        Field("where", choice(("process", "node")), "In one process, or in processes on one node."),
        Field("share", choice(("sum", "max")), "Resources of one process: the sum, or the maximum of its roles."),
    ),
)
AFFINITY = record_of(
    Affinity,
    "Affinity",
    "The nodes that a role may use.",
    (
        Field("labels", LABELS, "Labels that the nodes must have."),
        Field("near", NAMES, "Roles that must have an instance on the same node."),
        Field("apart", NAMES, "Roles that must not have an instance on the same node."),
    ),
)
POOL = record_of(
    Pool,
    "Pool",
    "A named part of the cluster.",
    (
        Field("labels", LABELS, "Labels of its nodes."),
        Field("cpus", amount(CPUS_LIMIT * 1000, "a number"), "CPUs that its roles may use in all."),
        Field("gpus", amount(GPUS_LIMIT * 1000, "a number"), "GPUs that its roles may use in all."),
        Field("memory", size(may_be_zero=False), "Memory that its roles may use in all."),
    ),
)
SCALE = record_of(
    Scale,
    "Scale",
    "Scaling by load.",
    (
        Field("target", number(1e-9, 1e12), "Value of the signal to keep."),
        Field(
            "signal",
            SIGNAL,
            "Calls that are outstanding per instance, or a method that returns a number: of the role, or role.method.",
        ),
        Field("inverse", flag(False), "A higher signal means fewer workers."),
        Field("tolerance", number(0, 1), "Share of the target within which nothing changes."),
        Field("interval", DURATION, "Time between decisions."),
        Field("cooldown", DURATION, "Time after a change in which workers are not removed."),
    ),
)
RESTART = record_of(
    Restart,
    "Restart",
    "Restarts of instances that died.",
    (
        Field("policy", choice(RESTART_POLICIES), "Restart, leave dead, or fail the system."),
        Field("limit", whole(1, 1_000_000), "Restarts of one instance within the window."),
        Field("window", DURATION, "Time in which restarts are counted."),
        Field("backoff", DURATION, "Wait before the first restart; it doubles."),
    ),
)
HEALTH = record_of(
    Health,
    "Health",
    "Checks of the method `health` of a role.",
    (
        Field("period", DURATION, "Time between checks."),
        Field("timeout", DURATION, "Time in which `health` must return."),
        Field("failure_threshold", whole(1, 1_000_000), "Consecutive failures after which the process is restarted."),
    ),
)
RECORDS = {Affinity: AFFINITY, Together: TOGETHER, Pool: POOL, Scale: SCALE, Restart: RESTART, Health: HEALTH}
TOGETHER_VALUE = _object_type(Together, "train", None, "a group", NAME.schema)
RESTART_VALUE = _object_type(
    Restart, "always", RESTART_POLICIES, "always, never, fail", {"enum": list(RESTART_POLICIES)}
)
AFFINITY_VALUE = _object_type(Affinity, {"near": ["trainer"]})
HEALTH_VALUE = _object_type(Health, {"failure_threshold": 5})
SCALE_VALUE = _object_type(Scale, {"target": 4})

ROLE = record_of(
    Role,
    "Role",
    "One kind of long-lived actor.",
    (
        Field("name", NAME, "Name of the role; unique in the system."),
        Field("cls", CLASS, "The class, as 'package.module:name'."),
        Field("args", ARGUMENTS, "Positional arguments of the class."),
        Field("kwargs", KEYWORDS, "Keyword arguments of the class."),
        Field("profile", choice(tuple(PROFILES)), "Profile that gives the defaults of resources and slots."),
        Field("workers", WORKERS, "Number of instances: n, or [minimum, maximum]."),
        Field("resources", RESOURCES_VALUE, "What one instance needs; of a gang, one rank."),
        Field("slots", whole(1, SLOTS_LIMIT), "Calls that one instance executes at the same time."),
        Field("ranks", whole(1, RANKS_LIMIT), "Processes per instance."),
        Field("together", TOGETHER_VALUE, "Colocation with other roles."),
        Field("pool", NAME, "Pool of the cluster that it runs in."),
        Field("spread", PLACEMENT, "On as many nodes as possible; strict: one per node."),
        Field("pack", PLACEMENT, "On as few nodes as possible; strict: all on one node."),
        Field("affinity", AFFINITY_VALUE, "Nodes that it may use: by labels, and by other roles on them."),
        Field("env", ENV, "Environment variables of its processes."),
        Field("env_from", VARIABLES, "Variables of the driver that its processes get as well."),
        Field("runtime_env", RUNTIME_ENV, "Ray's runtime environment of its processes."),
        Field("restart", RESTART_VALUE, "What happens when an instance dies."),
        Field("health", HEALTH_VALUE, "Limits of health checks."),
        Field("after", NAMES, "Roles that must be ready before it starts."),
        Field("calls", NAMES, "Roles that its methods call and wait for."),
        Field("scale", SCALE_VALUE, "Scaling by load."),
    ),
)


def role_problems(role: Role, label: str) -> list[tuple[str, Problem]]:
    """(field, problem) for every invalid value."""
    values = {name: getattr(role, name) for name in ROLE.names}
    return [(name, setting_problem(name, mistake, BAD_ROLE, label)) for name, mistake in ROLE.value_mistakes(values)]
