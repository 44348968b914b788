"""Exceptions with structured problems: code, message, evidence, subject and fixes.

The tree, with the exit code of the command line:

    DovetailError
    ├── ConfigError           2   a value, a file or a specification is invalid
    │   ├── ResourceError     2   the resources of a worker are invalid
    │   ├── ClusterError      2   a cluster description is invalid, or the machine cannot be read
    │   ├── JobRefusedError   2   a worker does not run the function of a job
    │   └── PipelineError     2   a pipeline, or the file that describes it, is invalid
    ├── InfeasibleError       3   the work is valid and does not fit on the cluster
    ├── EngineError           5   the engine cannot be started or reached
    ├── RunError              1   the work was started and failed
    │   ├── ActorLostError    1   an actor died during a call, or is dead
    │   ├── CallCycleError    1   calls of actors wait for each other
    │   ├── CallTimeoutError  1   a call of an actor was not answered in time
    │   ├── JobError          1   a job failed, died or was cancelled
    │   └── JobTimeoutError   1   a job did not finish in the time that its caller waits
    └── LedgerError           1   a seat was taken twice, or returned without having been taken

An error carries one or more `Problem`s, so that users can fix all of them at once. A code is stable: DT0xx is about
what the user wrote, DT1xx about what fits, DT2xx about placement, DT3xx about runs, DT4xx about Ray, recipes and
backfills, DT5xx about actors, DT6xx about jobs. `dovetail explain CODE` prints the cause and the remedy of a code
(`error_codes.py`).

Fixes are data until they are shown. The fixes of a problem are alternatives. A fix is a text that reads the same
everywhere ("free some disk space on /data"), or one of

    Change     settings to set or to remove: Change({"gpus": 0.5}), Change({"gpu_memory": UNSET})
    AddNodes   nodes to add to the cluster
    Call       a function to call: Call("table.backfill", ("n",), {"on_error": "skip"})

A `Renderer` writes them as one user interface spells them: `Renderer` itself as Python, others as YAML or as options of
the command line. A message, a note or a fix that names a setting or a call inside a sentence is a `Text`. No code reads
a rendered fix or message to find out what it is about: that is `Problem.subject`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar

from dovetail.text_format import terminal_text

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "UNSET",
    "ActorLostError",
    "AddNodes",
    "Call",
    "CallCycleError",
    "CallTimeoutError",
    "Change",
    "ClusterError",
    "ConfigError",
    "DovetailError",
    "EngineError",
    "Expression",
    "Fix",
    "Given",
    "InfeasibleError",
    "JobError",
    "JobRefusedError",
    "JobTimeoutError",
    "LedgerError",
    "ObjectSource",
    "PipelineError",
    "Problem",
    "ResourceError",
    "RunError",
    "Setting",
    "Subject",
    "Renderer",
    "Text",
    "argument_problem",
    "did_you_mean",
    "nearest_word",
    "python_literal",
    "short_repr",
]


class _Unset(Enum):
    UNSET = "unset"


UNSET: Final = _Unset.UNSET
"""Value of a setting that a `Change` removes."""


class Expression(str):
    """Python source inside a value of a fix, shown without quotes: Expression("udf")."""

    __slots__ = ()


class ObjectSource(Expression):
    """Python source of an object, and the data that files have in its place: "dt.Scale(target=4)", {"target": 4}."""

    __slots__ = ("data",)
    data: Mapping[str, object]

    def __new__(cls, source: str, data: Mapping[str, object]) -> Self:
        found = super().__new__(cls, source)
        found.data = data
        return found


@dataclass(frozen=True, slots=True)
class Subject:
    """What a problem or a fix is about: Subject("stage", "caption"), Subject("setting", "batch_size")."""

    kind: str
    name: str
    members: tuple[str, ...] = ()
    """The parts of a group that is named as one, such as the stages of a fused unit 'a+b'."""

    @property
    def names(self) -> tuple[str, ...]:
        """The members of a group, or the name itself."""
        return self.members or (self.name,)


@dataclass(frozen=True, slots=True)
class Change:
    """Settings to set, or with `UNSET` to remove, together.

    `subjects` have the settings; if there are none, it is the subject of the problem, or the call itself. `note`
    follows the rendered text, as a comment.
    """

    values: Mapping[str, object]
    subjects: tuple[Subject, ...] = ()
    note: str = ""

    def __hash__(self) -> int:
        return hash((tuple(self.values), self.subjects, self.note))

    def __str__(self) -> str:
        return PYTHON.fix(self)


@dataclass(frozen=True, slots=True)
class AddNodes:
    """Nodes to add to the cluster; `node` is the specification of one, such as "(8cpu, 32GB)"."""

    count: int
    node: str

    def __str__(self) -> str:
        return PYTHON.fix(self)


@dataclass(frozen=True, slots=True)
class Call:
    """A function to call, which a command line offers as a command or an option."""

    function: str
    arguments: tuple[object, ...] = ()
    keywords: Mapping[str, object] = field(default_factory=dict)
    note: str = ""

    def __hash__(self) -> int:
        return hash((self.function, tuple(self.keywords), self.note))

    def __str__(self) -> str:
        return PYTHON.fix(self)


Fix = str | Change | AddNodes | Call


@dataclass(frozen=True, slots=True)
class Setting:
    """The name of a setting inside a `Text`: max_errors, or --max-errors on the command line."""

    name: str


@dataclass(frozen=True, slots=True)
class Given:
    """A setting and the value that the user gave, inside a `Text`: workers=0, or --workers 0 on the command line."""

    name: str
    value: object


class Text(str):
    """A text with settings, changes and calls in it: Text("more than ", Setting("max_errors"), " allows").

    As a string it has the spelling of Python; a `Renderer` spells the parts in its own way. A copy or a pickle is a
    plain string, because the value of a `Given` may be anything.
    """

    __slots__ = ("parts",)
    parts: tuple[str | Setting | Given | Subject | Change | Call, ...]

    def __new__(cls, *parts: str | Setting | Given | Subject | Change | Call) -> Self:
        text = super().__new__(cls, "".join(map(PYTHON.part, parts)))
        text.parts = parts
        return text

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: a stable code, one sentence, the numbers behind it, and alternative fixes."""

    code: str
    message: str
    evidence: tuple[str, ...] = ()
    fixes: tuple[Fix, ...] = ()
    place: str = ""
    subject: Subject | None = None

    def at(self, place: str) -> Problem:
        return replace(self, place=place)

    @property
    def fix_texts(self) -> tuple[str, ...]:
        """The fixes as Python spells them."""
        return PYTHON.fixes(self)

    def render(self, renderer: Renderer | None = None) -> str:
        renderer = renderer or PYTHON
        where = f" {self.place}  " if self.place else " "
        lines = [f"error[{self.code}]{where}{renderer.text(self.message)}"]
        lines += [f"  {line}" for line in self.evidence]
        lines += [f"  fix  {line}" for line in renderer.fixes(self)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        return {
            "code": self.code,
            "place": self.place,
            "message": self.message,
            "evidence": list(self.evidence),
            "fixes": list(self.fix_texts),
        }


class Renderer:
    """Renders fixes as one user interface spells them. This class writes Python; subclasses override what differs."""

    def fixes(self, problem: Problem) -> tuple[str, ...]:
        """The fixes of a problem as text; a fix that renders as "" does not exist in this interface."""
        rendered = (self.fix(fix, problem.subject) for fix in problem.fixes)
        return tuple(text for text in dict.fromkeys(rendered) if text)

    def fix(self, fix: Fix, subject: Subject | None = None) -> str:
        """One fix as text; `subject` is that of its problem."""
        match fix:
            case str():
                return self.text(fix)
            case Change():
                return self.change(fix, subject)
            case AddNodes():
                return self.add_nodes(fix)
            case Call():
                return self.call(fix)

    def text(self, text: str) -> str:
        """A message, a note or a fix; the parts of a `Text` as this renderer spells them."""
        return "".join(map(self.part, text.parts)) if isinstance(text, Text) else text

    def part(self, part: str | Setting | Given | Subject | Change | Call) -> str:
        """One part of a `Text`."""
        match part:
            case Setting():
                return self.name(part.name)
            case Given():
                return self.given(part)
            case Subject():
                return self.subject(part)
            case _:
                return self.fix(part)

    def subject(self, subject: Subject) -> str:
        """The thing that a text is about: stage 'caption'."""
        return f"{subject.kind} {subject.name!r}"

    def given(self, given: Given) -> str:
        return f"{self.name(given.name)}={short_repr(given.value)}"

    def change(self, fix: Change, subject: Subject | None) -> str:  # noqa: ARG002 - subclasses name the subject
        given = [self.assignment(name, value) for name, value in fix.values.items() if value is not UNSET]
        removed = [name for name, value in fix.values.items() if value is UNSET]
        text = ", ".join(given)
        if removed:
            text += f"{', and ' if given else ''}omit {' and '.join(map(self.name, removed))}"
        if fix.subjects:
            text += f" for {', '.join(name for one in fix.subjects for name in one.names)}"
        return with_note(text, fix.note)

    def assignment(self, name: str, value: object) -> str:
        return f"{self.name(name)}={self.literal(value)}"

    def name(self, setting: str) -> str:
        """The name of a setting in this interface."""
        return setting

    def literal(self, value: object) -> str:
        return python_literal(value)

    def add_nodes(self, fix: AddNodes) -> str:
        return f"add {f'{fix.count} nodes' if fix.count > 1 else 'a node'} like 1x{fix.node}"

    def call(self, fix: Call) -> str:
        arguments = [python_literal(value) for value in fix.arguments]
        arguments += [f"{name}={python_literal(value)}" for name, value in fix.keywords.items()]
        return with_note(f"{fix.function}({', '.join(arguments)})", fix.note)

    def problem(self, problem: Problem) -> Problem:
        """The same problem with its message and fixes as texts of this interface."""
        return replace(problem, message=self.text(problem.message), fixes=self.fixes(problem))

    def error(self, error: AnyError) -> AnyError:
        """The same error with its problems as texts of this interface."""
        return type(error)(self.problem(problem) for problem in error.problems)


PYTHON: Final = Renderer()


def with_note(text: str, note: str) -> str:
    """A rendered fix and its comment."""
    return f"{text}  # {note}" if note else text


def python_literal(value: object) -> str:
    """A value as Python source; texts in double quotes."""
    match value:
        case Expression():
            return str(value)
        case str():
            import json  # late: workers import this module

            return json.dumps(value, ensure_ascii=False)
        case tuple():
            return f"({', '.join(map(python_literal, value))}{',' if len(value) == 1 else ''})"
        case list():
            return f"[{', '.join(map(python_literal, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{python_literal(key)}: {python_literal(part)}' for key, part in value.items())}}}"
        case _:
            return repr(value)


class DovetailError(Exception):
    """The root of every deliberate error; `problems` has at least one entry."""

    exit_code: ClassVar[int] = 1

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        assert self.problems, "an error has at least one problem"
        super().__init__(self.render())

    def render(self, renderer: Renderer | None = None) -> str:
        """All problems as text, with fixes spelled as `renderer` does; by default as Python. Control characters of data
        are escaped: Python prints errors in terminals."""
        return terminal_text("\n".join(problem.render(renderer) for problem in self.problems))

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(problem.code for problem in self.problems)

    def __reduce__(self) -> tuple[type[DovetailError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


AnyError = TypeVar("AnyError", bound=DovetailError)


class ConfigError(DovetailError):
    """A value, a file or a specification is invalid."""

    exit_code = 2


class ResourceError(ConfigError):
    """The resources of a worker are invalid."""


class ClusterError(ConfigError):
    """A cluster description is invalid, or the machine cannot be read."""


class PipelineError(ConfigError):
    """A pipeline, or the file that describes it, is invalid."""


class InfeasibleError(DovetailError):
    """The work is valid and does not fit on the cluster."""

    exit_code = 3


class EngineError(DovetailError):
    """The engine cannot be started or reached."""

    exit_code = 5


class RunError(DovetailError):
    """The work was started and failed."""

    exit_code = 1


class ActorLostError(RunError):
    """The instance of an actor that was called died during the call, or is dead."""


class CallTimeoutError(RunError, TimeoutError):
    """A call of an actor was not answered before its deadline."""


class CallCycleError(RunError):
    """A call of an actor would never be answered: the slots that it waits for wait for its caller."""


class JobError(RunError):
    """A job failed, died or was cancelled. `job_id`, `state`, and `traceback` of its last attempt, from the worker."""

    def __init__(
        self, problems: Problem | Iterable[Problem], job_id: str = "", state: str = "", traceback: str = ""
    ) -> None:
        super().__init__(problems)
        self.job_id, self.state, self.traceback = job_id, state, traceback

    def __reduce__(self) -> tuple[type[JobError], tuple[Any, ...]]:
        return type(self), (self.problems, self.job_id, self.state, self.traceback)


class JobTimeoutError(RunError, TimeoutError):
    """A job did not finish in the time that its caller waits. The job continues."""


class JobRefusedError(ConfigError):
    """A worker does not run the function of a job: it is not declared with `@dt.job` in its modules."""


class LedgerError(DovetailError):
    """A seat was taken twice, or returned without having been taken."""


def argument_problem(code: str, name: str, value: object, kind: str, *examples: object) -> Problem:
    """The problem that an argument has a value of the wrong kind, with valid examples as fixes."""
    message = Text(Given(name, value), f" is not {kind}")
    return Problem(code, message, fixes=tuple(Change({name: example}) for example in examples))


def nearest_word(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar; None if none is similar."""
    import difflib  # late: workers import this module

    by_folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[near[0]] if near else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)' for the nearest known word, or nothing."""
    near = nearest_word(word, known)
    return f" (did you mean {near!r}?)" if near is not None else ""


def short_repr(value: object) -> str:
    """A value as messages show it: at most 60 characters, and never an exception."""
    try:
        text = repr(value)
    except Exception:  # a user's __repr__ may raise, and the message about the value must be shown
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
