"""Errors of sources and sinks: changed or unreadable input, full disk, missing results, missing packages."""

from __future__ import annotations

import errno
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.control.payload import SourceSinkError
from dovetail.errors import ConfigError, Problem, Subject

if TYPE_CHECKING:
    from collections.abc import Iterable

INVALID_SETTING = "DT340"
NOT_FOUND = "DT341"
UNKNOWN_FORMAT = "DT342"
MISSING_PACKAGE = "DT343"
SOURCE_CHANGED = "DT344"
CANNOT_READ = "DT345"
CONTENT_MISMATCH = "DT346"

SOURCE_SUBJECT = Subject("source", "source")
"""What a setting such as `format` belongs to, for fixes."""

MAX_PATHS_SHOWN = 10
"""Maximum number of files named in a message."""


def source_changed(path: str, how: str) -> SourceSinkError:
    fix = "start a new run, or restore the file and resume; copy files that are still being written"
    return SourceSinkError(SOURCE_CHANGED, f"changed while it was read: {how}", fix, path)


def cannot_read(path: str, error: BaseException) -> SourceSinkError:
    """The file was removed, is not readable, is damaged, or its disk fails."""
    if isinstance(error, SourceSinkError):
        return error
    if isinstance(error, FileNotFoundError):
        return source_changed(path, "it is gone")
    if isinstance(error, PermissionError):
        return SourceSinkError(CANNOT_READ, "permission denied", f"chmod u+r {shlex.quote(path)}", path)
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return SourceSinkError(CANNOT_READ, f"cannot be read: {reason}", "fix the cause, then resume", path)


def archive_damaged(path: str, error: BaseException | str) -> SourceSinkError:
    reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return SourceSinkError(
        CANNOT_READ, f"the archive is damaged or truncated: {reason}", "create or download the file again", path
    )


def missing_source_package(package: str, extra: str | None, what: str) -> ConfigError:
    install = f"pip install 'dovetail-ml[{extra}]'" if extra else f"pip install {package}"
    return ConfigError(
        Problem(MISSING_PACKAGE, f"{what} needs the package {package}, which is not installed", fixes=(install,))
    )


def list_paths(paths: Iterable[str], count: int) -> str:
    """The first names, and the number of the others."""
    few = [path for path, _ in zip(paths, range(MAX_PATHS_SHOWN), strict=False)]
    more = f" and {count - len(few)} more" if count > len(few) else ""
    return ", ".join(few) + more


DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
PATH_GONE_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


def write_failed(error: OSError, path: str) -> SourceSinkError:
    """The error of a sink that ends a run; committed results are kept."""
    folder = shlex.quote(str(Path(path).parent))
    reason = error.strerror or str(error)
    # pyarrow and lance report the errno only as text
    if error.errno in DISK_FULL_ERRNOS or "No space left" in reason or "File too large" in reason:
        message = f"no space for the results: {reason}"
        return SourceSinkError("DT353", message, f"free disk space (df -h {folder}), then resume", path)
    if error.errno in PATH_GONE_ERRNOS:
        return results_missing(path)
    return SourceSinkError("DT355", f"the results cannot be written: {reason}", "fix the cause, then resume", path)


def results_missing(path: str) -> SourceSinkError:
    """Part files were removed; a resume computes their results again."""
    return SourceSinkError("DT354", "part files of committed results are missing", place=path)


def missing_sink_package(package: str, extra: str, path: str) -> ConfigError:
    return ConfigError(
        Problem(
            "DT358", f"{package} is needed for this sink", fixes=(f"pip install 'dovetail-ml[{extra}]'",), place=path
        )
    )
