"""The terminal: its width, whether output may be coloured, protection from control characters, and paths as people type
them."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from dovetail.text_format import DEFAULT_WIDTH, terminal_text

if TYPE_CHECKING:
    from typing import TextIO

ColourMode = Literal["auto", "always", "never"]
COLOUR_MODES: Final = ("auto", "always", "never")
FORCE_VARIABLES = ("FORCE_COLOR", "CLICOLOR_FORCE")

_chosen: list[ColourMode] = ["auto"]
"""The mode of this process; a list, because it is replaced."""


def choose_colour(mode: ColourMode) -> None:
    """Set when output is coloured: "auto" follows the environment and the stream."""
    _chosen[0] = mode


def forced_colour() -> bool | None:
    """True: coloured everywhere; False: nowhere; None: in terminals.

    The option comes first, then NO_COLOR, then FORCE_COLOR and CLICOLOR_FORCE. An empty variable is as good as none,
    and a force variable of 0 too.
    """
    if _chosen[0] != "auto":
        return _chosen[0] == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if any(os.environ.get(name, "0") not in ("", "0") for name in FORCE_VARIABLES):
        return True
    return None


UNLIMITED_WIDTH = 1_000_000


def may_colour(stream: TextIO) -> bool:
    forced = forced_colour()
    return is_terminal(stream) if forced is None else forced


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can overwrite lines and show colours."""
    return bool(stream.isatty()) and os.environ.get("TERM", "") not in ("dumb", "unknown")


OWN_COLOURS = re.compile(r"(\x1b\[(?:0|1|2|31|32|33)m)")
"""The control sequences of `cli/colour.py`; all others come from data."""


class ProtectedTerminal(io.TextIOWrapper):
    """A stream to a terminal that escapes control characters: texts may contain data, such as messages of exceptions
    and lines that workers printed. A display that moves the cursor writes to `raw`."""

    def __init__(self, raw: io.TextIOWrapper) -> None:
        super().__init__(raw.buffer, encoding=raw.encoding, errors=raw.errors, line_buffering=True, write_through=True)
        self.raw = raw

    def write(self, text: str, /) -> int:
        parts = OWN_COLOURS.split(text)
        super().write("".join(part if number % 2 else terminal_text(part) for number, part in enumerate(parts)))
        return len(text)

    def close(self) -> None:
        """The buffer belongs to the interpreter."""


def protect_terminals() -> None:
    """Escape control characters in everything that this program prints to a terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and stream.isatty():
            stream.flush()
            setattr(sys, name, ProtectedTerminal(stream))


def raw_terminal(stream: TextIO) -> TextIO:
    """The stream for a display that moves the cursor; its texts must not contain control characters."""
    return stream.raw if isinstance(stream, ProtectedTerminal) else stream


def terminal_width() -> int:
    """Columns of the terminal; 80 where the output is not a terminal."""
    import shutil  # late: it imports compression libraries

    return shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns


def table_width() -> int:
    """Columns of a table on stdout that is cut to the terminal. In a pipe or file it is not cut, because `grep` needs
    the whole text, unless COLUMNS limits it."""
    return terminal_width() if is_terminal(sys.stdout) or os.environ.get("COLUMNS") else UNLIMITED_WIDTH


def display_path(path: str) -> str:
    """A path inside the current folder is shown relative to it; anything else, such as a URL, as it is."""
    try:
        return str(Path(path).relative_to(Path.cwd())) if "://" not in path else path
    except (ValueError, OSError):
        return path
