"""Connection of one process to the database of a job store: transactions, durability, forks, and errors.

One connection writes and one reads. Writes are group commits (`group_commit.py`) in a write-ahead log, with
`synchronous=NORMAL` and a sync of the log after the commit for what must survive a power failure. That is as durable as
`synchronous=FULL`, which syncs at the same place, but holds the write lock of the database meanwhile.

**Forks.** SQLite keeps the locks of a file per process, in memory that a fork copies: a child would believe that it has
locks which only its parent has, even on a connection of its own. So connections are closed before a fork and opened
again when they are needed, in parent and child.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import threading
import time
import weakref
from contextlib import ExitStack, suppress
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote as percent_encoded

from dovetail.errors import ConfigError, Problem
from dovetail.jobs.store import StoreUnavailableError
from dovetail.jobs.stores import boot_clock, sqlite_schema
from dovetail.jobs.stores.group_commit import GroupCommit, LogSync, NotBegunError
from dovetail.machine.private_files import open_private

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dovetail.errors import DovetailError

T = TypeVar("T")
BUSY_TIMEOUT_S = 30.0
BUSY_PAUSES_S = 0.001, 0.008
"""First and longest mean pause before a process asks again for the write lock. SQLite's own pauses grow to 100 ms, with
which some processes wait for a second while others get the lock again and again."""
STATEMENTS_CACHED = 512
CACHE_KB = 16_384
LOG_LIMIT_BYTES = 64 * 2**20
"""The log is cut to this size when it starts again after a burst."""
FULL_DISK_BYTES = 65_536
"""With less free space than this, a failed write counts as one on a full disk: SQLite does not always say so."""
_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
_ENVIRONMENT = _BUSY | {
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOLFS,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}
"""Errors that do not come from a mistake in a query."""


class SqliteDatabase:
    """Transactions of one process. Thread-safe."""

    _writer: sqlite3.Connection | None
    _reader: sqlite3.Connection | None
    _files: dict[sqlite3.Connection, tuple[int, int]]
    """Device and inode of the file that a connection has open."""
    _read_lock: threading.RLock

    def __init__(
        self,
        path: Path,
        on_connected: Callable[[sqlite3.Connection], None],
        on_begin: Callable[[], None],
        on_committed: Callable[[], None],
        on_forked: Callable[[], None],
    ) -> None:
        """`on_connected` gets each new connection that writes; `on_begin` is called in every write transaction before
        its steps, `on_committed` after its end; `on_forked` in a forked child."""
        self.path = path
        self.clock_offset_ms: int | None = None
        self._on_connected, self._on_begin = on_connected, on_begin
        self._on_committed, self._on_forked = on_committed, on_forked
        self._closed = False
        self._reset()
        with _errors(self.path, opening=True), self._read_lock:
            self._reader = self._open_reader()
        _FORKS.add(self)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._writer = self._reader = None
        self._files = {}
        self._read_lock = threading.RLock()
        self._commits = GroupCommit(self._transact)
        self._sync = LogSync(f"{self.path}-wal")

    # --- transactions

    def write(self, act: Callable[[], T], is_durable: Callable[[T], bool] = bool) -> T:
        """Run a step in a write transaction. If `is_durable` is true for its result, it survives a power failure when
        this returns; it always survives the end of the process."""
        self._check()
        with _errors(self.path):
            answer, commit = self._commits.run(act)
            if is_durable(answer):
                self._sync.ensure(commit, lambda: self._commits.commits)
            return answer

    def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run queries that see one consistent state of the database."""
        self._check()
        with _errors(self.path), self._read_lock:
            self._check()
            if self._reader is not None and self._is_replaced(self._reader):
                self._disconnect_reader()
            if self._reader is None:
                self._reader = self._open_reader()
            self._reader.execute("BEGIN")
            try:
                return query(self._reader)
            finally:
                self._reader.execute("ROLLBACK")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            self.disconnect(stack)

    def _check(self) -> None:
        if self._closed:
            raise closed_error(self.path)
        if self._pid != os.getpid():
            self.on_forked()

    def _transact(self, acts: Sequence[Callable[[], Any]]) -> list[Any]:
        try:
            db = self._writing_connection()
            _begin(db)
        except Exception as error:
            raise NotBegunError from error
        try:
            self._on_begin()
            answers = [act() for act in acts]
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                if db.in_transaction:
                    db.execute("ROLLBACK")
            raise
        self._on_committed()
        return answers

    def _writing_connection(self) -> sqlite3.Connection:
        self._check()
        if self._writer is not None and self._is_replaced(self._writer):
            self._sync.forget()
            self._disconnect_writer()
        if self._writer is None:
            db = self._connect()
            self._writer = db
            self._on_connected(db)
        return self._writer

    # --- connections

    def _open_reader(self) -> sqlite3.Connection:
        db = self._connect()
        db.execute(f"PRAGMA busy_timeout = {1000 * BUSY_TIMEOUT_S:.0f}")
        db.execute("PRAGMA query_only = ON")
        return db

    def _connect(self) -> sqlite3.Connection:
        """A connection to the database, which is created if it is missing."""
        with suppress(FileExistsError):  # opening and closing an existing file would release SQLite's locks on it
            os.close(open_private(self.path, os.O_RDWR | os.O_EXCL))
        if not _can_write(self.path):  # SQLite would open it to read
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        db = sqlite3.connect(
            self.path,
            timeout=0.0,  # see _retried
            isolation_level=None,
            check_same_thread=False,
            cached_statements=STATEMENTS_CACHED,
        )
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            raise
        found = self.path.stat()
        self._files[db] = found.st_dev, found.st_ino
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        ready = _retried(partial(self._is_ready, db))
        [mode] = _retried(lambda: db.execute("PRAGMA journal_mode = WAL").fetchone())
        if mode != "wal":
            reason = "its file system does not support SQLite's write-ahead log"
            fix = "use a path on a local disk"
            raise ConfigError(Problem("DT662", "cannot be a job store", (reason,), (fix,), str(self.path)))
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA cache_size = -{CACHE_KB}")
        db.execute(f"PRAGMA journal_size_limit = {LOG_LIMIT_BYTES}")
        boot = boot_clock.boot_id()
        if not ready or sqlite_schema.read_clock_offset(db, boot) is None:
            _begin(db)
            try:
                if not sqlite_schema.is_ready_for_use(db, str(self.path)):
                    sqlite_schema.create_tables(db)
                sqlite_schema.make_clock_offset(db, boot)
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")
        self.clock_offset_ms = sqlite_schema.read_clock_offset(db, boot)

    def _is_ready(self, db: sqlite3.Connection) -> bool:
        db.execute("BEGIN")  # another process may create the tables now
        try:
            return sqlite_schema.is_ready_for_use(db, str(self.path))
        finally:
            db.execute("ROLLBACK")

    def _is_replaced(self, db: sqlite3.Connection) -> bool:
        """Whether the file was removed or replaced since the connection was opened."""
        try:
            found = os.stat(self.path)  # noqa: PTH116 - a string of a path is made once
        except FileNotFoundError:
            return True
        return (found.st_dev, found.st_ino) != self._files[db]

    def _disconnect_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            del self._files[reader]
            reader.close()

    def _disconnect_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            del self._files[writer]
            writer.close()

    def disconnect(self, stack: ExitStack) -> None:
        """Close all connections, and block transactions until the stack is closed."""
        stack.enter_context(self._commits.exclusive())
        stack.enter_context(self._sync.exclusive())
        stack.enter_context(self._read_lock)
        self._sync.forget()
        self._disconnect_reader()
        self._disconnect_writer()

    def on_forked(self) -> None:
        _ABANDONED.extend((self._writer, self._reader))  # the parent's: never closed
        self._reset()
        self._on_forked()


def _begin(db: sqlite3.Connection) -> None:
    _retried(partial(db.execute, "BEGIN IMMEDIATE"))


def _retried(act: Callable[[], T]) -> T:
    """Repeat an operation that needs a lock which another process holds."""
    deadline: float | None = None
    pause_s, longest_s = BUSY_PAUSES_S
    while True:
        try:
            return act()
        except sqlite3.OperationalError as error:
            now = time.monotonic()
            deadline = deadline or now + BUSY_TIMEOUT_S
            if _primary_code(error) not in _BUSY or now > deadline:
                raise
        time.sleep(pause_s * (0.5 + random.random()))  # noqa: S311 - not for secrets
        pause_s = min(2 * pause_s, longest_s)


# --- forks

_ABANDONED: list[sqlite3.Connection | None] = []
_FORKS: weakref.WeakSet[SqliteDatabase] = weakref.WeakSet()
_FORK_LOCK = threading.RLock()
_HELD: list[tuple[ExitStack, list[SqliteDatabase]]] = []


def _before_fork() -> None:
    stack = ExitStack()
    stack.enter_context(_FORK_LOCK)
    found = sorted(_FORKS, key=id)
    for database in found:
        database.disconnect(stack)
    _HELD.append((stack, found))


def _after_fork_in_parent() -> None:
    stack, _ = _HELD.pop()
    stack.close()


def _after_fork_in_child() -> None:
    global _FORK_LOCK  # threads of the parent that waited for it do not exist here
    _FORK_LOCK = threading.RLock()
    _, found = _HELD.pop()
    for database in found:
        database.on_forked()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


# --- errors


class _errors:  # noqa: N801 - used like a function
    """Context manager that turns errors of SQLite and of the system into errors of the store."""

    __slots__ = ("_opening", "_path")

    def __init__(self, path: Path, *, opening: bool = False) -> None:
        self._path, self._opening = path, opening

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) or (isinstance(error, sqlite3.Error) and _primary_code(error) in _ENVIRONMENT):
            raise store_error(self._path, error, opening=self._opening) from error


def _primary_code(error: sqlite3.Error) -> int:
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def store_error(path: Path, error: sqlite3.Error | OSError, *, opening: bool = False) -> DovetailError:
    """The error of the store for an error of SQLite or of the system."""
    place = str(path)
    code = _primary_code(error) if isinstance(error, sqlite3.Error) else 0
    number = error.errno if isinstance(error, OSError) else 0
    is_full = code == sqlite3.SQLITE_FULL or number in (errno.ENOSPC, errno.EDQUOT)
    if is_full or (code == sqlite3.SQLITE_IOERR and _free_bytes(path.parent) < FULL_DISK_BYTES):
        fix = f"free some disk space on the file system of {path.parent}, then repeat the operation"
        return _unavailable("the disk is full; the operation was not carried out", path, error, fix)
    if code in _BUSY:
        message = f"another process has kept the job store locked for {BUSY_TIMEOUT_S:.0f} s"
        return _unavailable(message, path, error, "end or resume the process that holds it, then repeat the operation")
    if code == sqlite3.SQLITE_NOTADB:
        return sqlite_schema.foreign_error(place, str(error))
    if code == sqlite3.SQLITE_CORRUPT:
        written = quote(place)
        fixes = (
            "restore the file from a backup, with all workers stopped",
            f"mv {written} {written}.damaged && rm -f {written}-wal {written}-shm"
            "  # starts empty; stop all workers before",
        )
        return ConfigError(Problem("DT663", "the job store is damaged", (str(error),), fixes, place))
    if code == sqlite3.SQLITE_READONLY or (opening and (isinstance(error, OSError) or code == sqlite3.SQLITE_CANTOPEN)):
        unusable = _unusable_path(path, error)
        if unusable is not None:
            return unusable
    fix = f"check the disk and the permissions of {path.parent}, then repeat the operation"
    return _unavailable("the job store cannot be used now", path, error, fix)


def closed_error(path: Path) -> StoreUnavailableError:
    fix = "open the queue again: dt.Queue(url)"
    return StoreUnavailableError(Problem("DT660", "the job store is closed", (), (fix,), str(path)))


def _unavailable(message: str, path: Path, error: Exception, fix: str) -> StoreUnavailableError:
    return StoreUnavailableError(Problem("DT660", message, (_reason(error),), (fix,), str(path)))


def _unusable_path(path: Path, error: sqlite3.Error | OSError) -> ConfigError | None:
    """The problem of a path that cannot hold a store; None if there is none."""
    folder = path.parent
    rename = 'name another file, such as dt.Queue("sqlite:///jobs.db")'
    if folder.exists() and not folder.is_dir():
        reason, fix = f"{folder} is not a folder", rename
    elif not folder.exists():
        reason, fix = f"there is no folder {folder}", f"mkdir -p {quote(str(folder))}"
    elif path.is_dir():
        reason, fix = (
            "it is a folder",
            f'name a file in it, such as dt.Queue("sqlite:///{percent_encoded(str(path))}/jobs.db")',
        )
    elif path.exists() and not _can_write(path):
        reason, fix = f"this user cannot write the file ({_reason(error)})", f"chmod u+w {quote(str(path))}"
    elif not _can_write(folder):
        reason, fix = (
            f"this user cannot create files in {folder} ({_reason(error)})",
            f"chmod u+wx {quote(str(folder))}",
        )
    else:
        return None
    return ConfigError(Problem("DT662", "cannot be a job store", (reason,), (fix,), str(path)))


def _free_bytes(folder: Path) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return FULL_DISK_BYTES
    return found.f_bavail * found.f_frsize


def _can_write(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
