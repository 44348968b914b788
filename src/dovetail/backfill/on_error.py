"""What becomes of a row whose call fails: `dt.Retry`, and the texts that `on_error=` takes?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from dovetail.errors import ConfigError, Problem, did_you_mean, shown
from dovetail.pipeline.durations import parse_duration

ON_ERROR = "DT442"
ENDS = ("fail", "skip")
RETRY = ("times", "backoff", "then")
TIMES_LIMIT = 1000
ANY = "*"


@dataclass(frozen=True, slots=True)
class OnError:
    """What is done with a row whose call raises: some kinds are tried again, and then it fails the run or is set
    aside."""

    then: Literal["fail", "skip"] = "fail"
    retry: tuple[str, ...] = ()
    """Names of exception types, of the exception itself or of what it derives from; "*": any."""
    times: int = 3
    backoff_s: float = 1.0
    """Before the first try after a failure; each later one waits twice as long."""

    def retries(self, error: BaseException) -> int:
        """How many more times a call that raised this is tried."""
        if not self.retry:
            return 0
        names = {name for kind in type(error).__mro__ for name in (kind.__name__, kind.__qualname__)}
        return self.times if ANY in self.retry or not names.isdisjoint(self.retry) else 0

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
        problems = [_unknown(name, value) for name, value in unknown.items()]
        names = []
        for kind in cast("tuple[object, ...]", kinds):
            if isinstance(kind, str) and kind.strip():
                names.append(kind.strip().rpartition(".")[2])
            elif isinstance(kind, type) and issubclass(kind, BaseException):
                names.append(kind.__name__)
            else:
                message = f"Retry({shown(kind)}): is not a type of exception, or the name of one"
                problems.append(Problem(ON_ERROR, message, fixes=("Retry(ConnectionError, TimeoutError)",)))
        problems += [*_wrong_times(times), *_wrong_end(then, "then")]
        seconds = 0.0
        try:
            seconds = 0.0 if backoff == 0 and not isinstance(backoff, bool) else parse_duration(backoff)
        except ValueError as error:
            problems.append(Problem(ON_ERROR, f"backoff={shown(backoff)} {error}", fixes=('backoff="1s"',)))
        if problems:
            raise ConfigError(problems)
        self.as_on_error = OnError(then, tuple(names) or (ANY,), times, seconds)

    def __repr__(self) -> str:
        given = self.as_on_error
        kinds = "".join(f"{name!r}, " for name in given.retry if name != ANY)
        return f"Retry({kinds}times={given.times}, backoff={given.backoff_s:g}, then={given.then!r})"


def on_error_of(given: object) -> OnError:
    """ "fail", "skip", a `Retry`, or an `OnError` as it is; ConfigError otherwise."""
    if isinstance(given, OnError):
        return given
    if isinstance(given, Retry):
        return given.as_on_error
    problems = _wrong_end(given, "on_error")
    if problems:
        raise ConfigError(problems)
    return OnError("skip" if given == "skip" else "fail")


def _unknown(name: str, value: object) -> Problem:
    message = f"Retry() has no {name}={shown(value)}{did_you_mean(name, RETRY)}"
    fixes = ('Retry(ConnectionError, times=3, backoff="1s", then="skip")',)
    return Problem(ON_ERROR, message, fixes=fixes)


def _wrong_times(times: object) -> list[Problem]:
    if isinstance(times, int) and not isinstance(times, bool) and 1 <= times <= TIMES_LIMIT:
        return []
    message = f"times={shown(times)} is not a whole number from 1 to {TIMES_LIMIT:,}"
    return [Problem(ON_ERROR, message, fixes=("times=3",))]


def _wrong_end(given: object, name: str) -> list[Problem]:
    if isinstance(given, str) and given in ENDS:
        return []
    near = did_you_mean(given, ENDS) if isinstance(given, str) else ""
    if isinstance(given, type) and issubclass(given, BaseException):
        near = f' (did you mean Retry({given.__name__}, then="skip")?)'
    message = f"{name}={shown(given)} is not a way to deal with a row that fails{near}"
    fixes = ('"fail": the run ends with its exception', '"skip": the row is NULL and in errors(column)')
    both = 'Retry(ConnectionError, times=3, backoff="1s", then="skip")'
    return [Problem(ON_ERROR, message, fixes=fixes if name == "then" else (*fixes, both))]
