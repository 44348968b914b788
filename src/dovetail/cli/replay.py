"""`dovetail replay`: feed a recorded run to a new controller and compare its commands."""

from __future__ import annotations

import json
import sys

import click

from dovetail.cli.options import json_option, run_argument
from dovetail.observe.replay import controller_from_record
from dovetail.observe.replay import replay as replay_log
from dovetail.observe.run_folder import find_run


@click.command(
    epilog="""\b
Examples:
  dovetail simulate video.yaml --cluster "1x(32cpu, 128GB, 2xL40S)" --record
  dovetail replay last
"""
)
@run_argument()
@json_option("Print the result as JSON.")
def replay(run: str, as_json: bool) -> None:
    """Feed the recorded input of RUN to a new controller and compare its commands with the recorded ones.

    The run must have been started with --record.
    """
    result = replay_log(find_run(run).replay_log, controller_from_record)
    difference = [] if result.difference is None else list(result.difference.lines())
    if as_json:
        about = {"same": not difference, "steps": result.steps, "commands": result.commands}
        click.echo(json.dumps(about | {"difference": difference}, indent=2))
    for line in [] if as_json else difference or [f"same: {result.steps} steps, {result.commands} commands"]:
        click.echo(line)
    sys.exit(1 if difference else 0)
