"""Guard that stops Data-Juicer from installing packages (pip, git clone, setup.py) during a run.

Data-Juicer runs pip when a module is missing, and has no option to disable that. It does so in its lazy imports, and in
operators that start pip, git or a setup.py. Both are blocked in this process until it exits.
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
"""Audit event -> position of the command in its arguments."""


class InstallRefused(ImportError):
    """A package is missing, and Dovetail does not install it."""


@cache
def forbid_installs() -> None:
    """Block installations in this process."""
    lazy = importlib.import_module("data_juicer.utils.lazy_loader").LazyLoader
    lazy._install_package = classmethod(_refuse_package)  # noqa: SLF001
    sys.addaudithook(_audit_command)


def _refuse_package(_lazy: type, wanted: str, _arguments: Sequence[str] | None = None) -> bool:
    """Replacement of Data-Juicer's installer: an installed package is accepted in any version."""
    name = _PACKAGE_NAME.match(wanted)
    if name is not None and not wanted.startswith(("git+", "http")):
        try:
            importlib.metadata.distribution(name[0])
        except importlib.metadata.PackageNotFoundError:
            pass
        else:
            return True
    raise InstallRefused(
        f"Data-Juicer needs {wanted!r}, and Dovetail installs nothing during a run: pip install '{wanted}'"
    )


def _audit_command(event: str, arguments: tuple[Any, ...]) -> None:
    position = _COMMAND_ARGUMENT.get(event)
    if position is None:
        return
    command = command_text(arguments[position])
    if is_install_command(command):
        raise InstallRefused(
            f"Data-Juicer tried to run {command!r}, and Dovetail installs nothing during a run: run the command before"
        )


def is_install_command(command: str) -> bool:
    """Whether a command installs or downloads code."""
    return _INSTALL_COMMAND.search(command) is not None


def command_text(command: Any) -> str:
    """A command as one line; it is given as a string or as a list of words."""
    words = [command] if isinstance(command, str | bytes | os.PathLike) else list(command)
    return " ".join(os.fsdecode(word) for word in words)
