"""Declarations of fields: one declaration per kind of file or object.

A declaration drives the checks, the JSON Schema and the table in docs/reference.md:

    SINK = Record("Sink", "A file that results are written to.", (
        Field("path", PATH, "A file or URL.", required=True),
        Field("ordered", FLAG, "Write rows in the order of the source.", False),
    ))

A `Type` describes valid values and finds every mistake in a value. Mistakes are data. Two functions render them:
`setting_problem` for an argument in Python ("batch_size=0 is not a whole number from 1 to 100"), `file_problem` for a
key of a file ("sink.ordered should be true or false, not 1"). Checks across fields are functions beside a declaration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeGuard

from dovetail.documents.document import KeyPath, dotted_path
from dovetail.documents.yaml_writer import yaml_literal
from dovetail.errors import UNSET, Change, Given, Problem, Subject, Text, did_you_mean, nearest_word, short_repr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Schema = dict[str, Any]
Located = tuple[KeyPath, Problem]
"""A problem and the path of the value that it is about: ("stages", 2, "after", 0)."""

NULL: Schema = {"type": "null"}
QUOTABLE_LIMIT = 100
"""Longest text, and most digits, that a fix repeats."""


@dataclass(frozen=True, slots=True)
class Noted:
    """A value to use instead, with a comment."""

    value: object
    note: str


@dataclass(frozen=True, slots=True)
class WrongValue:
    """A value that is not of the type of its field."""

    value: object
    expected: str
    """Text of the type: "a whole number from 1 to 100"."""
    reason: str = ""
    """What is wrong with it in Python; "" for "is not" and the expected type."""
    instead: tuple[object, ...] = ()
    """Values of the field that are valid; `UNSET` removes the field, `Noted` adds a comment."""
    code: str = ""
    """Error code; "" for the code of the record."""
    path: KeyPath = ()
    """Path of the wrong part, inside the value of the field."""
    corrected: object = None
    """The whole value of the field without its mistakes, if a part of it is wrong."""


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A key of a mapping that its record does not have."""

    path: KeyPath
    value: object
    known: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MissingKey:
    """A required key that a mapping does not have."""

    path: KeyPath
    example: object


@dataclass(frozen=True, slots=True)
class ParserProblem:
    """A mistake that the parser of a value describes."""

    path: KeyPath
    problem: Problem
    instead: tuple[object, ...] = ()
    """Valid values, as fixes before those of the problem."""


Mistake = WrongValue | UnknownKey | MissingKey | ParserProblem


@dataclass(frozen=True, slots=True)
class Type:
    """A type of values: its text in messages, an example, its JSON Schema, and a function that finds mistakes."""

    text: str
    example: object
    schema: Schema
    check: Callable[[object], Iterable[Mistake]]

    def accepts(self, value: object) -> bool:
        return next(iter(self.check(value)), None) is None


@dataclass(frozen=True, slots=True)
class Field:
    """One field of an object, or one key of a mapping in a file."""

    name: str
    type: Type
    description: str
    default: object = UNSET
    """`UNSET` if there is none, or if it depends on other values."""
    required: bool = False
    nullable: bool = False

    def mistakes(self, value: object) -> Iterable[Mistake]:
        return () if value is None and self.nullable else self.type.check(value)

    def schema(self) -> Schema:
        part = self.type.schema
        if self.nullable:
            choices = part.get("anyOf", [part])
            part = {"anyOf": choices if NULL in choices or {} in choices else [*choices, NULL]}
        if isinstance(self.default, str | int | float):
            part = {**part, "default": self.default}
        return {**part, "description": self.description} if self.description else part


@dataclass(frozen=True, slots=True)
class Record:
    """The fields of one kind of object or mapping."""

    title: str
    description: str
    fields: tuple[Field, ...]
    by_name: Mapping[str, Field] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {one.name: one for one in self.fields})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.by_name)

    def key_mistakes(self, data: Mapping[Any, object]) -> Iterator[UnknownKey | MissingKey]:
        """Keys of a mapping that are unknown, and required keys that it does not have."""
        for key, value in data.items():
            if not isinstance(key, str) or key not in self.by_name:
                yield UnknownKey((key if isinstance(key, str) else short_repr(key),), value, self.names)
        for one in self.fields:
            if one.required and one.name not in data:
                yield MissingKey((one.name,), one.type.example)

    def value_mistakes(self, data: Mapping[Any, object]) -> Iterator[tuple[str, Mistake]]:
        """(name of the field, mistake) for the values of known fields."""
        for one in self.fields:
            if one.name in data:
                for mistake in one.mistakes(data[one.name]):
                    yield one.name, mistake

    def mistakes(self, data: Mapping[Any, object]) -> Iterator[Mistake]:
        """All mistakes in a mapping of a file, with their paths."""
        yield from self.key_mistakes(data)
        for name, mistake in self.value_mistakes(data):
            yield replace(mistake, path=(name, *mistake.path))

    def properties(self) -> dict[str, Schema]:
        return {one.name: one.schema() for one in self.fields}

    def schema(self) -> Schema:
        found: Schema = {"description": self.description, "type": "object", "properties": self.properties()}
        found["additionalProperties"] = False
        required = [one.name for one in self.fields if one.required]
        return {**found, "required": required} if required else found

    def table(self) -> str:
        """The fields as a table in Markdown."""
        lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
        lines += [_table_row(one) for one in self.fields]
        return "\n".join(lines)


def _table_row(one: Field) -> str:
    default = "required" if one.required else ""
    if isinstance(one.default, str | int | float | list | tuple | Mapping):
        default = f"`{yaml_literal(one.default)}`"
    cells = (f"`{one.name}`", one.type.text, default, one.description)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def record_of(cls: type, title: str, description: str, declared: Iterable[Field]) -> Record:
    """A record of the fields of a dataclass, with the defaults of the dataclass. A field whose default is None may be
    null."""
    by_name = {one.name: one for one in declared}
    items = {item.name: item for item in fields(cls)}
    assert by_name.keys() == items.keys(), f"the fields of {cls.__name__} and their declaration differ"
    found = []
    for name, item in items.items():
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        required = default is MISSING
        found.append(
            replace(by_name[name], default=UNSET if required else default, required=required, nullable=default is None)
        )
    return Record(title, description, tuple(found))


# --- problems


def setting_problem(name: str, mistake: Mistake, code: str, label: str = "") -> Problem:
    """A mistake in an argument of Python; `label` names the object: "stage 'caption'"."""
    assert isinstance(mistake, WrongValue), "arguments have no keys"
    written = name + "".join(f"[{step!r}]" for step in mistake.path)
    reason = mistake.reason or f"is not {mistake.expected}"
    message = Text(f"{label}: " if label else "", Given(written, mistake.value), f" {reason}")
    fixes = tuple(_change(name, value) for value in ((mistake.corrected,) if mistake.path else mistake.instead))
    return Problem(mistake.code or code, message, fixes=fixes, subject=Subject("setting", name))


def _change(name: str, value: object) -> Change:
    return Change({name: value.value}, note=value.note) if isinstance(value, Noted) else Change({name: value})


def file_problem(mistake: Mistake, above: KeyPath = ()) -> Problem:
    """A mistake in a file, without its place; `above` is the path of the mapping that was checked."""
    shown = dotted_path("", (*above, *mistake.path)) or "the file"
    match mistake:
        case UnknownKey():
            return unknown_key_problem(str(mistake.path[-1]), mistake.known, mistake.value)
        case ParserProblem():
            lines = tuple(_line(mistake.path, value) for value in mistake.instead)
            return replace(mistake.problem, fixes=(*lines, *mistake.problem.fixes))
        case MissingKey():
            line = f"{mistake.path[-1]}: {yaml_literal(mistake.example)}"
            return Problem("DT012", f"{shown} is missing", fixes=(line,))
        case WrongValue():
            message = f"{shown} should be {mistake.expected}, not {short_repr(mistake.value)}"
            fixes = tuple(_line(mistake.path, value) for value in mistake.instead if value is not UNSET)
            return Problem("DT013", message, fixes=fixes or (f"correct {shown}",))


def _line(path: KeyPath, value: object) -> str:
    """A fix as a line of a file: the value of a key, or an entry of a list."""
    text = yaml_literal(value.value if isinstance(value, Noted) else value)
    return f"{path[-1]}: {text}" if path and isinstance(path[-1], str) else f"- {text}" if path else text


def unknown_key_problem(word: str, known: Iterable[str], value: object = UNSET) -> Problem:
    """The problem of a key that a mapping does not have; `value` is its value, for the fix."""
    keys = sorted(known)
    near = nearest_word(word, keys)
    line = "" if near is None or value is UNSET else f"{near}: {yaml_literal(value)}"
    return Problem(
        "DT011",
        f"unknown key {word!r}{did_you_mean(word, keys)}",
        evidence=(f"keys here: {', '.join(keys)}",) if keys else (),
        fixes=(line if 0 < len(line) <= QUOTABLE_LIMIT else f"remove {word!r}, or correct its spelling",),
    )


def unknown_argument_problem(word: str, known: Iterable[str], value: object, label: str = "") -> Problem:
    """The problem of an argument in Python that an object does not have; `label` names the object."""
    names = sorted(known)
    near = nearest_word(word, names)
    message = f"{label}: " if label else ""
    message += f"unknown argument {word!r}{did_you_mean(word, names)}"
    fix = f"remove {word}=" if near is None else Change({near: value})
    return Problem("DT011", message, (f"arguments: {', '.join(names)}",), (fix,))


# --- types


def predicate(text: str, example: object, schema: Schema, accepts: Callable[[object], bool]) -> Type:
    """The type of the values that a function accepts."""

    def check(value: object) -> Iterator[Mistake]:
        if not accepts(value):
            yield WrongValue(value, text, instead=(example,))

    return Type(text, example, schema, check)


def flag(example: bool) -> Type:
    """True or false."""

    def check(value: object) -> Iterator[Mistake]:
        if not isinstance(value, bool):
            yield WrongValue(value, "true or false", "is not True or False", instead=(example,))

    return Type("true or false", example, {"type": "boolean"}, check)


def choice(values: Sequence[str]) -> Type:
    """One of these texts."""
    text = f"one of {', '.join(values)}"
    return predicate(text, values[0], {"enum": list(values)}, lambda value: isinstance(value, str) and value in values)


def whole(low: int, high: int, text: str = "", example: int | None = None) -> Type:
    """A whole number in a range. A fix is the nearest valid number, unless there is an example."""
    called = text or f"a whole number from {low} to {high}"

    def check(value: object) -> Iterator[Mistake]:
        if not is_int(value) or not low <= value <= high:
            near = int(nearest(value, low, high)) if example is None else example
            yield WrongValue(value, called, instead=(near,))

    schema: Schema = {"type": "integer", "minimum": low, "maximum": high}
    return Type(called, low if example is None else example, schema, check)


def number(low: float, high: float, *, example: float = 1, note: str = "") -> Type:
    """A number in a range; with a note, it can also be left out."""
    called = f"a number from {low:g} to {high:g}"

    def check(value: object) -> Iterator[Mistake]:
        if not is_number(value) or not low <= value <= high:
            near = _rounded(nearest(value, low, high, otherwise=example))
            yield WrongValue(value, called, instead=(near, Noted(UNSET, note)) if note else (near,))

    return Type(called, example, {"type": "number", "minimum": low, "maximum": high}, check)


def one_of(text: str, *types: Type) -> Type:
    """A value of any of these types."""
    schemas = [schema for one in types for schema in one.schema.get("anyOf", [one.schema])]
    accepts = [one.accepts for one in types]
    return predicate(text, types[0].example, {"anyOf": schemas}, lambda value: any(fits(value) for fits in accepts))


def list_of(item: Type, text: str = "a list") -> Type:
    """A list whose items are of one type."""
    example = [] if item.example is None else [item.example]

    def check(value: object) -> Iterator[Mistake]:
        if not isinstance(value, list | tuple):
            yield WrongValue(value, text, instead=(example,))
            return
        for index, one in enumerate(value):
            for mistake in item.check(one):
                yield replace(mistake, path=(index, *mistake.path))

    return Type(text, example, {"type": "array", "items": item.schema}, check)


def mapping_of(
    values: Type,
    text: str,
    example: Mapping[str, object],
    *,
    key: Callable[[str], bool] = bool,
    key_text: str = "a name",
    may_be_empty: bool = True,
) -> Type:
    """A mapping whose keys are texts that `key` accepts and whose values are of one type."""

    def check(value: object) -> Iterator[Mistake]:
        if not isinstance(value, Mapping) or not (value or may_be_empty):
            yield WrongValue(value, text, instead=(example,))
            return
        invalid = [name for name in value if not isinstance(name, str) or not key(name)]
        for name in invalid:
            reason = f"has the key {short_repr(name)}, which is not {key_text}"
            yield WrongValue(value, text, reason, instead=(example,))
        mistakes = [
            replace(mistake, path=(name, *mistake.path))
            for name, one in value.items()
            if name not in invalid
            for mistake in values.check(one)
        ]
        corrected = example if invalid else _corrected(value, mistakes) or example
        for mistake in mistakes:
            yield replace(mistake, corrected=corrected) if isinstance(mistake, WrongValue) else mistake

    schema: Schema = {"type": "object", "additionalProperties": values.schema}
    return Type(text, example, schema if may_be_empty else {**schema, "minProperties": 1}, check)


def _corrected(mapping: Mapping[Any, object], mistakes: Iterable[Mistake]) -> dict[Any, object] | None:
    """The mapping with a valid value for every invalid one; None if a fix cannot repeat it."""
    found = dict(mapping)
    for mistake in mistakes:
        match mistake:
            case WrongValue(path=(name,), instead=(value, *_)):
                found[name] = value
            case _:
                return None
    return found if all(map(is_quotable, (*found, *found.values()))) else None


def record_type(record: Record, example: object = None) -> Type:
    """A mapping with the fields of a record."""

    def check(value: object) -> Iterator[Mistake]:
        if isinstance(value, Mapping):
            yield from record.mistakes(value)
        else:
            yield WrongValue(value, "a mapping", instead=(example,) if example is not None else ())

    return Type("a mapping", example, record.schema(), check)


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: float) -> bool:
    """Whether a float can hold the number: no infinity, and no integer of 400 digits."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_quotable(value: object) -> bool:
    """Whether a fix can repeat the value."""
    if isinstance(value, str):
        return value.isprintable() and len(value) <= QUOTABLE_LIMIT
    return isinstance(value, int | float) and abs(value) < 10**QUOTABLE_LIMIT


def number_in(text: str) -> float | None:
    """The number in a quoted text, or None."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def nearest(value: object, low: float, high: float, otherwise: float | None = None) -> float:
    """The valid number next to the value; `otherwise` if the value is below the range or is not a number."""
    found = number_in(value) if isinstance(value, str) else value
    if not is_number(found) or not found >= low:
        return low if otherwise is None else otherwise
    return min(found, high)


def _rounded(number: float) -> int | float:
    """The number with six significant digits, which is enough for a suggestion."""
    short = float(f"{number:.6g}")
    return int(short) if short == int(short) else short


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value)) and len(set(value)) == len(value)


_TEXT_SCHEMA: Schema = {"type": "string", "minLength": 1}
WHOLE_NUMBER = predicate("a whole number", 1, {"type": "integer"}, is_int)
NUMBER = predicate("a number", 1, {"type": "number"}, is_number)
ANYTHING = predicate("anything", "x", {}, lambda _value: True)
TEXT = predicate("a string", "utf-8", _TEXT_SCHEMA, _is_text)
PATH = predicate("a path", "out.jsonl", _TEXT_SCHEMA, _is_text)
TEXTS = predicate(
    "a list of names",
    ["id", "text"],
    {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "uniqueItems": True},
    _is_texts,
)
PATHS = one_of("a path, or a list of paths", replace(PATH, example="data/*.jsonl"), TEXTS)
FLAG = flag(True)
STRING = predicate("a string", "x", {"type": "string"}, lambda value: isinstance(value, str))
MAPPING = predicate("a mapping", {}, {"type": "object"}, lambda value: isinstance(value, Mapping))
