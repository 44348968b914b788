"""FillTarget, what a backfill computes, and the identity hash in data file names by which a result counts as done.

The identity excludes the run, the resources and the number of workers. It is part of the name of the data file, which
becomes part of the table in the same commit as the values: it can never be out of date.
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
"""Suffix of data files with failed rows."""


def make_identity(
    outputs: Sequence[tuple[str, str]], version: str, inputs: Sequence[str], where: str | None, generation: int
) -> str:
    """`outputs`: (column, type as text)."""
    text = json.dumps([[list(item) for item in outputs], version, list(inputs), where, generation])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_DIGITS]


def files_hash(fragment: Fragment, fields: Collection[int]) -> str:
    """Hash of the data files of these columns. Deletions of rows do not change it."""
    text = json.dumps([fragment.id, fragment.rows, files_with_fields(fragment, fields)])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_DIGITS]


def files_with_fields(fragment: Fragment, fields: Collection[int]) -> list[tuple[str, list[int]]]:
    """Files with these columns, and the columns in each: the same file name may belong to another column later."""
    return sorted((file.path, sorted({*file.fields} & {*fields})) for file in _files_of_fields(fragment, fields))


def _files_of_fields(fragment: Fragment, fields: Collection[int]) -> list[DataFileInfo]:
    return [file for file in fragment.files if any(number in fields for number in file.fields)]


def is_done(fragment: Fragment, identity: str, inputs: str, fields: Collection[int]) -> bool:
    """Whether the fragment already has the values to be computed."""
    prefix, own = f"dt-{identity}-{inputs}-", _files_of_fields(fragment, fields)
    filled = {number for file in own for number in file.fields}  # one of several may have been dropped and added again
    return bool(own) and filled.issuperset(fields) and all(file.path.startswith(prefix) for file in own)


def data_file_name(identity: str, inputs: str, *, incomplete: bool) -> str:
    """A unique name."""
    return f"dt-{identity}-{inputs}-{uuid.uuid4().hex}{INCOMPLETE_SUFFIX if incomplete else '.lance'}"


def is_incomplete(fragment: Fragment, fields: Collection[int]) -> bool:
    """Whether the fragment has failed rows."""
    return any(file.path.endswith(INCOMPLETE_SUFFIX) for file in _files_of_fields(fragment, fields))


def current_identity(fragment: Fragment, fields: Collection[int]) -> str:
    """Identity of its current values; "" if no backfill computed them."""
    for file in _files_of_fields(fragment, fields):
        pieces = file.path.split("-")
        if len(pieces) == 4 and pieces[0] == "dt":
            return pieces[1]
    return ""


RECOMPUTE_SUFFIX = "-recompute"
"""Suffix that separates the checkpoints of a recomputation from those of the first time."""


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
    """Fragment -> rows to retry; other rows are not computed."""
    masked: bool = False
    """Some rows keep their values."""
    recompute_fragments: bool = False
    """Complete fragments are computed again."""

    def fields(self, table: LanceTable) -> tuple[int, ...]:
        """Field ids in the order of the columns in data files."""
        ids = table.field_ids()
        return tuple(ids[name] for name in self.columns)

    def dependencies(self, table: LanceTable) -> tuple[str, ...]:
        """Columns on which the values depend."""
        named = table.columns_mentioned(self.where) if self.where is not None else ()
        return tuple(sorted({*self.inputs, *named} - {*self.columns}))

    def input_hash(self, table: LanceTable, fragment: Fragment) -> str:
        """Hash of the files from which the fragment is computed."""
        ids = table.field_ids()
        return files_hash(fragment, {ids[name] for name in self.dependencies(table) if name in ids})

    def kept_values_hash(self, table: LanceTable, fragment: Fragment) -> str:
        """Hash of the files with values that rows keep; "" if no row keeps its value."""
        return files_hash(fragment, self.fields(table)) if self.masked else ""


def make_target(table: LanceTable, udf: Udf, record: ColumnRecord, arguments: BackfillArguments) -> FillTarget:
    """Target of a call of `backfill`. A column that does not exist yet gets the return type of the function."""
    types = dict(zip(record.columns, record.types, strict=True))
    there = {name: table.schema.field(name) for name in record.columns if name in table.schema.names}
    outputs = [(name, str(there[name].type) if name in there else types[name]) for name in record.columns]
    generation = record.generation_of(arguments.where)
    identity = make_identity(outputs, udf.version, record.inputs, arguments.where, generation)
    masked = arguments.where is not None or any(not field.nullable for field in there.values())  # as deleted rows
    return FillTarget(
        folder=record.folder,
        columns=tuple(there),
        inputs=tuple(record.inputs),
        identity=identity,
        parts=f"{identity}{RECOMPUTE_SUFFIX}" if arguments.recompute_fragments else identity,
        where=arguments.where,
        fragments=arguments.fragments,
        masked=masked,
        recompute_fragments=arguments.recompute_fragments,
    )
