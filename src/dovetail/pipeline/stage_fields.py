"""Declaration of the fields of a stage, and the checks across them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from dovetail.documents.fields import (
    Field,
    Mistake,
    Noted,
    Record,
    Type,
    WrongValue,
    choice,
    flag,
    is_int,
    is_quotable,
    mapping_of,
    number,
    number_in,
    predicate,
    record_of,
    setting_problem,
    whole,
)
from dovetail.errors import UNSET, Change, ObjectSource, Problem, Subject, did_you_mean, nearest_word, short_repr
from dovetail.pipeline.durations import DURATION, DURATION_TEXT_SCHEMA
from dovetail.pipeline.error_policy import FINAL_ACTIONS, RETRY, Retry
from dovetail.pipeline.failure_rules import ANY_EXCEPTION, FAILURE_ACTIONS
from dovetail.pipeline.stage import GANG_VARIABLES, PartialBatches, Stage
from dovetail.pipeline.stage_function import Each, converts_items, has_callable_objects
from dovetail.resources.resources import RANKS_LIMIT, Resources

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME_LIMIT = 100
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
RUN_PATTERN = r"^(?!.*\.py:)[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*$"
RUN_EXAMPLE = "my_package.my_module:my_function"
WORKERS_LIMIT = 1_000_000
SLOTS_LIMIT = 10_000
RECYCLE_LIMIT = 10**9
PARTIAL_BATCHES = get_args(PartialBatches)
NO_STAGE = Noted([], "for a source")
AFTER_NOTHING = Change({"after": NO_STAGE.value}, note=NO_STAGE.note)


def stage_problems(stage: Stage, label: str = "") -> list[tuple[str, Problem]]:
    """(field, problem) for every invalid value; `label` is the name of the stage in messages."""
    values = {name: getattr(stage, name) for name in STAGE.names}
    found = [(name, setting_problem(name, mistake, "DT034", label)) for name, mistake in STAGE.value_mistakes(values)]
    return [*found, *_combination_problems(stage, label)]


def _combination_problems(stage: Stage, label: str) -> Iterator[tuple[str, Problem]]:
    """Problems of two fields together."""
    prefix = f"{label}: " if label else ""
    per_node, workers = stage.workers_per_node, stage.workers
    if per_node is not None and not (isinstance(workers, str) and workers == "auto"):
        message = f"{prefix}workers={short_repr(workers)} together with workers_per_node={short_repr(per_node)}"
        fixes = (Change({"workers": UNSET}), Change({"workers_per_node": UNSET}))
        problem = Problem("DT034", f"{message}: set only one of them", fixes=fixes)
        yield "workers", replace(problem, subject=Subject("setting", "workers"))
    env = stage.env if isinstance(stage.env, Mapping) else {}
    fixed = [name for name in GANG_VARIABLES if name in env and is_int(stage.ranks) and stage.ranks > 1]
    if fixed:
        message = f"{prefix}{', '.join(fixed)} {'is' if len(fixed) == 1 else 'are'} set by Dovetail for every rank"
        rest = {name: value for name, value in env.items() if name not in fixed}
        problem = Problem("DT034", message, fixes=(Change({"env": rest or UNSET}),))
        yield "env", replace(problem, subject=Subject("setting", "env"))
    if isinstance(stage.on_error, Retry) and stage.barrier is True:
        message = f"{prefix}on_error=Retry(...) together with barrier=True: a barrier is retried as a whole"
        problem = Problem("DT034", message, fixes=(Change({"on_error": "fail", "retries": 3}),))
        yield "on_error", replace(problem, subject=Subject("setting", "on_error"))
    if names := _policy_names(stage):
        message = f"{prefix}on_death=Retry({', '.join(names)}, ...): a worker that dies raises no exception; name none"
        problem = Problem("DT034", message, fixes=(Change({"on_death": "skip"}), Change({"on_death": UNSET})))
        yield "on_death", replace(problem, subject=Subject("setting", "on_death"))


def _policy_names(stage: Stage) -> tuple[str, ...]:
    """Exception types that `on_death` names."""
    policy = stage.on_death.policy if isinstance(stage.on_death, Retry) else None
    return () if policy is None else tuple(name for name in policy.retry if name != ANY_EXCEPTION)


def quote_value(value: object) -> str:
    """A value as both Python and YAML write it."""
    return json.dumps(value, ensure_ascii=False)


def similar_name(name: str) -> str:
    """A valid name like this one."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_.-")[:NAME_LIMIT] or "caption"


# --- types


def _name_mistakes(name: object) -> Iterator[Mistake]:
    if not isinstance(name, str):
        usable = is_int(name) and 0 <= name < 10**NAME_LIMIT
        yield WrongValue(name, "a name", "is not a string", (str(name) if usable else "caption",))
        return
    near = similar_name(name)
    if not name:
        yield WrongValue(name, "a name", "is empty", (near,))
    elif len(name) > NAME_LIMIT:
        yield WrongValue(name, "a name", f"has {len(name)} letters, more than {NAME_LIMIT}", (near,))
    elif not re.fullmatch(NAME_PATTERN, name):
        reason = "has other characters than letters, digits, _ - . or begins with - or ."
        yield WrongValue(name, "a name", reason, (near,))


def _run_mistakes(run: object) -> Iterator[Mistake]:
    if isinstance(run, str):
        if not re.fullmatch(RUN_PATTERN, run):
            yield WrongValue(run, RUN_TEXT, "is not the module and name of a function or class", (_similar_run(run),))
        return
    inner = run.fn if isinstance(run, Each) else run
    if not callable(inner):
        yield WrongValue(run, RUN_TEXT, "is not a function, a class or a string", (RUN_EXAMPLE,))
    elif isinstance(inner, type) and not (
        has_callable_objects(inner) or (isinstance(run, Each) and converts_items(inner))
    ):
        reason = "is a class whose objects cannot be called: it has no method __call__(self, items)"
        yield WrongValue(inner, RUN_TEXT, reason, (RUN_EXAMPLE,))


def _similar_run(text: str) -> str:
    module, _, name = text.strip().removesuffix("()").replace(".py:", ":").rpartition(":" if ":" in text else ".")
    near = f"{module.replace('/', '.')}:{name}"
    return near if re.fullmatch(RUN_PATTERN, near) else RUN_EXAMPLE


def _resources_mistakes(value: object) -> Iterator[Mistake]:
    if not isinstance(value, Resources):
        yield WrongValue(value, "a dt.Resources", instead=(ObjectSource("dt.Resources(cpus=1)", {"cpus": 1}),))


def _workers_mistakes(workers: object) -> Iterator[Mistake]:
    if isinstance(workers, tuple) and len(workers) == 2 and all(map(is_int, workers)):
        low, high = (min(max(1, count), WORKERS_LIMIT) for count in sorted(workers))
        if workers != (low, high):
            reason = f"is not (minimum, maximum) with 1 <= minimum <= maximum <= {WORKERS_LIMIT}"
            yield WrongValue(workers, WORKERS_TEXT, reason, ((low, high),))
    elif is_int(workers) or (isinstance(workers, str) and number_in(workers) is not None):
        yield from WORKER_COUNT.check(workers)
    elif not (isinstance(workers, str) and workers == "auto"):
        near = did_you_mean(workers, ["auto"]) if isinstance(workers, str) else ""
        reason = f'is not "auto", a whole number, or (minimum, maximum){near}'
        yield WrongValue(workers, WORKERS_TEXT, reason, ("auto", 4, (1, 4)))


def _on_error_mistakes(value: object) -> Iterator[Mistake]:
    if isinstance(value, Retry) or (isinstance(value, str) and value in FINAL_ACTIONS):
        return
    near = nearest_word(value, FINAL_ACTIONS) if isinstance(value, str) else None
    hint = f" (did you mean {near!r}?)" if near is not None else ""
    meant = sorted(FINAL_ACTIONS, key=lambda action: action != near)
    yield WrongValue(value, ON_ERROR_TEXT, f'is not "fail", "skip" or Retry(...){hint}', tuple(meant))


def _on_failure_mistakes(value: object) -> Iterator[Mistake]:
    if isinstance(value, Mapping):
        yield from FAILURE_MAPPING.check(value)
    elif not (isinstance(value, str) and value in FAILURE_ACTIONS):
        yield WrongValue(value, ON_FAILURE_TEXT, instead=({"RuntimeError": "restart"}, *FAILURE_ACTIONS))


def _variable_mistakes(value: object) -> Iterator[Mistake]:
    if not isinstance(value, str) or "\0" in value:
        yield WrongValue(value, "a string", instead=(str(value),) if is_quotable(value) else ())


def _is_variable_name(name: str) -> bool:
    return bool(name) and "=" not in name and "\0" not in name


def _is_runtime_env(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _after_mistakes(after: object) -> Iterator[Mistake]:
    if isinstance(after, tuple) and all(isinstance(name, str) for name in after):
        return
    names = [after] if isinstance(after, str) else []
    if isinstance(after, tuple):
        names = [name for name in after if isinstance(name, str)]
    yield WrongValue(after, "a list of names", instead=(names,) if names else (NO_STAGE, UNSET))


def _recycle_mistakes(value: object) -> Iterator[Mistake]:
    if isinstance(value, str) and number_in(value) is None:
        yield from DURATION.check(value)
    elif isinstance(value, int | str) and not isinstance(value, bool):
        yield from RECYCLE_COUNT.check(value)
    else:
        reason = 'is not a whole number of batches, or an age such as "1h"'
        yield WrongValue(value, RECYCLE_TEXT, reason, (1000, "1h"))


NAME = Type(
    "a name",
    "read",
    {"type": "string", "minLength": 1, "maxLength": NAME_LIMIT, "pattern": NAME_PATTERN},
    _name_mistakes,
)
RUN_TEXT = "`package.module:name`; in Python also a function or class"
RUN = Type(RUN_TEXT, "my_package.my_module:read", {"type": "string", "pattern": RUN_PATTERN}, _run_mistakes)
RESOURCES_VALUE = Type("[resources](#resources)", {"cpus": 1}, {"$ref": "#/$defs/resources"}, _resources_mistakes)
WORKER_COUNT = whole(1, WORKERS_LIMIT)
WORKERS_TEXT = "auto, a number, or [minimum, maximum]"
_RANGE_SCHEMA = {"type": "array", "items": WORKER_COUNT.schema, "minItems": 2, "maxItems": 2}
WORKERS = Type(
    WORKERS_TEXT, "auto", {"anyOf": [{"const": "auto"}, WORKER_COUNT.schema, _RANGE_SCHEMA]}, _workers_mistakes
)
ON_ERROR_TEXT = "fail, skip, or the mapping of a [retry](#retry)"
ON_ERROR = Type(ON_ERROR_TEXT, "fail", {"anyOf": [{"enum": list(FINAL_ACTIONS)}, RETRY.schema()]}, _on_error_mistakes)
FAILURE_MAPPING = mapping_of(
    choice(FAILURE_ACTIONS),
    "a mapping of exception types to retry or restart",
    {"RuntimeError": "restart"},
    key_text="the name of an exception type",
)
ON_FAILURE_TEXT = "retry, restart, or a mapping of exception types to them"
ON_FAILURE = Type(
    ON_FAILURE_TEXT,
    {"RuntimeError": "restart"},
    {"anyOf": [{"enum": list(FAILURE_ACTIONS)}, FAILURE_MAPPING.schema]},
    _on_failure_mistakes,
)
ENV = mapping_of(
    Type("a string", "1", {"type": "string"}, _variable_mistakes),
    "a mapping of names to strings",
    {"OMP_NUM_THREADS": "1"},
    key=_is_variable_name,
    key_text="the name of a variable",
)
RUNTIME_ENV = predicate("a mapping with strings for keys", {"pip": ["torch"]}, {"type": "object"}, _is_runtime_env)
AFTER = Type("a list of names", ["read"], {"type": "array", "items": NAME.schema, "uniqueItems": True}, _after_mistakes)
RECYCLE_COUNT = whole(1, RECYCLE_LIMIT)
RECYCLE_TEXT = "a number of batches, or an age such as 1h"
RECYCLE = Type(RECYCLE_TEXT, 1000, {"anyOf": [RECYCLE_COUNT.schema, DURATION_TEXT_SCHEMA]}, _recycle_mistakes)

STAGE = record_of(
    Stage,
    "Stage",
    "One step of the pipeline.",
    (
        Field("name", NAME, "Name of the stage; unique in the pipeline."),
        Field("run", RUN, "The function or class, as 'package.module:name'."),
        Field("resources", RESOURCES_VALUE, "What one worker needs."),
        Field("batch_size", whole(1, 10_000_000), "Items per call."),
        Field(
            "partial_batches",
            choice(PARTIAL_BATCHES),
            "When a call may get fewer items than batch_size: at the end of the input, or of each epoch, which makes a "
            "resume repeat less.",
        ),
        Field("workers", WORKERS, "Number of workers: auto, n, or [minimum, maximum]."),
        Field("workers_per_node", whole(1, 10_000), "Number of workers on every node; instead of workers."),
        Field("slots", whole(1, SLOTS_LIMIT), "Batches in flight per worker."),
        Field(
            "rate",
            number(1e-9, 1e12, note="it is measured"),
            "Items per second that one worker takes in; measured if left out.",
        ),
        Field("returns", number(0.0, 1e9, note="it is measured"), "Items out per item in; measured if left out."),
        Field("ranks", whole(1, RANKS_LIMIT), "Processes per worker, each with these resources."),
        Field("retries", whole(0, 1_000), "Number of times that a failed batch is retried."),
        Field("on_error", ON_ERROR, "When a call fails: fail the run, skip its items, or retry it with backoff."),
        Field(
            "on_death",
            ON_ERROR,
            "When the worker dies in a call, or is killed after its timeout; as on_error if left out.",
        ),
        Field(
            "on_failure",
            ON_FAILURE,
            "What exceptions mean for the worker, by type: retry keeps it, restart replaces it; if left out, CUDA "
            "errors and the like replace it.",
        ),
        Field("timeout", DURATION, "Time limit of one call: seconds, or 90s, 5m, 1h."),
        Field("setup_timeout", DURATION, "Time limit for a worker to become ready: seconds, or 90s, 5m, 1h."),
        Field(
            "max_setup_failures",
            whole(0, 1_000_000),
            "Setups of its workers that may fail in a row; if left out, 30% of all setups may fail.",
        ),
        Field("env", ENV, "Environment variables of its workers."),
        Field("runtime_env", RUNTIME_ENV, "Ray's runtime environment of its workers."),
        Field("after", AFTER, "Stages it gets items from; the stage before it if left out, [] for a source."),
        Field("fuse", flag(True), "Allow it to share workers with a neighbour."),
        Field("barrier", flag(False), "Wait for all of its input before it returns any output."),
        Field("recycle", RECYCLE, "Replace a worker after this number of batches, or at an age such as 1h."),
    ),
)

DEFAULT_NAMES = (
    "resources",
    "batch_size",
    "partial_batches",
    "slots",
    "retries",
    "on_error",
    "on_death",
    "on_failure",
    "timeout",
    "setup_timeout",
    "max_setup_failures",
    "env",
    "runtime_env",
    "recycle",
)
"""Fields of a stage for which a pipeline can have a default; the others are about one stage."""
DEFAULTS = Record(
    "Defaults",
    "Values of all stages that do not have their own. A value of a stage replaces the default as a whole: `env` and "
    "`resources` are not merged.",
    tuple(replace(STAGE.by_name[name], default=UNSET) for name in DEFAULT_NAMES),
)


def default_problems(defaults: Mapping[str, object]) -> list[tuple[str, Problem]]:
    """(field, problem) for every invalid value in the defaults of a pipeline."""
    mistakes = DEFAULTS.value_mistakes(defaults)
    return [(name, setting_problem(name, mistake, "DT034", "defaults")) for name, mistake in mistakes]
