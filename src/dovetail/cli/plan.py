"""dovetail plan: what would run where, how fast, and why."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

import dovetail as dt
from dovetail.cli.advice import for_files
from dovetail.cli.engines import contradiction, engine_option, there
from dovetail.cli.files import write_atomically
from dovetail.observe.words import duration
from dovetail.scheduling.modes import MODES
from dovetail.scheduling.narrate import headline, unit_table, use_lines
from dovetail.scheduling.planner import HEADROOM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.cli.engines import There


@click.command(
    epilog="""\b
Examples:
  dovetail plan pipeline.yaml
  dovetail plan examples/video.yaml --cluster "1x(32cpu, 128GB, 2xL40S:48GB)"
  dovetail plan pipeline.yaml --cluster cluster.yaml --mode waves --out plan.json
  dovetail plan pipeline.yaml --probe 50
  dovetail plan pipeline.yaml --engine ray:auto

\b
Speeds are those that FILE gives, else those that earlier runs measured, else assumed; the plan says which.
--probe runs real items through every stage on this machine first. Their results are thrown away, but whatever else
the stages do (write files, call services) they do.
"""
)
@click.argument("file")
@click.option("--cluster", "cluster_spec", default="auto", metavar="SPEC", help="A spec, a file, or auto (here).")
@engine_option("local")
@click.option("--mode", metavar="MODE", help=f"One of {', '.join(MODES)}; by default as FILE says, or auto.")
@click.option("--headroom", default=HEADROOM, show_default=True, help="Spare speed of stages near the slowest.")
@click.option("--out", metavar="FILE", help="Write the plan here, as JSON; - is stdout.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--probe", type=click.IntRange(min=1), metavar="N", help="Measure with N items of the source first.")
@click.option("--source", metavar="PATH", help="With --probe: read this instead of the file's source.")
@click.option("--no-profiles", is_flag=True, help="Do not look at what earlier runs measured.")
def plan(
    file: str,
    cluster_spec: str,
    engine: str,
    mode: str | None,
    headroom: float,
    out: str | None,
    as_json: bool,
    probe: int | None,
    source: str | None,
    no_profiles: bool,
) -> None:
    """Plan the pipeline in FILE on a cluster; nothing is started, unless you ask for a probe."""
    problems = [*_contradictions(probe, source, no_profiles), *contradiction(engine, cluster_spec)]
    if problems:
        raise dt.ConfigError(problems)
    if file.endswith(".json") and not is_pipeline(file):
        message, fix = "is a plan or something else, not a pipeline", f"dovetail explain {shlex.quote(file)}"
        raise dt.ConfigError(dt.Problem("DT035", message, fixes=(fix,), place=file))
    if probe is not None:
        _probe(file, source, probe)
    on = there(engine, cluster_spec)
    made = planned(file, on, mode, headroom, source=source, profiled=not no_profiles)
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
    for line in on.lines():
        click.echo(line)
    spec = made.cluster.spec() if on.on_ray else cluster_spec
    options = [] if spec == "auto" else ["--cluster", spec]
    options += [] if mode is None else ["--mode", mode]
    options += [] if headroom == HEADROOM else ["--headroom", f"{headroom:g}"]
    click.echo(f"\nNext:  {shlex.join(['dovetail', 'explain', file, *options])}", err=True)


def _contradictions(probe: int | None, source: str | None, no_profiles: bool) -> Iterator[dt.Problem]:
    if probe is not None and no_profiles:
        message = "--probe measures, and --no-profiles looks at nothing that was measured"
        yield dt.Problem("DT371", message, fixes=("leave out one of them",))
    if source is not None and probe is None:
        message = "--source is for --probe: a plan alone reads nothing"
        yield dt.Problem("DT371", message, fixes=(f"--probe 50 --source {shlex.quote(source)}",))


def _probe(file: str, source: str | None, items: int) -> None:
    """Runs it; what it measured is found by whoever plans next."""
    from dovetail.running.job import importable, load, missing_modules, opened
    from dovetail.running.probing import probe

    job = load(file, source=source)
    importable(job.file.parent)
    problems = missing_modules(job)
    if job.source is None:
        fixes = ("source: data/*.jsonl", "or on the command line: --source data.jsonl")
        message = "says no source: what is to be probed with?"
        problems.append(dt.Problem("DT371", message, fixes=fixes, place=file))
    if problems:
        raise dt.ConfigError(problems)
    told = probe(job.pipeline, opened(job)[0], items)
    click.echo(f"probed with {told.read} items in {duration(told.seconds)}", err=True)
    if told.read < max(stage.batch_size for stage in job.pipeline):
        click.echo("note: that is less than one batch of a stage; more items say more", err=True)


def planned(
    file: str,
    on: There | str,
    mode: str | None,
    headroom: float,
    *,
    source: str | None = None,
    profiled: bool = True,
) -> dt.Plan:
    """The plan of a pipeline file; what does not fit is told with the file's lines."""
    from dovetail.running.job import importable, load
    from dovetail.running.profiling import kinds_of, profiles_for

    job = load(file, source=source)
    on = there("local", on) if isinstance(on, str) else on
    profiles = {}
    if profiled:
        importable(job.file.parent)
        profiles = profiles_for(job.pipeline, on.cluster, *kinds_of(job))
    make = partial(dt.plan, job.pipeline, mode=mode or job.mode, headroom=headroom, profiles=profiles)
    try:
        return on.planned(make)
    except dt.InfeasibleError as error:
        raise for_files(error, file, on.cluster, on_ray=on.on_ray) from None


def is_pipeline(file: str) -> bool:
    """Whether a JSON file holds stages. Read here, because plans of large clusters are too large for `documents`."""
    try:
        data = json.loads(Path(file).read_text(errors="replace"))
    except OSError:
        return True  # let the reader of pipelines say what is wrong with the file
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "stages" in data
