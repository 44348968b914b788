"""Are the values that `@dt.udf(...)` is given ones that it can use?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from dovetail.backfill.on_error import OnError, Retry, on_error_of
from dovetail.errors import ConfigError, Problem, ResourceError, did_you_mean, shown
from dovetail.pipeline.checks import COUNTS
from dovetail.pipeline.durations import parse_duration
from dovetail.resources.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Callable

OPTION = "DT440"
ROWS_LIMIT = 1 << 20
SLOTS_LIMIT = COUNTS["slots"][1]
SPELLINGS = {"num_cpus": "cpus", "num_gpus": "gpus"}
SAID_ELSEWHERE = {
    "workers": "table.backfill(column, workers=4)",
    "concurrency": "table.backfill(column, workers=4)",
    "where": 'table.backfill(column, where="id < 10")',
    "name": "table.add_column(name, udf)",
    "retries": 'on_error=dt.Retry(ConnectionError, times=3, then="skip")',
}


class Asked(TypedDict, total=False):
    """What `udf` takes besides the function, for type checkers."""

    cpus: float | None
    gpus: float | None
    gpu_memory: str | None
    memory: str | None
    nvdecs: int
    nvencs: int
    entire_gpu: bool
    accelerator: str | None
    labels: Mapping[str, Any] | None
    custom: Mapping[str, float] | None
    batch_size: int | None
    version: str | None
    on_error: str | OnError | Retry
    timeout: float | str | None
    input_columns: Sequence[str] | None
    data_type: Any
    slots: int | None
    num_cpus: float | None
    num_gpus: float | None


@dataclass(frozen=True)
class Options:
    """Not the code, but what is said of it."""

    resources: Resources
    batch_size: int | None = None
    version: str | None = None
    on_error: OnError = field(default_factory=OnError)
    timeout_s: float | None = None
    input_columns: tuple[str, ...] | None = None
    data_type: Any = None
    slots: int | None = None


def checked(given: Mapping[str, object], unknown: Mapping[str, object]) -> tuple[Options, list[Problem]]:
    """The options, and everything that is wrong with them; if anything is, they are not to be used."""
    problems = [_unknown(name, [*given]) for name in unknown]
    values = dict(given)
    for spelling, name in SPELLINGS.items():
        asked = values.pop(spelling)
        if asked is not None and values[name] is not None:
            message = f"{spelling}={shown(asked)} and {name}={shown(values[name])} are the same thing, said twice"
            problems.append(Problem(OPTION, message, fixes=(f"leave {spelling} out",)))
        elif asked is not None:
            values[name] = asked
    resources = _resources(values, problems)
    found = Options(
        resources,
        _count("batch_size", values["batch_size"], ROWS_LIMIT, 256, problems),
        _version(values["version"], problems),
        _tried(on_error_of, values["on_error"], OnError(), problems),
        timeout_of(values["timeout"], problems),
        _columns(values["input_columns"], problems),
        values["data_type"],
        _count("slots", values["slots"], SLOTS_LIMIT, 16, problems),
    )
    problems += _wrong_type(found.data_type)
    return found, problems


def _unknown(name: str, known: list[str]) -> Problem:
    elsewhere = SAID_ELSEWHERE.get(name)
    near = "" if elsewhere else did_you_mean(name, known)
    fix = elsewhere or f"one of {', '.join(known)}"
    return Problem(OPTION, f"udf() has no {name}={near}", fixes=(fix,))


def _resources(values: dict[str, object], problems: list[Problem]) -> Resources:
    names = (
        "cpus",
        "gpus",
        "gpu_memory",
        "memory",
        "nvdecs",
        "nvencs",
        "entire_gpu",
        "accelerator",
        "labels",
        "custom",
    )
    asked: dict[str, Any] = {name: values[name] for name in names if values[name] is not None}
    try:
        return Resources(**asked)
    except ResourceError as error:
        problems += error.problems
        return Resources()


def _tried(make: Callable[[object], OnError], value: object, otherwise: OnError, problems: list[Problem]) -> OnError:
    try:
        return make(value)
    except ConfigError as error:
        problems += error.problems
        return otherwise


def _count(name: str, value: object, limit: int, example: int, problems: list[Problem]) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= limit):
        return value
    message = f"{name}={shown(value)} is not a whole number from 1 to {limit:,}"
    problems.append(Problem(OPTION, message, fixes=(f"{name}={example}", f"or leave {name} out")))
    return None


def timeout_of(value: object, problems: list[Problem]) -> float | None:
    """Seconds for one row; None: any."""
    if value is None:
        return None
    try:
        return parse_duration(value)
    except ValueError as error:
        problems.append(Problem(OPTION, f"timeout={shown(value)} {error}", fixes=('timeout="30s"',)))
        return None


def _version(value: object, problems: list[Problem]) -> str | None:
    if value is None or (isinstance(value, str) and value.strip() and len(value) <= 200):
        return value
    text = isinstance(value, int | float) and not isinstance(value, bool)
    message = f"version={shown(value)} is not a text of 1 to 200 characters"
    problems.append(Problem(OPTION, message, fixes=(f'version="{value}"' if text else 'version="2"',)))
    return None


def _columns(value: object, problems: list[Problem]) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        names = tuple(value)
        if names and all(isinstance(name, str) and name for name in names) and len(set(names)) == len(names):
            return names
    message = f"input_columns={shown(value)} is not a list of different names of columns"
    fix = f"input_columns=[{value!r}]" if isinstance(value, str) and value else 'input_columns=["text"]'
    problems.append(Problem(OPTION, message, fixes=(fix,)))
    return None


def _wrong_type(value: object) -> list[Problem]:
    """Of a data type its text: pyarrow's own are what they are."""
    if value is None:
        return []
    from dovetail.backfill.types import given_type

    named = value.items() if isinstance(value, Mapping) else [("", value)]
    problems = []
    for name, one in named:
        found = given_type(one)
        if isinstance(found, str):
            said = f"data_type={{{name!r}: {shown(one)}}}" if name else f"data_type={shown(one)}"
            problems.append(
                Problem(OPTION, f"{said} {found}", fixes=('data_type="list<float32>"', "data_type=pa.int32()"))
            )
    if isinstance(value, Mapping) and not value:
        problems.append(Problem(OPTION, "data_type={} names no column", fixes=('data_type={"words": "int32"}',)))
    return problems
