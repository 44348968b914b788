"""When are two results the same? Same columns, same version of the function, same rows asked for, same input files.

Never the run, the resources or the number of workers. What was computed carries it in the name of its data file, which
appears in the table with the very commit that makes the values visible: no other record can be older or newer.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dovetail.backfill.lance_table import DataFileInfo, Fragment

DIGITS = 16
INCOMPLETE = "x.lance"
"""How the name of a data file ends of which rows were set aside."""


def identity_of(
    outputs: Sequence[tuple[str, str]], version: str, inputs: Sequence[str], where: str | None, generation: int
) -> str:
    """`outputs`: column and type, as text."""
    told = json.dumps([[list(item) for item in outputs], version, list(inputs), where, generation])
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


def files_hash(fragment: Fragment, fields: Collection[int]) -> str:
    """Of the data files that hold those columns. Rows that were deleted since change nothing of the others."""
    told = json.dumps([fragment.id, fragment.rows, files_with(fragment, fields)])
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


def files_with(fragment: Fragment, fields: Collection[int]) -> list[tuple[str, list[int]]]:
    """Those that hold these columns, and which of them each holds: a name may be another column's by now, in the same
    file."""
    return sorted((file.path, sorted({*file.fields} & {*fields})) for file in _own(fragment, fields))


def _own(fragment: Fragment, fields: Collection[int]) -> list[DataFileInfo]:
    return [file for file in fragment.files if any(number in fields for number in file.fields)]


def is_done(fragment: Fragment, identity: str, inputs: str, fields: Collection[int]) -> bool:
    """Whether what is to be computed is what the fragment has."""
    prefix, own = f"dt-{identity}-{inputs}-", _own(fragment, fields)
    filled = {number for file in own for number in file.fields}  # one of several may have been dropped and added anew
    return bool(own) and filled.issuperset(fields) and all(file.path.startswith(prefix) for file in own)


def file_name(identity: str, inputs: str, *, incomplete: bool) -> str:
    """Never the same twice."""
    return f"dt-{identity}-{inputs}-{uuid.uuid4().hex}{INCOMPLETE if incomplete else '.lance'}"


def is_incomplete(fragment: Fragment, fields: Collection[int]) -> bool:
    """Whether rows of what fills it were set aside."""
    return any(file.path.endswith(INCOMPLETE) for file in _own(fragment, fields))


def filled_by(fragment: Fragment, fields: Collection[int]) -> str:
    """The identity of what fills it now; nothing if it was not us."""
    for file in _own(fragment, fields):
        pieces = file.path.split("-")
        if len(pieces) == 4 and pieces[0] == "dt":
            return pieces[1]
    return ""
