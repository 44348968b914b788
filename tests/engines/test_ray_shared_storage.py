"""Markers that show whether a node sees the same files. No Ray is started."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from dovetail.engines.ray.shared_storage import (
    missing_files,
    remove_markers,
    sees_marker,
    write_marker,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_the_same_folder_is_recognised_under_another_path(tmp_path: Path) -> None:
    folder, link = tmp_path / "run", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    token = write_marker(folder)
    assert sees_marker(folder, token)
    assert sees_marker(str(link), token)


def test_another_folder_with_the_same_path_is_not_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    token = write_marker(folder)
    assert not sees_marker(tmp_path, token)
    assert not sees_marker(tmp_path / "nowhere", token)
    shutil.rmtree(folder)
    folder.mkdir()
    write_marker(folder)
    assert not sees_marker(folder, token)


def test_a_damaged_marker_is_no_marker(tmp_path: Path) -> None:
    token = write_marker(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"")
    assert not sees_marker(tmp_path, token)
    path.write_bytes(b"\xff")
    assert not sees_marker(tmp_path, token)


def test_a_folder_has_one_marker_which_can_be_removed(tmp_path: Path) -> None:
    first, second = write_marker(tmp_path), write_marker(tmp_path)
    assert first != second
    assert len(list(tmp_path.iterdir())) == 1
    assert sees_marker(tmp_path, second)
    remove_markers(tmp_path)
    remove_markers(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_has_no_marker(tmp_path: Path) -> None:
    token = write_marker(tmp_path)
    tmp_path.chmod(0o555)
    assert not sees_marker(tmp_path, token)
    tmp_path.chmod(0o755)


def test_missing_files_and_folders_are_listed(tmp_path: Path) -> None:
    there = tmp_path / "in.jsonl"
    there.write_text("{}\n")
    gone = [str(tmp_path / "gone.jsonl"), str(tmp_path / "no" / "folder")]
    assert missing_files([str(there), str(tmp_path), *gone, "s3://bucket/key"]) == gone
