"""Functions and classes that do not exist, found from the source of their modules, which are not imported."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import Problem, did_you_mean, nearest_word

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterable, Iterator
    from importlib.machinery import ModuleSpec

    from dovetail.pipeline.stage import Stage

DYNAMIC_CALLS = {"globals", "exec", "setattr"}
"""Calls by which a module may define names that its source does not show."""


@dataclass(frozen=True, slots=True)
class MissingCode:
    """The module or the name of "package.module:name" that does not exist."""

    message: str
    searched: str
    nearest: str
    """The reference that was probably meant, "" if there is none like it."""
    name: str = ""
    """The missing function or class; "": the module is missing."""
    file: Path | None = None
    module: str = ""

    def remedy(self, near: str) -> str:
        """What to do if nothing has a similar name; `near`: the file beside which modules are found."""
        if self.file is not None:
            return f"define {self.name} in {self.file}"
        return f"create {self.module}.py beside {near}, or install the package"


def find_missing_code(label: str, reference: object, folder: Path) -> MissingCode | None:
    """None if the code exists, is not given as a string, or cannot be found without importing it. `label` names its
    user in messages: "stage 'caption'"."""
    module, _, path = reference.partition(":") if isinstance(reference, str) else ("", "", "")
    top = module.partition(".")[0]
    if not top or top in sys.modules:
        return None
    spec = _find_spec(top)
    if spec is None:
        near = nearest_word(top, _modules_in(folder))
        hint = f" (did you mean {near!r}?)" if near else ""
        message = f"{label}: no module named {top!r}{hint}"
        nearest = f"{near}{module.removeprefix(top)}:{path}" if near else ""
        return MissingCode(message, f"searched in {folder} and on sys.path", nearest, module=top)
    file = _source_file(spec, module)
    names, name = None if file is None else defined_names(file), path.partition(".")[0]
    if names is None or name in names:
        return None
    message = f"{label}: {module} has no {name!r}{did_you_mean(name, sorted(names))}"
    near = nearest_word(name, sorted(names))
    return MissingCode(message, f"in {file}", f"{module}:{near}" if near else "", name, file, module)


def missing_code_problems(stages: Iterable[Stage]) -> Iterator[Problem]:
    """Of a pipeline in Python whose workers have the import path of this process."""
    folder = Path(sys.path[0] if sys.path else ".").absolute()
    for stage in stages:
        missing = find_missing_code(f"stage {stage.name!r}", stage.run, folder)
        if missing is not None:
            program = Path(sys.argv[0]).name or "the program"
            fixes = (f'run="{missing.nearest}"',) if missing.nearest else (missing.remedy(program),)
            yield Problem("DT034", missing.message, (missing.searched,), fixes)


def _modules_in(folder: Path) -> list[str]:
    """Names of the modules in a folder."""
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return []
    return [path.stem for path in found if path.suffix == ".py" or (path / "__init__.py").is_file()]


def _find_spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


def _source_file(top: ModuleSpec, module: str) -> Path | None:
    """File of a module, found without importing its package; None: unknown."""
    parts = module.split(".")[1:]
    if not parts:
        return Path(top.origin) if top.origin and top.origin.endswith(".py") else None
    for folder in top.submodule_search_locations or ():
        for file in (Path(folder, *parts, "__init__.py"), Path(folder, *parts[:-1], f"{parts[-1]}.py")):
            if file.is_file():
                return file
    return None


def defined_names(file: Path) -> set[str] | None:
    """Names that a module binds at its top level, from its source; None: they are known only when it is imported."""
    import ast  # late: only functions that are given as strings need it

    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    names: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
                continue
            case ast.alias(name=name, asname=alias):
                names.add(alias or name.partition(".")[0])
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Call():
                if any(isinstance(one, ast.Name) and one.id in DYNAMIC_CALLS for one in ast.walk(node.func)):
                    return None
            case _:
                pass
        waiting += ast.iter_child_nodes(node)
    return None if {"*", "__getattr__"} & names else names
