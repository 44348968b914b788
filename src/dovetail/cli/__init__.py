"""The command `dovetail`: lazily imported commands, error messages and exit codes. Data goes to stdout, all else to
stderr."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import click

import dovetail
from dovetail.errors import DovetailError

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


COMMANDS = {
    "backfill": ("dovetail.cli.backfill", "Fill a column of a Lance table by a function."),
    "cancel": ("dovetail.cli.runs", "Stop a run now."),
    "cluster": ("dovetail.cli.cluster", "What there is: nodes, cards, codecs, and what would fit."),
    "completion": ("dovetail.cli.completion", "Make the shell complete commands and options."),
    "demo": ("dovetail.cli.demo", "Run a pipeline over generated documents here, and plan one for a cluster."),
    "drain": ("dovetail.cli.runs", "Let a run finish what it has in hand, and no more."),
    "explain": ("dovetail.cli.explain", "Why this many workers, why there, what one more would bring."),
    "init": ("dovetail.cli.init", "Write an example pipeline or recipe to start from."),
    "logs": ("dovetail.cli.logs", "What the workers of a run printed."),
    "ls": ("dovetail.cli.runs", "Which runs there are, and how they are doing."),
    "plan": ("dovetail.cli.plan", "What would run where, how fast, what limits it, and why."),
    "recipe": ("dovetail.cli.recipe", "A quick reference for recipes: workers, shares of cards, CPUs."),
    "replay": ("dovetail.cli.replay", "Does a recorded run decide the same today?"),
    "report": ("dovetail.cli.report", "Write an HTML report of a run."),
    "run": ("dovetail.cli.run", "Run a pipeline file or a recipe; or go on with a run."),
    "schema": ("dovetail.cli.schema", "The JSON Schema of a file, for editors."),
    "simulate": ("dovetail.cli.simulate", "The same pipeline on a cluster that nobody has."),
    "status": ("dovetail.cli.status", "How one run is doing, or how it went."),
    "trace": ("dovetail.cli.runs", "A run as a time line for Perfetto."),
}

EPILOG = """\b
Examples:
  dovetail init pipeline
  dovetail run pipeline.yaml --source 'data/*.jsonl' --sink out.jsonl
  dovetail run recipe.yaml
  dovetail backfill clips.lance length --udf functions:length
  dovetail run --resume last
  dovetail plan examples/video.yaml --cluster "1x(32cpu, 128GB, 2xL40S:48GB)"
  dovetail simulate examples/video.yaml --cluster "4x(128cpu, 1TB, 8xL40S:48GB)"
  dovetail cluster show
  dovetail cluster show "4x(32cpu, 128GB, 2xA100:40GB)" --fit "gpus=0.25, gpu_memory=8GB"
  dovetail demo
  dovetail status last

Exit codes: 0 fine, 1 work failed, 2 usage or configuration, 3 does not fit, 5 engine unreachable, 130 interrupted
(143 by SIGTERM).
"""


@click.group(
    cls=LazyGroup,
    commands_in=COMMANDS,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(dovetail.__version__, "--version", "-V", prog_name="dovetail")
def command_line() -> None:
    """Plans, places and runs heterogeneous ML work: what a worker needs, what there is, how many go where, why."""


def main() -> NoReturn:
    """The entry point; the only place that turns errors into exit codes."""
    _reopen_closed_streams()
    colour = False if os.environ.get("NO_COLOR") else None
    try:
        code = command_line.main(prog_name="dovetail", standalone_mode=False, color=colour)
    except DovetailError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except SystemExit:
        # click has met a reader that left (`| head`): it has enough of our output, and nothing failed
        if type(sys.stdout).__name__.endswith("PacifyFlushWrapper"):
            sys.exit(0)
        raise
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _reopen_closed_streams() -> None:
    """Some services start programs without stdin, stdout or stderr: then the next file or socket would become them, and
    be written to by whoever prints."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # takes the lowest number that is free, this one; for the processes that we start, too
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - for whoever talks, until the end
