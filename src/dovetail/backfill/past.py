"""Are values ours although their file is not? Then a compaction has copied what we had computed."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from dovetail.backfill.identity import DIGITS, files_with, filled_by, is_done, is_incomplete
from dovetail.backfill.lance_history import compactions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.backfill.aiming import Aim
    from dovetail.backfill.lance_table import Fragment, LanceTable
    from dovetail.backfill.store import Store


class Past:
    """What was compacted into the fragments of a table. Nothing is read unless somebody asks.

    That a fragment was found done is kept beside the table: versions, and with them this, are cleaned up some day.
    """

    def __init__(self, table: LanceTable, store: Store, aim: Aim) -> None:
        self._table, self._store, self._aim = table, store, aim
        self._fields = set(aim.fields(table))
        ids = table.field_ids()
        self._all = self._fields | {ids[name] for name in aim.watched(table) if name in ids}
        self._compactions: Iterator[tuple[list[Fragment], list[Fragment]]] | None = None
        self._made_of: dict[str, list[Fragment]] = {}
        """Files of a fragment -> fragments that were compacted into it, and beside it into others."""
        self._known: set[str] | None = None
        self.done: set[str] = set()
        """Files of fragments that were asked about, and are done."""

    def is_done(self, fragment: Fragment) -> bool:
        """Whether all that was compacted into it was done, and neither its input nor its values changed since."""
        if not self._may_be_copied(fragment):
            return False
        key = self._key(fragment)
        if self._known is None:
            self._known = read_carried(self._store, self._aim)
        if key in self._known or self._follows(fragment):
            self.done.add(key)
            return True
        return False

    def _follows(self, fragment: Fragment) -> bool:
        asked = [fragment]
        while asked:
            before = self._origin(asked.pop())
            if before is None:
                return False
            asked += [one for one in before if one.rows > one.deleted and not self._was_done(one)]
        return True

    def _may_be_copied(self, fragment: Fragment) -> bool:
        """It has values, in a file of somebody else."""
        filled = self._fields <= {number for file in fragment.files for number in file.fields}
        return filled and not filled_by(fragment, self._fields)

    def _was_done(self, fragment: Fragment) -> bool:
        """Rows that were set aside are not: their addresses are gone, and they are computed again."""
        inputs = self._aim.inputs_of(self._table, fragment)
        done = is_done(fragment, self._aim.identity, inputs, self._fields)
        return done and not is_incomplete(fragment, self._fields)

    def _origin(self, fragment: Fragment) -> list[Fragment] | None:
        if not self._may_be_copied(fragment):
            return None
        if self._compactions is None:
            self._compactions = compactions(self._table)
        key = self._key(fragment)
        while key not in self._made_of:
            found = next(self._compactions, None)
            if found is None:
                return None
            before, after = found
            self._made_of.update((self._key(one), before) for one in after)
        return self._made_of[key]

    def _key(self, fragment: Fragment) -> str:
        """The files of what it has and of what that depends on; names of files are never used twice."""
        return hashlib.sha256(json.dumps(files_with(fragment, self._all)).encode()).hexdigest()[:DIGITS]


def read_carried(store: Store, aim: Aim) -> set[str]:
    try:
        told = json.loads(store.get(_path(aim)) or b"[]")
    except ValueError:
        return set()
    return {one for one in told if isinstance(one, str)} if isinstance(told, list) else set()


def write_carried(store: Store, aim: Aim, done: set[str]) -> None:
    """`done`: of all fragments that the aim is about."""
    before = read_carried(store, aim)
    now = done if aim.fragments is None else before | done
    if now != before:
        store.put(_path(aim), json.dumps(sorted(now)).encode())


def _path(aim: Aim) -> str:
    return f"{aim.folder}/carried/{aim.identity}.json"
