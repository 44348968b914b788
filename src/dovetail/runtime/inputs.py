"""Input of a run: an iterable fed by the driver, a cursor over files or tables read by workers, or preloaded items."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from dovetail.data.iterable_source import IterableSource, is_non_blocking

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dovetail.data.interfaces import PayloadStore, Source
    from dovetail.data.readers.cursor import Cursor


class Input:
    """A source that is open, and not asked for anything yet."""

    kind: str
    cursor: Cursor | None = None

    def make_source(self, store: PayloadStore, marks: Mapping[int, object], /) -> Source:
        """`marks`: rows of which an earlier driver has told where they are."""
        raise NotImplementedError

    def fingerprint(self) -> dict[str, object]:
        """What must not have changed if somebody goes on with the run; empty: nobody can tell."""
        return {}

    def files(self) -> list[str]:
        """The files and tables that it is read from, as far as they are listed."""
        return []

    def close(self) -> None:
        return


class IterableInput(Input):
    kind = "iterable"

    def __init__(self, source: Iterable[Any], limit: int | None) -> None:
        self._at_hand = is_non_blocking(source)
        items: Iterator[Any] = iter(source)
        self._ours = items is not source
        self._items = items if limit is None else islice(items, limit)

    def make_source(self, store: PayloadStore, _marks: Mapping[int, object], /) -> Source:
        return IterableSource(self._items, store, at_hand=self._at_hand, ours=self._ours)


class CursorInput(Input):
    def __init__(self, cursor: Cursor) -> None:
        self.cursor: Cursor = cursor
        self.kind = cursor.kind
        self._has_source = False

    def make_source(self, store: PayloadStore, marks: Mapping[int, object], /) -> Source:
        from dovetail.data.split_source import SplitSource

        self._has_source = True
        return SplitSource(self.cursor, store, marks)

    def fingerprint(self) -> dict[str, object]:
        return self.cursor.fingerprint()

    def files(self) -> list[str]:
        told: dict[str, Any] = self.cursor.fingerprint()
        return [str(one[0]) for key in ("files", "tables") for one in told.get(key) or ()]

    def close(self) -> None:
        if not self._has_source:  # else who reads it closes it
            self.cursor.close()


def _open_ray_dataset(source: Any, limit: int | None, *, on_ray: bool) -> tuple[Any, Cursor | None]:
    """Of a Ray Dataset nodes of Ray fetch what they need; for workers of this machine the driver reads it."""
    from dovetail.data.readers.cursor import LimitedCursor
    from dovetail.data.readers.ray_dataset import RayDatasetCursor, is_ray_dataset

    if not is_ray_dataset(source):
        return source, None
    if not on_ray:
        return source.iter_rows(), None
    cursor = RayDatasetCursor(source)
    return source, cursor if limit is None else LimitedCursor(cursor, limit)


class PreloadedInput(Input):
    """Nothing to read: the input is there already, in front of several units."""

    kind = "kept"

    def make_source(self, store: PayloadStore, _marks: Mapping[int, object], /) -> Source:
        return IterableSource(iter(()), store, at_hand=True)


def open_input(
    source: Any, limit: int | None, before: dict[str, object] | None = None, *, on_ray: bool = False
) -> Input:
    """Files and tables by what they are called or can do, all else by iterating over it. `before`: the fingerprint that
    an earlier driver saw, so that a table with versions is opened at the same."""
    if is_non_blocking(source):
        return IterableInput(source, limit)
    if type(source).__module__.startswith("ray.data."):
        source, cursor = _open_ray_dataset(source, limit, on_ray=on_ray)
        if cursor is not None:
            return CursorInput(cursor)
    from dovetail.data.sources import open_source  # late: a list needs nothing of it

    cursor = open_source(source, limit, before)
    return IterableInput(source, limit) if cursor is None else CursorInput(cursor)
