"""What is said when a table cannot be changed?"""

from __future__ import annotations

import shlex
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dovetail.backfill.lance_opening import one_line
from dovetail.data.reading.files import is_remote
from dovetail.errors import DovetailError, Problem, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_CHANGED = "DT433"


def not_changed(uri: str, message: str, *fixes: str) -> RunError:
    fixes = fixes or ((may_write(uri),) if is_forbidden(message) else ("call backfill again",))
    return RunError(Problem(NOT_CHANGED, message, fixes=fixes, place=uri))


def may_write(uri: str) -> str:
    if is_remote(uri):
        return "storage_options of somebody who may write there"
    return f"chmod -R u+w {shlex.quote(uri)}, or copy the table to where you may write"


def is_forbidden(text: str) -> bool:
    return any(words in text.casefold() for words in ("permission denied", "read-only file system", "accessdenied"))


@contextmanager
def told_if_not_written(uri: str) -> Iterator[None]:
    """What a disk or a store says when it does not let us, as an error with a fix."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DovetailError):  # a function's own, of its own type
            raise
        raise not_changed(uri, f"cannot write beside the table: {one_line(error)}") from error
