"""Check a UDF against a table schema: input columns, accepted types, output types."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from dovetail.backfill.arrow_types import (
    NoArrowType,
    accepts,
    annotation_text,
    arrow_type,
    can_store,
    data_type_fixes,
    is_blob,
    parse_data_type,
    record_fields,
)
from dovetail.backfill.signature import BAD_SIGNATURE, NO_ANNOTATION, is_array, strip_optional
from dovetail.errors import Call, Expression, Problem, did_you_mean

if TYPE_CHECKING:
    from dovetail.backfill.udf import Udf

BAD_COLUMN_NAME = "DT453"
MISSING_INPUT = "DT444"
INPUT_TYPE_MISMATCH = "DT445"
OUTPUT_MISMATCH = "DT446"

OutputTypes = tuple[tuple[str, Any], ...]


def output_types(udf: Udf) -> tuple[OutputTypes, list[Problem]]:
    """(field name, pyarrow type) of the outputs, or the problems."""
    data_type, returns = udf.options.data_type, udf.signature.returns
    record = strip_optional(returns)
    fields = record_fields(record) if _is_named_tuple(record) else None
    if fields is None:
        if isinstance(data_type, Mapping):
            return tuple((name, parse_data_type(one)) for name, one in data_type.items()), []
        found = parse_data_type(data_type) if data_type is not None else arrow_type(_value_annotation(udf, returns))
        if isinstance(found, NoArrowType):
            return (), [Problem(BAD_SIGNATURE, f"{udf.name} {found}", fixes=data_type_fixes(udf.name, found))]
        return (("", found),), []
    if data_type is not None and not isinstance(data_type, Mapping):
        return (("", parse_data_type(data_type)),), []
    return _field_types(udf, fields, data_type or {})


def _field_types(udf: Udf, fields: dict[str, Any], data_type: Mapping[str, Any]) -> tuple[OutputTypes, list[Problem]]:
    problems = []
    for name in data_type:
        if name not in fields:
            near = did_you_mean(str(name), [*fields])
            message = f"{udf.name}: data_type= names {name!r}, but it returns {', '.join(fields)}{near}"
            problems.append(Problem(BAD_SIGNATURE, message, fixes=(f"one of {', '.join(fields)}",)))
    found = []
    for name, annotation in fields.items():
        kind = parse_data_type(data_type[name]) if name in data_type else arrow_type(_value_annotation(udf, annotation))
        if isinstance(kind, str):
            message = f"{udf.name}: its field {name} {kind}"
            problems.append(Problem(BAD_SIGNATURE, message, fixes=(f'data_type={{"{name}": "string"}}',)))
        found.append((name, kind))
    return tuple(found), problems


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _value_annotation(udf: Udf, annotation: Any) -> Any:
    """Annotation of one row: `list[str]` of a function of arrays is a list with one string per row."""
    if udf.kind == "scalar" or annotation is NO_ANNOTATION:
        return annotation
    if typing.get_origin(annotation) is typing.Annotated:
        return annotation
    plain = strip_optional(annotation)
    if typing.get_origin(plain) in (list, tuple, Sequence):
        return typing.get_args(plain)[0]
    if getattr(typing.get_origin(plain), "__name__", "") == "ndarray":
        found = arrow_type(plain)
        return plain if isinstance(found, str) else found.value_type
    return plain if is_array(plain) else annotation


def check_udf(udf: Udf, schema: Any, columns: Sequence[str]) -> list[Problem]:
    """All problems at once."""
    outputs, problems = output_types(udf)
    problems = [*udf.signature.problems, *problems]
    problems += _check_names(udf, schema, columns)
    problems += _check_inputs(udf, schema, columns)
    problems += _check_outputs(udf, outputs, schema, columns)
    return problems


def _check_names(udf: Udf, schema: Any, columns: Sequence[str]) -> list[Problem]:
    """Problems of names with backticks: Lance adds such columns, but neither reads them nor commits files for them."""
    problems = []
    for column in columns:
        if "`" in column:
            message = f"{udf.name}: cannot fill {column!r}: Lance cannot commit columns with a backtick in the name"
            problems.append(Problem(BAD_COLUMN_NAME, message, fixes=(f"call it {column.replace('`', '')!r}",)))
    named = udf.inputs or (schema.names if udf.kind == "batch" else ())
    read = [name for name in named if name in schema.names and name not in columns]
    odd = [name for name in read if "`" in name]
    if odd:
        message = (
            f"{udf.name}: reads {', '.join(map(repr, odd))}: Lance cannot read columns with a backtick in the name"
        )
        others = [name for name in read if name not in odd]
        fix = Call("@dt.udf", (), {"input_columns": others}) if others else "read another column"
        problems.append(Problem(MISSING_INPUT, message, fixes=(fix,)))
    return problems


def _check_inputs(udf: Udf, schema: Any, columns: Sequence[str]) -> list[Problem]:
    problems = []
    names = list(schema.names)
    annotations = udf.signature.annotations or (NO_ANNOTATION,) * len(udf.inputs)
    for number, column in enumerate(udf.inputs):
        if column not in names:
            message = f"{udf.name}: the table has no column {column!r}{did_you_mean(column, names)}"
            evidence = (f"columns: {', '.join(names[:50])}{', ...' if len(names) > 50 else ''}",)
            fix = Call("@dt.udf", (), {"input_columns": _corrected_inputs(udf, column, names)})
            fixes = (fix, "rename the parameter")
            problems.append(Problem(MISSING_INPUT, message, evidence, fixes))
            continue
        if column in columns:
            message = f"{udf.name}: reads {column!r}, the column that it fills"
            problems.append(Problem(MISSING_INPUT, message, fixes=("fill another column, or read another",)))
        annotation = annotations[number] if number < len(annotations) else NO_ANNOTATION
        kind = schema.field(column).type
        if not accepts(annotation, kind):
            message = f"{udf.name}: takes {annotation_text(annotation)} for {column}, but the column is {kind}"
            problems.append(
                Problem(INPUT_TYPE_MISMATCH, message, fixes=(_parameter_example(kind, column), "read another column"))
            )
    return problems


def _corrected_inputs(udf: Udf, column: str, names: list[str]) -> list[str]:
    import difflib

    near = difflib.get_close_matches(column, names, n=1, cutoff=0.6) or names[:1]
    return [(near[0] if near else "text") if name == column else name for name in udf.inputs]


def _parameter_example(kind: Any, column: str) -> str:
    from dovetail.backfill.arrow_types import is_list, python_class, underlying_type

    inner = underlying_type(kind)
    name = python_class(inner).__name__
    if is_list(inner):
        name = f"list[{python_class(underlying_type(inner.value_type)).__name__}]"
    return f"def ...({column if column.isidentifier() else 'value'}: {name})"


def _check_outputs(udf: Udf, outputs: OutputTypes, schema: Any, columns: Sequence[str]) -> list[Problem]:
    if not outputs:
        return []
    if len(outputs) != len(columns):
        given = (
            "one column" if len(outputs) == 1 else f"{len(outputs)} columns ({', '.join(name for name, _ in outputs)})"
        )
        message = f"{udf.name} returns {given}, but {len(columns)} are to be filled: {', '.join(columns)}"
        fix = Call("table.add_column", ([name or udf.name for name, _ in outputs], Expression(udf.name)))
        return [Problem(OUTPUT_MISMATCH, message, fixes=(fix,))]
    problems = []
    explicit = udf.options.data_type is not None
    for column, (_, kind) in zip(columns, outputs, strict=True):
        if isinstance(kind, str) or column not in schema.names:
            continue
        there = schema.field(column).type
        if is_blob(there):
            message = f"{udf.name}: cannot fill {column!r}: it is a blob column, which only Lance can write"
            problems.append(Problem(OUTPUT_MISMATCH, message, fixes=(fill_other_column(udf, schema, columns, column),)))
            continue
        if not (kind.equals(there) if explicit else can_store(kind, there)):
            message = f"{udf.name} returns {kind}, but column {column!r} is {there}"
            fixes = (
                Call("@dt.udf", (), {"data_type": str(there)}, note="if its values are of that type"),
                fill_other_column(udf, schema, columns, column),
            )
            problems.append(Problem(OUTPUT_MISMATCH, message, fixes=fixes))
    return problems


def fill_other_column(udf: Udf, schema: Any, columns: Sequence[str], column: str) -> Call:
    """The call that fills a new column instead of `column`."""
    names = [unused_name(name, schema.names) if name == column else name for name in columns]
    return Call("table.add_column", (names if len(names) > 1 else names[0], Expression(udf.name)))


def unused_name(column: str, taken: Sequence[str]) -> str:
    """A name like that of the column which the table does not have."""
    number = next(n for n in count(2) if f"{column}_{n}" not in taken)
    return f"{column}_{number}"
