"""Colours of the command line: summaries, status words and errors.

`click.echo` removes them where output is not coloured (`observe/terminal.py` decides where it is).
"""

from __future__ import annotations

from typing import Any, Final

import click

STYLES: Final[dict[str, dict[str, Any]]] = {
    "good": {"fg": "green"},
    "bad": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "strong": {"bold": True},
    "dim": {"dim": True},
}


def paint(text: str, style: str) -> str:
    return click.style(text, **STYLES[style])


def paint_error(text: str) -> str:
    """A rendered error with its codes in red and the word `fix` in green."""
    return "\n".join(map(_paint_error_line, text.split("\n")))


def _paint_error_line(line: str) -> str:
    if line.startswith("error["):
        code, bracket, message = line.partition("]")
        return f"{paint(code + bracket, 'bad')}{message}"
    if line.startswith("  fix  "):
        return f"  {paint('fix', 'good')}{line.removeprefix('  fix')}"
    return line
