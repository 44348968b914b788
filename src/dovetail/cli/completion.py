"""`dovetail completion` and shell completion of run ids."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

MAX_COMPLETIONS = 50


def complete_runs(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:  # noqa: ARG001
    """Ids that begin so, the youngest first."""
    from dovetail.errors import DovetailError
    from dovetail.observe.run_folder import LAST_RUN, list_runs

    try:
        names = [LAST_RUN, *(run.id for run in list_runs())]
    except DovetailError:
        return []
    return [name for name in names if name.startswith(begun)][:MAX_COMPLETIONS]


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
