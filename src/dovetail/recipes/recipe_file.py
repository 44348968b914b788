"""Parser of recipe files: steps, settings, and all problems at once with line and column."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dovetail.documents.fields import MissingKey, file_problem, unknown_key_problem
from dovetail.errors import Problem, did_you_mean, short_repr
from dovetail.recipes import custom_operators
from dovetail.recipes.catalogue import (
    BASE_PARAMETERS,
    FILTER_PARAMETERS,
    availability_problem,
    known_operators,
    native_class,
)
from dovetail.recipes.compiler import HASH_STAGE_SUFFIX, RESULTS_STAGE, STATS_STAGE
from dovetail.recipes.file_keys import (
    IGNORED_KEYS,
    KEY_FIELDS,
    OPERATOR_DEFAULTS,
    OPERATOR_KEYS,
    RECIPE_FILE,
    value_or_default,
)
from dovetail.recipes.parameters import coerce_parameters, constructor_problem, is_valid, parameter_problems
from dovetail.recipes.requirements import OperatorRequirements, parse_requirements, stage_settings
from dovetail.runtime.run_spec import add_import_path

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.documents.document import Document, KeyPath
    from dovetail.recipes.catalogue import OperatorSpec
    from dovetail.recipes.operators.base import Operator

EXAMPLE_PROCESS = "process: [{text_length_filter: {min_len: 50}}]"
PIPELINE_KEYS = {"name": "project_name", "source": "dataset_path", "sink": "export_path", "stages": "process"}
"""Keys of pipeline files -> keys of recipes."""
FILTER_BOUND_KEYS = ("min_closed_interval", "max_closed_interval", "reversed_range")


@dataclass(frozen=True, slots=True)
class RecipeStep:
    """One entry of `process`, as far as it could be parsed."""

    number: int
    op: str
    """Name of the operator as written in the file."""
    name: str
    """Unique name of its stage."""
    kind: str
    """mapper, filter, deduplicator, selector, grouper, ...; "custom" for a function of the user."""
    parameters: Mapping[str, Any]
    requirements: OperatorRequirements
    operator: Operator | None
    """None if it cannot run in this environment; `unready` has the reason."""
    unready: Problem | None = None
    skip_errors: bool = True
    """Whether failed rows are recorded and skipped, unless the settings of the stage have `on_error`."""


@dataclass(frozen=True, slots=True)
class ParsedRecipe:
    """A recipe file as far as it could be parsed, and every problem in it."""

    settings: Mapping[str, Any]
    steps: tuple[RecipeStep, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()


def parse_recipe(document: Document, folder: Path) -> ParsedRecipe:
    return _RecipeParser(document, folder).parse()


@dataclass
class _RecipeParser:
    document: Document
    folder: Path
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    custom: dict[str, Any] = field(default_factory=dict)
    """Operators of `custom_operator_paths`."""
    ignored: dict[str, None] = field(default_factory=dict)
    """Accepted keys and parameters without effect."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Settings of the stages of all operators that do not have their own."""

    def parse(self) -> ParsedRecipe:
        data = self.document.data
        if not isinstance(data, Mapping):
            self._report(
                (), Problem("DT013", f"the file should be a mapping, not {short_repr(data)}", fixes=(EXAMPLE_PROCESS,))
            )
            return ParsedRecipe({}, (), tuple(self.problems))
        top = self._top_level(data)
        if isinstance(top.get("custom_operator_paths"), str | list):
            self._load_custom(top["custom_operator_paths"])
        entries = data.get("process")
        steps: list[RecipeStep] = []
        if not isinstance(entries, list) or not entries:
            if "process" not in data:
                self._report((), file_problem(MissingKey(("process",), RECIPE_FILE.by_name["process"].type.example)))
        else:
            self._steps(entries, top, steps)
        if self.ignored:
            self.notes.insert(0, f"ignored (no effect in Dovetail): {', '.join(self.ignored)}")
        return ParsedRecipe(top, tuple(steps), tuple(sorted(self.problems, key=_line_and_column)), tuple(self.notes))

    # --- top-level keys

    def _top_level(self, data: Mapping[str, Any]) -> dict[str, Any]:
        self.ignored |= dict.fromkeys(sorted(key for key in data if key in IGNORED_KEYS))
        if data.get("op_fusion") is False:
            self.notes.append("op_fusion: false has no effect: operators that can share workers always do")
        found = {key: data[key] for key in data if key in RECIPE_FILE.by_name}
        for key in data:
            if key not in RECIPE_FILE.by_name and key not in IGNORED_KEYS:
                self._report((str(key),), self._unknown_top_level(str(key)))
        wrong = set()
        for key, mistake in RECIPE_FILE.value_mistakes(found):
            wrong.add(key)
            path = (key, *mistake.path)
            self._report(path, file_problem(replace(mistake, path=path)))
        if found.get("dataset") is not None and found.get("dataset_path") is not None:
            fix = ("remove one of the two",)
            self._report(("dataset",), Problem("DT410", "dataset and dataset_path both name the input", fixes=fix))
        if isinstance(found.get("defaults"), Mapping):
            self._set_defaults(found["defaults"], found)
        return {key: item for key, item in found.items() if key not in wrong}

    def _set_defaults(self, given: Mapping[str, Any], top: Mapping[str, Any]) -> None:
        known = {key: given[key] for key in given if key in OPERATOR_DEFAULTS.by_name}
        for key in given:
            if key not in known:
                problem = unknown_key_problem(str(key), OPERATOR_DEFAULTS.names)
                self._report(("defaults", str(key)), replace(problem, message=f"defaults: {problem.message}"))
        if top.get("skip_op_error") is not None:
            known["skip_op_error"] = top["skip_op_error"]

        def report(key: str, problem: Problem) -> None:
            self._report(("defaults", key), replace(problem, message=f"defaults: {problem.message}"))

        self.defaults = stage_settings(known, report)

    def _unknown_top_level(self, key: str) -> Problem:
        problem = unknown_key_problem(key, RECIPE_FILE.names)
        if key in known_operators():
            fixes = (f"process: [{{{key}: {{...}}}}]",)
            return replace(problem, message=f"{key!r} is an operator: it belongs in 'process'", fixes=fixes)
        if key in PIPELINE_KEYS:
            there = PIPELINE_KEYS[key]
            message = f"{key!r} is a key of pipeline files; recipes use {there!r}"
            return replace(problem, message=message, fixes=(f"write {there} instead of {key}",))
        if key in OPERATOR_KEYS:
            message = f"unknown key {key!r}: it belongs to an operator, inside 'process'"
            return replace(problem, message=message, fixes=(f"move {key!r} to the operators that need it",))
        return problem

    def _load_custom(self, paths: str | list[str]) -> None:
        listed = [paths] if isinstance(paths, str) else paths
        self.custom, problems = custom_operators.load_custom_operators(listed, self.folder)
        for number, problem in problems:
            self._report(("custom_operator_paths", *([number] if isinstance(paths, list) else [])), problem)

    # --- operators

    def _steps(self, entries: list[Any], top: Mapping[str, Any], steps: list[RecipeStep]) -> None:
        taken = {RESULTS_STAGE, STATS_STAGE}
        for number, entry in enumerate(entries):
            op, given = self._entry(number, entry)
            if op is None:
                continue
            plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", op.rpartition(":")[2] if ":" in op else op).strip("_.-") or "op"
            steps.append(self._step(number, op, _unique_name(plain[:90], taken), given, top))

    def _entry(self, number: int, entry: Any) -> tuple[str | None, dict[str, Any]]:
        """Operator and parameters: `- name`, `- name:`, or `- name: {key: value}`."""
        if isinstance(entry, str):
            return entry, {}
        if not isinstance(entry, Mapping) or len(entry) != 1:
            what = f"has {len(entry)} keys" if isinstance(entry, Mapping) else f"is {short_repr(entry)}"
            message = f"process[{number}] {what}; an entry is one operator with its parameters"
            fixes = ("- text_length_filter: {min_len: 50}",)
            if isinstance(entry, Mapping) and len(entry) > 1:
                fixes = (f"indent the parameters below {next(iter(entry))!r}, or write '- ' before each operator",)
            self._report(("process", number), Problem("DT013", message, fixes=fixes))
            return None, {}
        op, given = next(iter(entry.items()))
        if given is None:
            return op, {}
        if not isinstance(given, Mapping):
            message = f"the parameters of {op} should be a mapping, not {short_repr(given)}"
            self._report(("process", number, op), Problem("DT013", message, fixes=(f"- {op}: {{}}",)))
            return op, {}
        return op, dict(given)

    def _step(self, number: int, op: str, name: str, given: dict[str, Any], top: Mapping[str, Any]) -> RecipeStep:
        path: KeyPath = ("process", number, op)

        def report(key: str, problem: Problem) -> None:
            self._report((*path, key) if key in given else path, replace(problem, message=f"{op}: {problem.message}"))

        entry = known_operators().get(op)
        cuda = entry is not None and entry.cuda
        needs = parse_requirements(given, cuda_by_default=cuda, report=report, defaults=self.defaults)
        skips = value_or_default(given, "skip_op_error", value_or_default(top, "skip_op_error", True)) is not False
        half = RecipeStep(number, op, name, "custom", given, needs, None, None, skips)
        before = len(self.problems)
        self.ignored |= dict.fromkeys(f"{key} of {op}" for key in _ignored_parameters(given, entry))
        if op in self.custom or ":" in op:
            step = self._custom_step(half, report, path)
        elif entry is None:
            self._report(path, self._unknown(op))
            return half
        else:
            step = self._catalogue_step(half, entry, report)
        if step.operator is not None and len(self.problems) == before:
            _set_field_keys(step.operator, given, top)
        return step

    def _catalogue_step(self, step: RecipeStep, entry: OperatorSpec, report: Any) -> RecipeStep:
        wrong = list(parameter_problems(entry, step.parameters))
        path: KeyPath = ("process", step.number, step.op)
        for key, problem in wrong:
            self._report((*path, key) if key in step.parameters else path, problem)
        step = replace(step, kind=entry.kind)
        if step.parameters.get("adapter") == "data_juicer":
            from dovetail.recipes.data_juicer_adapter import adapt_operator

            through, unready = adapt_operator(entry, _constructor_parameters(entry, step.parameters))
            return replace(step, operator=through, unready=unready)
        unready = availability_problem(step.op)
        cls = native_class(step.op)
        if cls is None or wrong:
            return replace(step, unready=unready)
        parameters = coerce_parameters(entry, _constructor_parameters(entry, step.parameters))
        mistaken = constructor_problem(cls, parameters)
        if mistaken is not None:
            fixes = mistaken.fixes or (f"correct the parameters of {step.op}",)
            report("", replace(mistaken, fixes=fixes))
            return replace(step, unready=unready)
        operator = cls(**parameters)
        operator.recipe_parameters = parameters
        absent = operator.missing_assets() if unready is None else ""
        if absent:
            unready = Problem("DT421", f"{step.op}: {absent}", fixes=(_word_list_fix(step.op),))
        return replace(step, operator=operator, unready=unready)

    def _custom_step(self, step: RecipeStep, report: Any, path: KeyPath) -> RecipeStep:
        """A function or class of the user; parameters that are not base parameters are its arguments."""
        for key in (*KEY_FIELDS, "skip_op_error"):
            if step.parameters.get(key) is not None and not is_valid(BASE_PARAMETERS[key], step.parameters[key]):
                fix = f"{key}: {'true' if key == 'skip_op_error' else BASE_PARAMETERS[key].default}"
                report(key, Problem("DT412", f"{key} is {short_repr(step.parameters[key])}", fixes=(fix,)))
        if step.op in self.custom:
            target: Any = self.custom[step.op]
        else:
            add_import_path(self.folder)
            target, problem = custom_operators.import_target(step.op, self.folder)
            if problem is not None:
                self._report(path, problem)
                return step
        signature = custom_operators.signature_of(target)
        takes = {} if signature is None else signature.parameters
        base = BASE_PARAMETERS.keys() - takes
        arguments = {key: item for key, item in step.parameters.items() if key not in OPERATOR_KEYS and key not in base}
        try:
            operator = custom_operators.make_operator(target, arguments)
        except Exception as error:
            evidence = (
                f"given: {short_repr(arguments)}",
                *([f"signature: {signature}"] if signature is not None else []),
            )
            fix = "give only parameters of its signature"
            report("", Problem("DT415", f"does not accept these parameters: {error}", evidence, (fix,)))
            return step
        operator.recipe_parameters = arguments
        return replace(step, operator=operator, kind=operator_kind(operator))

    def _unknown(self, op: str) -> Problem:
        names = [*known_operators(), *self.custom]
        message = f"there is no operator {op!r}{did_you_mean(op, names)}"
        fixes = ("correct its name", "use your own operator: package.module:name, or custom_operator_paths")
        return Problem("DT410", message, fixes=fixes)

    def _report(self, path: KeyPath, problem: Problem) -> None:
        self.problems.append(replace(problem, place=self.document.place(path)))


def _word_list_fix(op: str) -> str:
    return f"{op.removesuffix('_filter')}_dir: a folder with the list"


def operator_kind(operator: Operator) -> str:
    from dovetail.recipes.operators import base

    kinds: dict[str, type] = {
        "filter": base.Filter,
        "deduplicator": base.Deduplicator,
        "selector": base.Selector,
        "grouper": base.Grouper,
        "aggregator": base.DatasetOperator,
    }
    found = [name for name, kind in kinds.items() if isinstance(operator, kind)]
    return found[0] if found else "custom" if isinstance(operator, custom_operators.CallableOperator) else "mapper"


def _constructor_parameters(entry: OperatorSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of its `__init__`, without those that all operators have."""
    return {key: item for key, item in given.items() if key in entry.parameters}


def _set_field_keys(operator: Operator, given: Mapping[str, Any], top: Mapping[str, Any]) -> None:
    """Set the names of its fields, and whether the bounds of a filter are inclusive."""
    texts = value_or_default(top, "text_keys", "text")
    fields = {
        "text_key": texts[0] if isinstance(texts, list) else texts,
        "image_key": value_or_default(top, "image_key", "images"),
        "image_bytes_key": value_or_default(top, "image_bytes_key", "image_bytes"),
    }
    for key in KEY_FIELDS:
        setattr(operator, key, value_or_default(given, key, fields[key]))
    for key in FILTER_BOUND_KEYS:
        if hasattr(operator, key) and given.get(key) is not None:
            setattr(operator, key, given[key])


def _unique_name(name: str, taken: set[str]) -> str:
    """A name that no stage has: the second `x` of a recipe is `x_2`."""
    found, number = name, 1
    while {found, f"{found}{HASH_STAGE_SUFFIX}", found.removesuffix(HASH_STAGE_SUFFIX)} & taken:
        number += 1
        found = f"{name}_{number}"
    taken.add(found)
    return found


def _ignored_parameters(given: Mapping[str, Any], entry: OperatorSpec | None) -> list[str]:
    """Parameters that every operator of Data-Juicer accepts and that have no effect in Dovetail."""
    own = OPERATOR_KEYS | set(FILTER_BOUND_KEYS) | (entry.parameters.keys() if entry is not None else set())
    accepted = BASE_PARAMETERS.keys() | FILTER_PARAMETERS.keys()
    return [key for key, item in given.items() if key in accepted and key not in own and item is not None]


def _line_and_column(problem: Problem) -> tuple[int, ...]:
    """Sort key. Changes of the command line have no line and come first."""
    found = re.search(r":(\d+):(\d+)$", problem.place)
    return (int(found[1]), int(found[2])) if found and not problem.place.startswith("--") else ()
