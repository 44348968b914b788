"""Files named with -o or --out: regular files are replaced atomically, links followed, devices and pipes written to."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from dovetail.cli.output_file import write_file, write_output
from dovetail.errors import ConfigError

FIX = "-o out.json"


def test_a_regular_file_is_replaced_atomically_and_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_text("a longer text")
    file.chmod(0o640)
    before = file.stat().st_ino
    write_file(str(file), "new", fix=FIX)
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("new", 0o640)
    assert file.stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed(tmp_path: Path, exists: bool) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    if exists:
        (folder / "real.json").write_text("old")
    link.symlink_to("folder/real.json")
    write_file(str(link), "new", fix=FIX)
    assert link.is_symlink()
    assert (folder / "real.json").read_text() == "new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = "x" * 200_000  # more than a pipe holds
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_file(str(pipe), text, fix=FIX)
    reader.join()
    assert read == [text]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_is_written_to_also_through_a_link(tmp_path: Path) -> None:
    """A pseudo terminal, and not /dev/null: without the rule, every other program on the machine would suffer."""
    controller, terminal = os.openpty()
    try:
        device, link = os.ttyname(terminal), tmp_path / "link"
        link.symlink_to(device)
        for path in (device, str(link)):
            write_file(path, "line\n", fix=FIX)
            assert os.read(controller, 100) == b"line\r\n"
            assert Path(device).is_char_device()
        assert link.is_symlink()
    finally:
        os.close(controller)
        os.close(terminal)


def test_an_open_file_is_appended_to(tmp_path: Path) -> None:
    """/dev/stdout is such a link; a shell may have opened the file behind it with >>."""
    file = tmp_path / "log"
    file.write_text("before\n")
    with file.open("ab") as opened:
        write_file(f"/proc/self/fd/{opened.fileno()}", "after\n", fix=FIX)
        opened.write(b"end\n")
    assert file.read_text() == "before\nafter\nend\n"


def test_a_dash_is_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_output("-", "text\n", fix=FIX)
    assert capsys.readouterr() == ("text\n", "")
    write_output("out.json", "text\n", fix=FIX, note="; done")
    assert capsys.readouterr() == ("", "wrote out.json; done\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("path", ["", ".", "no/such/out.json", "out\0.json"])
def test_a_path_that_cannot_be_written_is_an_error_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        write_file(path, "text", fix=FIX)
    (problem,) = caught.value.problems
    assert (problem.code, problem.fix_texts) == ("DT025", (FIX,))
    assert list(tmp_path.iterdir()) == []
