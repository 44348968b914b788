"""dovetail plan: what would run where, how fast, and why."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

import dovetail as dt
from dovetail.cli.advice import for_files
from dovetail.cli.files import write_atomically
from dovetail.scheduling.modes import MODES
from dovetail.scheduling.narrate import headline, unit_table, use_lines
from dovetail.scheduling.planner import HEADROOM


@click.command(
    epilog="""\b
Examples:
  dovetail plan pipeline.yaml
  dovetail plan examples/video.yaml --cluster "1x(32cpu, 128GB, 2xL40S:48GB)"
  dovetail plan pipeline.yaml --cluster cluster.yaml --mode waves --out plan.json
"""
)
@click.argument("file")
@click.option("--cluster", "cluster_spec", default="auto", metavar="SPEC", help="A spec, a file, or auto (here).")
@click.option("--mode", default="auto", metavar="MODE", help=f"One of {', '.join(MODES)}.")
@click.option("--headroom", default=HEADROOM, show_default=True, help="Spare speed of stages near the slowest.")
@click.option("--out", metavar="FILE", help="Write the plan here, as JSON; - is stdout.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(file: str, cluster_spec: str, mode: str, headroom: float, out: str | None, as_json: bool) -> None:
    """Plan the pipeline in FILE on a cluster; nothing is started."""
    if file.endswith(".json") and not is_pipeline(file):
        message, fix = "is a plan or something else, not a pipeline", f"dovetail explain {shlex.quote(file)}"
        raise dt.ConfigError(dt.Problem("DT035", message, fixes=(fix,), place=file))
    made = planned(file, cluster_spec, mode, headroom)
    if out is not None and out != "-":
        write_atomically(out, made.to_json() + "\n", fix="--out plan.json")
        click.echo(f"written: {out}", err=True)
    if as_json or out == "-":
        click.echo(made.to_json())
        return
    for line in [*headline(made), "", *unit_table(made), "", *(f"  {line}" for line in use_lines(made))]:
        click.echo(line)
    for note in made.notes[1:]:
        click.echo(f"note: {note}")
    options = [] if cluster_spec == "auto" else ["--cluster", cluster_spec]
    options += [] if mode == "auto" else ["--mode", mode]
    options += [] if headroom == HEADROOM else ["--headroom", f"{headroom:g}"]
    click.echo(f"\nNext:  {shlex.join(['dovetail', 'explain', file, *options])}", err=True)


def planned(file: str, cluster_spec: str, mode: str, headroom: float) -> dt.Plan:
    """The plan of a pipeline file; what does not fit is told with the file's lines."""
    pipeline, cluster = dt.Pipeline.load(file), dt.Cluster.of(cluster_spec)
    try:
        return dt.plan(pipeline, cluster, mode, headroom=headroom)
    except dt.InfeasibleError as error:
        raise for_files(error, file, cluster) from None


def is_pipeline(file: str) -> bool:
    """Whether a JSON file holds stages. Read here, because plans of large clusters are too large for `documents`."""
    try:
        data = json.loads(Path(file).read_text(errors="replace"))
    except OSError:
        return True  # let the reader of pipelines say what is wrong with the file
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "stages" in data
