"""The root of the file system is not searched for data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dovetail.data.readers.file_discovery import FileFinder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("path", ["/", "//", "/tmp/..", "link"])
def test_the_root_of_the_file_system_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def walk(*_: object, **__: object) -> None:
        raise AssertionError("the disk is searched")

    (tmp_path / "link").symlink_to("/")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.walk", walk)
    finder = FileFinder(lambda _: True)
    finder.add(path)
    (problem,) = finder.problems
    assert "is the root of the file system" in str(problem.message)
    assert problem.fix_texts
