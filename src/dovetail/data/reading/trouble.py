"""What is said when a source cannot be read? One sentence, and what to do about it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from dovetail.control.splits import Unusable
from dovetail.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

SETTING = "DT340"
NOT_FOUND = "DT341"
FORMAT = "DT342"
PACKAGE = "DT343"
CHANGED = "DT344"
CANNOT_READ = "DT345"
NOT_AS_SAID = "DT346"

SHOWN = 10
"""Files that a message names at most."""


def changed(path: str, how: str) -> Unusable:
    fix = "run again from the beginning, or put the file back as it was and resume; copy a file that others still write"
    return Unusable(CHANGED, f"changed while it was read: {how}", fix, path)


def cannot_read(path: str, error: BaseException) -> Unusable:
    """The file is there no more, forbidden, damaged, or its disk fails."""
    if isinstance(error, Unusable):
        return error
    if isinstance(error, FileNotFoundError):
        return changed(path, "it is gone")
    if isinstance(error, PermissionError):
        return Unusable(CANNOT_READ, "may not be read", f"chmod u+r {shlex.quote(path)}", path)
    said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return Unusable(CANNOT_READ, f"cannot be read: {said}", "resume when the cause is gone", path)


def damaged(path: str, error: BaseException | str) -> Unusable:
    said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return Unusable(CANNOT_READ, f"the archive is damaged or cut off: {said}", "make or fetch the file again", path)


def missing_package(package: str, extra: str | None, what: str) -> ConfigError:
    install = f"pip install 'dovetail-ml[{extra}]'" if extra else f"pip install {package}"
    return ConfigError(
        Problem(PACKAGE, f"{what} needs the package {package}, which is not installed", fixes=(install,))
    )


def names(paths: Iterable[str], count: int) -> str:
    """Some of them, and how many more there are."""
    few = [path for path, _ in zip(paths, range(SHOWN), strict=False)]
    more = f" and {count - len(few)} more" if count > len(few) else ""
    return ", ".join(few) + more
