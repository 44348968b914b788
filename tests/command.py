"""Run `dovetail` commands: in this process, or as users do in one of their own.

Starting Python and importing Dovetail takes half a CPU-second, and Lance another, so tests of what a command does call
`run_command`. Signals, closed or full streams, kills and imports are tested with `run_process`.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

import dovetail
from dovetail.cli import main
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parent
INSTALLED = tuple(
    f"{folder}{os.sep}"
    for folder in (sys.prefix, sys.base_prefix, TESTS, TESTS.parent / "benchmarks", Path(dovetail.__file__).parents[1])
)
"""Folders of modules that stay loaded; all others belong to a test."""


def run_process(
    *arguments: str, cwd: Path | None = None, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """`python -m dovetail` with these arguments, and with these variables in addition to those of this process."""
    return subprocess.run(
        [sys.executable, "-m", "dovetail", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | variables,
        cwd=cwd,
        input=stdin,
        timeout=2 * PATIENCE_S,
    )


def run_command(
    *arguments: str, cwd: Path | None = None, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """The installed command `dovetail` with these arguments, in this process. Its import path lacks the current
    folder, which that of `python -m dovetail` has."""
    words = ["dovetail", *arguments]
    with like_a_process(cwd, stdin, **variables) as (out, err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "path", sys.path[1:])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return subprocess.CompletedProcess(words, code if isinstance(code, int) else 1, text_of(out), text_of(err))


@contextmanager
def like_a_process(cwd: Path | None = None, stdin: str = "", **variables: str) -> Iterator[tuple[IO[str], IO[str]]]:
    """Run code as in a new process in this folder: with its own streams, variables, import path and modules.

    Yields stdout and stderr, which are files. All is restored afterwards. Modules of test folders are loaded again:
    another test may have used the same names, and a later command may find them changed.
    """
    folder = Path.cwd() if cwd is None else cwd
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    environment = dict(os.environ)
    aside = {name: sys.modules.pop(name) for name in modules_of_tests()}
    importlib.invalidate_caches()
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        streams = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streams-")))
        (streams / "stdin").write_text(stdin, encoding="utf-8")
        given = stack.enter_context((streams / "stdin").open(encoding="utf-8"))
        out = stack.enter_context((streams / "stdout").open("w", encoding="utf-8"))
        err = stack.enter_context((streams / "stderr").open("w", encoding="utf-8", errors="backslashreplace"))
        patch.setattr(sys, "stdin", given)
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.setattr(sys, "path", [str(folder.resolve()), *sys.path])
        patch.setattr(tempfile, "tempdir", None)  # is found from the variables
        patch.setattr(sys, "dont_write_bytecode", True)  # a file that is changed within a second has the same time
        patch.chdir(folder)
        os.environ.update(variables)
        try:
            yield out, err
        finally:
            os.environ.clear()
            os.environ.update(environment)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for name in modules_of_tests():
                del sys.modules[name]
            sys.modules.update(aside)


def modules_of_tests() -> list[str]:
    """Names of the loaded modules that tests have written."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return [name for name, file in files.items() if isinstance(file, str) and not file.startswith(INSTALLED)]


def text_of(stream: IO[str]) -> str:
    """Text written so far."""
    stream.flush()
    return Path(stream.name).read_text(encoding="utf-8")
