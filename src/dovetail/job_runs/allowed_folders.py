"""Folders whose files may run as jobs (`dovetail worker --runs`), and the check of the paths that a job names.

A pipeline file names functions, so it may run code, and so may everything that a job could replace by another file.
Links are resolved before a path is compared.
"""

from __future__ import annotations

import glob
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dovetail.errors import Problem
from dovetail.jobs.run_submission import FILE_SUFFIXES, FOLDERS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PATH_REFUSED = "DT635"


@dataclass(frozen=True, slots=True)
class AllowedFolders:
    """Folders, with all links resolved, and URL prefixes."""

    places: tuple[str, ...] = ()

    @classmethod
    def of_worker(cls, environ: Mapping[str, str]) -> Self:
        """Those of the worker that runs this process."""
        return cls(tuple(json.loads(environ.get(FOLDERS_VARIABLE) or "[]")))

    def has(self, path: str) -> bool:
        """Whether the absolute path of a file, folder or glob, or a URL, is in one of them."""
        if ".." in path.split("/"):
            return False
        if "://" in path:
            return any(path.startswith(f"{place.rstrip('/')}/") for place in self.places)
        if not path.startswith("/"):
            return False
        fixed = Path(_folder_of_glob(path)).resolve()
        return any(fixed.is_relative_to(place) for place in self.places if "://" not in place)

    def problems(self, **paths: str | Iterable[str] | None) -> Iterator[Problem]:
        """One problem for each path that is not in them. The name of an argument -> its path or paths."""
        for name, value in paths.items():
            for path in [value] if isinstance(value, str) else value or ():
                if not self.has(path):
                    yield self._problem(name, path)

    def _problem(self, name: str, path: str) -> Problem:
        message = f"{name} {path} is not in a folder whose files this worker runs"
        listed = ", ".join(self.places) or "none: it was started without --runs"
        folder = path.rpartition("/")[0] if "://" in path else str(Path(_folder_of_glob(path)).parent)
        return Problem(PATH_REFUSED, message, (f"folders: {listed}",), (f"dovetail worker --runs {folder}",))


def file_problems(allowed: AllowedFolders, file: str) -> Iterator[Problem]:
    """Why a pipeline, recipe or actors file may not run, or does not exist."""
    if not file.endswith(FILE_SUFFIXES):  # results of runs have other suffixes
        fixes = (f"name it {Path(file).stem}.yaml",)
        yield Problem(PATH_REFUSED, f"{file} is not a .yaml file", fixes=fixes)
        return
    problems = list(allowed.problems(file=file))
    yield from problems
    if not problems and not Path(file).is_file():
        fixes = ("keep it in a folder that all machines with workers reach",)
        yield Problem(PATH_REFUSED, f"{file} does not exist on the machine of this worker", fixes=fixes)


def module_file(allowed: AllowedFolders, folder: str, reference: str) -> tuple[Path | None, list[Problem]]:
    """The file of the module of "module:name" in a folder, and why it may not be imported. It is not imported."""
    module = reference.partition(":")[0]
    if all(part.isidentifier() for part in module.split(".")):
        base = Path(folder, *module.split("."))
        found = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
        if found is not None:
            problems = list(allowed.problems(udf=str(found)))
            return (None if problems else found), problems
    message = f"udf {reference!r}: there is no such module in {folder}"
    fixes = ("submit it in the folder that has the module, which must be one that the worker runs",)
    return None, [Problem(PATH_REFUSED, message, fixes=fixes)]


def _folder_of_glob(path: str) -> str:
    """The part of a path before its first component with a wildcard."""
    if not glob.has_magic(path) or os.path.exists(path):  # noqa: PTH110
        return path
    return next(str(folder) for folder in Path(path).parents if not glob.has_magic(str(folder)))
