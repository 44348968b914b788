"""Writing of exported files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from dovetail.export.exported_files import is_unedited, marked, write_files

if TYPE_CHECKING:
    from pathlib import Path

FILES = {"a.yaml": marked("compose", "x: 1\n"), "b.yaml": marked("compose", "y: 1\n")}


def test_files_that_were_not_edited_are_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "deploy"
    assert write_files(folder, FILES).changed == ("a.yaml", "b.yaml")
    changed = {"a.yaml": marked("compose", "x: 2\n")}
    written = write_files(folder, changed)
    assert (written.changed, written.unchanged, written.outdated) == (("a.yaml",), (), ("b.yaml",))
    assert write_files(folder, changed).unchanged == ("a.yaml",)
    assert (folder / "a.yaml").read_text() == changed["a.yaml"]
    assert sorted(path.name for path in folder.iterdir()) == ["a.yaml", "b.yaml"]


def test_nothing_is_written_if_one_file_was_edited(tmp_path: Path) -> None:
    write_files(tmp_path, FILES)
    (tmp_path / "b.yaml").write_text(FILES["b.yaml"].replace("y: 1", "y: 3"))
    (tmp_path / "c.yaml").write_text("of another owner\n")
    (tmp_path / "d.yaml").mkdir()
    with (tmp_path / "e.yaml").open("wb") as large:
        large.truncate(1 << 40)  # read as a whole, it would not fit in the memory
    changed = {name: marked("compose", "z: 1\n") for name in ("a.yaml", "b.yaml", "c.yaml", "e.yaml")}
    with pytest.raises(dt.ConfigError) as caught:
        write_files(tmp_path, changed)
    assert [problem.place for problem in caught.value.problems] == [str(tmp_path / f"{name}.yaml") for name in "bce"]
    assert (tmp_path / "a.yaml").read_text() == FILES["a.yaml"]
    assert write_files(tmp_path, changed, force=True).changed == ("a.yaml", "b.yaml", "c.yaml", "e.yaml")
    assert is_unedited((tmp_path / "b.yaml").read_text())


@pytest.mark.parametrize("name", ["file", "file/inside", "a\0b"])
def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(dt.ConfigError, match="DT025"):
        write_files(tmp_path / name, FILES)
