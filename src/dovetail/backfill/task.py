"""Messages between the driver and its workers: FillJob, RangeTask, RangeResult, FailedRow, PhaseTimes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.pipeline.error_policy import ErrorPolicy

MAX_PART_BYTES = 64 << 20
"""Results that a worker holds before it leaves them beside the table."""
COMPUTED_COLUMN = "_new"
"""In parts of a backfill that does not compute all rows: which rows it computed."""
WORKER_DIED = "WorkerDied"


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """A column that is filled."""

    name: str
    field: int
    """The table's number of it."""
    type: Any


@dataclass(frozen=True)
class FillJob:
    """The same for all tasks of a run."""

    uri: str
    storage: Mapping[str, str]
    version: int
    """Of the table: everybody reads the same one."""
    folder: str
    """Of this column, beside the table."""
    inputs: tuple[str, ...]
    outputs: tuple[OutputColumn, ...]
    identity: str
    """Of what is computed: part of the name of a data file, by which it is known as done."""
    parts: str
    """Of the checkpoints; another one where only some rows are computed again."""
    run: str
    on_error: ErrorPolicy
    batch_size: int | None = None
    timeout_s: float | None = None
    slots: int = 1
    where: str | None = None
    masked: bool = False
    """Only some rows are computed; the others keep what they have."""
    dependencies: tuple[str, ...] = ()
    """Columns on which the values depend."""
    part_bytes: int = MAX_PART_BYTES


@dataclass(frozen=True, slots=True)
class RangeTask:
    """Rows [start, stop) of a fragment, by their place in it; as far as the time goes."""

    fragment: int
    rows: int
    """Of the whole fragment, with those that are deleted."""
    inputs: str
    """Which files the fragment's input is in, as a hash."""
    start: int
    stop: int
    only: tuple[int, ...] | None = None
    """Of these rows no others are computed, if it is not None."""
    before: str = ""
    """Which files have the values that other rows keep, as a hash."""
    budget_s: float = 1.5

    @property
    def checkpoint_key(self) -> str:
        """Of its checkpoints: where rows keep what they have, those of other values are not its own, because a
        condition may name other rows now."""
        return f"{self.key}-{self.before}" if self.before else self.key

    @property
    def key(self) -> str:
        """Of what is told of its rows."""
        key = f"{self.fragment}-{self.inputs}"
        if self.only is None:
            return key
        return f"{key}-{hashlib.sha256(repr(self.only).encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that could not be computed."""

    fragment: int
    offset: int
    error_type: str
    message: str
    traceback: str = ""
    exception: bytes = b""
    """The exception itself, pickled by a worker of ours."""

    @property
    def address(self) -> int:
        return self.fragment << 32 | self.offset


@dataclass(slots=True)
class PhaseTimes:
    """Where the seconds went."""

    read: float = 0.0
    compute: float = 0.0
    checkpoint: float = 0.0
    write: float = 0.0
    commit: float = 0.0
    """By the driver, beside the workers."""
    start: float = 0.0
    """Until a worker was there, by the clock."""

    def add(self, other: PhaseTimes) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def parts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class RangeResult:
    """How far a task came."""

    task: RangeTask
    reached: int
    """Rows before this one are computed, or kept in parts."""
    computed: int = 0
    """Rows for which the function was asked, this time."""
    file: str = ""
    """The fragment's data file, if this was the last of its rows."""
    size_bytes: int = 0
    errors: int = 0
    """Rows of it that were set aside, this time."""
    failed: FailedRow | None = None
    """Why it stopped, if errors are to stop it."""
    times: PhaseTimes = field(default_factory=PhaseTimes)
    worker_error: str = ""
    """What hindered the worker, if it was not the function: a disk that is full, a store that does not answer."""
    untouched: bool = False
    """No row of the whole fragment is asked for: it keeps what it has."""
    fragment_changed: bool = False
    """The fragment is no more as it was when this began, and what it was then is no more to be had."""
    missing: tuple[tuple[int, int], ...] = ()
    """Rows of the fragment that nobody has any more: their part was damaged."""
    worker: tuple[str, int] = ("", 0)
    """Node and number of who did it."""

    @property
    def busy_s(self) -> float:
        return self.times.read + self.times.compute + self.times.checkpoint + self.times.write
