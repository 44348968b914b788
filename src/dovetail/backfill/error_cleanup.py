"""Delete or move error records that no longer apply, after recomputation, commits and compaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.backfill.checkpoints import CARRIED_OVER, errors_folder, parse_file_names, parts_folder, uncovered_ranges
from dovetail.backfill.target import RECOMPUTE_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dovetail.backfill.pending_work import PendingWork
    from dovetail.backfill.store import TableStore
    from dovetail.backfill.target import FillTarget

RETRY_INFIX = "-again-"
"""Separates the identity of failed rows from that of their retry."""


def delete_pending_errors(store: TableStore, target: FillTarget, work: PendingWork) -> None:
    """Delete error records of rows that are about to be computed; rows in parts are not computed again."""
    folder = errors_folder(target.folder, target.parts)
    tasks = {str(task.fragment): task for task in work.tasks}
    for name in store.names(folder):
        key, _, rest = name.partition(".")
        task = tasks.get(key.partition("-")[0])
        if task is None or (key == task.key and rest.startswith(f"{CARRIED_OVER}.")):
            continue
        if key != task.key or not _has_checkpoint(
            store, f"{parts_folder(target.folder, target.parts)}/{task.checkpoint_key}", rest
        ):
            store.delete(f"{folder}/{name}")


def _has_checkpoint(store: TableStore, folder: str, rest: str) -> bool:
    pieces = rest.split(".")
    rows = [int(piece) for piece in pieces[:2] if piece.isdecimal()]
    return len(rows) == 2 and not uncovered_ranges(parse_file_names(store.names(folder)).parts, *rows)


def delete_superseded_errors(store: TableStore, target: FillTarget, committed: Mapping[int, str]) -> None:
    """Delete error records of earlier values of fragments that now have values of this target and input."""
    for identity in store.folders(f"{target.folder}/errors"):
        folder = errors_folder(target.folder, identity)
        for name in (
            store.names(folder) if RETRY_INFIX not in identity and not identity.endswith(RECOMPUTE_SUFFIX) else ()
        ):
            number, _, inputs = name.partition(".")[0].partition("-")
            now = committed.get(int(number)) if number.isdecimal() else None
            if now is not None and (identity, inputs) != (target.identity, now):
                store.delete(f"{folder}/{name}")


def replace_retried_errors(store: TableStore, target: FillTarget, committed: Collection[int]) -> None:
    """Replace the error records of fragments that were computed again; records of rows that were not are kept."""
    done = {str(number) for number in committed}
    before, after = errors_folder(target.folder, target.identity), errors_folder(target.folder, target.parts)
    old = [name for name in store.names(before) if name.partition("-")[0] in done]
    new = {name: _without_retry_key(name) for name in store.names(after) if name.partition("-")[0] in done}
    for name, kept in new.items():
        store.put(f"{before}/{kept}", store.get(f"{after}/{name}") or b"")
    gone = [
        name for name in old if name not in new.values() and (target.only is not None or not _is_carried_over(name))
    ]
    store.delete(*(f"{before}/{name}" for name in gone))
    store.delete(*(f"{after}/{name}" for name in new))


def _is_carried_over(name: str) -> bool:
    return name.partition(".")[2].startswith(f"{CARRIED_OVER}.")


def _without_retry_key(name: str) -> str:
    """Name of an error record of a retry as one of the backfill itself (see `RangeTask.key`)."""
    key, _, rest = name.partition(".")
    return f"{'-'.join(key.split('-')[:2])}.{rest}"


def delete_orphaned_errors(store: TableStore, target: FillTarget, there: Collection[int]) -> None:
    """Delete error records of removed fragments and of finished retries."""
    for identity in store.folders(f"{target.folder}/errors"):
        folder = errors_folder(target.folder, identity)
        if target.only is not None and identity.startswith(f"{target.identity}{RETRY_INFIX}"):
            store.delete_folder(folder)
            continue
        for name in store.names(folder):
            number = name.partition(".")[0].partition("-")[0]
            if number.isdecimal() and int(number) not in there:
                store.delete(f"{folder}/{name}")
