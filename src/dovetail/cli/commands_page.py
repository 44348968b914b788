"""The page docs/commands.md: every command with its options and examples.

python -m dovetail.cli.commands_page > docs/commands.md
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import TYPE_CHECKING

import click

from dovetail.cli import command_line

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = """\
# Commands

Data goes to stdout, everything else to stderr. `--json` prints data for programs. `-h` or `--help` shows this page for
one command, and `dovetail completion SHELL` prints a script with which the shell completes files, runs, stages and
values.

This page is generated: `python -m dovetail.cli.commands_page > docs/commands.md`.
"""


def commands_page() -> str:
    context = click.Context(command_line, info_name="dovetail")
    parts = [HEAD]
    for name, command in _commands(command_line, context, "dovetail"):
        parts.append("\n".join(_section(name, command)))
    return "\n".join(parts)


def _commands(group: click.Group, context: click.Context, path: str) -> Iterator[tuple[str, click.Command]]:
    """Commands in alphabetical order; those of a group behind it."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        full = f"{path} {name}"
        yield full, command
        if isinstance(command, click.Group):
            yield from _commands(command, click.Context(command, context, name), full)


def _section(name: str, command: click.Command) -> Iterator[str]:
    yield f"## {name}"
    yield ""
    yield _plain(command.help or "")
    yield ""
    yield "```"
    yield " ".join([name, *_usage(command)])
    yield "```"
    yield ""
    options = [it for it in command.params if isinstance(it, click.Option) and not it.hidden]
    if options:
        yield "| option | |"
        yield "|---|---|"
        yield from (f"| {_option_text(it)} | {_cell(it.help or '')} |" for it in options)
        yield ""
    if command.epilog:
        yield "```"
        yield _without_marks(command.epilog)
        yield "```"
        yield ""


def _usage(command: click.Command) -> Iterator[str]:
    if any(isinstance(it, click.Option) for it in command.params):
        yield "[OPTIONS]"
    for it in command.params:
        if isinstance(it, click.Argument):
            name = it.metavar or (it.name or "").upper()
            yield name if it.required or name.startswith("[") else f"[{name}]"
    if isinstance(command, click.Group):
        yield "COMMAND"


def _option_text(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in sorted(option.opts, key=len, reverse=True))
    if option.is_flag:
        return names
    kind = option.type
    values = option.metavar or ("|".join(map(str, kind.choices)) if isinstance(kind, click.Choice) else "VALUE")
    return _cell(f"{names} {values}")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _plain(text: str) -> str:
    """The text without click's marks, one line per paragraph."""
    paragraphs = _without_marks(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _without_marks(text: str) -> str:
    return re.sub(r"^\x08\n", "", inspect.cleandoc(text).strip(), flags=re.MULTILINE)


if __name__ == "__main__":
    sys.stdout.write(commands_page())
