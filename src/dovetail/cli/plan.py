"""dovetail plan: what would run where, how fast, and why."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

import dovetail as dt
from dovetail.cli.engines import contradiction, engine_option, there
from dovetail.cli.files import write_atomically
from dovetail.cli.loading import explained, load_job, on_cluster, recipe_of
from dovetail.control.splits import Unusable
from dovetail.observe.words import duration
from dovetail.scheduling.modes import MODES
from dovetail.scheduling.narrate import headline, unit_table, use_lines
from dovetail.scheduling.planner import HEADROOM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.cli.engines import There
    from dovetail.running.job import Job


@click.command(
    epilog="""\b
Examples:
  dovetail plan pipeline.yaml
  dovetail plan examples/video.yaml --cluster "1x(32cpu, 128GB, 2xL40S:48GB)"
  dovetail plan pipeline.yaml --cluster cluster.yaml --mode waves --out plan.json
  dovetail plan pipeline.yaml --probe 50
  dovetail plan pipeline.yaml --engine ray:auto
  dovetail plan recipe.yaml --set process.3.num_proc=4 --set mode=sequential

\b
Speeds are those that FILE gives, else those that earlier runs measured, else assumed; the plan says which.
--probe runs real items through every stage on this machine first. Their results are thrown away, but whatever else
the stages do (write files, call services) they do. A recipe whose rows are there, and whose operators can run here, is
probed with a few of them unless earlier runs have measured it, or --no-probe is given.
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
@click.option("--no-probe", is_flag=True, help="Of a recipe: do not measure with a few of its rows first.")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change a value of the file; may be repeated.")
@click.option("--source", metavar="PATH", help="Measure with this instead of the file's source.")
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
    no_probe: bool,
    sets: tuple[str, ...],
    source: str | None,
    no_profiles: bool,
) -> None:
    """Plan the pipeline or the recipe in FILE on a cluster; of a pipeline nothing is started, unless you ask for a
    probe."""
    problems = [*_contradictions(probe, no_probe, no_profiles), *contradiction(engine, cluster_spec)]
    if problems:
        raise dt.ConfigError(problems)
    if file.endswith(".json") and not is_pipeline(file):
        message, fix = "is a plan or something else, not a pipeline", f"dovetail explain {shlex.quote(file)}"
        raise dt.ConfigError(dt.Problem("DT035", message, fixes=(fix,), place=file))
    job = load_job(file, sets, source)
    if source is not None and probe is None and recipe_of(job) is None:
        message = "--source is for --probe: a plan alone reads nothing"
        raise dt.ConfigError(dt.Problem("DT371", message, fixes=(f"--probe 50 --source {shlex.quote(source)}",)))
    on = there(engine, cluster_spec)
    job = on_cluster(job, on.cluster)
    _measure(job, on.cluster, probe, wanted=not (no_probe or no_profiles))
    made = planned(job, on, mode, headroom, profiled=not no_profiles)
    if out is not None and out != "-":
        write_atomically(out, made.to_json() + "\n", fix="--out plan.json")
        click.echo(f"written: {out}", err=True)
    if as_json or out == "-":
        click.echo(made.to_json())
        return
    for line in [*headline(made), "", *_table(job, made), "", *(f"  {line}" for line in use_lines(made))]:
        click.echo(line)
    for note in [*made.notes[1:], *_recipe_notes(job, on.cluster)]:
        click.echo(f"note: {note}")
    for line in on.lines():
        click.echo(line)
    spec = made.cluster.spec() if on.on_ray else cluster_spec
    options = [] if spec == "auto" else ["--cluster", spec]
    options += [] if mode is None else ["--mode", mode]
    options += [] if headroom == HEADROOM else ["--headroom", f"{headroom:g}"]
    click.echo(f"\nNext:  {shlex.join(['dovetail', 'explain', file, *options])}", err=True)


def _table(job: Job, made: dt.Plan) -> list[str]:
    recipe = recipe_of(job)
    if recipe is None:
        return unit_table(made)
    from dovetail.recipes.showing import operator_table

    return operator_table(recipe, made)


def _recipe_notes(job: Job, cluster: dt.Cluster) -> list[str]:
    recipe = recipe_of(job)
    if recipe is None:
        return []
    from dovetail.recipes.planning import notes

    return notes(recipe, cluster)


def _contradictions(probe: int | None, no_probe: bool, no_profiles: bool) -> Iterator[dt.Problem]:
    if probe is not None and no_profiles:
        message = "--probe measures, and --no-profiles looks at nothing that was measured"
        yield dt.Problem("DT371", message, fixes=("leave out one of them",))
    if probe is not None and no_probe:
        yield dt.Problem("DT371", "--probe and --no-probe do not go together", fixes=("leave out one of them",))


def _measure(job: Job, cluster: dt.Cluster, items: int | None, *, wanted: bool) -> None:
    """A pipeline is probed if that is asked for, a recipe if its rows are there."""
    recipe = recipe_of(job)
    if items is not None:
        _probe(job, items)
    elif wanted and recipe is not None and recipe.source is not None and not recipe.unready():
        from dovetail.recipes.running import probe
        from dovetail.recipes.sampling import missing_columns, sample

        try:
            rows = sample(recipe.source)
        except (dt.DovetailError, Unusable) as error:
            click.echo(f"note: not probed: {_reason(error)}", err=True)
            return
        problems = list(missing_columns(recipe, rows))
        if problems:
            raise dt.ConfigError(problems)
        probe(recipe, cluster, partial(click.echo, err=True), always=True)


def _reason(error: dt.DovetailError | Unusable) -> str:
    if isinstance(error, Unusable):
        return f"{error.place}: {error.message}"
    problem = error.problems[0]
    return f"{problem.place}: {problem.message}" if problem.place else problem.message


def _probe(job: Job, items: int) -> None:
    """Runs it; what it measured is found by whoever plans next."""
    from dovetail.running.job import importable, missing_modules, opened
    from dovetail.running.probing import probe

    importable(job.file.parent)
    problems = missing_modules(job)
    if job.source is None:
        fixes = ("source: data/*.jsonl", "or on the command line: --source data.jsonl")
        message = "says no source: what is to be probed with?"
        problems.append(dt.Problem("DT371", message, fixes=fixes, place=str(job.file)))
    if problems:
        raise dt.ConfigError(problems)
    told = probe(job.pipeline, opened(job)[0], items)
    click.echo(f"probed with {told.read} items in {duration(told.seconds)}", err=True)
    if told.read < max(stage.batch_size for stage in job.pipeline):
        click.echo("note: that is less than one batch of a stage; more items say more", err=True)


def planned(job: Job, on: There, mode: str | None, headroom: float, *, profiled: bool = True) -> dt.Plan:
    """The plan of a job; what does not fit is told with the file's lines."""
    from dovetail.running.job import importable
    from dovetail.running.profiling import kinds_of, profiles_for

    profiles = {}
    if profiled:
        importable(job.file.parent)
        profiles = profiles_for(job.pipeline, on.cluster, *kinds_of(job))
    make = partial(dt.plan, job.pipeline, mode=mode or job.mode, headroom=headroom, profiles=profiles)
    try:
        return on.planned(make)
    except dt.InfeasibleError as error:
        raise explained(error, job, on.cluster, mode, on_ray=on.on_ray) from None


def is_pipeline(file: str) -> bool:
    """Whether a JSON file is a pipeline or a recipe. Read here: plans of large clusters are large for `documents`."""
    try:
        data = json.loads(Path(file).read_text(errors="replace"))
    except OSError:
        return True  # let the reader of pipelines say what is wrong with the file
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and ("stages" in data or "process" in data)
