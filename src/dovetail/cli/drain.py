"""dovetail drain: let a run finish what it has in hand, and no more."""

from __future__ import annotations

import click

from dovetail.cli.ending import end_run
from dovetail.cli.run_names import complete_runs


@click.command(
    epilog="""\b
Examples:
  dovetail drain last
  dovetail drain 20261116-0305 --wait && dovetail run --resume 20261116-0305
"""
)
@click.argument("run", shell_complete=complete_runs)
@click.option("--wait", is_flag=True, help="Return when the run is over.")
def drain(run: str, wait: bool) -> None:
    """Tell RUN (an id, the beginning of one, `last`, or a folder) to read nothing more and finish what it has in hand.

    Nothing is lost or done twice: `dovetail run --resume RUN` goes on from there.
    """
    end_run(run, "drain", wait=wait)
