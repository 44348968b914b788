"""Event journal of a run (events.jsonl) with a byte budget, decreasing view rate and rotation.

Three limits apply. Views become less frequent in a long run: every two megabytes double the interval. Events have a
budget of bytes per second; events beyond it are counted, not written. And a full file becomes `events.1.jsonl`,
replacing the previous one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from dovetail.control.codec import to_jsonable
from dovetail.machine.private_files import append_to_private

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

JOURNAL_VERSION = 1
MAX_FILE_BYTES = 8_000_000
BYTES_PER_SECOND = 25_000
"""Budget for views, and again for events: 50 kB/s in total."""
BURST_BYTES = 500_000
BYTES_PER_INTERVAL_DOUBLING = 2_000_000


def json_line(data: Mapping[str, Any]) -> bytes:
    """One line of JSON for any data."""
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError):
        text = json.dumps(_without_nan(to_jsonable(data)), separators=(",", ":"))
    return text.encode() + b"\n"


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinities, which are not JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return value


class ViewInterval:
    """Time of the next view."""

    def __init__(
        self, first_s: float = 1.0, most_s: float = math.inf, level_bytes: int = BYTES_PER_INTERVAL_DOUBLING
    ) -> None:
        self.interval_s = first_s
        self.most_s = most_s
        self.level_bytes = level_bytes
        self.written = 0

    def next_due(self, now: float, size_bytes: int) -> float:
        """The next time, after this many bytes were written now."""
        self.written += size_bytes
        if self.written > self.level_bytes and self.interval_s < self.most_s:
            self.written = 0
            self.interval_s *= 2
        interval = max(self.interval_s, size_bytes / BYTES_PER_SECOND)
        return (math.floor(now / interval) + 1) * interval


class Journal:
    """Appends lines to a file with rotation."""

    def __init__(self, path: Path, older: Path, *, rotate_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self.rotated_path = older
        self.rotate_bytes = rotate_bytes
        self.left_out: Counter[str] = Counter()
        self.started_at = 0.0
        """Engine time at the start of the run: lines count from there."""
        self.rotations = 0
        self._tokens = float(BURST_BYTES)
        self._filled_at = -math.inf
        self._size = terminate_last_line(path)
        self._file = append_to_private(path, 1 << 16)

    def write(self, now: float, kind: str, data: Mapping[str, Any]) -> int:
        """Write unconditionally; returns the number of bytes."""
        return self._write(json_line({"v": JOURNAL_VERSION, "t": round(now - self.started_at, 6), "k": kind, **data}))

    def try_write(self, now: float, kind: str, data: Mapping[str, Any]) -> bool:
        """Write if the budget allows; whether it was written."""
        line = json_line({"v": JOURNAL_VERSION, "t": round(now - self.started_at, 6), "k": kind, **data})
        if self._filled_at < now:
            more = BURST_BYTES if self._filled_at == -math.inf else (now - self._filled_at) * BYTES_PER_SECOND
            self._tokens, self._filled_at = min(BURST_BYTES, self._tokens + more), now
        if self._tokens < len(line):
            self.left_out[kind] += 1
            return False
        self._tokens -= len(line)
        self._write(line)
        return True

    def _write(self, line: bytes) -> int:
        if self._size + len(line) > self.rotate_bytes and self._size:
            self._file.close()
            self.path.replace(self.rotated_path)
            self._file = append_to_private(self.path, 1 << 16)
            self._size = 0
            self.rotations += 1
        self._size += len(line)
        return self._file.write(line)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def terminate_last_line(path: Path) -> int:
    """Terminate a partial line of an earlier process, so that a new line starts. Returns the file size."""
    try:
        with path.open("rb+") as file:
            size = file.seek(0, 2)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    size += file.write(b"\n")
            return size
    except FileNotFoundError:
        return 0


TAIL_BYTES = 1 << 16


def last_line_time(path: Path) -> float:
    """Time of the last complete line, in seconds of the run; 0 if there is none."""
    try:
        size = path.stat().st_size
    except OSError:
        return 0.0
    lines, _ = read_lines_from(path, max(0, size - TAIL_BYTES))
    times = [line["t"] for line in lines if isinstance(line.get("t"), int | float)]
    return float(times[-1]) if times else 0.0


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; partial lines and other values are skipped."""
    return read_lines_from(path, 0)[0]


def read_lines_from(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """As `read_json_lines`, for the lines after `offset`; and the end of the last complete line."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read()
    except OSError:
        return [], offset
    found: list[dict[str, Any]] = []
    for line in text.split(b"\n"):
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict):
            found.append(data)
    return found, offset + text.rfind(b"\n") + 1
