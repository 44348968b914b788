"""FillTarget, what a backfill computes, and the identity hash in data file names by which a result counts as done.

Never the run, the resources or the number of workers. What was computed carries it in the name of its data file, which
appears in the table with the very commit that makes the values visible: no other record can be older or newer.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dovetail.backfill.arguments import BackfillArguments
    from dovetail.backfill.lance_table import DataFileInfo, Fragment, LanceTable
    from dovetail.backfill.records import ColumnRecord
    from dovetail.backfill.udf import Udf

HASH_DIGITS = 16
INCOMPLETE_SUFFIX = "x.lance"
"""How the name of a data file ends of which rows were set aside."""


def make_identity(
    outputs: Sequence[tuple[str, str]], version: str, inputs: Sequence[str], where: str | None, generation: int
) -> str:
    """`outputs`: column and type, as text."""
    told = json.dumps([[list(item) for item in outputs], version, list(inputs), where, generation])
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_DIGITS]


def files_hash(fragment: Fragment, fields: Collection[int]) -> str:
    """Of the data files that hold those columns. Rows that were deleted since change nothing of the others."""
    told = json.dumps([fragment.id, fragment.rows, files_with_fields(fragment, fields)])
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_DIGITS]


def files_with_fields(fragment: Fragment, fields: Collection[int]) -> list[tuple[str, list[int]]]:
    """Those that hold these columns, and which of them each holds: a name may be another column's by now, in the same
    file."""
    return sorted((file.path, sorted({*file.fields} & {*fields})) for file in _files_of_fields(fragment, fields))


def _files_of_fields(fragment: Fragment, fields: Collection[int]) -> list[DataFileInfo]:
    return [file for file in fragment.files if any(number in fields for number in file.fields)]


def is_done(fragment: Fragment, identity: str, inputs: str, fields: Collection[int]) -> bool:
    """Whether what is to be computed is what the fragment has."""
    prefix, own = f"dt-{identity}-{inputs}-", _files_of_fields(fragment, fields)
    filled = {number for file in own for number in file.fields}  # one of several may have been dropped and added anew
    return bool(own) and filled.issuperset(fields) and all(file.path.startswith(prefix) for file in own)


def data_file_name(identity: str, inputs: str, *, incomplete: bool) -> str:
    """Never the same twice."""
    return f"dt-{identity}-{inputs}-{uuid.uuid4().hex}{INCOMPLETE_SUFFIX if incomplete else '.lance'}"


def is_incomplete(fragment: Fragment, fields: Collection[int]) -> bool:
    """Whether rows of what fills it were set aside."""
    return any(file.path.endswith(INCOMPLETE_SUFFIX) for file in _files_of_fields(fragment, fields))


def current_identity(fragment: Fragment, fields: Collection[int]) -> str:
    """The identity of what fills it now; nothing if it was not us."""
    for file in _files_of_fields(fragment, fields):
        pieces = file.path.split("-")
        if len(pieces) == 4 and pieces[0] == "dt":
            return pieces[1]
    return ""


RECOMPUTE_SUFFIX = "-anew"
"""Checkpoints of fragments that are computed once more by the same function are not those of its first time."""


@dataclass(frozen=True, slots=True)
class FillTarget:
    folder: str
    columns: tuple[str, ...]
    inputs: tuple[str, ...]
    identity: str
    parts: str
    where: str | None = None
    fragments: int | tuple[int, ...] | None = None
    only: Mapping[int, tuple[int, ...]] | None = None
    """Fragment -> rows to compute once more; others are left alone."""
    masked: bool = False
    """Some rows keep the value that they have."""
    recompute_fragments: bool = False
    """Also what is done."""

    def fields(self, table: LanceTable) -> tuple[int, ...]:
        """In the order of the columns, as data files have them."""
        ids = table.field_ids()
        return tuple(ids[name] for name in self.columns)

    def dependencies(self, table: LanceTable) -> tuple[str, ...]:
        """Columns on which its values depend."""
        named = table.columns_mentioned(self.where) if self.where is not None else ()
        return tuple(sorted({*self.inputs, *named} - {*self.columns}))

    def input_hash(self, table: LanceTable, fragment: Fragment) -> str:
        """The hash of the files from which it is computed."""
        ids = table.field_ids()
        return files_hash(fragment, {ids[name] for name in self.dependencies(table) if name in ids})

    def kept_values_hash(self, table: LanceTable, fragment: Fragment) -> str:
        """The hash of the files with the values that rows keep; nothing if none does."""
        return files_hash(fragment, self.fields(table)) if self.masked else ""


def make_target(table: LanceTable, udf: Udf, record: ColumnRecord, asked: BackfillArguments) -> FillTarget:
    """What a call of `backfill` is about. A column that is not there yet has the type that the function gives."""
    types = dict(zip(record.columns, record.types, strict=True))
    there = {name: table.schema.field(name) for name in record.columns if name in table.schema.names}
    outputs = [(name, str(there[name].type) if name in there else types[name]) for name in record.columns]
    generation = record.generation_of(asked.where)
    wanted = make_identity(outputs, udf.version, record.inputs, asked.where, generation)
    identity = record.same.get(wanted, wanted)
    inputs = record.provenance_of(identity).inputs if identity != wanted else record.inputs
    masked = asked.where is not None or any(not field.nullable for field in there.values())  # deleted rows keep theirs
    return FillTarget(
        folder=record.folder,
        columns=tuple(there),
        inputs=tuple(inputs),
        identity=identity,
        parts=f"{identity}{RECOMPUTE_SUFFIX}" if asked.recompute_fragments else identity,
        where=asked.where,
        fragments=asked.fragments,
        masked=masked,
        recompute_fragments=asked.recompute_fragments,
    )
