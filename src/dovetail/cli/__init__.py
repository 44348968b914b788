"""The command `dovetail`: lazily imported commands, error messages and exit codes.

Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import difflib
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import click

import dovetail
from dovetail.cli.colour import paint, paint_error
from dovetail.errors import DovetailError
from dovetail.observe.terminal import COLOUR_MODES, choose_colour, forced_colour, protect_terminals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.observe.terminal import ColourMode


MAX_COMMAND_HELP_CHARS = 1000


class SuggestingGroup(click.Group):
    """A group whose error message for an unknown command suggests the nearest ones, and whose help has whole
    sentences."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0].lower(), self.list_commands(ctx), n=2, cutoff=0.6)
            near.sort(key=lambda name: abs(len(name) - len(args[0])))  # a wrong letter is likelier than a missing one
            if ctx.parent is None and args[0].endswith((".yaml", ".yml")):
                near = [f"run {args[0]}"]
            hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
            raise click.UsageError(f"No such command {args[0]!r}{hint}.", error.ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, one.get_short_help_str(MAX_COMMAND_HELP_CHARS)) for name, one in found if one and not one.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class LazyGroup(SuggestingGroup):
    """A group that imports a command when it is used; `commands_in`: name -> (module, one-line help)."""

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


class CommandLine(LazyGroup):
    """The command `dovetail`; `--color` is accepted behind a command, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_color_first(args))


def with_color_first(args: list[str]) -> list[str]:
    """The arguments with the option `--color` in front of the command."""
    end = args.index("--") if "--" in args else len(args)
    moved: list[str] = []
    others: list[str] = []
    words = iter(args[:end])
    for word in words:
        if word == "--color" and (value := next(words, None)) is not None:
            moved += [word, value]
        elif word.startswith("--color="):
            moved.append(word)
        else:
            others.append(word)
    return [*moved, *others, *args[end:]]


COMMANDS = {
    "actors": ("dovetail.cli.actors", "Run systems of long-lived actors."),
    "backfill": ("dovetail.cli.backfill", "Fill columns of a Lance table with functions."),
    "cancel": ("dovetail.cli.cancel", "Stop a run immediately."),
    "cluster": ("dovetail.cli.cluster", "Show nodes, GPUs and codecs, and how many workers fit."),
    "completion": ("dovetail.cli.completion", "Print a shell completion script."),
    "demo": ("dovetail.cli.demo", "Run a sample pipeline here, and plan one for a cluster."),
    "drain": ("dovetail.cli.cancel", "Stop reading input, finish the work in flight, then exit."),
    "errors": ("dovetail.cli.errors", "Show the failed items of a run, grouped by error."),
    "explain": ("dovetail.cli.explain", "Explain worker counts, placement and bottlenecks of a plan."),
    "export": ("dovetail.cli.export", "Write files that deploy the job queue with Compose or Kubernetes."),
    "init": ("dovetail.cli.init", "Write a runnable pipeline, recipe, backfill, actors or jobs project."),
    "jobs": ("dovetail.cli.jobs", "Submit, list and change jobs of a queue."),
    "logs": ("dovetail.cli.logs", "Print the output of the workers of a run."),
    "ls": ("dovetail.cli.ls", "List runs and their status."),
    "plan": ("dovetail.cli.plan", "Show placement, predicted rate and bottleneck; start nothing."),
    "profile": ("dovetail.cli.profile", "List, show or forget measured speeds of stages."),
    "recipe": ("dovetail.cli.recipe", "Recommend worker counts and GPU shares for recipe operators."),
    "replay": ("dovetail.cli.replay", "Replay a recorded run and compare the decisions."),
    "report": ("dovetail.cli.report", "Write an HTML report of a run."),
    "rm": ("dovetail.cli.rm", "Remove runs that have ended."),
    "run": ("dovetail.cli.run", "Run a pipeline or recipe file, or resume a run."),
    "schema": (
        "dovetail.cli.schema",
        "Print the JSON Schema of pipeline, recipe, cluster, actors, deploy or jobs files.",
    ),
    "serve": ("dovetail.cli.serve", "Answer HTTP requests with a pipeline."),
    "simulate": ("dovetail.cli.simulate", "Simulate a pipeline, recipe, actors or jobs in virtual time."),
    "status": ("dovetail.cli.status", "Show the progress or result of a run."),
    "trace": ("dovetail.cli.trace", "Export the timeline of a run for Perfetto."),
    "worker": ("dovetail.cli.worker", "Run jobs of a queue."),
}

EPILOG = """\b
Examples:
  dovetail init pipeline
  dovetail run pipeline.yaml --source 'data/*.jsonl' --sink out.jsonl
  dovetail run recipe.yaml
  dovetail backfill run clips.lance length --udf functions:length
  dovetail run --resume last
  dovetail plan examples/video.yaml --cluster "1x(32cpu, 128GB, 2xL40S:48GB)"
  dovetail simulate examples/video.yaml --cluster "4x(128cpu, 1TB, 8xL40S)"
  dovetail cluster show
  dovetail cluster show "4x(32cpu, 128GB, 2xA100:40GB)" --fit "gpus=0.25"
  dovetail serve pipeline.yaml --port 8000
  dovetail demo
  dovetail status --watch
  dovetail --color always status | less -R

Exit codes: 0 success, 1 the run failed, 2 usage or configuration error, 3 does not fit on the cluster,
5 engine unreachable, 130 interrupted (143 by SIGTERM).
"""


@click.group(
    cls=CommandLine,
    commands_in=COMMANDS,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(dovetail.__version__, "--version", "-V", prog_name="dovetail")
@click.option(
    "--color",
    type=click.Choice(COLOUR_MODES),
    default="auto",
    is_eager=True,
    expose_value=False,
    callback=lambda context, _, mode: _choose_colour(context, mode),
    help="Colour the output; auto: in terminals, unless NO_COLOR is set.",
)
def command_line() -> None:
    """Plan and run ML data pipelines on one machine or a Ray cluster."""


def _choose_colour(context: click.Context, mode: ColourMode) -> None:
    choose_colour(mode)
    context.color = forced_colour()


def main() -> NoReturn:
    """Entry point; the only place that turns errors into exit codes."""
    _reopen_closed_streams()
    protect_terminals()
    choose_colour("auto")
    try:
        code = command_line.main(prog_name="dovetail", standalone_mode=False, color=forced_colour())
    except DovetailError as error:
        click.echo(paint_error(str(error)), err=True, color=forced_colour())
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except OSError as error:
        click.echo(f"{paint('error', 'bad')}: {error}", err=True, color=forced_colour())
        sys.exit(1)
    except SystemExit:
        # click reports a closed pipe (`| head`) this way; nothing failed
        if type(sys.stdout).__name__.endswith("PacifyFlushWrapper"):
            sys.exit(0)
        raise
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _reopen_closed_streams() -> None:
    """Opens stdin, stdout and stderr on /dev/null if they are closed, as under some service managers. Otherwise the
    next file or socket would take their number and receive what is printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # takes the lowest free number, this one; inherited by child processes
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - stays open until the process ends
