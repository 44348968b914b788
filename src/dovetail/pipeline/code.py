"""Is this still the same code? A hash of what a stage runs, for what was measured of it to be found again.

Told by its source as a tree, so that comments, docstrings and lines do not matter but constants do: the function or
class itself and, of the same module, everything it names. A function inside of another, a lambda, and one of a notebook
is told by its own part of the source, by what it holds and by what it uses; only without any source by its compiled
code. Code of other modules counts by its name only. An object with a method `code_key` is told by the text that it
gives, one with `hashed_as` by what that gives. The same on every version of Python, as long as there is source; and
`@udf(...)` above a function does not count: what a worker needs does not change what it computes.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import inspect
import linecache
import sys
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING

from dovetail.pipeline.held_data import LARGE, PLAIN, told_data, told_large
from dovetail.pipeline.stage import Each

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DEPTH = 8
DIGITS = 20
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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
    if not isinstance(what, type) and callable(getattr(type(what), "hashed_as", None)):
        return _told(what.hashed_as(), depth)  # type: ignore[attr-defined]
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
        _tree(function) or _code(code, function.__doc__),
        _value(function.__defaults__, depth - 1),
        _value(function.__kwdefaults__, depth - 1),
        *(f"{name}={_value(_content(cell), depth - 1)}" for name, cell in _cells(function)),
        *(f"{name}={_value(used[name], depth - 1)}" for name in sorted(_names(code)) if name in used),
    ]
    return f"function({'; '.join(parts)})"


def _has_source(function: FunctionType) -> bool:
    return "<" not in function.__qualname__ and not function.__closure__


def _cells(function: FunctionType) -> list[tuple[str, object]]:
    """In the order of their names: Python's own differs between versions."""
    return sorted(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False), key=lambda it: it[0])


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
    """Of data all of it, of code the code, of objects their class and what they hold, of others the type."""
    if isinstance(value, PLAIN):
        return repr(value)
    if depth <= 0:
        return f"a {type(value).__qualname__}"
    if isinstance(value, dict | list | tuple | set | frozenset):
        return _container(value, depth)
    if isinstance(value, type | FunctionType | MethodType | functools.partial | Each) or hasattr(
        type(value), "hashed_as"
    ):
        return _told(value, depth)
    if inspect.ismodule(value) or inspect.isbuiltin(value):
        return f"name {value.__name__}"
    held = _held(value)
    if held is None or _is_installed(type(value).__module__):
        return told_data(value) or f"a {type(value).__module__}.{type(value).__qualname__}"
    return f"object({_class(type(value), depth - 1)}, {_container(held, depth - 1)})"


def _held(value: object) -> dict[object, object] | None:
    """What an object has, also in slots; None: it has nothing that can be seen."""
    held = getattr(value, "__dict__", None)
    own = [kind for kind in type(value).__mro__ if not _is_installed(kind.__module__)]
    names = [name for kind in own for name, it in vars(kind).items() if inspect.ismemberdescriptor(it)]
    slots: dict[object, object] = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**held, **slots} if isinstance(held, dict) else slots or None


def _container(value: dict[object, object] | list[object] | tuple[object, ...] | Iterable[object], depth: int) -> str:
    kind = type(value).__name__
    if len(value) > LARGE:  # type: ignore[arg-type]
        return told_large(value)
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
            new = {it.id for it in _walk(node) if isinstance(it, ast.Name)} & definitions.keys() - needed
            needed |= new
            waiting += new
    told = [_dump(node) for name in sorted(needed) for node in definitions[name]]
    return f"source {qualified}: {'; '.join(told)}"


def _tree(function: FunctionType) -> str:
    """Its own part of the file, or notebook cell, that it comes from; nothing if there is none, or several could be."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    source = "".join(linecache.getlines(code.co_filename, function.__globals__))
    try:
        nodes = [node for node in ast.walk(_parsed(source)) if _is_at(node, code)] if source else []
    except (SyntaxError, ValueError):
        return ""
    if len(nodes) > 1:  # lambdas in one line: by the columns of what they give
        exact = {place for place in code.co_positions() if None not in place}
        nodes = [node for node in nodes if isinstance(node, ast.Lambda) and _extent(node.body) in exact]
    return _dump(nodes[0]) if len(nodes) == 1 else ""


def _is_at(node: ast.AST, code: CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    return isinstance(node, FUNCTIONS) and node.name == code.co_name and _begins(node) == code.co_firstlineno


def _extent(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _dump(node: object) -> str:
    """Like `ast.dump`, which differs between versions of Python: without fields that are empty or say what the place
    says already."""
    if isinstance(node, list):
        return f"[{', '.join(map(_dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    given = [(name, _field(node, name)) for name in node._fields if name not in ("ctx", "kind", "type_comment")]
    parts = [f"{name}={_dump(value)}" for name, value in given if value is not None and value != []]
    if isinstance(node, ast.Constant) and node.value is None:
        parts = ["None"]
    return f"{type(node).__name__}({', '.join(parts)})"


def _field(node: ast.AST, name: str) -> object:
    value = getattr(node, name, None)
    if isinstance(node, ast.JoinedStr) and value:  # Python 3.12 ends some with an empty text
        return [it for it in value if getattr(it, "value", None) != ""]
    return [it for it in value if not _is_udf(it)] if name == "decorator_list" and value else value


def _is_udf(decorator: ast.expr) -> bool:
    """`@udf`, `@dt.udf`, with or without arguments."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(called, "id", None) == "udf" or getattr(called, "attr", None) == "udf"


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All that `_dump` shows."""
    waiting: list[object] = [node]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, ast.AST):
            yield one
            waiting += [_field(one, name) for name in one._fields]


@functools.lru_cache(maxsize=64)
def _parsed(source: str) -> ast.Module:
    """Without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            _drop_docstring(node)
    return tree


@functools.lru_cache(maxsize=64)
def _definitions(source: str) -> dict[str, list[ast.stmt]]:
    """Name -> the statements at the top of a module that bind it."""
    tree = _parsed(source)
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
            if isinstance(node, FUNCTIONS) and node.name == last and _begins(node) <= line <= node.lineno:
                return True
    return False


def _begins(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(it.lineno for it in node.decorator_list)])


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
