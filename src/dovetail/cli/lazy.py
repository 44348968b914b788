"""How does `dovetail --help` stay quick? A command's module is imported only when that command is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping


class LazyGroup(click.Group):
    """A group whose commands are named with their one-line help and the module that holds them."""

    def __init__(self, *arguments: Any, commands_in: Mapping[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.commands_in = commands_in

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(self.commands_in)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self.commands_in:
            return None
        module, _ = self.commands_in[cmd_name]
        command = getattr(import_module(module), cmd_name)
        assert isinstance(command, click.Command), f"{module}.{cmd_name} is not a command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(self.commands_in.items())])
