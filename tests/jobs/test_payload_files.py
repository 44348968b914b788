"""Files of jobs, in a folder and behind a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from dovetail.jobs.payload_files import LocalFiles, PayloadFiles, log_name, open_files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["folder", "url"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> PayloadFiles:
    if request.param == "folder":
        return open_files(tmp_path / "files")
    pytest.importorskip("fsspec")
    return open_files(f"memory://{tmp_path.name}/files/")


def test_a_file_is_read_back_until_its_job_is_deleted(files: PayloadFiles) -> None:
    mine, other = files.write(b"one", "0123ab"), files.write(b"two", "0123ac")
    files.put(log_name("0123ab", 2), b"epoch 1")
    assert (files.read(mine), files.read(other), files.read("ab/0123ab/2.log")) == (b"one", b"two", b"epoch 1")
    files.delete_of(["0123ab", "0zz"])
    assert files.read(other) == b"two"
    with pytest.raises(dt.ConfigError, match="is not in") as caught:
        files.read(mine)
    assert caught.value.codes == ("DT607",)


def test_names_are_never_reused(files: PayloadFiles) -> None:
    assert len({files.write(b"", "0123ab") for _ in range(100)}) == 100
    assert files.read(files.write(b"without a job")) == b"without a job"


@pytest.mark.parametrize(
    "name", ["../x", "ab/../../etc/passwd", "/etc/passwd", "ab/cd/x", "ab/xab/.x", "ab/xab/x/y", ""]
)
def test_a_name_of_the_store_cannot_leave_the_folder(files: PayloadFiles, name: str) -> None:
    with pytest.raises(dt.ConfigError, match="is not the name of a file"):
        files.read(name)


def test_files_of_a_folder_are_private_and_appear_whole(tmp_path: Path) -> None:
    files = open_files(f"file://{tmp_path}/files")
    assert isinstance(files, LocalFiles)
    path = files.path_of(files.write(b"x", "0123ab"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert {parent.stat().st_mode & 0o777 for parent in list(path.parents)[:3]} == {0o700}
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_is_an_error_with_a_code(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(dt.EngineError, match="cannot be written") as caught:
        open_files(tmp_path / "file" / "folder").write(b"x", "0123ab")
    assert caught.value.codes == ("DT607",)


def test_an_unknown_protocol_is_refused_with_its_reason() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(dt.ConfigError, match="cannot be opened") as caught:
        open_files("nosuchstore://bucket")
    assert caught.value.codes == ("DT601",)
