"""Exceptions, with structured problems: code, message, evidence and fixes.

The tree, with the exit code of the command line:

    DovetailError
    ├── ConfigError           2   something the user wrote is wrong: a value, a file, a spec
    │   ├── ResourceError     2   what one worker asks for makes no sense
    │   ├── ClusterError      2   the description of a cluster makes no sense, or the machine cannot be read
    │   └── PipelineError     2   a pipeline, or the file that describes it, makes no sense
    ├── InfeasibleError       3   well-formed, but it does not fit on what there is
    ├── EngineError           5   who should do the work cannot be started or reached
    ├── RunError              1   the work was begun, and failed
    └── LedgerError           1   a seat was taken twice, or given back without having been taken

An error carries one or more `Problem`s, because users fix all of them at once. A code is stable: DT0xx is about
what was written, DT1xx about what fits, DT2xx about who sits where, DT3xx about runs.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "ClusterError",
    "ConfigError",
    "DovetailError",
    "EngineError",
    "InfeasibleError",
    "LedgerError",
    "PipelineError",
    "Problem",
    "ResourceError",
    "RunError",
    "did_you_mean",
    "short_repr",
]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: a stable code, one sentence, the numbers behind it, and ways out."""

    code: str
    message: str
    evidence: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    place: str = ""

    def at(self, place: str) -> Problem:
        return replace(self, place=place)

    def render(self) -> str:
        where = f" {self.place}  " if self.place else " "
        lines = [f"error[{self.code}]{where}{self.message}"]
        lines += [f"  {line}" for line in self.evidence]
        lines += [f"  fix  {line}" for line in self.fixes]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        return {
            "code": self.code,
            "place": self.place,
            "message": self.message,
            "evidence": list(self.evidence),
            "fixes": list(self.fixes),
        }


class DovetailError(Exception):
    """The root of every deliberate error; `problems` has at least one entry."""

    exit_code: ClassVar[int] = 1

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        assert self.problems, "an error without a problem says nothing"
        super().__init__("\n".join(problem.render() for problem in self.problems))

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(problem.code for problem in self.problems)

    def __reduce__(self) -> tuple[type[DovetailError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class ConfigError(DovetailError):
    """Something the user wrote is wrong."""

    exit_code = 2


class ResourceError(ConfigError):
    """What one worker asks for makes no sense."""


class ClusterError(ConfigError):
    """The description of a cluster makes no sense."""


class PipelineError(ConfigError):
    """A pipeline, or the file that describes it, makes no sense."""


class InfeasibleError(DovetailError):
    """Well-formed, but it does not fit on what there is."""

    exit_code = 3


class EngineError(DovetailError):
    """Who should do the work cannot be started or reached."""

    exit_code = 5


class RunError(DovetailError):
    """The work was begun, and failed."""

    exit_code = 1


class LedgerError(DovetailError):
    """A seat was taken twice, or given back without having been taken."""


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """' (did you mean ...?)' for the nearest known word, or nothing."""
    by_folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return f" (did you mean {by_folded[near[0]]!r}?)" if near else ""


def short_repr(value: object) -> str:
    """A value as messages show it: short, and whatever it is."""
    try:
        text = repr(value)
    except Exception:  # whatever was given, the message about it must come out
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
