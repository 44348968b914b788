"""Hash of the code and data that a stage runs, to recognise the stage in later runs.

Code is hashed as the syntax tree of its source, so that comments, docstrings and line breaks do not matter and
constants do: the function or class itself and everything of the same module that it names. Nested functions, lambdas
and functions of notebooks are hashed by their own part of the source, their closure and the names they use; code
without source by its bytecode. Code of other modules counts by its name. An object with a method `code_key` is hashed
by the string that this returns, one with `hashed_as` by the object that this returns. With source, the hash is the
same on every version of Python. The decorator `@udf(...)` is ignored: resources do not change results.

Data is hashed only for known types. Pickles of other objects contain the order of sets, addresses, seeds and names that
differ between versions, so that equal objects would get different hashes.
"""

from __future__ import annotations

import array
import ast
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import importlib.machinery
import inspect
import linecache
import re
import sys
import uuid
from collections import deque
from types import CodeType, FunctionType, MappingProxyType, MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from dovetail.pipeline.stage_function import Each

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes)
CONTAINER_TYPES = (dict, list, tuple, set, frozenset)
REPR_TYPES = (
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    range,
)
"""Types whose `repr` is their complete value."""
BYTES_TYPES = "biufcmMSU"
"""Kinds of numpy types whose bytes are their values; others contain pointers or padding."""
DATA_DEPTH_LIMIT = 16
LARGE_DATA_BYTES = 1000
"""Larger containers are replaced by a hash, with only the type of objects that are not data."""

Known = dict[int, tuple[object, str]]
"""id -> (large container, its description). The reference keeps the id from being reused."""


def describe_data(value: object) -> str | None:
    """None if it is not data of a known type. Never raises."""
    return _describe_value(value, DATA_DEPTH_LIMIT, {})


def describe_large_data(value: Any) -> str:
    """Description of a large container: its data, and the types of other objects in it."""
    return _describe_large(value, DATA_DEPTH_LIMIT, {})


def _describe_value(value: Any, depth: int, known: Known) -> str | None:
    try:
        return _describe_builtin(value, depth, known) or _describe_third_party(value, depth, known)
    except Exception:  # libraries raise any exception for unusual data
        return None


def _describe_builtin(value: Any, depth: int, known: Known) -> str | None:
    if isinstance(value, REPR_TYPES) or _is_path(value):
        shown = repr(value)
        return shown if " at 0x" not in shown else None
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, re.Pattern):
        return f"pattern({value.pattern!r}, {value.flags})"
    if isinstance(value, bytearray | memoryview | array.array):
        view = memoryview(value)
        return _hashed(f"{type(value).__name__} {view.format} {view.shape}", view.tobytes())
    if isinstance(value, deque):
        return f"deque{_item(list(value), depth, known)}"
    if isinstance(value, MappingProxyType):
        return _item(dict(value), depth, known)
    if type(value) is SimpleNamespace:
        return f"namespace{_item(vars(value), depth, known)}"
    return None


def _is_path(value: Any) -> bool:
    pathlib = sys.modules.get("pathlib")
    return pathlib is not None and isinstance(value, pathlib.PurePath)


def _describe_third_party(value: Any, depth: int, known: Known) -> str | None:
    return _numpy(value, depth, known) or _arrow(value, depth, known) or _pandas(value, depth, known)


def _numpy(value: Any, depth: int, known: Known) -> str | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        return None
    about = f"{type(value).__name__} {value.dtype} {value.shape}"
    if value.dtype.char in "gG":
        value = value.astype(str)  # long doubles contain padding
    if value.dtype.kind in BYTES_TYPES:
        return _hashed(about, value.tobytes())
    return f"{about} {_item(value.tolist(), depth - 1, known)}"


def _arrow(value: Any, depth: int, known: Known) -> str | None:
    pa = sys.modules.get("pyarrow")
    if pa is None:
        return None
    if isinstance(value, pa.DataType | pa.Field | pa.Schema):
        return f"{type(value).__name__} {value}"
    if isinstance(value, pa.Scalar):
        return f"{value.type} {_item(value.as_py(), depth - 1, known)}"
    if isinstance(value, pa.Array | pa.ChunkedArray):
        table = pa.table({"": value})
    elif isinstance(value, pa.RecordBatch | pa.Table):
        table = pa.table(value) if isinstance(value, pa.Table) else pa.Table.from_batches([value])
    else:
        return None
    table = table.replace_schema_metadata(None).combine_chunks()  # chunks and the version of pandas do not count
    described = pa.BufferOutputStream()
    with pa.ipc.new_stream(described, table.schema) as stream:
        stream.write_table(table, max_chunksize=65_536)
    return _hashed(f"{type(value).__name__} {table.num_rows}", described.getvalue())


def _pandas(value: Any, depth: int, known: Known) -> str | None:
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(value, pandas.DataFrame | pandas.Series | pandas.Index):
        return None
    if isinstance(value, pandas.Index):
        return f"index {value.name!r} {_item(value.to_numpy(), depth - 1, known)}"
    if isinstance(value, pandas.Series):
        return f"series {value.name!r} {_item([value.index, value.to_numpy()], depth - 1, known)}"
    columns = [value.iloc[:, place].to_numpy() for place in range(value.shape[1])]
    return f"frame {_item([value.index, value.columns, *columns], depth - 1, known)}"


def _item(value: Any, depth: int, known: Known) -> str:
    if isinstance(value, PLAIN_TYPES):
        return repr(value)
    if depth <= 0:
        return f"a {type(value).__qualname__}"
    if not isinstance(value, CONTAINER_TYPES):
        return _describe_value(value, depth, known) or f"a {type(value).__module__}.{type(value).__qualname__}"
    if len(value) > LARGE_DATA_BYTES:
        return _describe_large(value, depth, known)
    described = _items(value, depth, known)
    return f"{type(value).__name__}({', '.join(described)})"


def _describe_large(value: Any, depth: int, known: Known) -> str:
    about = f"{type(value).__name__} of {len(value)}"
    if id(value) not in known:
        known[id(value)] = value, about  # a recursive container is not described again
        items = "\n".join(_items(value, depth, known)).encode("utf-8", "surrogatepass")
        known[id(value)] = value, _hashed(about, items)
    return known[id(value)][1]


def _items(value: Any, depth: int, known: Known) -> list[str]:
    if isinstance(value, dict):
        return sorted(f"{_item(key, depth - 1, known)}: {_item(it, depth - 1, known)}" for key, it in value.items())
    described = [_item(it, depth - 1, known) for it in value]
    return described if isinstance(value, list | tuple) else sorted(described)


def _hashed(about: str, data: Any) -> str:
    return f"{about} {hashlib.sha256(data).hexdigest()}"


CODE_DEPTH_LIMIT = 8
HASH_DIGITS = 20
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def code_hash(run: object) -> str:
    """Description of an object. Never raises: an object that cannot be inspected is described by its name."""
    try:
        described = _describe_code(run, CODE_DEPTH_LIMIT)
    except Exception:  # attributes of user objects may raise any exception
        described = f"name {getattr(run, '__module__', '')}:{getattr(run, '__qualname__', type(run).__qualname__)}"
    return hashlib.sha256(described.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_DIGITS]


def _describe_code(what: object, depth: int) -> str:
    """Complete description of an object as a string."""
    if depth <= 0:
        return f"a {type(what).__qualname__}"
    if not isinstance(what, type) and callable(getattr(type(what), "code_key", None)):
        return f"key {what.code_key()}"  # type: ignore[attr-defined]
    if not isinstance(what, type) and callable(getattr(type(what), "hashed_as", None)):
        return _describe_code(what.hashed_as(), depth)  # type: ignore[attr-defined]
    if isinstance(what, str):
        module, _, name = what.partition(":")
        return _in_module(module, name, None) or f"name {what}"
    if isinstance(what, Each):
        return f"each({_describe_code(what.fn, depth - 1)})"
    if isinstance(what, functools.partial):
        held = (_value(item, depth - 1) for item in (what.args, what.keywords))
        return f"partial({_describe_code(what.func, depth - 1)}, {', '.join(held)})"
    if isinstance(what, MethodType):
        return f"method({_describe_code(what.__func__, depth - 1)}, {_value(what.__self__, depth - 1)})"
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
    """Sorted by name, because the order of Python differs between versions."""
    return sorted(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False), key=lambda it: it[0])


def _content(cell: object) -> object:
    try:
        return cell.cell_contents  # type: ignore[attr-defined]
    except ValueError:  # an empty cell
        return None


def _class(kind: type, depth: int) -> str:
    """Description of a class with its bases of other modules, except those of Python. Bases of the same module are in
    the source."""
    if kind.__module__ == "builtins":
        return f"class {kind.__qualname__}"
    found = _in_module(kind.__module__, kind.__qualname__, None) if "<" not in kind.__qualname__ else ""
    others = [base for base in kind.__bases__ if not (found and base.__module__ == kind.__module__)]
    bases = [_class(base, depth - 1) for base in others if base is not object and depth > 1]
    if not found and _is_installed(kind.__module__):
        found = f"name {kind.__module__}:{kind.__qualname__}"
    described = found or _members(kind, depth)
    return f"{described}({', '.join(bases)})" if bases else described


def _members(kind: type, depth: int) -> str:
    """Methods and plain values of a class without source."""
    parts = []
    for name, value in sorted(vars(kind).items()):
        inner = getattr(value, "__func__", value)  # of static and class methods
        if isinstance(inner, FunctionType):
            parts.append(f"{name}={_function(inner, depth - 1)}")
        elif not name.startswith("__"):
            parts.append(f"{name}={_value(value, depth - 1)}")
    return f"class({'; '.join(parts)})"


def _value(value: object, depth: int) -> str:
    """Data completely, code as code, objects by their class and attributes, other values by their type."""
    if isinstance(value, PLAIN_TYPES):
        return repr(value)
    if depth <= 0:
        return f"a {type(value).__qualname__}"
    if isinstance(value, dict | list | tuple | set | frozenset):
        return _container(value, depth)
    if isinstance(value, type | FunctionType | MethodType | functools.partial | Each) or hasattr(
        type(value), "hashed_as"
    ):
        return _describe_code(value, depth)
    if inspect.ismodule(value) or inspect.isbuiltin(value):
        return f"name {value.__name__}"
    held = _describe_captured(value)
    if held is None or _is_installed(type(value).__module__):
        return describe_data(value) or f"a {type(value).__module__}.{type(value).__qualname__}"
    return f"object({_class(type(value), depth - 1)}, {_container(held, depth - 1)})"


def _describe_captured(value: object) -> dict[object, object] | None:
    """Attributes of an object, also in slots; None if it has none."""
    held = getattr(value, "__dict__", None)
    own = [kind for kind in type(value).__mro__ if not _is_installed(kind.__module__)]
    names = [name for kind in own for name, it in vars(kind).items() if inspect.ismemberdescriptor(it)]
    slots: dict[object, object] = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**held, **slots} if isinstance(held, dict) else slots or None


def _container(value: dict[object, object] | list[object] | tuple[object, ...] | Iterable[object], depth: int) -> str:
    kind = type(value).__name__
    if len(value) > LARGE_DATA_BYTES:  # type: ignore[arg-type]
        return describe_large_data(value)
    if isinstance(value, dict):
        described = [f"{_value(key, depth - 1)}: {_value(item, depth - 1)}" for key, item in value.items()]
    else:
        described = [_value(item, depth - 1) for item in value]
    return f"{kind}({', '.join(described if isinstance(value, list | tuple) else sorted(described))})"


# --- code without source


def _code(code: CodeType, doc: str | None) -> str:
    """Bytecode without file name, line numbers and docstring."""
    described = [it for place, it in enumerate(code.co_consts) if place or it is None or it != doc]
    consts = [_code(it, None) if isinstance(it, CodeType) else repr(it) for it in described]
    return f"code({code.co_code.hex()} {consts} {code.co_names} {code.co_varnames})"


def _names(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _names(inner)
    return found


# --- source


def _in_module(module: str, qualified: str, line: int | None) -> str:
    """Source of a name in a module and of the names that it uses in the same module; empty if unknown. `line`: first
    line of the loaded function; a different line means that the source has changed since it was loaded."""
    source = _source(module)
    top = qualified.partition(".")[0]
    if not source or not top:
        return ""
    definitions = _definitions(source)
    if top not in definitions or (line is not None and not _first_line(definitions[top], qualified, line)):
        return ""
    needed = {top}
    waiting = [top]
    while waiting:
        for node in definitions[waiting.pop()]:
            new = {it.id for it in _walk(node) if isinstance(it, ast.Name)} & definitions.keys() - needed
            needed |= new
            waiting += new
    described = [_dump(node) for name in sorted(needed) for node in definitions[name]]
    return f"source {qualified}: {'; '.join(described)}"


def _tree(function: FunctionType) -> str:
    """Its part of the file or notebook cell; empty if there is no source or it is ambiguous."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    source = "".join(linecache.getlines(code.co_filename, function.__globals__))
    try:
        nodes = [node for node in ast.walk(_parsed(source)) if _is_at(node, code)] if source else []
    except (SyntaxError, ValueError):
        return ""
    if len(nodes) > 1:  # several lambdas in one line: compare the columns of their bodies
        exact = {place for place in code.co_positions() if None not in place}
        nodes = [node for node in nodes if isinstance(node, ast.Lambda) and _extent(node.body) in exact]
    return _dump(nodes[0]) if len(nodes) == 1 else ""


def _is_at(node: ast.AST, code: CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    return isinstance(node, FUNCTIONS) and node.name == code.co_name and _starts_on_line(node) == code.co_firstlineno


def _extent(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _dump(node: object) -> str:
    """Like `ast.dump`, but the same on all versions of Python: without empty and redundant fields."""
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
    if isinstance(node, ast.JoinedStr) and value:  # Python 3.12 ends some with an empty string
        return [it for it in value if getattr(it, "value", None) != ""]
    return [it for it in value if not _is_udf(it)] if name == "decorator_list" and value else value


def _is_udf(decorator: ast.expr) -> bool:
    """Whether a decorator is `@udf` or `@dt.udf`, with or without arguments."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(called, "id", None) == "udf" or getattr(called, "attr", None) == "udf"


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The child nodes that `_dump` includes."""
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
    """Statements without docstrings."""
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


def _first_line(statements: Iterable[ast.stmt], qualified: str, line: int) -> bool:
    last = qualified.rpartition(".")[2]
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, FUNCTIONS) and node.name == last and _starts_on_line(node) <= line <= node.lineno:
                return True
    return False


def _starts_on_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(it.lineno for it in node.decorator_list)])


def _source(module: str) -> str:
    """Source of a module, loaded or as the import system finds it; imports neither it nor its packages."""
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
    """Whether a module belongs to Python or an installed package, which is identified by its version."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return True
    loaded = sys.modules.get(module)
    origin = getattr(loaded, "__file__", None) if loaded is not None else getattr(_spec(module), "origin", None)
    return "site-packages" in str(origin or "") or "dist-packages" in str(origin or "")
