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
    line: int = 0
    """The line of `file` that is wrong; 0: something is missing."""

    def remedy(self, near: str) -> str:
        """What to do if nothing has a similar name; `near`: the file beside which modules are found."""
        if self.line:
            return f"correct line {self.line} of {self.file}"
        if self.file is not None:
            return f"define {self.name} in {self.file}"
        return f"create {self.module}.py beside {near}, or install the package"


def find_missing_code(label: str, reference: object, folder: Path, *, called: bool = True) -> MissingCode | None:
    """None if the code exists, is not given as a string, or cannot be found without importing it. `label` names its
    user in messages: "stage 'caption'". `called`: objects of a class are called, as those of a stage."""
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
    tree = None if file is None else _parsed(file)
    if file is None or tree is None:
        return None
    if isinstance(tree, SyntaxError):
        where = f"{file.name}, line {tree.lineno}"
        return MissingCode(
            f"{label}: {where}: {tree.msg}", (tree.text or "").rstrip(), "", file=file, line=tree.lineno or 1
        )
    names, name = defined_names(tree), path.partition(".")[0]
    if names is None or name in names:
        line = _uncallable_class_line(tree, path) if called else 0
        message = (
            f"{label}: {reference} is a class whose objects cannot be called: it has no method __call__(self, items)"
        )
        return MissingCode(message, f"in {file}, line {line}", "", f"{path}.__call__", file) if line else None
    message = f"{label}: {module} has no {name!r}{did_you_mean(name, sorted(names))}"
    near = nearest_word(name, sorted(names))
    return MissingCode(message, f"in {file}", f"{module}:{near}" if near else "", name, file, module)


def missing_code_problems(stages: Iterable[Stage]) -> Iterator[Problem]:
    """Problems of a pipeline in Python whose workers have the import path of this process."""
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


def _parsed(file: Path) -> ast.Module | SyntaxError | None:
    """The source of a module; None: it cannot be read."""
    import ast  # late: only functions that are given as strings need it

    try:
        return ast.parse(file.read_bytes())
    except SyntaxError as error:
        return error
    except (OSError, ValueError):
        return None


def defined_names(tree: ast.Module) -> set[str] | None:
    """Names that a module binds at its top level; None: they are known only when it is imported."""
    import ast

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


def _uncallable_class_line(tree: ast.Module, name: str) -> int:
    """Line of a class without bases and decorators that has no `__call__`; 0: there is none, or it is not certain."""
    import ast

    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    if len(found) != 1 or found[0].bases or found[0].keywords or found[0].decorator_list:
        return 0
    is_plain = all(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Expr) for node in found[0].body)
    methods = {node.name for node in found[0].body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    return found[0].lineno if is_plain and not uses and "__call__" not in methods else 0
