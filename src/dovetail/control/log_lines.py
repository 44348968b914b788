"""Format of a line in the log of a worker: '2026-11-16T03:05:33.250Z text'.

Workers write the time before each line that Python code prints. Lines of other programs and of libraries that write to
the file themselves have none.
"""

from __future__ import annotations

import re

LOG_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
"""Format for `time.strftime`, in UTC; milliseconds and Z follow."""
LOG_LINE = re.compile(r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (?P<text>.*)", re.DOTALL)


def split_log_line(line: str) -> tuple[str, str]:
    """Time and text; the time is empty if the line has none."""
    found = LOG_LINE.fullmatch(line)
    return (found["time"], found["text"]) if found else ("", line)
