"""`dovetail trace`: export the timeline of a run."""

from __future__ import annotations

import shlex

import click

from dovetail.cli.options import output_option, run_argument
from dovetail.cli.output_file import write_output
from dovetail.observe.history import RunHistory
from dovetail.observe.run_folder import find_run
from dovetail.observe.trace import trace_json


@click.command(
    epilog="""\b
Examples:
  dovetail trace last -o trace.json     # open it at https://ui.perfetto.dev
  dovetail trace last -o - | gzip > trace.json.gz
"""
)
@run_argument()
@output_option("Write the trace as JSON to FILE", required=True)
def trace(run: str, out: str) -> None:
    """Export the timeline of RUN."""
    folder = find_run(run)
    text = trace_json(RunHistory.load(folder.path)) + "\n"
    fix = f"dovetail trace {shlex.quote(run)} -o trace.json"
    write_output(out, text, fix=fix, note="; open it at https://ui.perfetto.dev")
