"""BackfillArguments: validation of the arguments of Table.backfill, with all problems reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.backfill.udf import MAX_BATCH_ROWS, MAX_SLOTS, is_whole_number, parse_timeout
from dovetail.errors import (
    Change,
    ConfigError,
    DovetailError,
    Given,
    Problem,
    Setting,
    Text,
    argument_problem,
    did_you_mean,
)
from dovetail.pipeline.durations import parse_duration
from dovetail.pipeline.error_policy import MAX_ERRORS_TEXT, parse_error_policy, parse_max_errors
from dovetail.runtime.arguments import engine_errors, share_errors

if TYPE_CHECKING:
    from dovetail.pipeline.error_policy import ErrorPolicy
    from dovetail.pipeline.stage import Workers
    from dovetail.resources.cluster import Cluster

BAD_BACKFILL_ARGUMENT = "DT437"
MAX_COUNT = 1_000_000
DEFAULT_COMMIT_EVERY = "10s"
ARGUMENT_NAMES: tuple[str, ...] = (
    *("workers", "batch_size", "slots", "where", "fragments", "on_error", "max_errors", "timeout", "engine"),
    *("cluster", "commit_every", "recompute", "wait", "progress", "share", "env_from", "trust_table"),
)
ALIASES = {"concurrency": "workers", "intra_applier_concurrency": "slots", "num_frags": "fragments"}
"""Geneva's name -> ours."""


@dataclass(frozen=True, slots=True)
class BackfillArguments:
    """Parsed arguments of a backfill."""

    workers: Workers = "auto"
    batch_size: int | None = None
    slots: int | None = None
    where: str | None = None
    fragments: int | tuple[int, ...] | None = None
    """Number of unfinished fragments, or ids."""
    on_error: ErrorPolicy | None = None
    max_errors: int | float | None = None
    """Maximum number (int) or share (float) of failed rows."""
    timeout_s: float | None = None
    engine: str = "local"
    cluster: Cluster | str = "auto"
    commit_every_s: float = 10.0
    recompute: bool = False
    wait: bool = True
    progress: bool | None = None
    share: float | None = None
    env_from: tuple[str, ...] = ()
    trust_table: bool = False
    """Load the function that the table names."""

    @property
    def recompute_fragments(self) -> bool:
        """Only the listed fragments are computed again."""
        return self.recompute and isinstance(self.fragments, tuple)


def parse_arguments(given: Mapping[str, Any]) -> BackfillArguments:
    """Parse arguments; ConfigError with all problems."""
    found, problems = validate_arguments(given)
    if found is None:
        raise ConfigError(problems)
    return found


def validate_arguments(given: Mapping[str, Any]) -> tuple[BackfillArguments | None, list[Problem]]:
    """The parsed arguments, or None and all problems."""
    checker = _ArgumentChecker(given)
    found: dict[str, Any] = {
        "workers": checker.workers(),
        "batch_size": checker.count("batch_size", MAX_BATCH_ROWS),
        "slots": checker.count("slots", MAX_SLOTS),
        "where": checker.where(),
        "fragments": checker.fragments(),
        "on_error": checker.on_error(),
        "max_errors": checker.max_errors(),
        "timeout_s": parse_timeout(checker.values.get("timeout"), checker.problems),
        "commit_every_s": checker.commit_interval(),
        "recompute": checker.flag("recompute", otherwise=False),
        "wait": checker.flag("wait", otherwise=True),
        "trust_table": checker.flag("trust_table", otherwise=False),
    }
    values = checker.values
    engine, env_from = values.get("engine", "local"), values.get("env_from", ())
    checker.problems += [*engine_errors(engine), *share_errors(engine, values.get("share"), env_from)]
    if "progress" in values:
        found["progress"] = checker.flag("progress", otherwise=True)
    found |= {name: values[name] for name in ("engine", "cluster", "share") if name in values}
    if checker.problems:
        return None, checker.problems
    return BackfillArguments(**found, env_from=tuple(env_from)), []


class _ArgumentChecker:
    """Values by our names, and problems by the names as given."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.problems: list[Problem] = []
        self.values: dict[str, Any] = {}
        """Values that were given; None counts as not given."""
        self.written: dict[str, str] = {}
        for name, value in given.items():
            ours = ALIASES.get(name, name)
            if ours not in ARGUMENT_NAMES:
                fix = f"one of: {', '.join(ARGUMENT_NAMES)}"
                near = did_you_mean(name, [*ARGUMENT_NAMES, *ALIASES])
                self.problems.append(Problem(BAD_BACKFILL_ARGUMENT, f"unknown argument {name}={near}", fixes=(fix,)))
            elif value is not None:
                self._add_value(ours, name, value)

    def _add_value(self, ours: str, name: str, value: Any) -> None:
        if ours in self.values and self.values[ours] != value:
            message = f"{self.written[ours]} and {name} are the same argument with different values"
            self.problems.append(Problem(BAD_BACKFILL_ARGUMENT, message, fixes=(Text("only ", Setting(ours)),)))
        else:
            self.values[ours], self.written[ours] = value, name

    def _add_problem(self, ours: str, what: str, *examples: object) -> None:
        problem = argument_problem(BAD_BACKFILL_ARGUMENT, self.written[ours], self.values[ours], what, *examples)
        self.problems.append(problem)

    def count(self, ours: str, most: int) -> int | None:
        value = self.values.get(ours)
        if value is None or _is_count(value, most=most):
            return value
        self._add_problem(ours, f"a whole number from 1 to {most:,}", 64)
        return None

    def workers(self) -> Workers:
        value = self.values.get("workers", "auto")
        if value == "auto" or _is_count(value):
            return value  # type: ignore[no-any-return]
        pair = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
        if pair and all(map(_is_count, value)) and value[0] <= value[1]:
            return value[0], value[1]
        self._add_problem("workers", '"auto", a number or a range', "auto", (1, 4))
        return "auto"

    def where(self) -> str | None:
        value = self.values.get("where")
        if value is None or (isinstance(value, str) and value.strip()):
            return value
        self._add_problem("where", "an SQL condition", "length(text) > 100")
        return None

    def fragments(self) -> int | tuple[int, ...] | None:
        value = self.values.get("fragments")
        if value is None or _is_count(value):
            return value
        listed = isinstance(value, Sequence) and not isinstance(value, str) and value
        if listed and all(_is_count(it, 0) for it in value):
            return tuple(dict.fromkeys(value))
        self._add_problem("fragments", "a number of fragments or a list of ids", [0])
        return None

    def on_error(self) -> ErrorPolicy | None:
        value = self.values.get("on_error")
        try:
            return None if value is None else parse_error_policy(value)
        except DovetailError as error:
            self.problems += error.problems
            return None

    def max_errors(self) -> int | float | None:
        """A count or a share (0.01 or "1%")."""
        try:
            return parse_max_errors(self.values.get("max_errors"))
        except ValueError:
            self._add_problem("max_errors", MAX_ERRORS_TEXT, 100)
            return None

    def commit_interval(self) -> float:
        value = self.values.get("commit_every", DEFAULT_COMMIT_EVERY)
        if value == 0 and not isinstance(value, bool):
            return 0.0
        try:
            return parse_duration(value)
        except ValueError as error:
            message = Text(Given("commit_every", value), f" {error}")
            self.problems.append(Problem(BAD_BACKFILL_ARGUMENT, message, fixes=(Change({"commit_every": "10s"}),)))
            return 10.0

    def flag(self, name: str, *, otherwise: bool) -> bool:
        value = self.values.get(name, otherwise)
        if isinstance(value, bool):
            return value
        self._add_problem(name, "True or False", True)
        return otherwise


def _is_count(value: object, least: int = 1, most: int = MAX_COUNT) -> bool:
    return is_whole_number(value, least, most)
