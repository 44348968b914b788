"""What does a recipe say, and what is wrong with it? Everything at once, with line and column."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dovetail.documents.validate import missing_key, unknown_key
from dovetail.errors import Problem, did_you_mean, shown
from dovetail.pipeline.ends import value_problems
from dovetail.recipes import custom
from dovetail.recipes.catalogue import BASE_PARAMETERS, FILTER_PARAMETERS, known, own, runs_here
from dovetail.recipes.compiling import HASHED, RESULTS, STATS_OUT
from dovetail.recipes.keys import ACTED, IDLE, KEY_FIELDS, TOP, value
from dovetail.recipes.needs import Needs, needs_of
from dovetail.recipes.parameters import fits, fitted, own_problems, problems_of
from dovetail.running.job import importable

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.documents.document import Document, Steps
    from dovetail.recipes.catalogue import Known
    from dovetail.recipes.operators.base import Operator

EXAMPLE = "process: [{text_length_filter: {min_len: 50}}]"
PIPELINE_KEYS = {"name": "project_name", "source": "dataset_path", "sink": "export_path", "stages": "process"}
"""What is called differently in a pipeline file."""
FILTER_FIELDS = ("min_closed_interval", "max_closed_interval", "reversed_range")


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of `process`, as far as it could be read."""

    number: int
    op: str
    """As it is written."""
    name: str
    """As the stage is called: unique."""
    kind: str
    """mapper, filter, deduplicator, selector, grouper, ...; "custom" if a user's function does whatever it does."""
    given: Mapping[str, Any]
    needs: Needs
    operator: Operator | None
    """None if it cannot run here; `unready` says why."""
    unready: Problem | None = None
    skips: bool = True
    """Whether rows that fail are set aside."""


@dataclass(frozen=True, slots=True)
class Written:
    """A recipe file as far as it could be read, and everything that is wrong with it."""

    top: Mapping[str, Any]
    steps: tuple[Step, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()


def written(document: Document, folder: Path) -> Written:
    return _Reader(document, folder).recipe()


@dataclass
class _Reader:
    document: Document
    folder: Path
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)
    """Operators of `custom_operator_paths`."""
    idle: dict[str, None] = field(default_factory=dict)
    """What is accepted and not acted on."""

    def recipe(self) -> Written:
        data = self.document.data
        if not isinstance(data, Mapping):
            self._add((), Problem("DT013", f"the file should be a mapping, not {shown(data)}", fixes=(EXAMPLE,)))
            return Written({}, (), tuple(self.problems))
        top = self._top(data)
        if isinstance(top.get("custom_operator_paths"), str | list):
            self._look_for_own(top["custom_operator_paths"])
        entries = data.get("process")
        steps: list[Step] = []
        if not isinstance(entries, list) or not entries:
            if "process" in data:
                what = f"process should be a list of operators, not {shown(entries)}"
                self._add(("process",), Problem("DT013", what, fixes=(EXAMPLE,)))
            else:
                self._add((), replace(missing_key("process", "process", ""), fixes=(EXAMPLE,)))
        else:
            self._steps(entries, top, steps)
        if self.idle:
            self.notes.insert(0, f"accepted, and without meaning here: {', '.join(self.idle)}")
        return Written(top, tuple(steps), tuple(sorted(self.problems, key=_line_and_column)), tuple(self.notes))

    # --- the top

    def _top(self, data: Mapping[str, Any]) -> dict[str, Any]:
        self.idle |= dict.fromkeys(sorted(key for key in data if key in IDLE))
        if data.get("op_fusion") is False:
            self.notes.append("op_fusion: false is not acted on: operators that can share workers always do")
        found = {key: data[key] for key in data if key in TOP}
        for key in data:
            if key not in TOP and key not in IDLE:
                self._add((str(key),), self._unknown_top(str(key)))
        formed = {key: item for key, item in found.items() if key != "process"}
        wrong = set()
        for path, problem in value_problems((), formed, TOP):
            wrong.add(path[0])
            self._add(path, problem)
        if found.get("dataset") is not None and found.get("dataset_path") is not None:
            fix = ("remove one of the two",)
            self._add(("dataset",), Problem("DT410", "dataset and dataset_path both name the input", fixes=fix))
        return {key: item for key, item in found.items() if key not in wrong}

    def _unknown_top(self, key: str) -> Problem:
        problem = unknown_key(key, TOP, "")
        if key in known():
            fixes = (f"process: [{{{key}: {{...}}}}]",)
            return replace(problem, message=f"{key!r} is an operator: it belongs into 'process'", fixes=fixes)
        if key in PIPELINE_KEYS:
            there = PIPELINE_KEYS[key]
            message = f"{key!r} is a key of pipelines: in a recipe it is {there!r}"
            return replace(problem, message=message, fixes=(f"write {there} instead of {key}",))
        if key in ACTED:
            message = f"unknown key {key!r}: it belongs to an operator, inside 'process'"
            return replace(problem, message=message, fixes=(f"move {key!r} to the operators that need it",))
        return problem

    def _look_for_own(self, paths: str | list[str]) -> None:
        listed = [paths] if isinstance(paths, str) else paths
        self.own, problems = custom.found_in(listed, self.folder)
        for number, problem in problems:
            self._add(("custom_operator_paths", *([number] if isinstance(paths, list) else [])), problem)

    # --- operators

    def _steps(self, entries: list[Any], top: Mapping[str, Any], steps: list[Step]) -> None:
        taken = {RESULTS, STATS_OUT}
        for number, entry in enumerate(entries):
            op, given = self._entry(number, entry)
            if op is None:
                continue
            plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", op.rpartition(":")[2] if ":" in op else op).strip("_.-") or "op"
            steps.append(self._step(number, op, _free(plain[:90], taken), given, top))

    def _entry(self, number: int, entry: Any) -> tuple[str | None, dict[str, Any]]:
        """Operator and parameters: `- name`, `- name:`, or `- name: {key: value}`."""
        if isinstance(entry, str):
            return entry, {}
        if not isinstance(entry, Mapping) or len(entry) != 1:
            what = f"has {len(entry)} keys" if isinstance(entry, Mapping) else f"is {shown(entry)}"
            message = f"process[{number}] {what}, and should be one operator with its parameters"
            fixes = ("- text_length_filter: {min_len: 50}",)
            if isinstance(entry, Mapping) and len(entry) > 1:
                fixes = (f"indent the parameters below {next(iter(entry))!r}, or write '- ' before each operator",)
            self._add(("process", number), Problem("DT013", message, fixes=fixes))
            return None, {}
        op, given = next(iter(entry.items()))
        if given is None:
            return op, {}
        if not isinstance(given, Mapping):
            message = f"the parameters of {op} should be a mapping, not {shown(given)}"
            self._add(("process", number, op), Problem("DT013", message, fixes=(f"- {op}: {{}}",)))
            return op, {}
        return op, dict(given)

    def _step(self, number: int, op: str, name: str, given: dict[str, Any], top: Mapping[str, Any]) -> Step:
        path: Steps = ("process", number, op)

        def tell(key: str, problem: Problem) -> None:
            self._add((*path, key) if key in given else path, replace(problem, message=f"{op}: {problem.message}"))

        entry = known().get(op)
        needs = needs_of(given, cuda_by_default=entry is not None and entry.cuda, tell=tell)
        skips = value(given, "skip_op_error", value(top, "skip_op_error", True)) is not False
        half = Step(number, op, name, "custom", given, needs, None, None, skips)
        before = len(self.problems)
        self.idle |= dict.fromkeys(f"{key} of {op}" for key in _idle_in(given, entry))
        if op in self.own or ":" in op:
            step = self._users(half, tell, path)
        elif entry is None:
            self._add(path, self._unknown(op))
            return half
        else:
            step = self._known(half, entry, tell)
        if step.operator is not None and len(self.problems) == before:
            _put_keys(step.operator, given, top)
        return step

    def _known(self, step: Step, entry: Known, tell: Any) -> Step:
        wrong = list(problems_of(entry, step.given))
        for key, problem in wrong:
            tell(key, replace(problem, message=problem.message.removeprefix(f"{step.op}: ")))
        step = replace(step, kind=entry.kind)
        if step.given.get("adapter") == "data_juicer":
            from dovetail.recipes.adapter import adapted

            through, unready = adapted(entry, _own_parameters(entry, step.given))
            return replace(step, operator=through, unready=unready)
        unready = runs_here(step.op)
        cls = own(step.op)
        if cls is None or wrong:
            return replace(step, unready=unready)
        parameters = fitted(entry, _own_parameters(entry, step.given))
        mistaken = own_problems(cls, parameters)
        if mistaken is not None:
            fixes = mistaken.fixes or (f"give {step.op} what it asks for",)
            tell("", replace(mistaken, fixes=fixes))
            return replace(step, unready=unready)
        operator = cls(**parameters)
        operator.made_with = parameters
        absent = operator.absent() if unready is None else ""
        if absent:
            unready = Problem("DT421", f"{step.op}: {absent}", fixes=(_where_lists_are(step.op),))
        return replace(step, operator=operator, unready=unready)

    def _users(self, step: Step, tell: Any, path: Steps) -> Step:
        """A function or class of the user's; what is no base parameter is an argument of it."""
        for key in (*KEY_FIELDS, "skip_op_error"):
            if step.given.get(key) is not None and not fits(BASE_PARAMETERS[key], step.given[key]):
                fix = f"{key}: {'true' if key == 'skip_op_error' else BASE_PARAMETERS[key].default}"
                tell(key, Problem("DT412", f"{key} is {shown(step.given[key])}", fixes=(fix,)))
        if step.op in self.own:
            target: Any = self.own[step.op]
        else:
            importable(self.folder)
            target, problem = custom.named(step.op, self.folder)
            if problem is not None:
                self._add(path, problem)
                return step
        signature = custom.signature_of(target)
        takes = {} if signature is None else signature.parameters
        base = BASE_PARAMETERS.keys() - takes
        arguments = {key: item for key, item in step.given.items() if key not in ACTED and key not in base}
        try:
            operator = custom.made(target, arguments)
        except Exception as error:
            evidence = (f"given: {shown(arguments)}", *([f"it takes: {signature}"] if signature is not None else []))
            fix = "write what it takes, and nothing else"
            tell("", Problem("DT415", f"does not take these parameters: {error}", evidence, (fix,)))
            return step
        operator.made_with = arguments
        return replace(step, operator=operator, kind=kind_of(operator))

    def _unknown(self, op: str) -> Problem:
        names = [*known(), *self.own]
        message = f"there is no operator {op!r}{did_you_mean(op, names)}"
        fixes = ("correct its name", "or name your own: package.module:name, or custom_operator_paths")
        return Problem("DT410", message, fixes=fixes)

    def _add(self, path: Steps, problem: Problem) -> None:
        self.problems.append(replace(problem, place=self.document.place(path)))


def _where_lists_are(op: str) -> str:
    return f"{op.removesuffix('_filter')}_dir: a folder with the list"


def kind_of(operator: Operator) -> str:
    from dovetail.recipes.operators import base

    kinds: dict[str, type] = {
        "filter": base.Filter,
        "deduplicator": base.Deduplicator,
        "selector": base.Selector,
        "grouper": base.Grouper,
        "aggregator": base.Whole,
    }
    found = [name for name, kind in kinds.items() if isinstance(operator, kind)]
    return found[0] if found else "custom" if isinstance(operator, custom.Wrapped) else "mapper"


def _own_parameters(entry: Known, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of its `__init__`; what all operators have is for whoever runs it."""
    return {key: item for key, item in given.items() if key in entry.parameters}


def _put_keys(operator: Operator, given: Mapping[str, Any], top: Mapping[str, Any]) -> None:
    """Which fields it works on, and how a filter reads its bounds."""
    texts = value(top, "text_keys", "text")
    fields = {
        "text_key": texts[0] if isinstance(texts, list) else texts,
        "image_key": value(top, "image_key", "images"),
        "image_bytes_key": value(top, "image_bytes_key", "image_bytes"),
    }
    for key in KEY_FIELDS:
        setattr(operator, key, value(given, key, fields[key]))
    for key in FILTER_FIELDS:
        if hasattr(operator, key) and given.get(key) is not None:
            setattr(operator, key, given[key])


def _free(name: str, taken: set[str]) -> str:
    """A name that no stage has yet: of two operators that are alike the second is number 2."""
    found, number = name, 1
    while {found, f"{found}{HASHED}", found.removesuffix(HASHED)} & taken:
        number += 1
        found = f"{name}_{number}"
    taken.add(found)
    return found


def _idle_in(given: Mapping[str, Any], entry: Known | None) -> list[str]:
    """What every operator of Data-Juicer accepts, and what nobody here looks at."""
    own = ACTED | set(FILTER_FIELDS) | (entry.parameters.keys() if entry is not None else set())
    accepted = BASE_PARAMETERS.keys() | FILTER_PARAMETERS.keys()
    return [key for key, item in given.items() if key in accepted and key not in own and item is not None]


def _line_and_column(problem: Problem) -> tuple[int, ...]:
    """What the command line changed has neither, and comes first."""
    found = re.search(r":(\d+):(\d+)$", problem.place)
    return (int(found[1]), int(found[2])) if found and not problem.place.startswith("--") else ()
