"""Error policy of a call (fail, skip, or `dt.Retry` with backoff) and the error budget of a run (`max_errors`).

Stages and UDFs share both."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from dovetail.documents.fields import (
    STRING,
    TEXT,
    Field,
    Mistake,
    Record,
    Type,
    WrongValue,
    choice,
    is_number,
    list_of,
    one_of,
    setting_problem,
    whole,
)
from dovetail.errors import (
    Call,
    Change,
    ConfigError,
    Expression,
    Given,
    Problem,
    Text,
    did_you_mean,
    short_repr,
)
from dovetail.pipeline.durations import (
    DURATION,
    DURATION_LIMIT_S,
    DURATION_TEXT,
    DURATION_TEXT_SCHEMA,
    parse_duration,
)
from dovetail.pipeline.failure_rules import ANY_EXCEPTION, type_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BAD_ERROR_POLICY = "DT442"
FINAL_ACTIONS = ("fail", "skip")
RETRY_OPTIONS = ("times", "backoff", "then")
RETRY_EXAMPLE = Call("Retry", (Expression("ConnectionError"),), {"times": 3, "backoff": "1s", "then": "skip"})
RETRY_FILE_EXAMPLE = "on_error: {retry: [ConnectionError], times: 3, backoff: 1s, then: skip}"
MAX_RETRIES = 1000


def _backoff_mistakes(value: object) -> Iterator[Mistake]:
    if not is_number(value) or value != 0:
        for mistake in DURATION.check(value):
            assert isinstance(mistake, WrongValue)
            yield replace(mistake, instead=("1s",))


BACKOFF = Type(
    DURATION_TEXT,
    "1s",
    {"anyOf": [{"type": "number", "minimum": 0, "maximum": DURATION_LIMIT_S}, DURATION_TEXT_SCHEMA]},
    _backoff_mistakes,
)
RETRY = Record(
    "Retry",
    "A retry policy: `on_error: {retry: [ConnectionError], times: 3, backoff: 1s, then: skip}`.",
    (
        Field(
            "retry",
            one_of("a name, or a list of names", STRING, list_of(TEXT)),
            "Exception types that are retried; none: all.",
        ),
        Field("times", whole(1, MAX_RETRIES, example=3), "Retries after the first attempt.", 3),
        Field("backoff", BACKOFF, "Wait before the first retry; it doubles with every further retry.", "1s"),
        Field("then", choice(FINAL_ACTIONS), "When retries are used up: fail the run or skip the items.", "fail"),
    ),
)
"""Keys of `on_error:` in a file; `Retry` has the same options."""


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """What happens when a call raises: exceptions listed in `retry` are retried first, then `then` applies."""

    then: Literal["fail", "skip"] = "fail"
    retry: tuple[str, ...] = ()
    """Names of exception types or of their base classes; "*": every exception."""
    times: int = 3
    """Retries after the first attempt."""
    backoff_s: float = 1.0
    """Wait before the first retry; it doubles with every further retry."""

    def retries_for(self, error: BaseException) -> int:
        """Number of retries that a call which raised this exception gets."""
        if not self.retry:
            return 0
        names = type_names(error)
        return self.times if ANY_EXCEPTION in self.retry or not names.isdisjoint(self.retry) else 0

    def wait_s(self, retries: int) -> float:
        """Wait before the next retry, after this many retries."""
        return float(self.backoff_s * 2**retries)

    @property
    def max_wait_s(self) -> float:
        """Sum of all waits of one call."""
        return float(self.backoff_s * (2**self.times - 1)) if self.retry else 0.0


class Retry:
    """Retry policy: `on_error=dt.Retry(ConnectionError, TimeoutError, times=3, backoff="1s", then="skip")`.

    A call that raises one of these exceptions (any exception if none is listed) is repeated up to `times` times. The
    wait starts at `backoff` and doubles: 1, 2, 4 s. If the call still fails, `then` applies. Exceptions are types or
    names of types."""

    def __init__(
        self,
        *exceptions: type[BaseException] | str,
        times: int = 3,
        backoff: float | str = "1s",
        then: Literal["fail", "skip"] = "fail",
        **unknown: object,
    ) -> None:
        problems = [_unknown_retry_option(name, value) for name, value in unknown.items()]
        names = []
        for kind in cast("tuple[object, ...]", exceptions):
            if isinstance(kind, str) and kind.strip():
                names.append(kind.strip().rpartition(".")[2])
            elif isinstance(kind, type) and issubclass(kind, BaseException):
                names.append(kind.__name__)
            else:
                written = Call("Retry", (Expression(short_repr(kind)),))
                message = Text(written, " is not an exception type or the name of one")
                example = Call("Retry", (Expression("ConnectionError"), Expression("TimeoutError")))
                problems.append(Problem(BAD_ERROR_POLICY, message, fixes=(example,)))
        options = RETRY.value_mistakes({"times": times, "backoff": backoff})
        problems += [setting_problem(name, mistake, BAD_ERROR_POLICY) for name, mistake in options]
        problems += _check_final_action(then, "then")
        if problems:
            raise ConfigError(problems)
        seconds = parse_duration(backoff) if backoff else 0.0
        self.policy = ErrorPolicy(then, tuple(names) or (ANY_EXCEPTION,), times, seconds)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Retry) and self.policy == other.policy

    def __hash__(self) -> int:
        return hash(self.policy)

    def __repr__(self) -> str:
        given = self.policy
        kinds = "".join(f"{name!r}, " for name in given.retry if name != ANY_EXCEPTION)
        return f"Retry({kinds}times={given.times}, backoff={given.backoff_s:g}, then={given.then!r})"


def retry_from_data(data: Mapping[Any, Any]) -> Retry:
    """The `Retry` that the mapping `on_error:` of a file specifies; ConfigError if it is invalid."""
    listed = data.get("retry", [])
    options = {str(key): value for key, value in data.items() if key != "retry"}
    return Retry(*(listed if isinstance(listed, list | tuple) else [listed]), **options)


def retry_to_data(retry: Retry) -> dict[str, Any]:
    """The reverse of `retry_from_data`."""
    policy = retry.policy
    named = [name for name in policy.retry if name != ANY_EXCEPTION]
    return {"retry": named, "times": policy.times, "backoff": policy.backoff_s, "then": policy.then}


def parse_error_policy(given: object) -> ErrorPolicy:
    """The policy of "fail", "skip" or a `Retry`; an ErrorPolicy is returned as it is; ConfigError otherwise."""
    if isinstance(given, ErrorPolicy):
        return given
    if isinstance(given, Retry):
        return given.policy
    problems = _check_final_action(given, "on_error")
    if problems:
        raise ConfigError(problems)
    return ErrorPolicy("skip" if given == "skip" else "fail")


def _unknown_retry_option(name: str, value: object) -> Problem:
    message = f"Retry() has no option {name}={short_repr(value)}{did_you_mean(name, RETRY_OPTIONS)}"
    return Problem(BAD_ERROR_POLICY, message, fixes=(RETRY_EXAMPLE,))


def _check_final_action(given: object, name: str) -> list[Problem]:
    if isinstance(given, str) and given in FINAL_ACTIONS:
        return []
    near = did_you_mean(given, FINAL_ACTIONS) if isinstance(given, str) else ""
    if isinstance(given, type) and issubclass(given, BaseException):
        near = f' (did you mean Retry({given.__name__}, then="skip")?)'
    message = Text(Given(name, given), f" is not a valid error policy{near}")
    fixes = (
        Change({name: "fail"}, note="the run stops with the exception"),
        Change({name: "skip"}, note="the failed row or item is recorded, and the run continues"),
    )
    return [Problem(BAD_ERROR_POLICY, message, fixes=fixes if name == "then" else (*fixes, RETRY_EXAMPLE))]


MAX_ERROR_COUNT = 10**12
MAX_ERRORS_TEXT = 'a number of items or a percentage of them ("1%")'
PERCENT_PATTERN = r"^\s*(100(\.0*)?|\d{1,2}(\.\d*)?)\s*%\s*$"


def parse_max_errors(value: object) -> int | float | None:
    """The limit as a count (int) or a share of the items (float); None: no limit. ValueError: it is neither.

    A share is written as "1%" or 0.01."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ERROR_COUNT):
        return value
    if isinstance(value, float) and 0 <= value < 1:
        return value
    if isinstance(value, str) and re.fullmatch(PERCENT_PATTERN, value):
        return float(value.strip()[:-1]) / 100
    raise ValueError(f"is not {MAX_ERRORS_TEXT}")


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """How many items of a run may fail before the run fails."""

    limit: int | float | None = None
    """A count (int), a share of the items (float), or no limit."""

    def is_exceeded(self, failed: int, items: int) -> bool:
        """Whether more items failed than allowed, of `items` in all."""
        if self.limit is None:
            return False
        return failed > (self.limit * items if isinstance(self.limit, float) else self.limit)

    def text(self, items: int, noun: str = "item") -> str:
        """The limit for messages: "100", or "1% of 2,000 items"."""
        limit = self.limit or 0
        if isinstance(limit, float):
            return f"{100 * limit:g}% of {items:,} {noun}{'' if items == 1 else 's'}"
        return f"{limit:,}"
