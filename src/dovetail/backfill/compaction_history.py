"""Recognise results that a compaction copied into new fragments, from the table's transaction history.

Behaviour of Lance, established by experiment (pylance 14.0.2): a compaction is a `Rewrite` transaction whose groups
list the old fragments, with their files and deletions, and the new ones. Reading one takes 0.1 ms on a local disk.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING

from dovetail.backfill.target import HASH_DIGITS, current_identity, files_with_fields, is_done, is_incomplete

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.backfill.lance_table import Fragment, LanceTable
    from dovetail.backfill.store import TableStore
    from dovetail.backfill.target import FillTarget

MAX_VERSIONS = 2_000
MAX_READ_S = 3.0
"""Time limit for reading transactions; on an object store one may take 50 ms."""


def read_compactions(table: LanceTable) -> Iterator[tuple[list[Fragment], list[Fragment]]]:
    """(old fragments, new fragments) of each compaction, newest first."""
    import lance

    began = time.monotonic()
    for version in range(table.version, max(0, table.version - MAX_VERSIONS), -1):
        try:
            transaction = table.dataset.read_transaction(version)
        except (OSError, ValueError, NotImplementedError):  # cleaned up, or written without a transaction
            return
        operation = getattr(transaction, "operation", None)
        if isinstance(operation, lance.LanceOperation.Rewrite):
            for group in operation.groups:
                yield (
                    [table.describe_fragment(it) for it in group.old_fragments],
                    [table.describe_fragment(it) for it in group.new_fragments],
                )
        if time.monotonic() - began > MAX_READ_S:
            return


class CompactionHistory:
    """Compactions that produced the fragments of a table. Transactions are read only on demand.

    The result is recorded beside the table, because versions and their transactions are eventually cleaned up.
    """

    def __init__(self, table: LanceTable, store: TableStore, target: FillTarget) -> None:
        self._table, self._store, self._target = table, store, target
        self._fields = set(target.fields(table))
        ids = table.field_ids()
        self._all = self._fields | {ids[name] for name in target.dependencies(table) if name in ids}
        self._compactions: Iterator[tuple[list[Fragment], list[Fragment]]] | None = None
        self._sources: dict[str, list[Fragment]] = {}
        """Files of a fragment -> fragments that were compacted into it and its siblings."""
        self._known: set[str] | None = None
        self.done: set[str] = set()
        """Files of fragments that were found complete."""

    def is_done(self, fragment: Fragment) -> bool:
        """Whether all fragments compacted into it were complete, and its input and values have not changed since."""
        if not self._may_be_copied(fragment):
            return False
        key = self._key(fragment)
        if self._known is None:
            self._known = read_carried_fragments(self._store, self._target)
        if key in self._known or self._descends_from_done(fragment):
            self.done.add(key)
            return True
        return False

    def _descends_from_done(self, fragment: Fragment) -> bool:
        pending = [fragment]
        while pending:
            before = self._sources_of(pending.pop())
            if before is None:
                return False
            pending += [one for one in before if one.rows > one.deleted and not self._was_done(one)]
        return True

    def _may_be_copied(self, fragment: Fragment) -> bool:
        """Whether it has values in a file that no backfill wrote."""
        filled = self._fields <= {number for file in fragment.files for number in file.fields}
        return filled and not current_identity(fragment, self._fields)

    def _was_done(self, fragment: Fragment) -> bool:
        """Fragments with failed rows do not count: the row addresses are lost, and the rows are computed again."""
        inputs = self._target.input_hash(self._table, fragment)
        done = is_done(fragment, self._target.identity, inputs, self._fields)
        return done and not is_incomplete(fragment, self._fields)

    def _sources_of(self, fragment: Fragment) -> list[Fragment] | None:
        if not self._may_be_copied(fragment):
            return None
        if self._compactions is None:
            self._compactions = read_compactions(self._table)
        key = self._key(fragment)
        while key not in self._sources:
            found = next(self._compactions, None)
            if found is None:
                return None
            before, after = found
            self._sources.update((self._key(one), before) for one in after)
        return self._sources[key]

    def _key(self, fragment: Fragment) -> str:
        """Files of its values and of their inputs; file names are unique."""
        return hashlib.sha256(json.dumps(files_with_fields(fragment, self._all)).encode()).hexdigest()[:HASH_DIGITS]


def read_carried_fragments(store: TableStore, target: FillTarget) -> set[str]:
    try:
        keys = json.loads(store.get(_carried_path(target)) or b"[]")
    except ValueError:
        return set()
    return {one for one in keys if isinstance(one, str)} if isinstance(keys, list) else set()


def write_carried_fragments(store: TableStore, target: FillTarget, done: set[str]) -> None:
    """`done`: complete fragments of the target."""
    before = read_carried_fragments(store, target)
    now = done if target.fragments is None else before | done
    if now != before:
        store.put(_carried_path(target), json.dumps(sorted(now)).encode())


def _carried_path(target: FillTarget) -> str:
    return f"{target.folder}/carried/{target.identity}.json"
