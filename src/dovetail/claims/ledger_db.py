"""Where do the runs of one machine write down what each may use? A small SQLite file that all of them share.

Every look is one transaction on a connection of its own: nothing is kept open, so threads, forks and a file that was
replaced do no harm. Whoever looks removes the rows of processes that are gone.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dovetail.claims import rows
from dovetail.claims.book import BEAT_S, STALE_S, About, Book, Grant, Wait
from dovetail.claims.process import is_there
from dovetail.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.claims.book import Row
    from dovetail.claims.owner import Process
    from dovetail.resources.cluster import Cluster

__all__ = ["BEAT_S", "STALE_S", "About", "ClaimBook", "Grant", "LedgerFile", "Wait"]
T = TypeVar("T")
BUSY_S = 10.0


class ClaimBook(Book):
    """The owners of one machine, in a file."""

    def __init__(
        self,
        path: str | Path,
        machine: str,
        cluster: Cluster,
        *,
        wall: Callable[[], float] = time.time,
        alive: Callable[[Process], bool | None] = is_there,
    ) -> None:
        self.path = Path(path)
        super().__init__(LedgerFile(self.path, machine), machine, cluster, wall=wall, alive=alive)


class LedgerFile:
    """The rows of one machine."""

    def __init__(self, path: Path, machine: str) -> None:
        self.path, self.machine = path, machine
        self._stamp: tuple[int, ...] = ()

    def read(self) -> list[Row]:
        return self._do("BEGIN", lambda db: self._all(db) if _is_ours(db) else [])

    def change(self, decide: Callable[[list[Row]], tuple[list[str], Row | None, T]]) -> T:
        def change(db: sqlite3.Connection) -> T:
            void, row, answer = decide(self._all(db))
            db.executemany(rows.DELETE, [(owner,) for owner in void])
            if row is not None:
                db.execute(rows.WRITE, row)
            return answer

        return self._writing(change)

    def delete(self, owner: str) -> None:
        self._writing(lambda db: db.execute(rows.DELETE, (owner,)))

    def changed(self) -> bool:
        """A look at the file, not into it."""
        try:
            found = self.path.stat()
            stamp: tuple[int, ...] = (found.st_ino, found.st_mtime_ns, found.st_size)
        except OSError:
            stamp = ()
        before, self._stamp = self._stamp, stamp
        return before != stamp

    def damaged(self, reason: str) -> ConfigError:
        message = "is not the ledger of this machine's runs, or is damaged"
        fixes = (f"when no run is going: rm {self.path}", "or export DOVETAIL_HOME=/a/folder/of/yours")
        return ConfigError(Problem("DT320", message, (reason,), fixes, str(self.path)))

    # --- transactions

    def _all(self, db: sqlite3.Connection) -> list[Row]:
        return list(db.execute(rows.READ, (self.machine,)))

    def _writing(self, action: Callable[[sqlite3.Connection], T]) -> T:
        def act(db: sqlite3.Connection) -> T:
            if not _is_ours(db):
                db.execute(rows.CREATE)
                db.execute(f"PRAGMA application_id = {rows.APPLICATION}")
                db.execute(f"PRAGMA user_version = {rows.VERSION}")
            return action(db)

        return self._do("BEGIN IMMEDIATE", act)

    def _do(self, begin: str, action: Callable[[sqlite3.Connection], T]) -> T:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)) as db:
                db.execute(begin)
                answer = action(db)
                db.execute("COMMIT")
                return answer
        except (sqlite3.OperationalError, OSError) as error:
            raise self._unusable(error) from None
        except sqlite3.DatabaseError as error:
            raise self.damaged(str(error)) from None

    def _unusable(self, error: Exception) -> ConfigError:
        reason = getattr(error, "strerror", None) or str(error)
        folder = self.path.parent
        evidence = () if os.access(folder, os.W_OK) else (f"the folder {folder} cannot be written",)
        fixes = ("export DOVETAIL_HOME=/a/folder/of/yours, on a disk of this machine",)
        message = f"the ledger of this machine's runs cannot be used: {reason}"
        return ConfigError(Problem("DT321", message, evidence, fixes, str(self.path)))


def _is_ours(db: sqlite3.Connection) -> bool:
    """False for an empty file; what others made is refused."""
    [application] = db.execute("PRAGMA application_id").fetchone()
    [version] = db.execute("PRAGMA user_version").fetchone()
    if (application, version) == (rows.APPLICATION, rows.VERSION):
        return True
    [tables] = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application or version or tables:
        raise sqlite3.DatabaseError(f"a database of another program or version, with {tables} tables")
    return False
