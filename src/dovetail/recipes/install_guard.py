"""Guard that stops Data-Juicer from installing packages (pip, git clone, setup.py) during a run.

Data-Juicer runs pip where a module is missing, and has no switch against it. Two ways lead there: its lazy imports, and
operators that start pip, git or a setup.py themselves. Both are closed in this process, for good.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_PACKAGE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_INSTALL_COMMAND = re.compile(
    r"(?:^|[\s/])(?:pip3?|uv|mim|conda|mamba|pipenv|poetry)\s(?:.*\s)?(?:un)?install\b"
    r"|\bsetup\.py\s+(?:install|develop)\b"
    r"|(?:^|[\s/])git\s(?:.*\s)?clone\b"
)
_COMMAND_ARGUMENT = {"subprocess.Popen": 1, "os.system": 0, "os.exec": 1, "os.posix_spawn": 1, "os.spawn": 2}
"""Audit event -> which of its arguments is the command."""


class InstallRefused(ImportError):
    """Something is missing, and is not installed by us."""


@cache
def forbid_installs() -> None:
    """From now on nothing in this process installs anything."""
    lazy = importlib.import_module("data_juicer.utils.lazy_loader").LazyLoader
    lazy._install_package = classmethod(_refuse_package)  # noqa: SLF001
    sys.addaudithook(_audit_command)


def _refuse_package(_lazy: type, wanted: str, _arguments: Sequence[str] | None = None) -> bool:
    """In place of its installer: what is there already will do, whatever version it asks for."""
    name = _PACKAGE_NAME.match(wanted)
    if name is not None and not wanted.startswith(("git+", "http")):
        try:
            importlib.metadata.distribution(name[0])
        except importlib.metadata.PackageNotFoundError:
            pass
        else:
            return True
    raise InstallRefused(f"Data-Juicer wants {wanted!r}, and nothing is installed during a run: pip install '{wanted}'")


def _audit_command(event: str, arguments: tuple[Any, ...]) -> None:
    position = _COMMAND_ARGUMENT.get(event)
    if position is None:
        return
    command = command_text(arguments[position])
    if is_install_command(command):
        raise InstallRefused(
            f"Data-Juicer wants to run {command!r}, and nothing is installed during a run: run it yourself"
        )


def is_install_command(command: str) -> bool:
    """Whether a command brings code to this machine."""
    return _INSTALL_COMMAND.search(command) is not None


def command_text(said: Any) -> str:
    """A command as one line, whether it was given as a text or in words."""
    words = [said] if isinstance(said, str | bytes | os.PathLike) else list(said)
    return " ".join(os.fsdecode(word) for word in words)
