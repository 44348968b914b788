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
    """What an engine offers to those who bring and take items in the driver."""

    def store(self, keys: Keys, items: list[Any]) -> Segment:
        """Items as a payload that workers can open. One thread at a time. Unsendable: one of them cannot be."""
        ...

    def store_split(self, keys: range, split: Split) -> Segment:
        """A piece of the source as a payload that workers read by themselves. One thread at a time."""
        ...

    def load(self, segment: Segment) -> tuple[Keys, list[Any]]:
        """The keys and items of a payload; those that cannot be read are Unreadable. From any thread."""
        ...

    def release_mappings(self) -> None:
        """Nothing more will be loaded: what was is the reader's alone."""
        ...

    @property
    def unreadable(self) -> bool:
        """Whether an item that was loaded could not be read, ever."""
        ...

    def post(self, event: Event) -> None: ...


class Source(Protocol):
    def pull(self, pull: Pull) -> None:
        """Answers by posting, now or later. Must not block."""
        ...

    def close(self) -> None: ...

    @property
    def error(self) -> BaseException | None:
        """What went wrong with it; then the run was told to end."""
        ...


class Sink(Protocol):
    def take(self, deliver: Deliver) -> None:
        """Must not block."""
        ...

    def has_space(self) -> bool:
        """Whether more results are welcome; if not, nothing is read until `wanted` is called."""
        ...


class SourceAndSink:
    """A source and a sink as the loop sees them. Nothing is read while results pile up."""

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
                self.on_space()  # room may have come between the two looks

    def on_space(self) -> None:
        """There may be room for results again. From any thread."""
        with self._lock:
            held = self._held
            if held is None or not self._sink.has_space():
                return
            self._held = None
        self._source.pull(held)


class FileSinkInterface(Protocol):
    """A file or table that workers write; see data/sinks.py, which is imported only where there is one."""

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
    """Where the results of a run go."""

    __slots__ = ("files", "functions", "label_of")

    def __init__(
        self,
        files: dict[str, FileSinkInterface] | None = None,
        functions: dict[str, Callable[[list[Any]], object]] | None = None,
    ) -> None:
        """By label: the leaf stage that it belongs to, or empty for one that all leaves share."""
        self.files = files or {}
        self.functions = functions or {}
        self.label_of: dict[str, str] = {}
        """Leaf unit -> its sink; those that have none are iterated over."""
