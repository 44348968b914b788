"""Base of the readers of pipeline files and actors files: collects all problems, each with its place and its fixes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.documents.fields import UnknownKey, WrongValue, file_problem
from dovetail.documents.yaml_writer import YAML
from dovetail.errors import ResourceError, Subject, nearest_word
from dovetail.pipeline.option_renderer import OptionRenderer
from dovetail.pipeline.overrides import NAMED_LISTS, set_option
from dovetail.resources.resources import RESOURCES, Resources

if TYPE_CHECKING:
    from dovetail.documents.document import Document, KeyPath
    from dovetail.documents.fields import Mistake, Record
    from dovetail.errors import Fix, Problem

OPTION = "--set "
"""Begin of the place of a value that the command line gave."""


class FileReader:
    """Collects all problems, so that they can be fixed at once."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []
        self.given: dict[int, set[str]] = {}
        """Keys of each stage or role in the file that can be checked; a key that is missing or wrong is reported
        once."""

    def mapping(self, path: KeyPath, data: object, record: Record, example: object) -> dict[str, Any]:
        """The values of known keys; unknown and missing keys are problems."""
        if not isinstance(data, Mapping):
            self.report(path, WrongValue(data, "a mapping", instead=(example,)))
            return {}
        for mistake in record.key_mistakes(data):
            problem = file_problem(mistake, path)
            place = self.document.place((*path, *mistake.path))
            if isinstance(mistake, UnknownKey):
                problem = self.with_hint(problem, mistake, record)
                if place.startswith(OPTION):
                    key = self.right_key(mistake, record)
                    problem = replace(problem, fixes=_spelled_as_option(place, problem, mistake, key))
            self.problems.append(replace(problem, place=place))
        return {key: data[key] for key in record.names if key in data}

    def with_hint(self, problem: Problem, mistake: UnknownKey, record: Record) -> Problem:  # noqa: ARG002 - for others
        """The problem of an unknown key, with what else is known about it."""
        return problem

    def right_key(self, mistake: UnknownKey, record: Record) -> str:  # noqa: ARG002 - for others
        """The key that was probably meant, relative to the mapping: "batch_size", "resources.cpus"; "": none."""
        return nearest_word(str(mistake.path[-1]), mistake.known) or ""

    def resources(self, path: KeyPath, entry: object, called: str) -> Resources:
        """The resources of a mapping; `called` names the stage or role."""
        known = self.mapping(path, entry, RESOURCES, {"cpus": 1})
        try:
            return Resources(**known)
        except ResourceError as error:
            for problem in error.problems:
                setting = problem.subject.name if problem.subject is not None else ""
                about = (setting,) if setting in known else ()
                self.add((*path, *about), replace(problem, message=f"{called}: {problem.message}"))
            return Resources()

    def report(self, path: KeyPath, mistake: Mistake) -> None:
        """Add the problem of a value."""
        problem = file_problem(replace(mistake, path=path))
        self.problems.append(replace(problem, place=self.document.place(path)))

    def add(self, path: KeyPath, problem: Problem) -> None:
        """Add a problem with its place, and with its fixes as lines of the file or as options."""
        self.problems.append(replace(problem, fixes=self.fixes(path, problem), place=self.document.place(path)))

    def fixes(self, path: KeyPath, problem: Problem) -> tuple[Fix, ...]:
        subject = self._entry_subject(path) if self.document.place(path).startswith(OPTION) else None
        if subject is None:
            return YAML.fixes(problem)
        return OptionRenderer().fixes(replace(problem, subject=subject))

    def was_given(self, path: KeyPath) -> bool:
        """Whether the file has the key of a stage or role that a problem is about."""
        match path:
            case (str(name), int(number), str(key), *_) if name in NAMED_LISTS:
                return key in self.given[number]
        return True

    def sorted_problems(self) -> tuple[Problem, ...]:
        """Order by line and column. Values of the command line (`overrides.py`) have neither, and come first."""
        return tuple(sorted(self.problems, key=self._line_and_column))

    def _line_and_column(self, problem: Problem) -> tuple[int, ...]:
        found = re.search(r":(\d+):(\d+)$", problem.place) if self.document.root is not None else None
        return (int(found[1]), int(found[2])) if found and not problem.place.startswith("--") else ()

    def _entry_subject(self, path: KeyPath) -> Subject | None:
        """The stage or role that a path is in; None: in none, or it has no valid name."""
        match path:
            case (str(key), int(number), *_) if key in NAMED_LISTS:
                name = self.document.data[key][number].get("name")
                return Subject(NAMED_LISTS[key], name) if isinstance(name, str) and name else None
        return None


def _spelled_as_option(place: str, problem: Problem, mistake: UnknownKey, key: str) -> tuple[Fix, ...]:
    """The fix of an unknown key of the option `--set`, as that option with the right key."""
    path, _, value = place.removeprefix(OPTION).partition("=")
    before, _, last = path.rpartition(".")
    if not key or last != mistake.path[-1]:
        return problem.fixes
    return (set_option(f"{before}.{key}" if before else key, value),)
