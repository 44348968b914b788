"""dovetail cancel: stop a run now."""

from __future__ import annotations

import click

from dovetail.cli.ending import end_run
from dovetail.cli.run_names import complete_runs


@click.command(
    epilog="""\b
Examples:
  dovetail cancel last
  dovetail cancel 20261116-0305 --wait
"""
)
@click.argument("run", shell_complete=complete_runs)
@click.option("--wait", is_flag=True, help="Return when the run is over.")
def cancel(run: str, wait: bool) -> None:
    """Tell RUN (an id, the beginning of one, `last`, or a folder) to stop now.

    What it has in hand is done again by `dovetail run --resume RUN`; to have it finished, use `dovetail drain`.
    """
    end_run(run, "cancel", wait=wait)
