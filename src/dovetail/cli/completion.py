"""dovetail completion: TAB in the shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command(
    epilog="""\b
Examples:
  eval "$(dovetail completion bash)"                 # this shell
  dovetail completion fish > ~/.config/fish/completions/dovetail.fish
"""
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete `dovetail` commands and options."""
    kind = get_completion_class(shell)
    assert kind is not None, f"click has no completion for {shell}"
    root = context.find_root().command
    click.echo(kind(root, {}, "dovetail", "_DOVETAIL_COMPLETE").source())
