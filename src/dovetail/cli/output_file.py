"""Writing of a file named on the command line: atomic, through links, into devices and pipes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import click

from dovetail.errors import ConfigError, Problem

STDOUT = "-"
DESCRIPTOR_FOLDERS = ("/dev/", "/proc/")
"""Links in these folders are open files: /dev/stdout may be a regular file, to which the shell appends."""


def write_output(path: str, text: str, *, fix: str, note: str = "") -> None:
    """Write the output of a command: to stdout for "-", else to the file, and report that on stderr."""
    if path == STDOUT:
        click.echo(text, nl=False)
        return
    write_file(path, text, fix=fix)
    click.echo(f"wrote {path}{note}", err=True)


def write_file(path: str, text: str, *, fix: str, fix_if_there: str | None = None) -> None:
    """Write a file; a failure is a ConfigError with this fix.

    A regular file is replaced atomically, unless `fix_if_there` is given and it exists. A link is followed. A device or
    a pipe is written to.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise file_error(path, "is a folder, not a file", fix)
        if fix_if_there is not None and target.exists():
            raise file_error(path, "file exists", fix_if_there)
        if _is_written_in_place(target):
            with target.open("ab", buffering=0) as file:
                _write_all(file.fileno(), text.encode())
        else:
            _replace_atomically(Path(os.path.realpath(target)), text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise file_error(path, f"cannot be written: {reason}", fix) from None


def _is_written_in_place(target: Path) -> bool:
    """Whether it is a device, a pipe or an open file of a process."""
    if target.is_symlink() and os.path.abspath(target).startswith(DESCRIPTOR_FOLDERS):  # noqa: PTH100 - not resolved
        return True
    return target.exists() and not target.is_file()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _replace_atomically(target: Path, text: str) -> None:
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def file_error(path: str, message: str, fix: str) -> ConfigError:
    return ConfigError(Problem("DT025", message, fixes=(fix,), place=path))
