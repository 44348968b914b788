"""Parse YAML and JSON files into documents; every syntax error has its line and column."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.documents.document import Document
from dovetail.errors import ConfigError, Problem, nearest_word

if TYPE_CHECKING:
    from collections.abc import Iterable

    import yaml

SURROGATE = re.compile("[\ud800-\udfff]")
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
SIZE_LIMIT_BYTES = 16 << 20
DEPTH_LIMIT = 100
_CLOSING = {"[": "]", "{": "}"}
_JSON_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')
"""A bracket, or a whole text, in which brackets mean nothing."""
NODES_LIMIT = 1_000_000
"""Maximum number of nodes with expanded aliases; protects against alias bombs."""


def read_document(path: str | Path) -> Document:
    """Read the document in a file."""
    path = Path(path)
    name = str(path)
    if path.suffix == ".py" and path.is_file():
        raise _config_error(name, "is a Python program, not a YAML file", f"python {shlex.quote(name)}")
    try:
        with path.open("rb") as file:
            raw = file.read(SIZE_LIMIT_BYTES + 1)
    except FileNotFoundError:
        near = _similar_file(path)
        hint = f" (did you mean {str(near)!r}?)" if near is not None else ""
        fix = "pass the path of an existing file" if near is None else str(path.parent / near)
        raise _config_error(name, f"no such file{hint}", fix) from None
    except IsADirectoryError:
        inside = [entry for entry in sorted(path.iterdir()) if entry.suffix in (".yaml", ".yml")]
        fix = str(inside[0]) if inside else "pass the path of a file in it"
        raise _config_error(name, "is a folder, not a file", fix) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _config_error(name, f"cannot be read: {reason}", "pass the path of a readable file") from None
    if len(raw) > SIZE_LIMIT_BYTES:
        raise _config_error(
            name, "is larger than 16 MB: this is not a configuration file", "pass the path of a configuration file"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        message = f"is not UTF-8 text (byte 0x{error.object[error.start]:02x} on line {line})"
        raise _config_error(f"{name}:{line}", message, f"iconv -f LATIN1 -t UTF-8 {name} > utf8.yaml") from None
    return parse_document(text, name)


def parse_document(text: str, name: str) -> Document:
    """Parse JSON if the name ends in .json, else YAML. Duplicate keys and recursive aliases are errors."""
    if not text.strip():
        raise _config_error(name, "is empty", "write at least one key")
    if name.endswith(".json"):
        data = _json(text, name)
        _check_depth(data, name)
        return Document(name, data, _compose_json_as_yaml(text))
    import yaml

    try:
        root = _compose(text)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_problem(error, name, text)) from None
    except RecursionError:
        raise _config_error(name, f"is nested more than {DEPTH_LIMIT} levels deep", "use fewer levels") from None
    except (OverflowError, ValueError) as error:  # the yaml package cannot decode escapes such as "\\U99999999"
        raise _config_error(
            name, f"not valid YAML: {error}", "correct the escape sequences in quoted strings"
        ) from None
    if root is None:
        raise _config_error(name, "is empty", "write at least one key")
    builder = _Builder(name)
    data = builder.build(root, root.start_mark, 0)
    if builder.problems:
        raise ConfigError(builder.problems)
    return Document(name, data, root)


def _compose(text: str) -> yaml.Node | None:
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _compose_json_as_yaml(text: str) -> yaml.Node | None:
    """The nodes of a JSON text that is also YAML, for line and column; None: errors have the path instead."""
    import yaml

    try:
        return _compose(text)
    except (yaml.YAMLError, RecursionError):
        return None


def _json(text: str, name: str) -> Any:
    twice: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        data = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ConfigError(_json_problem(error, name, text)) from None
    except RecursionError:
        raise _config_error(name, f"is nested more than {DEPTH_LIMIT} levels deep", "use fewer levels") from None
    except ValueError as error:
        raise _config_error(name, f"contains a value that cannot be read: {error}", "put it in quotes") from None
    if twice:
        raise ConfigError(_locate_duplicate_keys(text, name) or [_duplicate_key(key, name) for key in twice])
    return data


def _check_depth(data: Any, name: str) -> None:
    """The limit of YAML, which the JSON parser does not have."""
    level: list[Any] = [data]
    for _ in range(DEPTH_LIMIT + 1):
        level = [part for one in level for part in _parts(one)]
        if not level:
            return
    raise ConfigError(
        Problem("DT014", f"nested more than {DEPTH_LIMIT} levels deep", fixes=("use fewer levels",), place=name)
    )


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _json_problem(error: json.JSONDecodeError, name: str, text: str) -> Problem:
    if error.pos >= len(text.rstrip()) and (position := _open_json_bracket(text)) is not None:
        before = text[:position]
        place = f"{name}:{before.count(chr(10)) + 1}:{position - before.rfind(chr(10))}"
        message = f"not valid JSON: the bracket {text[position]} is not closed"
        return Problem("DT010", message, fixes=(f"add {_CLOSING[text[position]]}",), place=place)
    place = f"{name}:{error.lineno}:{error.colno}"
    fixes = ("check commas, quotes and brackets in this line",)
    return Problem("DT010", f"not valid JSON: {error.msg}", fixes=fixes, place=place)


def _open_json_bracket(text: str) -> int | None:
    """The position of the innermost bracket that is not closed."""
    opened: list[int] = []
    for match in _JSON_BRACKET.finditer(text):
        if match[0] in _CLOSING:
            opened.append(match.start())
        elif match[0] in _CLOSING.values() and opened:
            opened.pop()
    return opened[-1] if opened else None


def _duplicate_key(key: str, place: str) -> Problem:
    return Problem("DT014", f"key {key!r} is given twice", fixes=("remove one of the two",), place=place)


def _locate_duplicate_keys(text: str, name: str) -> list[Problem]:
    """The same problems with line and column, if this JSON is also YAML."""
    root = _compose_json_as_yaml(text)
    if root is None:
        return []
    builder = _Builder(name)
    builder.build(root, root.start_mark, 0)
    return builder.problems


class _Builder:
    """Plain data from the nodes of a YAML document: mappings with string keys, lists, strings, numbers, true, false and
    null. Aliases are followed and merge keys (<<) merged; anything else is a problem with its place."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[Problem] = []
        self._parts = 0
        self._above: set[int] = set()

    def build(self, node: yaml.Node, at: yaml.Mark, depth: int) -> Any:
        self._parts += 1
        if self._parts > NODES_LIMIT:
            raise _config_error(
                self.name, f"has more than {NODES_LIMIT} values with its aliases expanded", "use fewer aliases"
            )
        if id(node) in self._above:
            return self._wrong(at, "an alias contains itself", "replace the alias by its value")
        if depth > DEPTH_LIMIT:
            return self._wrong(at, f"nested more than {DEPTH_LIMIT} levels deep", "use fewer levels")
        if not isinstance(node.value, list):
            return self._scalar(node, at)
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            return self._wrong(
                at, f"{node.tag.rsplit(':', 1)[-1]!r} is not plain data", "write a mapping or a list", "DT010"
            )
        self._above.add(id(node))
        if node.tag.endswith(":seq"):
            built: Any = [self.build(item, item.start_mark, depth + 1) for item in node.value]
        else:
            built = self._mapping(node, depth)
        self._above.discard(id(node))
        return built

    def _mapping(self, node: yaml.Node, depth: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merged: dict[str, Any] = {}
        for key, value in node.value:
            at = key.start_mark
            if isinstance(key.value, list):
                self._wrong(at, "a key must be a string", "put it in quotes")
            elif key.tag == "tag:yaml.org,2002:merge":
                merged = {**self._merged(value, at, depth), **merged}
            elif (name := _join_surrogates(key.value)) in own:
                message = f"key {name!r} is given twice; the first is on line {lines[name]}"
                self._wrong(at, message, "remove one of the two")
            else:
                lines[name] = at.line + 1
                own[name] = self.build(value, at, depth + 1)
        return {**merged, **own}

    def _merged(self, value: yaml.Node, at: yaml.Mark, depth: int) -> dict[str, Any]:
        built = self.build(value, at, depth + 1)
        parts = built if isinstance(built, list) else [built]
        result: dict[str, Any] = {}
        for part in reversed(parts):
            if isinstance(part, dict):
                result.update(part)
            elif not self.problems:
                self._wrong(at, "only mappings can be merged with <<", "write '<<: *name' for a mapping", "DT010")
        return result

    def _scalar(self, node: yaml.Node, at: yaml.Mark) -> Any:
        from yaml.constructor import SafeConstructor

        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind == "str" and not getattr(node, "style", None) and _EXPONENT.fullmatch(node.value):
            return float(node.value)  # 1e3 is a number, except in YAML 1.1
        if kind in ("str", "timestamp", "value", "merge"):
            return _join_surrogates(node.value)
        if kind not in ("null", "bool", "int", "float"):
            return self._wrong(at, f"{node.tag!r} is not plain data", "use a string or a number", "DT010")
        try:
            return SafeConstructor().construct_object(node)
        except Exception as error:  # any exception of the converters means that the text is invalid
            shown = node.value if len(node.value) <= 40 else f"{node.value[:37]}..."
            return self._wrong(
                at, f"{shown!r} is not a {kind} that can be read ({error})"[:300], "put it in quotes", "DT010"
            )

    def _wrong(self, at: yaml.Mark, message: str, fix: str, code: str = "DT014") -> None:
        place = f"{self.name}:{at.line + 1}:{at.column + 1}"
        self.problems.append(Problem(code, message, fixes=(fix,), place=place))


def _join_surrogates(text: str) -> str:
    """Replace pairs of surrogates, as JSON escapes characters above U+FFFF, by their character."""
    if text.isascii() or not SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def _unclosed_problem(error: yaml.YAMLError, name: str, text: str) -> Problem | None:
    """The quote or bracket that is not closed; the error itself is found where the next one is, or at the end."""
    context = getattr(error, "context", None) or ""
    start, found = getattr(error, "context_mark", None), getattr(error, "problem_mark", None)
    if found is not None and (mark := _long_quote(text, found)) is not None:
        start, context = mark, "quoted"
    elif start is None or not ("quoted" in context or "flow" in context) or (found and found.line == start.line):
        return None
    letter = text[start.index : start.index + 1]
    kind, closing = ("bracket", _CLOSING[letter]) if letter in _CLOSING else ("quote", letter)
    line = text.splitlines()[start.line].rstrip()
    message = f"not valid YAML: the {kind} {letter} is not closed{' on this line' if kind == 'quote' else ''}"
    place = f"{name}:{start.line + 1}:{start.column + 1}"
    return Problem(
        "DT010", message, evidence=(line[:80],), fixes=(f"add {closing} at the end of the value",), place=place
    )


def _long_quote(text: str, end: yaml.Mark) -> yaml.Mark | None:
    """The start of a quoted text that spans lines and after which the error was found: its first line lacks a quote."""
    import yaml

    last: yaml.Token | None = None
    try:
        for token in yaml.scan(text):
            if token.start_mark.index >= end.index:
                break
            if isinstance(token, yaml.ScalarToken):
                last = token
    except yaml.YAMLError:
        pass  # the error that is explained here
    if not isinstance(last, yaml.ScalarToken) or last.plain or last.style not in ("'", '"'):
        return None
    start: yaml.Mark = last.start_mark
    return start if start.line < last.end_mark.line else None


def _syntax_problem(error: yaml.YAMLError, name: str, text: str) -> Problem:
    unclosed = _unclosed_problem(error, name, text)
    if unclosed is not None:
        return unclosed
    mark, position = getattr(error, "problem_mark", None), getattr(error, "position", None)
    place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    if isinstance(position, int):
        before = text[:position]
        place = f"{name}:{before.count(chr(10)) + 1}:{position - before.rfind(chr(10))}"
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    character = getattr(error, "character", None)
    if isinstance(character, int):
        reason = f"{reason} (character 0x{character:04x} at position {getattr(error, 'position', '?')})"
    context = getattr(error, "context", None)
    message = f"not valid YAML: {reason}" + (f" ({context})" if context else "")
    return Problem("DT010", message, fixes=("check indentation, quotes, tabs and colons in this line",), place=place)


def _config_error(place: str, message: str, fix: str) -> ConfigError:
    return ConfigError(Problem("DT010", message, fixes=(fix,), place=place))


def _similar_file(path: Path) -> Path | None:
    """A file with this name in a folder beside it, as `dovetail init` writes it, or one with a similar name."""
    try:
        entries = list(path.parent.iterdir())
        inside = [entry.name for entry in entries if os.path.isfile(entry / path.name)]  # noqa: PTH113 - never raises
        near = nearest_word(path.name, [entry.name for entry in entries if not entry.is_dir()])
    except OSError:
        return None
    if len(inside) == 1:
        return Path(inside[0]) / path.name
    return None if near is None else Path(near)
