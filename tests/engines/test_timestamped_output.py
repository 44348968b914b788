"""Times before the lines that a worker prints."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from dovetail.control.log_lines import split_log_line
from dovetail.engines.local.timestamped_output import TimestampedOutput

if TYPE_CHECKING:
    from collections.abc import Callable

STAMP = "1970-01-01T00:00:01.250Z "


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setattr("dovetail.engines.local.timestamped_output.time.time", lambda: 1.25)

    def write(*texts: str) -> str:
        raw = io.BytesIO()
        stream = TimestampedOutput(io.TextIOWrapper(raw, encoding="utf-8"))
        for text in texts:
            assert stream.write(text) == len(text)
        stream.flush()
        return raw.getvalue().decode()

    return write


def test_every_line_begins_with_the_time(written: Callable[..., str]) -> None:
    assert written("one\ntwo\n") == f"{STAMP}one\n{STAMP}two\n"
    assert written("a", "", "b", "\n", "c") == f"{STAMP}ab\n{STAMP}c"
    assert written("\n\n") == f"{STAMP}\n{STAMP}\n"
    assert written("ü\u2028\n") == f"{STAMP}ü\u2028\n"


def test_time_and_text_are_found_in_a_line(written: Callable[..., str]) -> None:
    (line,) = written("one two\n").splitlines()
    assert split_log_line(line) == ("1970-01-01T00:00:01.250Z", "one two")
    assert split_log_line("one two") == ("", "one two")
    assert split_log_line("") == ("", "")
