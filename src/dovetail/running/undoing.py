"""What becomes of what was begun, if a run or a service does not start? It is undone, the last first."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dovetail.observe.folder import RunFolder


@contextmanager
def undone() -> Iterator[list[Callable[[], None]]]:
    """Whoever begins something adds how it is undone."""
    undo: list[Callable[[], None]] = []
    try:
        yield undo
    except BaseException:
        for one in reversed(undo):
            one()
        raise


def remove(folder: RunFolder) -> None:
    from shutil import rmtree  # late: most runs begin

    rmtree(folder.path, ignore_errors=True)
