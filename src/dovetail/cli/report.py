"""`dovetail report`: HTML report of one run."""

from __future__ import annotations

import shlex

import click

from dovetail.cli.options import FILE_PATH, run_argument
from dovetail.cli.output_file import write_output
from dovetail.observe.history import RunHistory
from dovetail.observe.run_folder import find_run


@click.command(
    epilog="""\b
Examples:
  dovetail report -o run.html
  dovetail report 20261116-0305 -o run.html
  dovetail report last -o - > run.html
"""
)
@run_argument()
@click.option(
    "-o",
    "--out",
    default="report.html",
    show_default=True,
    metavar="FILE",
    type=FILE_PATH,
    help="File to write; - is stdout.",
)
def report(run: str, out: str) -> None:
    """Write an HTML report of RUN.

    The report is one file that needs no network: plan and rate, a table of stages, verdicts with the change to make,
    charts, and failed items. It works for pipelines, recipes and backfills, also while they run.
    """
    from dovetail.observe.html_report import html_report

    text = html_report(RunHistory.load(find_run(run).path))
    write_output(out, text, fix=f"dovetail report {shlex.quote(run)} -o run.html")
