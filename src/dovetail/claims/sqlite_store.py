"""Claim store of one machine: rows in a shared SQLite file (ledger.db).

Every access is one transaction on a connection of its own: no connection stays open, so threads, forks and a replaced
file are safe. Every write removes the rows of processes that have ended.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dovetail.claims import serialization
from dovetail.claims.owner import is_alive
from dovetail.claims.store import HEARTBEAT_S, STALE_HEARTBEAT_S, ClaimRequest, ClaimStore, Grant, Wait
from dovetail.errors import ConfigError, Problem
from dovetail.machine.private_files import make_private_folder, open_private

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.claims.owner import ProcessId
    from dovetail.claims.store import Row
    from dovetail.resources.cluster import Cluster

__all__ = ["HEARTBEAT_S", "STALE_HEARTBEAT_S", "ClaimRequest", "MachineClaimStore", "Grant", "SqliteClaimRows", "Wait"]
T = TypeVar("T")
BUSY_TIMEOUT_S = 10.0


class MachineClaimStore(ClaimStore):
    """The owners of one machine, in a file."""

    def __init__(
        self,
        path: str | Path,
        machine: str,
        cluster: Cluster,
        *,
        wall: Callable[[], float] = time.time,
        alive: Callable[[ProcessId], bool | None] = is_alive,
    ) -> None:
        self.path = Path(path)
        super().__init__(SqliteClaimRows(self.path, machine), machine, cluster, wall=wall, alive=alive)


class SqliteClaimRows:
    """The rows of one machine."""

    def __init__(self, path: Path, machine: str) -> None:
        self.path, self.machine = path, machine
        self._stamp: tuple[int, ...] = ()

    def read(self) -> list[Row]:
        return self._transaction("BEGIN", lambda db: self._select_all(db) if _is_claims_database(db) else [])

    def transact(self, decide: Callable[[list[Row]], tuple[list[str], Row | None, T]]) -> T:
        def change(db: sqlite3.Connection) -> T:
            dead, row, answer = decide(self._select_all(db))
            db.executemany(serialization.DELETE_SQL, [(owner,) for owner in dead])
            if row is not None:
                db.execute(serialization.UPSERT_SQL, row)
            return answer

        return self._write_transaction(change)

    def delete(self, owner: str) -> None:
        self._write_transaction(lambda db: db.execute(serialization.DELETE_SQL, (owner,)))

    def has_changed(self) -> bool:
        """Compare the attributes of the file with those of the last call."""
        try:
            found = self.path.stat()
            stamp: tuple[int, ...] = (found.st_ino, found.st_mtime_ns, found.st_size)
        except OSError:
            stamp = ()
        before, self._stamp = self._stamp, stamp
        return before != stamp

    def damaged_error(self, reason: str) -> ConfigError:
        message = "is not the claims database of this machine, or is damaged"
        fixes = (f"when no run is active: rm {self.path}", "export DOVETAIL_HOME=/path/to/your/folder")
        return ConfigError(Problem("DT320", message, (reason,), fixes, str(self.path)))

    # --- transactions

    def _select_all(self, db: sqlite3.Connection) -> list[Row]:
        return list(db.execute(serialization.SELECT_SQL, (self.machine,)))

    def _write_transaction(self, action: Callable[[sqlite3.Connection], T]) -> T:
        def act(db: sqlite3.Connection) -> T:
            if not _is_claims_database(db):
                db.execute("DROP TABLE IF EXISTS claims")  # of an earlier version
                db.execute(serialization.CREATE_SQL)
                db.execute(f"PRAGMA application_id = {serialization.APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {serialization.SCHEMA_VERSION}")
            return action(db)

        return self._transaction("BEGIN IMMEDIATE", act)

    def _transaction(self, begin: str, action: Callable[[sqlite3.Connection], T]) -> T:
        try:
            make_private_folder(self.path.parent)
            if not self.path.exists():
                os.close(open_private(self.path, os.O_RDWR))
            with closing(sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as db:
                db.execute(begin)
                answer = action(db)
                db.execute("COMMIT")
                return answer
        except (sqlite3.OperationalError, OSError) as error:
            raise self._unusable_error(error) from None
        except sqlite3.DatabaseError as error:
            raise self.damaged_error(str(error)) from None

    def _unusable_error(self, error: Exception) -> ConfigError:
        reason = getattr(error, "strerror", None) or str(error)
        folder = self.path.parent
        evidence = () if os.access(folder, os.W_OK) else (f"folder {folder} is not writable",)
        fixes = ("export DOVETAIL_HOME=/path/to/your/folder, on a local disk",)
        message = f"cannot use the claims database of this machine: {reason}"
        return ConfigError(Problem("DT321", message, evidence, fixes, str(self.path)))


def _is_claims_database(db: sqlite3.Connection) -> bool:
    """False for an empty file and one of an earlier version; raises for a database of another program."""
    [application] = db.execute("PRAGMA application_id").fetchone()
    [version] = db.execute("PRAGMA user_version").fetchone()
    if (application, version) == (serialization.APPLICATION_ID, serialization.SCHEMA_VERSION):
        return True
    if application == serialization.APPLICATION_ID and version < serialization.SCHEMA_VERSION:
        return False
    [tables] = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application or version or tables:
        raise sqlite3.DatabaseError(f"a database of another program or version, with {tables} tables")
    return False
