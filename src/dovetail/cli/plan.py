"""`dovetail plan`: placement, predicted rate and bottleneck of a pipeline or recipe, with an optional probe."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

import dovetail as dt
from dovetail.cli.engine_option import engine_conflicts, engine_option, target_cluster
from dovetail.cli.output_file import write_file
from dovetail.cli.run_spec_loader import fit_to_cluster, infeasible_error_for_file, load_run_spec, recipe_of
from dovetail.control.payload import SourceSinkError
from dovetail.observe.text_format import format_duration
from dovetail.scheduling.modes import MODES
from dovetail.scheduling.plan_report import headline_lines, unit_table, use_lines
from dovetail.scheduling.planner import DEFAULT_HEADROOM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.cli.engine_option import TargetCluster
    from dovetail.runtime.run_spec import RunSpec


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
@click.option("--headroom", default=DEFAULT_HEADROOM, show_default=True, help="Spare speed of stages near the slowest.")
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
    problems = [*_option_conflicts(probe, no_probe, no_profiles), *engine_conflicts(engine, cluster_spec)]
    if problems:
        raise dt.ConfigError(problems)
    if file.endswith(".json") and not is_pipeline(file):
        message, fix = "is a plan or something else, not a pipeline", f"dovetail explain {shlex.quote(file)}"
        raise dt.ConfigError(dt.Problem("DT035", message, fixes=(fix,), place=file))
    job = load_run_spec(file, sets, source)
    if source is not None and probe is None and recipe_of(job) is None:
        message = "--source is for --probe: a plan alone reads nothing"
        raise dt.ConfigError(dt.Problem("DT371", message, fixes=(f"--probe 50 --source {shlex.quote(source)}",)))
    on = target_cluster(engine, cluster_spec)
    job = fit_to_cluster(job, on.cluster)
    _probe_if_needed(job, on.cluster, probe, wanted=not (no_probe or no_profiles))
    made = plan_run_spec(job, on, mode, headroom, profiled=not no_profiles)
    if out is not None and out != "-":
        write_file(out, made.to_json() + "\n", fix="--out plan.json")
        click.echo(f"written: {out}", err=True)
    if as_json or out == "-":
        click.echo(made.to_json())
        return
    for line in [*headline_lines(made), "", *_plan_table(job, made), "", *(f"  {line}" for line in use_lines(made))]:
        click.echo(line)
    for note in [*made.notes[1:], *_recipe_notes(job, on.cluster)]:
        click.echo(f"note: {note}")
    for line in on.usage_lines():
        click.echo(line)
    spec = made.cluster.spec() if on.on_ray else cluster_spec
    options = [] if spec == "auto" else ["--cluster", spec]
    options += [] if mode is None else ["--mode", mode]
    options += [] if headroom == DEFAULT_HEADROOM else ["--headroom", f"{headroom:g}"]
    click.echo(f"\nNext:  {shlex.join(['dovetail', 'explain', file, *options])}", err=True)


def _plan_table(job: RunSpec, made: dt.Plan) -> list[str]:
    recipe = recipe_of(job)
    if recipe is None:
        return unit_table(made)
    from dovetail.recipes.operator_tables import plan_table

    return plan_table(recipe, made)


def _recipe_notes(job: RunSpec, cluster: dt.Cluster) -> list[str]:
    recipe = recipe_of(job)
    if recipe is None:
        return []
    from dovetail.recipes.recipe_plan import plan_notes

    return plan_notes(recipe, cluster)


def _option_conflicts(probe: int | None, no_probe: bool, no_profiles: bool) -> Iterator[dt.Problem]:
    if probe is not None and no_profiles:
        message = "--probe measures, and --no-profiles looks at nothing that was measured"
        yield dt.Problem("DT371", message, fixes=("leave out one of them",))
    if probe is not None and no_probe:
        yield dt.Problem("DT371", "--probe and --no-probe do not go together", fixes=("leave out one of them",))


def _probe_if_needed(job: RunSpec, cluster: dt.Cluster, items: int | None, *, wanted: bool) -> None:
    """A pipeline is probed if that is asked for, a recipe if its rows are there."""
    recipe = recipe_of(job)
    if items is not None:
        _probe(job, items)
    elif wanted and recipe is not None and recipe.source is not None and not recipe.unready():
        from dovetail.recipes.column_check import missing_columns, sample_rows
        from dovetail.recipes.runner import probe_recipe

        try:
            rows = sample_rows(recipe.source)
        except (dt.DovetailError, SourceSinkError) as error:
            click.echo(f"note: not probed: {_error_text(error)}", err=True)
            return
        problems = list(missing_columns(recipe, rows))
        if problems:
            raise dt.ConfigError(problems)
        probe_recipe(recipe, cluster, partial(click.echo, err=True), always=True)


def _error_text(error: dt.DovetailError | SourceSinkError) -> str:
    if isinstance(error, SourceSinkError):
        return f"{error.place}: {error.message}"
    problem = error.problems[0]
    return f"{problem.place}: {problem.message}" if problem.place else problem.message


def _probe(job: RunSpec, items: int) -> None:
    """Runs it; what it measured is found by whoever plans next."""
    from dovetail.runtime.probe import probe
    from dovetail.runtime.run_spec import add_import_path, missing_modules, open_source_and_sink

    add_import_path(job.file.parent)
    problems = missing_modules(job)
    if job.source is None:
        fixes = ("source: data/*.jsonl", "on the command line: --source data.jsonl")
        message = "says no source: what is to be probed with?"
        problems.append(dt.Problem("DT371", message, fixes=fixes, place=str(job.file)))
    if problems:
        raise dt.ConfigError(problems)
    told = probe(job.pipeline, open_source_and_sink(job)[0], items)
    click.echo(f"probed with {told.read} items in {format_duration(told.seconds)}", err=True)
    if told.read < max(stage.batch_size for stage in job.pipeline):
        click.echo("note: that is less than one batch of a stage; more items say more", err=True)


def plan_run_spec(
    job: RunSpec, on: TargetCluster, mode: str | None, headroom: float, *, profiled: bool = True
) -> dt.Plan:
    """The plan of a job; what does not fit is told with the file's lines."""
    from dovetail.runtime.run_spec import add_import_path
    from dovetail.runtime.stage_profiles import load_profiles, source_sink_kinds

    profiles = {}
    if profiled:
        add_import_path(job.file.parent)
        profiles = load_profiles(job.pipeline, on.cluster, *source_sink_kinds(job))
    make = partial(dt.plan, job.pipeline, mode=mode or job.mode, headroom=headroom, profiles=profiles)
    try:
        return on.plan(make)
    except dt.InfeasibleError as error:
        raise infeasible_error_for_file(error, job, on.cluster, mode, on_ray=on.on_ray) from None


def is_pipeline(file: str) -> bool:
    """Whether a JSON file is a pipeline or a recipe. Read here: plans of large clusters are large for `documents`."""
    try:
        data = json.loads(Path(file).read_text(errors="replace"))
    except OSError:
        return True  # let the reader of pipelines say what is wrong with the file
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and ("stages" in data or "process" in data)
