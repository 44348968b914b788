"""Input of a run: an iterable fed by the driver, a cursor over files or tables read by workers, or preloaded items."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from dovetail.data.iterable_source import IterableSource, is_non_blocking
from dovetail.data.sample import Sample, SampledCursor, sampled_items

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dovetail.data.interfaces import PayloadStore, Source
    from dovetail.data.readers.cursor import Cursor


class Input:
    """An opened source from which nothing has been read."""

    kind: str
    cursor: Cursor | None = None

    def make_source(self, store: PayloadStore, marks: Mapping[int, object], /) -> Source:
        """`marks`: positions in the source that an earlier driver recorded."""
        raise NotImplementedError

    def fingerprint(self) -> dict[str, object]:
        """Fingerprint that must be unchanged for a resume; empty if that cannot be checked."""
        return {}

    def files(self) -> list[str]:
        """The files and tables that it reads, as far as they are listed."""
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
        fingerprint: dict[str, Any] = self.cursor.fingerprint()
        return [str(entry[0]) for key in ("files", "tables") for entry in fingerprint.get(key) or ()]

    def close(self) -> None:
        if not self._has_source:  # otherwise the source closes it
            self.cursor.close()


def _open_ray_dataset(source: Any, limit: int | None, *, on_ray: bool) -> tuple[Any, Cursor | None]:
    """A cursor whose blocks are fetched by the nodes of Ray; for local workers, rows that the driver reads."""
    from dovetail.data.readers.cursor import LimitedCursor
    from dovetail.data.readers.ray_dataset import RayDatasetCursor, is_ray_dataset

    if not is_ray_dataset(source):
        return source, None
    if not on_ray:
        return source.iter_rows(), None
    cursor = RayDatasetCursor(source)
    return source, cursor if limit is None else LimitedCursor(cursor, limit)


class PreloadedInput(Input):
    """No source: the input of units is already stored (a retry of failed items)."""

    kind = "kept"

    def make_source(self, store: PayloadStore, _marks: Mapping[int, object], /) -> Source:
        return IterableSource(iter(()), store, at_hand=True)


def _open_sample(sample: Sample) -> Input:
    if isinstance(sample.source, Sequence) and not isinstance(sample.source, str | bytes):
        return IterableInput(sampled_items(sample.source, sample), None)
    found = open_input(sample.source, None)
    if isinstance(found, CursorInput):
        return CursorInput(SampledCursor(found.cursor, sample.limit, sample.piece_items))
    return IterableInput(sample.source, sample.limit)


def open_input(
    source: Any, limit: int | None, before: dict[str, object] | None = None, *, on_ray: bool = False
) -> Input:
    """Opens files and tables by name or type; everything else is iterated. `before`: the fingerprint that an earlier
    driver recorded, so that a table with versions is opened at the same version."""
    if is_non_blocking(source):
        return IterableInput(source, limit)
    if isinstance(source, Sample):
        return _open_sample(source)
    if type(source).__module__.startswith("ray.data."):
        source, cursor = _open_ray_dataset(source, limit, on_ray=on_ray)
        if cursor is not None:
            return CursorInput(cursor)
    from dovetail.data.sources import open_source  # late: not needed for a list

    cursor = open_source(source, limit, before)
    return IterableInput(source, limit) if cursor is None else CursorInput(cursor)
