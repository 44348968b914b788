"""Files beside a table on a disk and in a bucket: complete or absent."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest

from dovetail.backfill.store import TableStore, column_folder
from rivals import create_files

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("lance")


@pytest.fixture(params=["disk", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TableStore:
    if request.param == "disk":
        (tmp_path / "some table.lance").mkdir()
        return TableStore(str(tmp_path / "some table.lance"))
    bucket = request.getfixturevalue("bucket")
    return TableStore(f"{bucket.uri}/some folder/some table.lance/", bucket.storage)


NAMES = ["a", "p.0.100.12345", "t.3.4.run", "with space", "50%", "%20", "ü", "a+b", "x=1&y", "#", "1-ab"]


def test_a_stored_file_is_listed_under_its_name(store: TableStore) -> None:
    for name in NAMES:
        store.put(f"c-x%20y/parts/{name}", name.encode())
    assert store.names("c-x%20y/parts") == sorted(NAMES)
    assert [store.get(f"c-x%20y/parts/{name}") for name in NAMES] == [name.encode() for name in NAMES]
    assert store.folders("") == ["c-x%20y"]
    assert store.folders("c-x%20y") == ["parts"]
    assert store.names("") == store.names("c-x%20y") == []


def test_a_missing_file_is_none(store: TableStore) -> None:
    assert store.get("nothing/here") is None
    assert store.names("nothing") == store.folders("nothing") == []
    store.delete("nothing/here", "nor")
    store.delete_folder("nothing")
    store.put("file", b"1")
    assert store.get("file/inside") is None
    assert store.names("file") == []


def test_put_replaces(store: TableStore) -> None:
    store.put("a/b", b"long before")
    store.put("a/b", b"new")
    assert store.get("a/b") == b"new"
    store.put("a/b", b"")
    assert store.get("a/b") == b""
    assert store.names("a") == ["b"]


def test_large_and_binary_files_are_read_as_they_were_written(store: TableStore) -> None:
    data = os.urandom(12 << 20)  # S3 gets this in several pieces
    store.put("a/large", data)
    assert store.get("a/large") == data


def test_create_writes_a_file_only_if_it_does_not_exist(store: TableStore) -> None:
    assert store.create("a/b", b"1")
    assert not store.create("a/b", b"2")
    assert store.get("a/b") == b"1"
    store.delete("a/b")
    assert store.create("a/b", b"3")
    assert store.names("a") == ["b"]


def test_delete_removes_only_the_given_files(store: TableStore) -> None:
    for name in ("a/1", "a/2", "a/3", "ab/1", "a/b/c"):
        store.put(name, b"x")
    store.delete("a/1", "a/nothing", "a/3")
    assert store.names("a") == ["2"]
    store.delete_folder("a")
    assert store.names("a") == store.folders("a") == store.names("a/b") == []
    assert store.names("ab") == ["1"]


def test_folders_and_files_of_one_folder_are_distinguished(store: TableStore) -> None:
    store.put("a/file", b"")
    store.put("a/folder/file", b"")
    store.put("a/folder/deep/file", b"")
    assert (store.names("a"), store.folders("a")) == (["file"], ["folder"])


def test_it_pickles_and_does_not_show_its_keys(store: TableStore) -> None:
    store.put("a", b"1")
    again = pickle.loads(pickle.dumps(store))
    assert again.get("a") == b"1"
    assert again.describe() == store.describe()
    assert store.describe().endswith("some table.lance/_dovetail")
    assert "aws" not in repr(store)
    assert "aws" not in store.describe()


def test_columns_of_any_name_have_folders_of_their_own() -> None:
    names = ["columns", "Columns", "a b", "a%20b", "ä", "a/b", "..", "c-x", "x"]
    folders = [column_folder(name) for name in names]
    assert len(set(folders)) == len(names)
    assert not any("/" in folder or folder in ("columns", "..") for folder in folders)


def test_a_column_with_a_long_name_has_a_folder_with_a_short_one(store: TableStore) -> None:
    long = "\u5217" * 28  # nine letters each, once quoted
    names = [long, long + "a", "a" + long, "ab" + long, "x" * 300, "x" * 301, "\u5217" * 27, "x" * 248]
    folders = [column_folder(name) for name in names]
    assert len(set(folders)) == len(names)
    assert all(folder.startswith("c-") and len(f"{folder}.json".encode()) <= 255 for folder in folders)
    assert folders[4].startswith(f"c-{'x' * 98}=")
    assert folders[-1] == f"c-{'x' * 248}", "what has a folder already keeps it"
    for folder in folders:
        assert "%" not in folder or len(unquote(folder.partition("=")[0], errors="ignore")) > 10
        store.put(f"columns/{folder}.json", b"1")
        store.put(f"{folder}/jobs/a.json", b"2")
    assert store.folders("") == sorted(["columns", *folders])


def test_a_store_that_does_not_answer_is_an_error_and_not_an_empty_one(bucket: Any) -> None:
    storage = {**bucket.storage, "aws_endpoint": "http://127.0.0.1:1", "client_max_retries": "0"}
    store = TableStore(f"{bucket.uri}/t.lance", storage)
    for look in (store.get, store.names, store.folders, store.delete, store.delete_folder):
        with pytest.raises(OSError, match=r"127\.0\.0\.1:1"):
            look("a")
    for change in (store.put, store.create):
        with pytest.raises(OSError, match=r"127\.0\.0\.1:1"):
            change("a", b"x")


def test_of_several_that_create_at_the_same_moment_one_does(tmp_path: Path) -> None:
    count, processes = 50, 3
    context = multiprocessing.get_context("spawn")
    barrier, got = context.Barrier(processes), context.Queue()
    children = [
        context.Process(target=create_files, args=(str(tmp_path), count, barrier, str(at), got))
        for at in range(processes)
    ]
    for child in children:
        child.start()
    made: list[tuple[int, str]] = []
    ended = 0
    while ended < processes:
        one = got.get(timeout=60)
        ended += one is None
        made += [one] if one else []
    for child in children:
        child.join()
    store = TableStore(str(tmp_path))
    assert sorted(at for at, _ in made) == list(range(count))
    assert all(store.get(f"a/{at}") == mine.encode() for at, mine in made)


WRITES = """
import sys
from dovetail.backfill.store import TableStore
store = TableStore(sys.argv[1])
print("ready", flush=True)
while True:
    for letter in "ab":
        store.put("x/file", letter.encode() * 3_000_000)
"""


def test_a_killed_writer_leaves_a_complete_file_or_none(tmp_path: Path) -> None:
    store = TableStore(str(tmp_path))
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        seen: set[bytes] = set()
        while len(seen) < 2:  # reading beside a writer: never half a file
            data = store.get("x/file")
            if data is not None:
                assert data in (b"a" * 3_000_000, b"b" * 3_000_000)
                seen.add(data[:1])
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert store.get("x/file") in (b"a" * 3_000_000, b"b" * 3_000_000)
        assert store.names("x") == ["file"]
        store.delete("x/file")
