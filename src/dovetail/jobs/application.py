"""Application of a worker: the functions that it may run, how its modules are loaded, and what is refused.

A worker never imports what a job names: it looks the reference up among the functions that are declared with `@dt.job`
in the modules of its application.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from dataclasses import dataclass, field, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, JobRefusedError, Problem, did_you_mean, nearest_word, short_repr
from dovetail.jobs.job_function import (
    REFERENCE_PATTERN,
    RUN_MODULE,
    SCRIPT_MODULE_PREFIX,
    JobFunction,
    module_reference,
    script_path,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType


FUNCTION_REFUSED = "DT608"
BAD_APPLICATION = "DT609"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Application:
    """The functions that a worker may run: those declared with `@dt.job` in its modules."""

    modules: tuple[str, ...] = ()
    """Modules as given: "pkg.module" or "path/script.py"."""
    functions: Mapping[str, JobFunction] = field(default_factory=dict)
    """Functions of jobs by reference."""
    _aliases: Mapping[str, JobFunction] = field(default_factory=dict, repr=False)
    """Functions by file and name, for jobs that were submitted by running one of the modules as a script."""

    @classmethod
    def load(cls, modules: Sequence[str]) -> Application:
        """Import modules and scripts; ConfigError with everything that is wrong."""
        if isinstance(modules, str):
            modules = [modules]
        problems: list[Problem] = []
        functions: dict[str, JobFunction] = {}
        aliases: dict[str, JobFunction] = {}
        if not modules:
            message = "no module with job functions is given, so this worker could run nothing"
            fixes = ("--app pkg.module", "--app path/script.py", "--runs FOLDER")
            problems.append(Problem(BAD_APPLICATION, message, fixes=fixes))
        for written in modules:
            module = _load(written)
            if isinstance(module, Problem):
                problems.append(module)
                continue
            found = _functions_of(module)
            if not found:
                problems.append(_no_functions(written, module))
            functions |= {one.reference: one for one in found}
            path = getattr(module, "__file__", None)
            if path:
                aliases |= {f"{script_path(path)}:{one.reference.rpartition(':')[2]}": one for one in found}
        if problems:
            raise ConfigError(problems)
        return cls(tuple(map(str, modules)), functions, aliases)

    def find(self, reference: str) -> JobFunction:
        """The function of a job. JobRefusedError if it is not in the application; nothing is ever imported."""
        found = self.functions.get(reference) or self._aliases.get(reference)
        if found is None:
            raise JobRefusedError(self._refusal(reference))
        return found

    def _refusal(self, reference: str) -> Problem:
        place, _, name = reference.rpartition(":")
        known = sorted(self.functions)
        listed = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
        evidence = (f"modules: {', '.join(self.modules) or 'none'}", f"functions: {listed or 'none'}")
        same_place = [one.rpartition(":")[2] for one in known if one.rpartition(":")[0] == place]
        near = nearest_word(name, same_place)
        message = f"this worker does not run {short_repr(reference)}"
        if place == RUN_MODULE:
            message = "this worker runs no pipelines, recipes, backfills or actor systems"
            return Problem(
                FUNCTION_REFUSED, message, evidence, ("dovetail worker --runs FOLDER, with the folder of the file",)
            )
        if place in self.modules or same_place:
            message += f": {place} declares no job function {name!r}{did_you_mean(name, same_place)}"
            fixes = (f"submit {place}:{near}",) if near else (f"write @dt.job above def {name} in {place}",)
        else:
            message += ": its module is not in the application"
            fixes = (f"add --app {place} to the worker, if the function may run there",)
            if not re.match(REFERENCE_PATTERN, reference):
                fixes = ('submit "pkg.module:name"',)
        return Problem(FUNCTION_REFUSED, message, evidence, fixes)


def load_application(modules: Sequence[str] | str, *, runs: bool) -> Application:
    """The application of a worker; `runs`: with the job functions of runs."""
    given = [modules] if isinstance(modules, str) else list(modules)
    return Application.load([*given, RUN_MODULE] if runs else given)


def _functions_of(module: ModuleType) -> list[JobFunction]:
    """Functions that the module itself declares, without those that it imports from other modules."""
    place = module_reference(module.__name__)
    found = []
    for name, value in list(vars(module).items()):
        if isinstance(value, JobFunction) and value.function.__module__ == module.__name__:
            reference = f"{place}:{name}"
            found.append(value if value.reference == reference else replace(value, reference=reference))
    return found


def _load(written: str) -> ModuleType | Problem:
    text = str(written)
    if text.endswith(".py") or "/" in text:
        return _load_script(text)
    if not _MODULE.fullmatch(text):
        message = f"{short_repr(text)} is not the name of a module or the path of a script"
        module = text.partition(":")[0]
        fixes = (f"--app {module}",) if _MODULE.fullmatch(module) else ("--app pkg.module", "--app path/script.py")
        return Problem(BAD_APPLICATION, message, fixes=fixes)
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(text)
    except ModuleNotFoundError as error:
        if error.name is None or not (text == error.name or text.startswith(f"{error.name}.")):
            return _import_failed(text, error)
        evidence = (f"searched in {Path.cwd()} and on sys.path",)
        fixes = ("start the worker in the folder that has the package, or install the package",)
        if Path(text.replace(".", "/") + ".py").exists() or Path(f"{text.removesuffix('.py')}.py").exists():
            fixes = (f"--app {text}.py", *fixes)
        return Problem(BAD_APPLICATION, f"no module named {error.name!r}", evidence, fixes)
    except (Exception, SystemExit) as error:
        return _import_failed(text, error)


def _load_script(text: str) -> ModuleType | Problem:
    path = Path(script_path(os.path.expanduser(text)))  # noqa: PTH111
    if not path.is_file():
        nearby = [one.name for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
        message = f"{text}: no such file{did_you_mean(path.name, nearby)}"
        return Problem(
            BAD_APPLICATION, message, fixes=(f"--app {nearest_word(path.name, nearby) or 'path/script.py'}",)
        )
    from hashlib import blake2b  # late: it loads OpenSSL, which makes every process of a job 0.1 ms slower

    name = f"{SCRIPT_MODULE_PREFIX}{path.stem}_{blake2b(os.fsencode(path), digest_size=6).hexdigest()}"
    loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    _add_to_path(path.parent)
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        return Problem(BAD_APPLICATION, f"{text} is not a Python file", fixes=("--app path/script.py",))
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        return _import_failed(text, error)
    return module


def _add_to_path(folder: Path) -> None:
    """Make the modules of a folder importable, as for a script in it."""
    if str(folder) not in sys.path and not ("" in sys.path and folder == Path.cwd()):
        sys.path.insert(0, str(folder))


def _import_failed(written: str, error: BaseException) -> Problem:
    frames = traceback.extract_tb(error.__traceback__)
    last = next((one for one in reversed(frames) if "importlib" not in one.filename), None)
    evidence = (f"{last.filename}:{last.lineno}: {last.line}",) if last is not None else ()
    reason = str(error)
    if isinstance(error, SyntaxError):  # its place is not among the frames
        evidence = (f"{error.filename}:{error.lineno}: {(error.text or '').strip()}",)
        reason = error.msg
    message = f"{written} cannot be imported: {type(error).__name__}: {reason}"
    return Problem(BAD_APPLICATION, message, evidence, fixes=("correct the error in the module",))


def _no_functions(written: str, module: ModuleType) -> Problem:
    others = sorted({value.function.__module__ for value in vars(module).values() if isinstance(value, JobFunction)})
    plain = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    evidence = tuple(f"it imports job functions from {other}" for other in others)
    fixes = tuple(f"--app {other}" for other in others) or (f"write @dt.job above def {(plain or ['train'])[0]}",)
    return Problem(BAD_APPLICATION, f"{written} declares no job function", evidence, fixes)
