"""What does a YAML or JSON file say, and at which line and column?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dovetail.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    import yaml
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")
Path_ = tuple["str | int", ...]

SIZE_LIMIT_BYTES = 16 << 20
DEPTH_LIMIT = 100


@dataclass(frozen=True, slots=True)
class Document:
    """Plain data with a memory of where each part of it was written."""

    name: str
    data: Any
    root: yaml.Node | None = None

    def place(self, path: Path_ = ()) -> str:
        """'cluster.yaml:3:9' for the part at this path, or for the nearest part around it; for data without a file
        the path itself, 'nodes[2].memory'."""
        if self.root is None:
            return _dotted(self.name, path)
        node, at = self.root, self.root.start_mark
        for step in path:
            found = _child(node, step)
            if found is None:
                break
            key, node = found
            at = key.start_mark
        return f"{self.name}:{at.line + 1}:{at.column + 1}"


def read_document(path: str | Path) -> Document:
    """The one document in a file; whatever is wrong with the file is a ConfigError with the place."""
    path = Path(path)
    name = str(path)
    try:
        if path.stat().st_size > SIZE_LIMIT_BYTES:
            raise _problem(name, "is larger than 16 MB: this is not a configuration file", "name the right file")
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise _problem(name, "no such file" + _nearby(path), "name a file that is there") from None
    except IsADirectoryError:
        raise _problem(name, "is a folder, not a file", "name a file in it") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        message = f"is not UTF-8 text (byte 0x{error.object[error.start]:02x} on line {line})"
        raise _problem(f"{name}:{line}", message, f"iconv -f LATIN1 -t UTF-8 {name} > utf8.yaml") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _problem(name, f"cannot be read: {reason}", "name a file that can be read") from None
    return parse_document(text, name)


def parse_document(text: str, name: str) -> Document:
    """YAML (and so JSON) text by the safe loader; duplicate keys and endless aliases are errors."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise _problem(name, "is empty", "write at least one key")
        problems = _structure_problems(root, name)
        if problems:
            raise ConfigError(problems)
        data = loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_problem(error, name)) from None
    except (ValueError, OverflowError, RecursionError) as error:
        # the safe loader's own conversions: a date 2024-13-45, an int of a million digits, nesting without end
        raise _problem(name, f"holds a value that cannot be read: {error}", "put it in quotes") from None
    finally:
        loader.dispose()
    return Document(name, data, root)


def validated(document: Document, schema: type[T]) -> T:
    """The document as `schema` (a frozen dataclass), or every mismatch at once with its place."""
    from pydantic import ValidationError

    try:
        # as JSON, because only there does pydantic's strict mode take mappings for dataclasses
        text = json.dumps(document.data, default=str)
        value: T = _adapter(schema).validate_json(text, strict=True)
    except (TypeError, ValueError, RecursionError) as error:
        if not isinstance(error, ValidationError):
            raise _problem(document.place(), f"is not plain data: {error}", "use texts, numbers and lists") from None
        found = [_mismatch(detail, document, schema) for detail in error.errors(include_url=False)]
        raise ConfigError(found) from None
    return value


def _adapter(schema: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)


def _mismatch(detail: ErrorDetails, document: Document, schema: type[Any]) -> Problem:
    path: Path_ = detail["loc"]
    where = document.place(path)
    shown = _dotted("", path) or "the file"
    match detail["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            known = sorted(_keys_beside(path, schema))
            word = str(path[-1])
            return Problem(
                "DT011",
                f"unknown key {word!r}{did_you_mean(word, known)}",
                evidence=(f"keys here: {', '.join(known)}",) if known else (),
                fixes=(f"remove {word!r}, or correct its spelling",),
                place=where,
            )
        case "missing" | "missing_argument":
            return Problem("DT012", f"{shown} is missing", fixes=(f"add '{path[-1]}:'",), place=where)
        case _:
            message = detail["msg"].replace("Input should be", "should be").replace("Input must be", "must be")
            got = _shortened(detail["input"])
            return Problem("DT013", f"{shown} {message}, not {got}", fixes=(f"correct {shown}",), place=where)


def _keys_beside(path: Path_, schema: type[Any]) -> list[str]:
    """The keys that the schema knows where `path` points, found by walking its JSON schema."""
    whole = _adapter(schema).json_schema()
    here: dict[str, Any] = whole
    for step in path[:-1]:
        here = _resolved(here, whole)
        here = here.get("items", {}) if isinstance(step, int) else here.get("properties", {}).get(step, {})
    return list(_resolved(here, whole).get("properties", {}))


def _resolved(part: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Follows $ref and the first object among alternatives."""
    for choice in part.get("anyOf", ()):
        if "$ref" in choice or "properties" in choice or "items" in choice:
            part = choice
            break
    if "$ref" in part:
        found: dict[str, Any] = whole["$defs"][part["$ref"].rsplit("/", 1)[-1]]
        return found
    return part


def _structure_problems(root: yaml.Node, name: str) -> list[Problem]:
    """Duplicate keys, keys that are no words, aliases that contain themselves, and nesting without end."""
    import yaml

    problems: list[Problem] = []
    done: set[int] = set()
    above: set[int] = set()

    def walk(node: yaml.Node, depth: int) -> None:
        place = f"{name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        if id(node) in above or depth > DEPTH_LIMIT:
            what = "an alias contains itself" if id(node) in above else f"nested more than {DEPTH_LIMIT} deep"
            problems.append(Problem("DT014", what, fixes=("write the part out",), place=place))
            return
        if id(node) in done:
            return
        above.add(id(node))
        if isinstance(node, yaml.MappingNode):
            problems.extend(_key_problems(node, name))
            for key, value in node.value:
                walk(key, depth + 1)
                walk(value, depth + 1)
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                walk(value, depth + 1)
        above.discard(id(node))
        done.add(id(node))

    walk(root, 0)
    return problems


def _key_problems(node: yaml.MappingNode, name: str) -> list[Problem]:
    import yaml

    problems = []
    seen: dict[str, int] = {}
    for key, _value in node.value:
        line = key.start_mark.line + 1
        place = f"{name}:{line}:{key.start_mark.column + 1}"
        if not isinstance(key, yaml.ScalarNode):
            problems.append(Problem("DT014", "a key must be a word", fixes=("put it in quotes",), place=place))
        elif key.value in seen and key.tag != "tag:yaml.org,2002:merge":
            message = f"key {key.value!r} is given twice; the first is on line {seen[key.value]}"
            problems.append(Problem("DT014", message, fixes=("remove one of the two",), place=place))
        else:
            seen[key.value] = line
    return problems


def _child(node: yaml.Node, step: str | int) -> tuple[yaml.Node, yaml.Node] | None:
    """(where it starts, the part itself) one step down."""
    import yaml

    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and 0 <= step < len(node.value):
        return node.value[step], node.value[step]
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(step):
                return key, value
    return None


def _syntax_problem(error: yaml.YAMLError, name: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    said = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    context = getattr(error, "context", None)
    message = f"not valid YAML: {said}" + (f" ({context})" if context else "")
    return Problem(
        "DT010", message, fixes=("look at this line: indentation, quotes, a tab, a missing colon",), place=place
    )


def _problem(place: str, message: str, fix: str) -> ConfigError:
    return ConfigError(Problem("DT010", message, fixes=(fix,), place=place))


def _nearby(path: Path) -> str:
    try:
        return did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()])
    except OSError:
        return ""


def _dotted(name: str, path: Path_) -> str:
    text = name
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def _shortened(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
