"""dovetail trace: a run as a time line for Perfetto or chrome://tracing."""

from __future__ import annotations

import shlex

import click

from dovetail.cli.files import write_atomically
from dovetail.observe.folder import find_run
from dovetail.observe.history import History
from dovetail.observe.trace import trace_json


@click.command(
    epilog="""\b
Examples:
  dovetail trace last -o trace.json     # then open it at https://ui.perfetto.dev
  dovetail trace last -o - | gzip > trace.json.gz
"""
)
@click.argument("run")
@click.option("-o", "--out", required=True, metavar="FILE", help="Write the trace here, as JSON; - is stdout.")
def trace(run: str, out: str) -> None:
    """Write RUN (an id, the beginning of one, `last`, or a folder) as a trace."""
    folder = find_run(run)
    text = trace_json(History.load(folder.path)) + "\n"
    if out == "-":
        click.echo(text, nl=False)
        return
    write_atomically(out, text, fix=f"dovetail trace {shlex.quote(run)} -o trace.json")
    click.echo(f"written: {out}; open it at https://ui.perfetto.dev", err=True)
