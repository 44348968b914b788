"""dovetail plan: what would run where, how fast, and why."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

import dovetail as dt
from dovetail.scheduling.narrate import headline, unit_table, use_lines
from dovetail.scheduling.planner import HEADROOM, MODES


@click.command(
    epilog="""\b
Examples:
  dovetail plan pipeline.yaml
  dovetail plan examples/video.yaml --cluster "1x(32cpu, 128GB, 2xL40S:48GB)"
  dovetail plan pipeline.yaml --cluster cluster.yaml --mode waves --out plan.json
"""
)
@click.argument("file")
@click.option(
    "--cluster", "cluster_spec", default="auto", metavar="SPEC", help="A spec, a file, or auto: this machine."
)
@click.option("--mode", default="auto", metavar="MODE", help=f"One of {', '.join(MODES)}.")
@click.option(
    "--headroom", default=HEADROOM, show_default=True, help="Spare speed for stages near the slowest, a factor."
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan here, as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(file: str, cluster_spec: str, mode: str, headroom: float, out: Path | None, as_json: bool) -> None:
    """Plan the pipeline in FILE on a cluster; nothing is started."""
    made = dt.plan(dt.Pipeline.load(file), cluster_spec, mode, headroom=headroom)
    if out is not None:
        write_atomically(out, made.to_json() + "\n")
        click.echo(f"written: {out}", err=True)
    if as_json:
        click.echo(made.to_json())
        return
    for line in [*headline(made), "", *unit_table(made), ""]:
        click.echo(line)
    for line in use_lines(made):
        click.echo(f"  {line}")
    for note in made.notes[1:]:
        click.echo(f"note: {note}")
    click.echo()
    click.echo(f"Next:  dovetail explain {file}    dovetail explain {file} {made.bottleneck.split('+')[0]}", err=True)


def load_plan(file: str, cluster_spec: str, mode: str) -> dt.Plan:
    """The plan in a .json file that `dovetail plan --out` wrote, else the plan of a pipeline file."""
    if not file.endswith(".json") or _is_pipeline(file):
        return dt.plan(dt.Pipeline.load(file), cluster_spec, mode)
    made = dt.Plan.from_json(Path(file).read_text(errors="replace"))
    if cluster_spec != "auto":
        made.require_cluster(dt.Cluster.of(cluster_spec))
    return made


def _is_pipeline(file: str) -> bool:
    """Whether a JSON file holds stages. Read here, because plans of large clusters are too large for `documents`."""
    try:
        data = json.loads(Path(file).read_text(errors="replace"))
    except OSError:
        return True  # let the reader of pipelines say what is wrong with the file
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "stages" in data


def write_atomically(path: Path, text: str) -> None:
    """All of it or nothing: a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        problem = dt.Problem(
            "DT010", f"cannot be written: {error.strerror}", fixes=("name another file",), place=str(path)
        )
        raise dt.ConfigError(problem) from None
