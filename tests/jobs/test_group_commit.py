"""Group commit: steps share transactions, transactions share syncs."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.jobs.stores.group_commit import GroupCommit, LogSync, NotBegunError
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class Transactions:
    """Transactions that the test holds open."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.error: Exception | None = None

    def __call__(self, acts: Sequence[Callable[[], Any]]) -> list[Any]:
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        if self.error is not None:
            raise NotBegunError from self.error
        answers = [act() for act in acts]
        self.sizes.append(len(acts))
        return answers


def failing() -> int:
    raise ValueError("bad step")


def run_group(transactions: Transactions, acts: list[Callable[[], int]]) -> dict[int, object]:
    """Run a step, and these while its transaction is open; answers and errors by position."""
    commits = GroupCommit(transactions)
    results: dict[int, object] = {}
    arrived: list[int] = []

    def run(number: int, act: Callable[[], int]) -> None:
        arrived.append(number)
        try:
            results[number] = commits.run(act)
        except Exception as error:
            results[number] = error

    first = threading.Thread(target=run, args=(-1, lambda: -1))
    first.start()
    assert transactions.begun.wait(PATIENCE_S)
    threads = [threading.Thread(target=run, args=item) for item in enumerate(acts)]
    for thread in threads:
        thread.start()
    until(lambda: len(arrived) == len(acts) + 1 and commits.waiting == len(acts), "all steps wait")
    transactions.may_end.set()
    for thread in (first, *threads):
        thread.join(PATIENCE_S)
    return results


def test_steps_that_wait_share_the_next_transaction() -> None:
    transactions = Transactions()
    results = run_group(transactions, [lambda n=n: n for n in range(5)])  # type: ignore[misc]
    assert transactions.sizes == [1, 5]
    assert results == {-1: (-1, 1)} | {n: (n, 2) for n in range(5)}


def test_a_step_that_fails_fails_alone() -> None:
    transactions = Transactions()
    results = run_group(transactions, [lambda: 0, failing, lambda: 2])
    assert [type(results[1]), str(results[1])] == [ValueError, "bad step"]
    assert [results[0], results[2]] in ([(0, 2), (2, 3)], [(0, 3), (2, 2)])
    assert transactions.sizes == [1, 1, 1]


def test_what_concerns_all_steps_is_tried_once() -> None:
    transactions = Transactions()
    transactions.error = OSError("the disk is gone")
    results = run_group(transactions, [lambda: 0, lambda: 1])
    assert set(map(str, results.values())) == {"the disk is gone"}
    assert transactions.sizes == []


def test_steps_of_a_leader_that_is_interrupted_are_run_by_another() -> None:
    class Interrupt(BaseException):
        pass

    calls: list[int] = []
    begun, may_end = threading.Event(), threading.Event()

    def transact(acts: Sequence[Callable[[], Any]]) -> list[Any]:
        calls.append(len(acts))
        if len(calls) == 1:
            begun.set()
            assert may_end.wait(PATIENCE_S)
        elif len(calls) == 2:
            raise Interrupt
        return [act() for act in acts]

    commits = GroupCommit(transact)
    ended: list[str] = []

    def run(name: str) -> None:
        try:
            commits.run(lambda: None)
            ended.append(name)
        except Interrupt:
            ended.append("interrupted")

    threads = [threading.Thread(target=run, args=(name,)) for name in ("first", "second", "third")]
    threads[0].start()
    assert begun.wait(PATIENCE_S)
    for thread in threads[1:]:
        thread.start()
    until(lambda: commits.waiting == 2, "two steps wait")
    may_end.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert calls == [1, 2, 1]
    assert sorted(ended) in (["first", "interrupted", "second"], ["first", "interrupted", "third"])


def test_a_sync_covers_the_transactions_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.touch()
    syncs: list[int] = []
    began, may_end = threading.Event(), threading.Event()

    def fdatasync(descriptor: int) -> None:
        syncs.append(descriptor)
        began.set()
        assert may_end.wait(PATIENCE_S)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    sync = LogSync(str(log))
    latest = [3]
    durable: list[int] = []

    def ensure(commit: int) -> None:
        sync.ensure(commit, lambda: latest[0])
        durable.append(commit)

    first = threading.Thread(target=ensure, args=(1,))
    first.start()
    assert began.wait(PATIENCE_S)
    latest[0] = 9  # committed while the sync runs: needs the next one
    threads = [threading.Thread(target=ensure, args=(commit,)) for commit in (2, 3, 4, 5, 9)]
    for thread in threads:
        thread.start()
    assert durable == []
    may_end.set()
    for thread in (first, *threads):
        thread.join(PATIENCE_S)
    assert sorted(durable) == [1, 2, 3, 4, 5, 9]
    assert len(syncs) == 2
    sync.forget()


def test_a_sync_that_fails_makes_nothing_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.touch()
    calls: list[int] = []

    def fdatasync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError("I/O error")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    sync = LogSync(str(log))
    with pytest.raises(OSError, match="I/O error"):
        sync.ensure(1, lambda: 1)
    sync.ensure(1, lambda: 1)
    sync.ensure(1, lambda: 1)
    assert len(calls) == 2
    sync.forget()
