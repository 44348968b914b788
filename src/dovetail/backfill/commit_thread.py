"""Background thread that commits finished data files to the table, the first at once and then at intervals."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from dovetail.errors import DovetailError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.backfill.lance_table import CommitResult, Fragment, LanceTable, NewDataFile

MAX_FAILED_COMMITS = 3
"""Consecutive failed commits before giving up: a brief outage of the store must not end a job of days, and finished
files are kept."""


class Committer:
    """Commit thread of the driver; calls back after every commit."""

    def __init__(
        self,
        table: LanceTable,
        every_s: float,
        input_hash: Callable[[LanceTable, Fragment], str],
        on_commit: Callable[[CommitResult], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` is called before every commit and raises if the commit is not allowed."""
        self._table = table
        self._every_s = every_s
        self._input_hash = input_hash
        self._on_commit = on_commit
        self._check = check
        self._changed = threading.Condition()
        self._files: list[NewDataFile] = []
        self._done: list[CommitResult] = []
        self._due = time.monotonic()
        self._failed_commits = 0
        self._finishing = False
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        """Why committing stopped; `finish` retries, and raises this if it fails again."""
        self.seconds = 0.0
        self.commits = 0

    def add(self, file: NewDataFile) -> None:
        with self._changed:
            self._files.append(file)
            if self._thread is None and not self._finishing:
                self._thread = threading.Thread(target=self._run, name="dovetail-commits", daemon=True)
                self._thread.start()
            self._changed.notify()

    def finish(self) -> list[CommitResult]:
        """Commit the remaining files; returns all commits."""
        with self._changed:
            self._finishing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        if self._files:
            self.error = None
            self._commit()
        if self.error is not None:
            raise self.error
        return list(self._done)

    def _run(self) -> None:
        try:
            while self._is_due():
                try:
                    self._commit()
                except (DovetailError, OSError):
                    self._failed_commits += 1
                    if self._failed_commits >= MAX_FAILED_COMMITS:
                        raise
        except BaseException as error:  # raised again in `finish`
            self.error = error

    def _is_due(self) -> bool:
        """Wait until a commit is due; False: `finish` commits the rest."""
        with self._changed:
            while not self._finishing:
                left = self._due - time.monotonic() if self._files else None
                if left is not None and left <= 0:
                    return True
                self._changed.wait(left)
            return False

    def _commit(self) -> None:
        with self._changed:
            files, self._files = self._files, []
        began = time.monotonic()
        try:
            self._check()
            committed = self._table.commit(files, self._input_hash)
        except BaseException:
            with self._changed:
                self._files = files + self._files
            raise
        finally:
            now = time.monotonic()
            self.seconds += now - began
            self._due = now + self._every_s
        self._failed_commits = 0
        self.commits += bool(committed.fragments)
        self._done.append(committed)
        self._on_commit(committed)
