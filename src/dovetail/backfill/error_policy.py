"""Error policy of a call (fail, skip, dt.Retry with backoff) and the error budget of a run (max_errors)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from dovetail.backfill.failed_rows import TOO_MANY_FAILED_ROWS
from dovetail.errors import ConfigError, Problem, RunError, did_you_mean, short_repr
from dovetail.pipeline.durations import parse_duration

BAD_ERROR_POLICY = "DT442"
FINAL_ACTIONS = ("fail", "skip")
RETRY_OPTIONS = ("times", "backoff", "then")
MAX_RETRIES = 1000
ANY_EXCEPTION = "*"


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """What is done with a row whose call raises: some kinds are tried again, and then it fails the run or is set
    aside."""

    then: Literal["fail", "skip"] = "fail"
    retry: tuple[str, ...] = ()
    """Names of exception types, of the exception itself or of what it derives from; "*": any."""
    times: int = 3
    backoff_s: float = 1.0
    """Before the first try after a failure; each later one waits twice as long."""

    def retries_for(self, error: BaseException) -> int:
        """How many more times a call that raised this is tried."""
        if not self.retry:
            return 0
        names = {name for kind in type(error).__mro__ for name in (kind.__name__, kind.__qualname__)}
        return self.times if ANY_EXCEPTION in self.retry or not names.isdisjoint(self.retry) else 0

    def wait_s(self, tried: int) -> float:
        """Before it is tried again, after so many tries that failed again."""
        return float(self.backoff_s * 2**tried)


class Retry:
    """`on_error=dt.Retry(ConnectionError, TimeoutError, times=3, backoff="1s", then="skip")`: these kinds of exceptions
    are tried again, all kinds without any; waiting 1, 2, 4 s. Types, or their names as texts."""

    def __init__(
        self,
        *kinds: type[BaseException] | str,
        times: int = 3,
        backoff: float | str = "1s",
        then: Literal["fail", "skip"] = "fail",
        **unknown: object,
    ) -> None:
        problems = [_unknown_retry_option(name, value) for name, value in unknown.items()]
        names = []
        for kind in cast("tuple[object, ...]", kinds):
            if isinstance(kind, str) and kind.strip():
                names.append(kind.strip().rpartition(".")[2])
            elif isinstance(kind, type) and issubclass(kind, BaseException):
                names.append(kind.__name__)
            else:
                message = f"Retry({short_repr(kind)}): is not a type of exception, or the name of one"
                problems.append(Problem(BAD_ERROR_POLICY, message, fixes=("Retry(ConnectionError, TimeoutError)",)))
        problems += [*_check_times(times), *_check_final_action(then, "then")]
        seconds = 0.0
        try:
            seconds = 0.0 if backoff == 0 and not isinstance(backoff, bool) else parse_duration(backoff)
        except ValueError as error:
            problems.append(
                Problem(BAD_ERROR_POLICY, f"backoff={short_repr(backoff)} {error}", fixes=('backoff="1s"',))
            )
        if problems:
            raise ConfigError(problems)
        self.policy = ErrorPolicy(then, tuple(names) or (ANY_EXCEPTION,), times, seconds)

    def __repr__(self) -> str:
        given = self.policy
        kinds = "".join(f"{name!r}, " for name in given.retry if name != ANY_EXCEPTION)
        return f"Retry({kinds}times={given.times}, backoff={given.backoff_s:g}, then={given.then!r})"


def parse_error_policy(given: object) -> ErrorPolicy:
    """ "fail", "skip", a `Retry`, or an `OnError` as it is; ConfigError otherwise."""
    if isinstance(given, ErrorPolicy):
        return given
    if isinstance(given, Retry):
        return given.policy
    problems = _check_final_action(given, "on_error")
    if problems:
        raise ConfigError(problems)
    return ErrorPolicy("skip" if given == "skip" else "fail")


def _unknown_retry_option(name: str, value: object) -> Problem:
    message = f"Retry() has no {name}={short_repr(value)}{did_you_mean(name, RETRY_OPTIONS)}"
    fixes = ('Retry(ConnectionError, times=3, backoff="1s", then="skip")',)
    return Problem(BAD_ERROR_POLICY, message, fixes=fixes)


def _check_times(times: object) -> list[Problem]:
    if isinstance(times, int) and not isinstance(times, bool) and 1 <= times <= MAX_RETRIES:
        return []
    message = f"times={short_repr(times)} is not a whole number from 1 to {MAX_RETRIES:,}"
    return [Problem(BAD_ERROR_POLICY, message, fixes=("times=3",))]


def _check_final_action(given: object, name: str) -> list[Problem]:
    if isinstance(given, str) and given in FINAL_ACTIONS:
        return []
    near = did_you_mean(given, FINAL_ACTIONS) if isinstance(given, str) else ""
    if isinstance(given, type) and issubclass(given, BaseException):
        near = f' (did you mean Retry({given.__name__}, then="skip")?)'
    message = f"{name}={short_repr(given)} is not a way to deal with a row that fails{near}"
    fixes = ('"fail": the run ends with its exception', '"skip": the row is NULL and in errors(column)')
    both = 'Retry(ConnectionError, times=3, backoff="1s", then="skip")'
    return [Problem(BAD_ERROR_POLICY, message, fixes=fixes if name == "then" else (*fixes, both))]


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    column: str
    limit: int | float | None
    """So many, or this share of them."""
    before: int
    """Rows that failed in earlier calls: a call that is made again must not succeed for that."""
    rows: int
    """That are asked for."""

    def is_over(self, errors: int) -> bool:
        if self.limit is None:
            return False
        return self.before + errors > (self.limit * self.rows if isinstance(self.limit, float) else self.limit)

    def error(self, errors: int) -> RunError:
        limit, column = self.limit or 0, self.column
        allowed = f"{100 * limit:g} % of {self.rows:,} rows" if isinstance(limit, float) else f"{limit:,}"
        message = f"column {column!r}: {self.before + errors:,} rows failed, more than the {allowed} that may"
        earlier = (f"{self.before:,} of them in earlier calls",) if self.before else ()
        fixes = (
            f'table.errors("{column}") says why; table.retry_errors("{column}") computes them again',
            "a larger max_errors=; what is finished is committed",
        )
        return RunError(Problem(TOO_MANY_FAILED_ROWS, message, earlier, fixes))
