"""Stage: one step of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, Self

from dovetail.documents.fields import unknown_argument_problem
from dovetail.errors import PipelineError, Problem, nearest_word
from dovetail.pipeline.durations import parse_duration
from dovetail.pipeline.error_policy import ErrorPolicy, Retry, parse_error_policy
from dovetail.pipeline.failure_rules import FailureAction, FailureRules, exception_name, make_failure_rules
from dovetail.pipeline.stage_code import StageCode
from dovetail.resources.resources import Resources

if TYPE_CHECKING:
    from dovetail.resources.shape import Shape

Run = Callable[..., Any] | str
"""A function, a class, or "package.module:name" of one."""
Workers = Literal["auto"] | int | tuple[int, int]
PartialBatches = Literal["end", "epoch"]
ONE_CPU = Resources()
GANG_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Environment variables by which the ranks of a gang find each other, named as by torchrun."""


@dataclass(frozen=True)
class Stage:
    """One step of a pipeline: a function or class, and the resources of each worker. `Pipeline` validates it."""

    name: str
    run: Run
    resources: Resources = ONE_CPU
    _: KW_ONLY
    batch_size: int = 1
    """Items per call."""
    partial_batches: PartialBatches = "end"
    """When a call may get fewer items: at the end of the input, or of each epoch, so that a resume repeats less."""
    workers: Workers = "auto"
    """Number of workers: "auto", n, or (minimum, maximum)."""
    workers_per_node: int | None = None
    slots: int | None = None
    """Batches in flight per worker."""
    rate: float | None = None
    """Items per second that one worker takes in; None: measured."""
    returns: float | None = None
    """Items out per item in; None: measured."""
    ranks: int = 1
    """Processes per worker, each with `resources`."""
    retries: int = 3
    on_error: Literal["fail", "skip"] | Retry = "fail"
    """When a call fails: fail the run, skip its items, or retry it in its worker (`dt.Retry`)."""
    on_death: Literal["fail", "skip"] | Retry | None = None
    """When the worker dies in a call, or is killed after its timeout; None: as on_error, after `retries` retries."""
    on_failure: FailureAction | Mapping[Any, FailureAction] | None = None
    """What an exception means for its worker, by type: "retry" keeps the worker, "restart" replaces it."""
    timeout: float | str | None = None
    """Time limit of one call: seconds, or "90s", "5m", "1h"."""
    setup_timeout: float | str | None = None
    max_setup_failures: int | None = None
    """The run fails when more setups of its workers than this fail in a row."""
    env: Mapping[str, str] | None = None
    runtime_env: Mapping[str, Any] | None = None
    after: Sequence[str] | None = None
    """None: the stage before it in the list; []: a source."""
    fuse: bool = True
    """Whether it may share workers with a neighbour."""
    barrier: bool = False
    """Whether it needs all of its input before it returns any output."""
    recycle: int | str | None = None
    """Replace a worker after this number of batches, or at this age ("1h")."""

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        stage = super().__new__(cls)
        names = [item.name for item in fields(cls)]
        if not named.keys() <= set(names):
            raise PipelineError(_unknown_arguments({**dict(zip(names, arguments, strict=False)), **named}, names))
        given = frozenset(named) | frozenset(names[: len(arguments)])
        object.__setattr__(stage, "_given", given)
        return stage

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            plain = _plain(value)
            if plain is not value:
                object.__setattr__(self, item.name, plain)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Stage:
        """The same stage with these values for the fields that it was not given."""
        given: frozenset[str] = getattr(self, "_given", frozenset())
        missing = {name: value for name, value in defaults.items() if name not in given}
        return replace(self, **missing) if missing else self

    def __hash__(self) -> int:
        return hash((Stage, self.name))

    @property
    def shape(self) -> Shape:
        return self.resources.shape(self.ranks)

    @property
    def error_policy(self) -> ErrorPolicy:
        return parse_error_policy(self.on_error)

    def code(self) -> StageCode:
        """What its workers need."""
        policy = self.error_policy
        return StageCode(
            name=self.name,
            run=self.run,
            batch_size=self.batch_size,
            barrier=self.barrier,
            retry=policy if policy.retry else None,
            timeout_s=self.timeout_s,
            failure_rules=self.failure_rules,
            env=self.env,
            runtime_env=self.runtime_env,
        )

    @property
    def death_policy(self) -> ErrorPolicy:
        return ErrorPolicy(self.error_policy.then) if self.on_death is None else parse_error_policy(self.on_death)

    @property
    def failure_rules(self) -> FailureRules:
        """Names of exception types and what they mean for the worker; "*": all others."""
        return make_failure_rules(self.on_failure)

    @property
    def timeout_s(self) -> float | None:
        return None if self.timeout is None else parse_duration(self.timeout)

    @property
    def setup_timeout_s(self) -> float | None:
        return None if self.setup_timeout is None else parse_duration(self.setup_timeout)

    @property
    def recycle_batches(self) -> int | None:
        return self.recycle if isinstance(self.recycle, int) else None

    @property
    def recycle_s(self) -> float | None:
        return parse_duration(self.recycle) if isinstance(self.recycle, str) else None


def _plain(value: object) -> object:
    """Convert numbers of numpy to Python; copy lists and mappings, so that later changes have no effect."""
    if isinstance(value, bool | int):
        return value
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, dict):
        return {exception_name(key): inner for key, inner in value.items()}
    try:
        if isinstance(value, Integral):
            return int(value)
        return float(value) if isinstance(value, Real) else value
    except (OverflowError, ValueError):
        return value


def _unknown_arguments(given: Mapping[str, Any], names: Sequence[str]) -> list[Problem]:
    """Problems of arguments that a stage does not have; those of its resources have one fix."""
    label = f"stage {given['name']!r}" if isinstance(given.get("name"), str) else "a stage"
    resource_names = [item.name for item in fields(Resources)]
    problems, moved = [], {}
    for word in given.keys() - set(names):
        near = nearest_word(word, [*names, *resource_names])
        if near in resource_names:
            moved[word] = (near, given[word])
        else:
            problems.append(unknown_argument_problem(word, names, given[word], label))
    if moved:
        before = given.get("resources")
        kept = vars(before) if isinstance(before, Resources) else {}
        values = {name: value for name, value in kept.items() if value != getattr(ONE_CPU, name)} | dict(moved.values())
        fix = f"resources=dt.Resources({', '.join(f'{name}={value!r}' for name, value in values.items())})"
        words = ", ".join(map(repr, sorted(moved)))
        message = f"{label}: unknown argument {words}: what a worker needs belongs to `resources`"
        problems.append(Problem("DT011", message, fixes=(fix,)))
    return sorted(problems, key=lambda problem: problem.message)
