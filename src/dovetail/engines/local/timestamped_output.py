"""Standard streams of a worker with the time before each line."""

from __future__ import annotations

import io
import time
from typing import TextIO

from dovetail.control.log_lines import LOG_TIME_FORMAT


class TimestampedOutput(io.TextIOWrapper):
    """Writes to the same file as another stream."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
        self._replaced = stream  # it would close the file at its end
        self._at_line_start = True
        self._second = -1
        self._second_text = ""

    def write(self, text: str) -> int:
        if not text:
            return 0
        prefix = self._time_prefix()
        ends_line = text.endswith("\n")
        lines = (text[:-1] if ends_line else text).replace("\n", f"\n{prefix}")
        begin, end = prefix if self._at_line_start else "", "\n" if ends_line else ""
        self._at_line_start = ends_line
        super().write(f"{begin}{lines}{end}")
        return len(text)

    def _time_prefix(self) -> str:
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second, self._second_text = second, time.strftime(LOG_TIME_FORMAT, time.gmtime(second))
        return f"{self._second_text}.{int(1000 * (now - second)):03d}Z "
