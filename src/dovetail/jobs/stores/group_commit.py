"""Group commit: steps of concurrent threads share one transaction, and transactions share one sync of the log.

The first thread that comes becomes the leader: it runs its step and those of all threads that wait, in one
transaction. Threads that come meanwhile are the next group. The sync of the log follows after the transaction, without
the write lock of the database: other threads and processes write while it runs. A sync covers every transaction that
was committed before it began, so under load one sync serves many.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")


class NotBegunError(Exception):
    """The transaction could not begin (`__cause__` has the reason). None of its steps has run."""


class _Waiting:
    """A step that waits for its transaction."""

    __slots__ = ("act", "answer", "commit", "error", "is_done")

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act
        self.answer: Any = None
        self.commit = 0
        self.error: Exception | None = None
        self.is_done = False


class GroupCommit:
    """Runs steps in transactions, one at a time."""

    def __init__(self, transact: Callable[[Sequence[Callable[[], Any]]], list[Any]]) -> None:
        """`transact` runs steps in one transaction; if it raises, nothing of it has happened. It raises `NotBegunError`
        for what concerns all steps alike."""
        self._transact = transact
        self._turn = threading.Condition(threading.Lock())
        self._queue: list[_Waiting] = []
        self._is_led = False
        self._commits = 0

    def run(self, act: Callable[[], T]) -> tuple[T, int]:
        """Run a step. Returns its result and the number of its transaction."""
        mine = _Waiting(act)
        group = self._join(mine)
        if group:
            try:
                self._commit(group)
            finally:
                with self._turn:
                    self._queue[:0] = [other for other in group if not other.is_done and other is not mine]
                    self._is_led = False
                    self._turn.notify_all()
        if mine.error is not None:
            raise mine.error
        return cast("T", mine.answer), mine.commit

    @property
    def commits(self) -> int:
        """Number of the latest transaction."""
        return self._commits

    @property
    def waiting(self) -> int:
        """Number of steps that wait for the next transaction."""
        return len(self._queue)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Block all transactions."""
        with self._turn:
            while self._is_led:
                self._turn.wait()
            self._is_led = True
        try:
            yield
        finally:
            with self._turn:
                self._is_led = False
                self._turn.notify_all()

    def _join(self, mine: _Waiting) -> list[_Waiting]:
        """The group that this thread leads; empty if another leader has run the step."""
        with self._turn:
            self._queue.append(mine)
            try:
                while self._is_led and not mine.is_done:
                    self._turn.wait()
            except BaseException:  # a signal handler has raised
                with suppress(ValueError):
                    self._queue.remove(mine)
                raise
            if mine.is_done:
                return []
            self._is_led = True
            group, self._queue = self._queue, []
            return group

    def _commit(self, group: list[_Waiting]) -> None:
        try:
            answers = self._transact([one.act for one in group])
        except NotBegunError as error:
            for one in group:
                one.error, one.is_done = cast("Exception", error.__cause__), True
            return
        except Exception as error:
            if len(group) == 1:
                group[0].error, group[0].is_done = error, True
                return
            for one in group:  # each step fails with its own error
                self._commit([one])
            return
        self._commits += 1
        for one, answer in zip(group, answers, strict=True):
            one.answer, one.commit, one.is_done = answer, self._commits, True


class LogSync:
    """Makes transactions durable by syncing the write-ahead log. Thread-safe."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._turn = threading.Condition(threading.Lock())
        self._descriptor: int | None = None
        self._is_running = False
        self._synced = 0

    def ensure(self, commit: int, latest: Callable[[], int]) -> None:
        """Return when the transaction of this number is durable; `latest` gives the number of the latest one."""
        with self._turn:
            while self._is_running and self._synced < commit:
                self._turn.wait()
            if self._synced >= commit:
                return
            self._is_running = True
        covered = 0
        try:
            covered = latest()
            self._sync()
        except BaseException:
            covered = 0
            raise
        finally:
            with self._turn:
                self._is_running = False
                self._synced = max(self._synced, covered)
                self._turn.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Block all syncs."""
        with self._turn:
            while self._is_running:
                self._turn.wait()
            self._is_running = True
        try:
            yield
        finally:
            with self._turn:
                self._is_running = False
                self._turn.notify_all()

    def forget(self) -> None:
        """Close the log; the next sync opens it again. Called when no sync runs."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _sync(self) -> None:
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return  # the last process has copied the log into the database, and has synced that
        os.fdatasync(self._descriptor)
