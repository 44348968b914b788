"""Writing of exported files to a folder: all or nothing, and never over files that were edited.

The first line of a file has a checksum of the rest, so a file that was not edited is known by itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

EDITED = "DT647"
NOT_WRITTEN = "DT025"
SIZE_LIMIT_BYTES = 1 << 20
_FIRST_LINE = re.compile(r"# Written by `dovetail export [a-z]+`; replaced by it unless edited: ([0-9a-f]{16})\n")


@dataclass(frozen=True, slots=True)
class Written:
    """What was done to a folder."""

    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    outdated: tuple[str, ...]
    """Files of an earlier export that this one does not have."""


def marked(kind: str, text: str) -> str:
    """The text with its first line."""
    return f"# Written by `dovetail export {kind}`; replaced by it unless edited: {_checksum(text)}\n{text}"


def is_unedited(text: str) -> bool:
    """Whether a text is as it was exported."""
    found = _FIRST_LINE.match(text)
    return found is not None and found[1] == _checksum(text[found.end() :])


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_files(folder: Path, files: Mapping[str, str], *, force: bool = False) -> Written:
    """Write all files, or none; ConfigError names all that were edited."""
    try:
        present = {path.name: _text_of(path) for path in sorted(folder.iterdir())} if folder.exists() else {}
        problems = [
            _edited_problem(folder / name)
            for name in files
            if name in present and present[name] != files[name] and not is_unedited(present[name])
        ]
        if problems and not force:
            raise ConfigError(problems)
        changed = {name: text for name, text in files.items() if present.get(name) != text}
        if folder.exists():
            _replace_files(folder, changed)
        else:
            _make_folder(folder, changed)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fixes = ("-o deploy",)
        raise ConfigError(
            Problem(NOT_WRITTEN, f"cannot be written: {reason}", fixes=fixes, place=str(folder))
        ) from None
    outdated = tuple(name for name, text in present.items() if name not in files and is_unedited(text))
    return Written(tuple(changed), tuple(name for name in files if name not in changed), outdated)


def _text_of(path: Path) -> str:
    """The text of a file; "" for folders, and for files that are too large to be exported ones."""
    is_small = path.is_file() and path.stat().st_size <= SIZE_LIMIT_BYTES
    return path.read_bytes().decode("utf-8", "replace") if is_small else ""


def _edited_problem(path: Path) -> Problem:
    fixes = ("--force", f"-o {path.parent}-new")
    return Problem(EDITED, "was edited, or not written by `dovetail export`", fixes=fixes, place=str(path))


def _make_folder(folder: Path, files: Mapping[str, str]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_files(folder: Path, files: Mapping[str, str]) -> None:
    """All texts are on the disk before the first file is replaced."""
    temporary = {name: folder / f".{name}.{os.getpid()}.tmp" for name in files}
    try:
        for name, path in temporary.items():
            path.write_text(files[name], encoding="utf-8")
        for name, path in temporary.items():
            path.replace(folder / name)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
