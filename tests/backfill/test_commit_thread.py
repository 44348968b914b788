"""Commits of finished files: the first at once, then by time, the rest at the end."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from dovetail.backfill.commit_thread import Committer
from dovetail.backfill.lance_table import CommitResult, Fragment, LanceTable, NewDataFile
from dovetail.errors import RunError
from waiting import until

pa = pytest.importorskip("pyarrow")
lance = pytest.importorskip("lance")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EACH = 5
NEVER_S = 1e6


@pytest.fixture
def table(tmp_path: Path) -> LanceTable:
    rows = pa.table({"id": list(range(6 * EACH))})
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows, uri, max_rows_per_file=EACH)
    return LanceTable(uri).add_columns([pa.field("u", pa.string())])


def inputs(_: LanceTable, fragment: Fragment) -> str:
    return fragment.files[0].path


def write_file(table: LanceTable, fragment: int) -> NewDataFile:
    schema = pa.schema([table.schema.field("u")])
    name = f"dt-{fragment}.lance"
    size = table.write(name, schema, [pa.record_batch([pa.array([str(fragment)] * EACH)], schema=schema)])
    return NewDataFile(fragment, name, (1,), inputs(table, table.fragments()[fragment]), size)


class RecordedCommits:
    """Callback that records every commit and the thread that reported it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.all: list[CommitResult] = []
        self.threads: set[str] = set()

    def __call__(self, committed: CommitResult) -> None:
        with self._changed:
            self.all.append(committed)
            self.threads.add(threading.current_thread().name)
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 60), "no further commit was reported"

    def fragments(self) -> list[int]:
        return [fragment for one in self.all for fragment in one.fragments]


def committed_values(table: LanceTable) -> set[str]:
    return set(table.newest().dataset.to_table(columns=["u"])["u"].to_pylist()) - {None}


def test_the_first_file_is_committed_at_once_and_the_rest_at_the_end(table: LanceTable) -> None:
    recorded = RecordedCommits()
    committer = Committer(table, NEVER_S, inputs, recorded)
    committer.add(write_file(table, 3))
    recorded.wait(lambda: recorded.fragments() == [3])
    assert committed_values(table) == {"3"}
    for fragment in (0, 1, 2):
        committer.add(write_file(table, fragment))
    assert committed_values(table) == {"3"}
    assert committer.finish() == recorded.all
    assert [one.fragments for one in recorded.all] == [(3,), (0, 1, 2)]
    assert committed_values(table) == {"0", "1", "2", "3"}
    assert committer.commits == 2
    assert 0 < committer.seconds < 60
    assert committer.finish() == recorded.all, "twice does no harm"


def test_later_files_are_committed_at_intervals(table: LanceTable) -> None:
    recorded = RecordedCommits()
    every_s = 0.3
    committer = Committer(table, every_s, inputs, recorded)
    began = time.monotonic()
    for fragment in range(3):
        committer.add(write_file(table, fragment))
        recorded.wait(lambda: len(recorded.all) == fragment + 1)  # noqa: B023 - called before the next one
    assert [one.fragments for one in recorded.all] == [(0,), (1,), (2,)]
    assert time.monotonic() - began >= 2 * every_s
    assert len(committer.finish()) == 3


def test_without_files_there_is_no_commit(table: LanceTable) -> None:
    recorded = RecordedCommits()
    committer = Committer(table, 0.01, inputs, recorded)
    assert committer.finish() == []
    assert (committer.commits, committer.seconds) == (0, 0.0)
    assert table.newest().version == table.version


def test_a_compaction_between_commits_is_reported(table: LanceTable) -> None:
    recorded = RecordedCommits()
    committer = Committer(table, NEVER_S, inputs, recorded)
    files = [write_file(table, fragment) for fragment in range(6)]
    committer.add(files[0])
    recorded.wait(lambda: bool(recorded.all))
    dataset = lance.dataset(table.uri)
    dataset.update({"id": "id + 1000"}, where="id = 7")
    dataset.delete("id = 16")  # fragment 3
    dataset.optimize.compact_files(target_rows_per_fragment=EACH, materialize_deletions_threshold=0.15)
    there = {fragment.id for fragment in table.newest().fragments()}
    assert 0 in there
    gone = tuple(fragment for fragment in range(1, 6) if fragment not in there)
    assert 3 in gone
    for file in files[1:]:
        committer.add(file)
    last = committer.finish()[-1]
    assert last.changed_fragments == gone
    assert last.fragments == tuple(fragment for fragment in range(1, 6) if fragment in there)
    assert {str(fragment) for fragment in (0, *last.fragments)} == committed_values(table)


def test_an_update_between_commits_has_no_effect(table: LanceTable) -> None:
    recorded = RecordedCommits()
    committer = Committer(table, NEVER_S, inputs, recorded)
    committer.add(write_file(table, 0))
    recorded.wait(lambda: bool(recorded.all))
    committer.add(write_file(table, 1))
    lance.dataset(table.uri).update({"id": "id + 1000"}, where="id = 7")
    last = committer.finish()[-1]
    assert (last.fragments, last.changed_fragments) == ((1,), ())
    assert committed_values(table) == {"0", "1"}


def test_a_failed_commit_is_retried_and_raised_at_the_end(table: LanceTable) -> None:
    recorded = RecordedCommits()
    asked = 0

    def failing(newest: LanceTable, fragment: Fragment) -> str:
        nonlocal asked
        asked += 1
        if asked <= 2:
            raise OSError("the store does not answer")
        return inputs(newest, fragment)

    committer = Committer(table, 0.01, failing, recorded)
    committer.add(write_file(table, 0))
    recorded.wait(lambda: recorded.fragments() == [0])
    assert (asked, committer.error) == (3, None)
    table.drop_columns(["u"])
    committer.add(write_file(table, 1))
    until(lambda: committer.error is not None)
    committer.add(write_file(table, 2))
    for _ in range(2):
        with pytest.raises(RunError, match="'u' was dropped") as caught:
            committer.finish()
        assert caught.value.codes == ("DT433",)
    assert recorded.fragments() == [0]


def test_a_failed_commit_may_succeed_at_the_end(table: LanceTable) -> None:
    recorded = RecordedCommits()
    broken = True

    def failing(newest: LanceTable, fragment: Fragment) -> str:
        if broken:
            raise OSError("the store does not answer")
        return inputs(newest, fragment)

    committer = Committer(table, 0.01, failing, recorded)
    committer.add(write_file(table, 0))
    committer.add(write_file(table, 1))
    until(lambda: committer.error is not None)
    broken = False
    assert [one.fragments for one in committer.finish()] == [(0, 1)]
    assert committed_values(table) == {"0", "1"}


def test_an_error_of_the_callback_is_raised_and_nothing_is_committed_twice(table: LanceTable) -> None:
    def fail(_: CommitResult) -> None:
        raise ZeroDivisionError

    committer = Committer(table, 0.01, inputs, fail)
    committer.add(write_file(table, 0))
    until(lambda: committer.error is not None)
    with pytest.raises(ZeroDivisionError):
        committer.finish()
    assert table.newest().version == table.version + 1
