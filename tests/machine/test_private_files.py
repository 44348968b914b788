"""Folders of mode 0700, files of mode 0600, and the users that can change a path."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from dovetail.machine.private_files import append_to_private, foreign_access, make_private_folder, open_private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OTHER_USER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture(params=[0o002, 0o022, 0o077], autouse=True)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_is_private_under_any_umask_and_its_parents_are_as_usual(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "usual" / "private")
    assert mode(tmp_path / "usual" / "private") == 0o700
    (tmp_path / "other").mkdir()
    assert mode(tmp_path / "usual") == mode(tmp_path / "other")


def test_an_existing_folder_stays_as_it_is_and_a_file_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_private_folder(tmp_path)
    assert mode(tmp_path) == 0o755
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_private_folder(tmp_path / "file")
    with pytest.raises(FileExistsError):
        make_private_folder(tmp_path, exist_ok=False)


def test_files_are_private_under_any_umask(tmp_path: Path) -> None:
    os.close(open_private(tmp_path / "one", os.O_WRONLY))
    for _ in range(2):
        with append_to_private(tmp_path / "two") as file:
            file.write(b"x")
    assert (mode(tmp_path / "one"), mode(tmp_path / "two")) == (0o600, 0o600)
    assert (tmp_path / "two").read_bytes() == b"xx"


@pytest.mark.parametrize(
    ("bits", "reason"),
    [
        (0o700, ""),
        (0o755, ""),
        (0o770, "is writable by its group"),
        (0o702, "is writable by everyone"),
        (0o1777, ""),  # the sticky bit: others cannot exchange what is in it
    ],
)
def test_permissions_of_others_are_found(tmp_path: Path, bits: int, reason: str) -> None:
    tmp_path.chmod(bits)
    assert foreign_access(tmp_path) == reason


@needs_root
def test_another_owner_is_found_also_behind_and_of_a_link(tmp_path: Path) -> None:
    theirs, link = tmp_path / "theirs", tmp_path / "link"
    theirs.touch(0o600)
    os.chown(theirs, OTHER_USER, OTHER_USER)
    link.symlink_to(theirs)
    assert foreign_access(theirs) == foreign_access(link) == f"belongs to user {OTHER_USER}"
    os.chown(theirs, 0, 0)
    assert foreign_access(link) == ""
    os.chown(link, OTHER_USER, OTHER_USER, follow_symlinks=False)
    assert foreign_access(link) == f"belongs to user {OTHER_USER}"
