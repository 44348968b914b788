"""Messages between the driver and its workers: FillSpec, RangeTask, RangeResult, FailedRow, PhaseTimes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.pipeline.error_policy import ErrorPolicy

MAX_PART_BYTES = 64 << 20
"""Size of the results that a worker buffers before it saves a part."""
COMPUTED_COLUMN = "_new"
"""Column of parts that marks the computed rows, if not all are computed."""
WORKER_DIED = "WorkerDied"
NO_FRAGMENT = -1
"""Fragment of a failed row before it is known; its offset is then the position in the batch."""


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """A column to fill."""

    name: str
    field: int
    """Field id in the table."""
    type: Any


@dataclass(frozen=True)
class FillSpec:
    """What the workers of a run compute and where: settings shared by all tasks."""

    uri: str
    storage: Mapping[str, str]
    version: int
    """Table version that all workers read."""
    folder: str
    """Folder of the column beside the table."""
    inputs: tuple[str, ...]
    outputs: tuple[OutputColumn, ...]
    identity: str
    """Identity of the values; part of the data file name, by which they count as complete."""
    parts: str
    """Identity of the checkpoints; differs from `identity` if only some rows are computed again."""
    run: str
    on_error: ErrorPolicy
    batch_size: int | None = None
    timeout_s: float | None = None
    slots: int = 1
    where: str | None = None
    masked: bool = False
    """Only some rows are computed; the others keep their values."""
    dependencies: tuple[str, ...] = ()
    """Columns on which the values depend."""
    part_bytes: int = MAX_PART_BYTES


@dataclass(frozen=True, slots=True)
class RangeTask:
    """Rows [start, stop) of a fragment, to be computed within a time budget."""

    fragment: int
    rows: int
    """Rows of the fragment, including deleted ones."""
    inputs: str
    """Hash of the input files of the fragment."""
    start: int
    stop: int
    only: tuple[int, ...] | None = None
    """The only rows to compute; None: all."""
    before: str = ""
    """Hash of the files with the values that other rows keep."""
    budget_s: float = 1.5

    @property
    def checkpoint_key(self) -> str:
        """Key of its checkpoints. It includes the kept values, because after they change a condition may match other
        rows."""
        return f"{self.key}-{self.before}" if self.before else self.key

    @property
    def key(self) -> str:
        """Key of the error records of its rows."""
        key = f"{self.fragment}-{self.inputs}"
        if self.only is None:
            return key
        return f"{key}-{hashlib.sha256(repr(self.only).encode()).hexdigest()[:8]}"


def row_place(fragment: int, offset: int) -> str:
    """A row as messages show it, by its address (`_rowaddr`)."""
    return f"row {fragment << 32 | offset} (fragment {fragment}, offset {offset})"


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that failed. `error_type`: name of the exception type."""

    fragment: int
    offset: int
    error_type: str
    message: str
    traceback: str = ""
    exception: bytes = b""
    """The exception pickled by cloudpickle, or its type, message and attributes; b"": not picklable."""

    @property
    def address(self) -> int:
        return self.fragment << 32 | self.offset

    @property
    def place(self) -> str:
        return row_place(self.fragment, self.offset)


@dataclass(slots=True)
class PhaseTimes:
    """Time by phase in seconds."""

    read: float = 0.0
    compute: float = 0.0
    checkpoint: float = 0.0
    write: float = 0.0
    commit: float = 0.0
    """Spent in the driver, concurrently with the workers."""
    start: float = 0.0
    """Wall-clock time until the first worker was ready."""

    def add(self, other: PhaseTimes) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def parts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class RangeResult:
    """Result of a task."""

    task: RangeTask
    reached: int
    """Rows before this one are computed or in parts."""
    computed: int = 0
    """Rows computed by this task."""
    file: str = ""
    """Data file of the fragment, if this task completed it."""
    size_bytes: int = 0
    errors: int = 0
    """Rows that failed in this task."""
    failed: FailedRow | None = None
    """The row that stopped the task, with on_error="fail"."""
    times: PhaseTimes = field(default_factory=PhaseTimes)
    worker_error: str = ""
    """Error outside of the function: a full disk, an unreachable store."""
    untouched: bool = False
    """No row of the fragment is requested: it keeps its values."""
    fragment_changed: bool = False
    """The fragment changed since the start, and its old version no longer exists."""
    missing: tuple[tuple[int, int], ...] = ()
    """Rows of the fragment whose part was damaged."""
    worker: tuple[str, int] = ("", 0)
    """Node and id of the worker."""

    @property
    def busy_s(self) -> float:
        return self.times.read + self.times.compute + self.times.checkpoint + self.times.write
