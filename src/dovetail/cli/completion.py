"""`dovetail completion`: the shell completion script, with file names where no value is known."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from dovetail.cli.options import SuggestingChoice

SHELLS = ("bash", "zsh", "fish")


@click.command(
    epilog="""\b
Examples:
  eval "$(dovetail completion bash)"                 # the current shell
  dovetail completion fish > ~/.config/fish/completions/dovetail.fish
"""
)
@click.argument("shell", type=SuggestingChoice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of `dovetail` for SHELL."""
    kind = get_completion_class(shell)
    assert kind is not None, f"click has no completion for {shell}"
    root = context.find_root().command
    click.echo(kind(root, {}, "dovetail", "_DOVETAIL_COMPLETE").source())
