"""Which columns, by which function, for which rows? What decides about done and not done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.backfill.identity import files_hash, identity_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.backfill.asking import Asked
    from dovetail.backfill.lance_table import Fragment, LanceTable
    from dovetail.backfill.records import ColumnRecord
    from dovetail.backfill.udf import Udf

ANEW = "-anew"
"""Checkpoints of fragments that are computed once more by the same function are not those of its first time."""


@dataclass(frozen=True, slots=True)
class Aim:
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
    anew: bool = False
    """Also what is done."""

    def fields(self, table: LanceTable) -> tuple[int, ...]:
        """In the order of the columns, as data files have them."""
        ids = table.field_ids()
        return tuple(ids[name] for name in self.columns)

    def watched(self, table: LanceTable) -> tuple[str, ...]:
        """Columns on which its values depend."""
        named = table.columns_in(self.where) if self.where is not None else ()
        return tuple(sorted({*self.inputs, *named} - {*self.columns}))

    def inputs_of(self, table: LanceTable, fragment: Fragment) -> str:
        """The hash of the files from which it is computed."""
        ids = table.field_ids()
        return files_hash(fragment, {ids[name] for name in self.watched(table) if name in ids})

    def before_of(self, table: LanceTable, fragment: Fragment) -> str:
        """The hash of the files with the values that rows keep; nothing if none does."""
        return files_hash(fragment, self.fields(table)) if self.masked else ""


def aim_of(table: LanceTable, udf: Udf, record: ColumnRecord, asked: Asked) -> Aim:
    """What a call of `backfill` is about. A column that is not there yet has the type that the function gives."""
    types = dict(zip(record.columns, record.types, strict=True))
    there = {name: table.schema.field(name) for name in record.columns if name in table.schema.names}
    outputs = [(name, str(there[name].type) if name in there else types[name]) for name in record.columns]
    generation = record.generation_of(asked.where)
    wanted = identity_of(outputs, udf.version, record.inputs, asked.where, generation)
    identity = record.same.get(wanted, wanted)
    inputs = record.made_of(identity).inputs if identity != wanted else record.inputs
    masked = asked.where is not None or any(not field.nullable for field in there.values())  # deleted rows keep theirs
    return Aim(
        folder=record.folder,
        columns=tuple(there),
        inputs=tuple(inputs),
        identity=identity,
        parts=f"{identity}{ANEW}" if asked.anew else identity,
        where=asked.where,
        fragments=asked.fragments,
        masked=masked,
        anew=asked.anew,
    )
