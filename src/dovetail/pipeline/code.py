"""Is this still the same code? A hash of what a stage runs, for what was measured of it to be found again.

Told by its source as a tree, so that comments, docstrings and lines do not matter but constants do: the function or
class itself and, of the same module, everything it names. What has no source (a lambda, a notebook, a function inside
of another) is told by its compiled code and by the plain data it holds. Code of other modules counts by its name only.
An object with a method `code_key` is told by the text that it gives.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import inspect
import sys
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING

from dovetail.pipeline.stage import Each

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PLAIN = (type(None), bool, int, float, complex, str, bytes)
LARGE = 1000
"""Of larger containers only the kind and the length count."""
DEPTH = 8
DIGITS = 20


def code_hash(run: object) -> str:
    """Never raises: what cannot be looked into is told by its name."""
    try:
        told = _told(run, DEPTH)
    except Exception:  # whatever a user's object does when it is looked at
        told = f"name {getattr(run, '__module__', '')}:{getattr(run, '__qualname__', type(run).__qualname__)}"
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


def _told(what: object, depth: int) -> str:
    """Everything that makes it what it is, as a text."""
    if depth <= 0:
        return f"a {type(what).__qualname__}"
    if not isinstance(what, type) and callable(getattr(type(what), "code_key", None)):
        return f"key {what.code_key()}"  # type: ignore[attr-defined]
    if isinstance(what, str):
        module, _, name = what.partition(":")
        return _in_module(module, name, None) or f"name {what}"
    if isinstance(what, Each):
        return f"each({_told(what.fn, depth - 1)})"
    if isinstance(what, functools.partial):
        held = (_value(item, depth - 1) for item in (what.args, what.keywords))
        return f"partial({_told(what.func, depth - 1)}, {', '.join(held)})"
    if isinstance(what, MethodType):
        return f"method({_told(what.__func__, depth - 1)}, {_value(what.__self__, depth - 1)})"
    if isinstance(what, FunctionType):
        return _function(what, depth)
    if isinstance(what, type):
        return _class(what, depth)
    if isinstance(getattr(type(what), "__call__", None), FunctionType):  # noqa: B004 - a method of its class
        return _value(what, depth)
    return f"name {getattr(what, '__module__', '')}:{getattr(what, '__qualname__', type(what).__qualname__)}"


def _function(function: FunctionType, depth: int) -> str:
    code = function.__code__
    found = _in_module(function.__module__, function.__qualname__, code.co_firstlineno) if _has_source(function) else ""
    if found:
        return found
    used = function.__globals__
    parts = [
        _code(code, function.__doc__),
        _value(function.__defaults__, depth - 1),
        _value(function.__kwdefaults__, depth - 1),
        *(_value(_content(cell), depth - 1) for cell in function.__closure__ or ()),
        *(f"{name}={_value(used[name], depth - 1)}" for name in sorted(_names(code)) if name in used),
    ]
    return f"function({'; '.join(parts)})"


def _has_source(function: FunctionType) -> bool:
    return "<" not in function.__qualname__ and not function.__closure__


def _content(cell: object) -> object:
    try:
        return cell.cell_contents  # type: ignore[attr-defined]
    except ValueError:  # empty yet
        return None


def _class(kind: type, depth: int) -> str:
    """With its bases of other modules, as far as they are not Python's own; those of the same are in the source."""
    if kind.__module__ == "builtins":
        return f"class {kind.__qualname__}"
    found = _in_module(kind.__module__, kind.__qualname__, None) if "<" not in kind.__qualname__ else ""
    others = [base for base in kind.__bases__ if not (found and base.__module__ == kind.__module__)]
    bases = [_class(base, depth - 1) for base in others if base is not object and depth > 1]
    if not found and _is_installed(kind.__module__):
        found = f"name {kind.__module__}:{kind.__qualname__}"
    told = found or _members(kind, depth)
    return f"{told}({', '.join(bases)})" if bases else told


def _members(kind: type, depth: int) -> str:
    """Of a class without source: its methods, and plain values."""
    parts = []
    for name, value in sorted(vars(kind).items()):
        inner = getattr(value, "__func__", value)  # of static and class methods
        if isinstance(inner, FunctionType):
            parts.append(f"{name}={_function(inner, depth - 1)}")
        elif not name.startswith("__"):
            parts.append(f"{name}={_value(value, depth - 1)}")
    return f"class({'; '.join(parts)})"


def _value(value: object, depth: int) -> str:
    """Of plain data all of it, of code the code, of objects their class and what they hold, of others the type."""
    if isinstance(value, PLAIN):
        return repr(value)
    if depth <= 0:
        return f"a {type(value).__qualname__}"
    if isinstance(value, dict | list | tuple | set | frozenset):
        return _container(value, depth)
    if isinstance(value, type | FunctionType | MethodType | functools.partial | Each):
        return _told(value, depth)
    if inspect.ismodule(value) or inspect.isbuiltin(value):
        return f"name {value.__name__}"
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict) or _is_installed(type(value).__module__):
        return f"a {type(value).__module__}.{type(value).__qualname__}"
    return f"object({_class(type(value), depth - 1)}, {_container(held, depth - 1)})"


def _container(value: dict[object, object] | list[object] | tuple[object, ...] | Iterable[object], depth: int) -> str:
    kind = type(value).__name__
    if len(value) > LARGE:  # type: ignore[arg-type]
        return f"{kind} of {len(value)}"  # type: ignore[arg-type]
    if isinstance(value, dict):
        told = [f"{_value(key, depth - 1)}: {_value(item, depth - 1)}" for key, item in value.items()]
    else:
        told = [_value(item, depth - 1) for item in value]
    return f"{kind}({', '.join(told if isinstance(value, list | tuple) else sorted(told))})"


# --- code without source


def _code(code: CodeType, doc: str | None) -> str:
    """Without file and lines, and without its docstring."""
    told = [it for place, it in enumerate(code.co_consts) if place or it is None or it != doc]
    consts = [_code(it, None) if isinstance(it, CodeType) else repr(it) for it in told]
    return f"code({code.co_code.hex()} {consts} {code.co_names} {code.co_varnames})"


def _names(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _names(inner)
    return found


# --- source


def _in_module(module: str, qualified: str, line: int | None) -> str:
    """What a module's source says of a name, and of what that names in the same module; nothing if it cannot be told.
    `line`: where a function that is loaded begins; elsewhere means that the source is not the one it came from."""
    source = _source(module)
    top = qualified.partition(".")[0]
    if not source or not top:
        return ""
    definitions = _definitions(source)
    if top not in definitions or (line is not None and not _begins_at(definitions[top], qualified, line)):
        return ""
    needed = {top}
    waiting = [top]
    while waiting:
        for node in definitions[waiting.pop()]:
            new = {it.id for it in ast.walk(node) if isinstance(it, ast.Name)} & definitions.keys() - needed
            needed |= new
            waiting += new
    told = [ast.dump(node) for name in sorted(needed) for node in definitions[name]]
    return f"source {qualified}: {'; '.join(told)}"


@functools.lru_cache(maxsize=64)
def _definitions(source: str) -> dict[str, list[ast.stmt]]:
    """Name -> the statements at the top of a module that bind it, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            _drop_docstring(node)
    found: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for name in set(_bound(statement)):
            found.setdefault(name, []).append(statement)
    return found


def _drop_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
    if ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:] or [ast.Pass()]


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top binds, also within its `if` and `try`."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    else:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif node is not statement and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name


def _begins_at(statements: Iterable[ast.stmt], qualified: str, line: int) -> bool:
    last = qualified.rpartition(".")[2]
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == last:
                first = min([node.lineno, *(it.lineno for it in node.decorator_list)])
                if first <= line <= node.lineno:
                    return True
    return False


def _source(module: str) -> str:
    """Of a module that is loaded, or as it would be found: neither it nor its packages are imported for that."""
    if not module or _is_installed(module):
        return ""
    loaded = sys.modules.get(module)
    if loaded is not None:
        try:
            return inspect.getsource(loaded)
        except (OSError, TypeError):
            return ""
    spec = _spec(module)
    get_source = getattr(spec.loader, "get_source", None) if spec is not None else None
    return (get_source(module) or "") if callable(get_source) else ""


def _spec(module: str) -> importlib.machinery.ModuleSpec | None:
    name, _, rest = module.partition(".")
    find = importlib.machinery.PathFinder.find_spec
    spec = find(name)
    for part in rest.split(".") if rest else ():
        if spec is None or not spec.submodule_search_locations:
            return None
        name = f"{name}.{part}"
        spec = find(name, list(spec.submodule_search_locations))
    return spec


def _is_installed(module: str) -> bool:
    """Python's own, or a package's: its version says more than its source, and it may be large."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return True
    loaded = sys.modules.get(module)
    origin = getattr(loaded, "__file__", None) if loaded is not None else getattr(_spec(module), "origin", None)
    return "site-packages" in str(origin or "") or "dist-packages" in str(origin or "")
