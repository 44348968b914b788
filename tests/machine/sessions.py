"""Real processes that lead sessions of their own, as workers do, and do what a test asks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


PRELUDE = """
import os, signal, subprocess, sys, time

def say(text="done"):
    print(text, flush=True)

def wait():
    "For a line of the test."
    return sys.stdin.readline()

def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
"""


class Session:
    """A process that runs a piece of code."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def hear(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str = "") -> None:
        """Let it continue from where it waits."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def session(code: str) -> Iterator[Session]:
    """Its process group is killed at the end."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-I", "-c", PRELUDE + code]
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        started = Session(process)
        try:
            yield started
        finally:
            started.end()
