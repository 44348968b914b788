"""What can be asked of a backfill? Checked all at once, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.backfill.on_error import on_error_of
from dovetail.backfill.options import timeout_of
from dovetail.errors import ConfigError, DovetailError, Problem, did_you_mean, shown
from dovetail.pipeline.durations import parse_duration
from dovetail.running.arguments import of_engine, of_share

if TYPE_CHECKING:
    from dovetail.backfill.on_error import OnError
    from dovetail.pipeline.stage import Workers
    from dovetail.resources.cluster import Cluster

WRONG = "DT437"
MOST = 1_000_000
COMMIT_EVERY = "10s"
SEEDS = {"concurrency": "workers", "intra_applier_concurrency": "slots", "num_frags": "fragments"}
"""Other spellings that are understood."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of a backfill, each as it is used."""

    workers: Workers = "auto"
    batch_size: int | None = None
    slots: int | None = None
    where: str | None = None
    fragments: int | tuple[int, ...] | None = None
    """So many of those that are not done, or these."""
    on_error: OnError | None = None
    max_errors: int | float | None = None
    """How many rows may fail, or which share of them."""
    timeout_s: float | None = None
    engine: str = "local"
    cluster: Cluster | str = "auto"
    commit_every_s: float = 10.0
    recompute: bool = False
    wait: bool = True
    progress: bool | None = None
    share: float | None = None
    env_from: tuple[str, ...] = ()


def asked_of(given: Mapping[str, Any]) -> Asked:
    """ConfigError with everything that is wrong."""
    problems: list[Problem] = []
    values = _spelled(given, problems)
    error = values.get("on_error")
    found: dict[str, Any] = {
        "workers": _workers(values.get("workers", "auto"), problems),
        "batch_size": _count("batch_size", values.get("batch_size"), problems),
        "slots": _count("slots", values.get("slots"), problems),
        "where": _where(values.get("where"), problems),
        "fragments": _fragments(values.get("fragments"), problems),
        "on_error": _on_error(error, problems) if error is not None else None,
        "max_errors": _budget(values.get("max_errors"), problems),
        "timeout_s": timeout_of(values.get("timeout"), problems),
        "commit_every_s": _every(values.get("commit_every", COMMIT_EVERY), problems),
    }
    problems += of_engine(values.get("engine", "local"))
    problems += of_share(values.get("engine", "local"), values.get("share"), values.get("env_from", ()))
    if not isinstance(values.get("progress", True), bool):
        problems.append(_wrong("progress", values["progress"], "neither True nor False", "progress=True"))
    for name in ("recompute", "wait"):
        value = values.get(name, name == "wait")
        if not isinstance(value, bool):
            problems.append(_wrong(name, value, "neither True nor False", f"{name}=True"))
        found[name] = value
    found |= {name: values[name] for name in ("engine", "cluster", "progress", "share") if name in values}
    if problems:
        raise ConfigError(problems)
    return Asked(**found, env_from=tuple(values.get("env_from", ())))


def _wrong(name: str, value: object, what: str, fix: str) -> Problem:
    return Problem(WRONG, f"{name}={shown(value)} is {what}", fixes=(fix,))


def _spelled(given: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """By our names; what is None was not said, except where None means something."""
    known = ["workers", "batch_size", "slots", "where", "fragments", "on_error", "max_errors", "timeout", "engine"]
    known += ["cluster", "commit_every", "recompute", "wait", "progress", "share", "env_from"]
    values: dict[str, Any] = {}
    for name, value in given.items():
        ours = SEEDS.get(name, name)
        if ours not in known:
            fix = f"one of: {', '.join(known)}"
            problems.append(Problem(WRONG, f"there is no {name}={did_you_mean(name, [*known, *SEEDS])}", fixes=(fix,)))
        elif value is None:
            continue
        elif ours in values and values[ours] != value:
            problems.append(Problem(WRONG, f"{ours} and {name} are the same, and differ", fixes=(f"only {ours}=",)))
        else:
            values[ours] = value
    return values


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST


def _count(name: str, value: object, problems: list[Problem]) -> int | None:
    if value is None or _is_count(value):
        return value  # type: ignore[return-value]
    problems.append(_wrong(name, value, f"not a whole number from 1 to {MOST:,}", f"{name}=64"))
    return None


def _workers(value: Any, problems: list[Problem]) -> Workers:
    if value == "auto" or _is_count(value):
        return value  # type: ignore[no-any-return]
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2 and all(map(_is_count, value)):
        low, high = value
        if low <= high:
            return low, high
    problems.append(_wrong("workers", value, 'not "auto", a number, or (least, most)', 'workers="auto"'))
    return "auto"


def _where(value: object, problems: list[Problem]) -> str | None:
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    problems.append(_wrong("where", value, "not a condition as SQL has it", 'where="length(text) > 100"'))
    return None


def _fragments(value: Any, problems: list[Problem]) -> int | tuple[int, ...] | None:
    if value is None or _is_count(value):
        return value  # type: ignore[no-any-return]
    listed = isinstance(value, Sequence) and not isinstance(value, str) and value
    if listed and all(_is_count(it, 0) for it in value):
        return tuple(dict.fromkeys(value))
    problems.append(
        _wrong("fragments", value, "neither a number of fragments nor a list of their ids", "fragments=[0]")
    )
    return None


def _on_error(value: object, problems: list[Problem]) -> OnError | None:
    try:
        return on_error_of(value)
    except DovetailError as error:
        problems += error.problems
        return None


def _budget(value: Any, problems: list[Problem]) -> int | float | None:
    """A count, or a share: 0.01, "1%"."""
    said = value
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            value = float(value.strip()[:-1]) / 100
        except ValueError:
            value = -1
    if value is None or _is_count(value, 0) or value == 0:
        return value  # type: ignore[no-any-return]
    if isinstance(value, float) and 0 <= value < 1:
        return value
    problems.append(_wrong("max_errors", said, 'neither a number of rows nor a share ("1%", 0.01)', "max_errors=100"))
    return None


def _every(value: object, problems: list[Problem]) -> float:
    if value == 0 and not isinstance(value, bool):
        return 0.0
    try:
        return parse_duration(value)
    except ValueError as error:
        problems.append(Problem(WRONG, f"commit_every={shown(value)} {error}", fixes=('commit_every="10s"',)))
        return 10.0
