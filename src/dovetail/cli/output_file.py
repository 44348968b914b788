"""Atomic writing of a file named on the command line, with errors that carry a fix."""

from __future__ import annotations

import os
from pathlib import Path

from dovetail.errors import ConfigError, Problem


def write_file(path: str, text: str, *, fix: str, fix_if_there: str | None = None) -> None:
    """Writes the file atomically; a failure is a ConfigError with this fix. An existing file is overwritten, unless
    `fix_if_there` is given."""
    target = Path(path)
    temporary = target.with_name(f".{target.name[:100]}.{os.getpid()}.tmp") if target.name else target
    try:
        if target.is_dir():
            raise file_error(path, "is a folder, not a file", fix)
        if fix_if_there is not None and target.exists():
            raise file_error(path, "file exists", fix_if_there)
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise file_error(path, f"cannot be written: {reason}", fix) from None


def file_error(path: str, message: str, fix: str) -> ConfigError:
    return ConfigError(Problem("DT025", message, fixes=(fix,), place=path))
