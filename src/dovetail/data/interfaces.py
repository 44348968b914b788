"""Interfaces of sources, sinks and the payload store, and the connection of source and sink to the control loop."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.control.commands import Deliver, Pull

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from dovetail.control.commands import DataCommand
    from dovetail.control.events import Event
    from dovetail.control.payload import PartFileRange, Segment, Split, Writer

    Keys = range | list[Any]


class PayloadStore(Protocol):
    """The part of an engine that sources and sinks in the driver use."""

    def store(self, keys: Keys, items: list[Any]) -> Segment:
        """Store items as a payload for workers. Thread: one at a time. Raises UnsendableItemError."""
        ...

    def store_split(self, keys: range, split: Split) -> Segment:
        """Store a split of the source, which workers read. Thread: one at a time."""
        ...

    def load(self, segment: Segment) -> tuple[Keys, list[Any]]:
        """The keys and items of a payload; unreadable items are UnreadableItem. Thread: any."""
        ...

    def release_mappings(self) -> None:
        """Release all mappings: nothing more will be loaded."""
        ...

    @property
    def unreadable(self) -> bool:
        """Whether any loaded item could not be read."""
        ...

    def post(self, event: Event) -> None: ...


class Source(Protocol):
    def pull(self, pull: Pull) -> None:
        """Answer by posting, now or later. Must not block."""
        ...

    def close(self) -> None: ...

    def place_of(self, row: int) -> str:
        """Where the item with this number is, for people: "data/pages.jsonl:17" or "item 17". Thread: any."""
        ...

    @property
    def error(self) -> BaseException | None:
        """The error of the source; the run then ends."""
        ...


class Sink(Protocol):
    def take(self, deliver: Deliver) -> None:
        """Must not block."""
        ...

    def has_space(self) -> bool:
        """Whether more results are accepted; if not, the source is paused until `wanted` is called."""
        ...


class SourceAndSink:
    """Connects a source and a sink to the loop. The source is paused while results pile up."""

    def __init__(self, source: Source, sink: Sink) -> None:
        self._source = source
        self._sink = sink
        self._held: Pull | None = None
        self._lock = Lock()

    def submit(self, commands: Sequence[DataCommand]) -> None:
        for command in commands:
            if isinstance(command, Deliver):
                self._sink.take(command)
            elif self._sink.has_space():
                self._source.pull(command)
            else:
                self._held = command
                self.on_space()  # space may have become free between the two checks

    def on_space(self) -> None:
        """There may be space for results again. Thread: any."""
        with self._lock:
            held = self._held
            if held is None or not self._sink.has_space():
                return
            self._held = None
        self._source.pull(held)


class FileSinkInterface(Protocol):
    """A file or table that workers write; see data/sinks.py, which is imported only when needed."""

    kind: str
    spec: Any
    parts: Path
    """The folder that workers write to."""

    def prepare(self, *, resumed: bool) -> None: ...
    def base(self) -> Any: ...
    def set_base(self, base: Any) -> None: ...
    def which_exist(self, pieces: Iterable[PartFileRange]) -> list[bool]: ...
    def writer(self) -> Writer: ...
    def sync(self, parts: Iterable[str]) -> None: ...
    def finish(self, pieces: Sequence[PartFileRange]) -> list[str]: ...
    def discard(self) -> None: ...
    def close(self) -> None: ...


class RunOutputs:
    """Destinations of the results of a run."""

    __slots__ = ("files", "functions", "label_of")

    def __init__(
        self,
        files: dict[str, FileSinkInterface] | None = None,
        functions: dict[str, Callable[[list[Any]], object]] | None = None,
    ) -> None:
        """Files and functions by label: the name of a leaf stage, or empty for a sink shared by all leaves."""
        self.files = files or {}
        self.functions = functions or {}
        self.label_of: dict[str, str] = {}
        """Leaf unit -> its sink; results of other leaves are iterated over."""
