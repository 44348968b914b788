"""Is it found out before a run whether a node sees the same files? No Ray is needed."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from dovetail.engines.ray.shared_storage import (
    file_sizes,
    missing_files,
    remove_markers,
    sees_marker,
    unseen_files_error,
    write_marker,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_the_same_folder_is_recognised_also_by_another_name(tmp_path: Path) -> None:
    folder, link = tmp_path / "run", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    token = write_marker(folder)
    assert sees_marker(folder, token)
    assert sees_marker(str(link), token)


def test_another_folder_of_the_same_name_is_not_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    token = write_marker(folder)
    assert not sees_marker(tmp_path, token)
    assert not sees_marker(tmp_path / "nowhere", token)
    shutil.rmtree(folder)
    folder.mkdir()
    write_marker(folder)
    assert not sees_marker(folder, token)


def test_a_mark_that_is_torn_or_no_text_is_none(tmp_path: Path) -> None:
    token = write_marker(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"")
    assert not sees_marker(tmp_path, token)
    path.write_bytes(b"\xff")
    assert not sees_marker(tmp_path, token)


def test_there_is_one_mark_and_it_can_be_taken_away(tmp_path: Path) -> None:
    first, second = write_marker(tmp_path), write_marker(tmp_path)
    assert first != second
    assert len(list(tmp_path.iterdir())) == 1
    assert sees_marker(tmp_path, second)
    remove_markers(tmp_path)
    remove_markers(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_of_no_use(tmp_path: Path) -> None:
    token = write_marker(tmp_path)
    tmp_path.chmod(0o555)
    assert not sees_marker(tmp_path, token)
    tmp_path.chmod(0o755)


def test_files_and_folders_that_are_not_there_are_missing(tmp_path: Path) -> None:
    there = tmp_path / "in.jsonl"
    there.write_text("{}\n")
    gone = [str(tmp_path / "gone.jsonl"), str(tmp_path / "no" / "folder")]
    assert missing_files([str(there), str(tmp_path), *gone, "s3://bucket/key"]) == gone


def test_another_file_of_the_same_name_is_missing(tmp_path: Path) -> None:
    file, folder = tmp_path / "in.jsonl", tmp_path / "rows"
    file.write_text("{}\n")
    folder.mkdir()
    at_driver = file_sizes([str(file), str(folder), "s3://bucket/key"])
    assert at_driver == {str(file): 3, str(folder): None}
    assert missing_files(at_driver) == []
    file.write_text("another\n")
    assert missing_files(at_driver) == [str(file)]
    file.unlink()
    file.mkdir()
    assert missing_files(at_driver) == [str(file)]


def test_paths_are_described_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    assert file_sizes(["in.jsonl"]) == {str(tmp_path / "in.jsonl"): 3}


def test_the_error_says_which_node_misses_what_and_what_to_do() -> None:
    error = unseen_files_error({"b": ["/data/in.jsonl"], "a": [], "c": [f"/data/{number}" for number in range(7)]})
    text = str(error)
    assert "DT405" in text
    assert "2 nodes do not see files of the source" in text
    assert "node b does not see /data/in.jsonl" in text
    assert "/data/4 and 2 more" in text
    assert "put /data/in.jsonl on storage that all nodes share" in text
    assert "s3://" in text
    assert "node a" not in text
    many = str(unseen_files_error({f"n{number}": ["/x"] for number in range(30)}))
    assert "and 25 more nodes" in many
    assert "one node does not see" in str(unseen_files_error({"a": ["/x"]}))
