"""`dovetail plan`: placement, predicted rate and bottleneck of a pipeline or recipe, with an optional probe; placement
of actors."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

import dovetail as dt
from dovetail.actors import is_actors_file
from dovetail.cli.engine_option import engine_conflicts, engine_option, target_cluster
from dovetail.cli.options import (
    cluster_option,
    file_argument,
    json_option,
    mode_option,
    no_profiles_option,
    output_option,
    set_option,
    source_option,
)
from dovetail.cli.output_file import STDOUT, write_output
from dovetail.cli.run_spec_loader import fit_to_cluster, infeasible_error_for_file, load_run_spec, recipe_of
from dovetail.control.payload import SourceSinkError
from dovetail.documents.parser import read_document
from dovetail.observe.terminal import terminal_width
from dovetail.pipeline.secret_settings import mask_override
from dovetail.scheduling.plan_report import headline_lines, unit_table, use_lines
from dovetail.scheduling.planner import DEFAULT_HEADROOM
from dovetail.text_format import format_duration, format_percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dovetail.cli.engine_option import TargetCluster
    from dovetail.runtime.run_spec import RunSpec
    from dovetail.scheduling.stage_rates import Profile

DEFAULT_PROBE_ITEMS = 1000


@click.command(
    epilog="""\b
Examples:
  dovetail plan pipeline.yaml
  dovetail plan examples/video.yaml --cluster "1x(32cpu, 128GB, 2xL40S:48GB)"
  dovetail plan pipeline.yaml --cluster cluster.yaml --out plan.json
  dovetail plan pipeline.yaml --probe
  dovetail plan pipeline.yaml --engine ray:auto
  dovetail plan recipe.yaml --set process.3.num_proc=4 --set mode=sequential
  dovetail plan actors.yaml --cluster "4x(32cpu, 128GB, 2xA100)"

\b
The rate of a stage is taken from FILE, else from earlier runs; otherwise it
is unknown, and so is the rate of the plan. --probe first runs items from all
over the source through every stage on this machine, until the speeds are
known to 10 %, and discards the results; side effects of the stages (files,
requests) do happen. A recipe is probed with a few rows automatically if its
dataset and operators are available, unless --no-probe is given.
"""
)
@file_argument()
@cluster_option()
@engine_option("local")
@mode_option()
@click.option(
    "--headroom",
    default=DEFAULT_HEADROOM,
    show_default=True,
    metavar="FACTOR",
    help="Spare capacity of stages that are nearly as slow as the bottleneck.",
)
@output_option("Write the plan as JSON to FILE")
@json_option("Print the plan as JSON.")
@click.option(
    "--probe",
    type=click.IntRange(min=1),
    is_flag=False,
    flag_value=DEFAULT_PROBE_ITEMS,
    metavar="[N]",
    help=f"Measure the stages with at most N items first.  [default N: {DEFAULT_PROBE_ITEMS}]",
)
@click.option("--no-probe", is_flag=True, help="Do not measure a recipe with a few rows first.")
@set_option()
@source_option("Probe with this instead of FILE's source.")
@no_profiles_option()
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
    """Plan the pipeline, recipe or actors in FILE on a cluster. Without a probe, nothing is started."""
    problems = [*_option_conflicts(probe, no_probe, no_profiles), *engine_conflicts(engine, cluster_spec)]
    if problems:
        raise dt.ConfigError(problems)
    if file.endswith(".json") and not is_pipeline(file):
        message, fix = "not a pipeline or recipe file", f"dovetail explain {shlex.quote(file)}"
        raise dt.ConfigError(dt.Problem("DT035", message, fixes=(fix,), place=file))
    document = read_document(file)
    if is_actors_file(document.data):
        from dovetail.cli.actors_plan import print_plan  # late: most files are pipelines

        not_for_actors = {"--mode": mode, "--probe": probe, "--no-probe": no_probe, "--source": source}
        print_plan(file, sets, target_cluster(engine, cluster_spec), out, as_json, not_for_actors)
        return
    job = load_run_spec(file, sets, source)
    if source is not None and probe is None and recipe_of(job) is None:
        message = "--source requires --probe: a plan reads no data"
        raise dt.ConfigError(dt.Problem("DT371", message, fixes=(f"--probe --source {shlex.quote(source)}",)))
    on = target_cluster(engine, cluster_spec)
    job = fit_to_cluster(job, on.cluster)
    _probe_if_needed(job, on, probe, wanted=not (no_probe or no_profiles))
    made = plan_run_spec(job, on, mode, headroom, profiled=not no_profiles)
    if out is not None:
        write_output(out, made.to_json() + "\n", fix="--out plan.json")
    if as_json and out != STDOUT:
        click.echo(made.to_json())
    if as_json or out == STDOUT:
        return
    for line in [*headline_lines(made), "", *_plan_table(job, made), "", *(f"  {line}" for line in use_lines(made))]:
        click.echo(line)
    for note in [*made.notes[1:], *_recipe_notes(job, on.cluster)]:
        click.echo(f"note: {note}")
    for line in on.usage_lines():
        click.echo(line)
    options = [] if cluster_spec == "auto" else ["--cluster", cluster_spec]
    options += [] if engine == "local" else ["--engine", engine]
    options += [] if mode is None else ["--mode", mode]
    options += [word for text in sets for word in ("--set", mask_override(text))]
    options += [] if source is None else ["--source", source]
    options += [] if headroom == DEFAULT_HEADROOM else ["--headroom", f"{headroom:g}"]
    options += ["--no-profiles"] if no_profiles else []
    click.echo(f"\nNext:  {shlex.join(['dovetail', 'explain', file, *options])}", err=True)


def _plan_table(job: RunSpec, made: dt.Plan) -> list[str]:
    recipe = recipe_of(job)
    if recipe is None:
        return unit_table(made, terminal_width())
    from dovetail.recipes.operator_tables import plan_table

    return plan_table(recipe, made, terminal_width())


def _recipe_notes(job: RunSpec, cluster: dt.Cluster) -> list[str]:
    recipe = recipe_of(job)
    if recipe is None:
        return []
    from dovetail.recipes.recipe_plan import plan_notes

    return plan_notes(recipe, cluster)


def _option_conflicts(probe: int | None, no_probe: bool, no_profiles: bool) -> Iterator[dt.Problem]:
    if probe is not None and no_profiles:
        message = "--probe and --no-profiles cannot be combined: the plan would ignore the measurement"
        yield dt.Problem("DT371", message, fixes=("remove one of them",))
    if probe is not None and no_probe:
        yield dt.Problem("DT371", "--probe and --no-probe cannot be combined", fixes=("remove one of them",))


def _probe_if_needed(job: RunSpec, on: TargetCluster, items: int | None, *, wanted: bool) -> None:
    """Probes a pipeline on request, and a recipe if its rows can be read."""
    recipe = recipe_of(job)
    if items is not None:
        _probe(job, items, "auto" if on.on_ray else on.cluster)
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
        probe_recipe(recipe, on.cluster, partial(click.echo, err=True), always=True)


def _error_text(error: dt.DovetailError | SourceSinkError) -> str:
    if isinstance(error, SourceSinkError):
        return f"{error.place}: {error.message}"
    problem = error.problems[0]
    return f"{problem.place}: {problem.message}" if problem.place else problem.message


def _probe(job: RunSpec, items: int, cluster: dt.Cluster | str) -> None:
    """Measures the stages; the next plan finds the stored measurements."""
    from dovetail.runtime.probe import probe
    from dovetail.runtime.run_spec import add_import_path, missing_code, open_source_and_sink
    from dovetail.runtime.stage_profiles import load_profiles, source_sink_kinds

    add_import_path(job.file.parent)
    problems = missing_code(job)
    if job.source is None:
        fixes = ("source: data/*.jsonl", "--source data.jsonl")
        message = "no source to probe with: add `source:` to the file or pass --source"
        problems.append(dt.Problem("DT371", message, fixes=fixes, place=str(job.file)))
    if problems:
        raise dt.ConfigError(problems)
    probed = probe(job.pipeline, open_source_and_sink(job)[0], items, cluster)
    measured = load_profiles(job.pipeline, cluster, *source_sink_kinds(job))
    text = f"probed with {probed.read} items in {format_duration(probed.seconds)}"
    click.echo(f"{text}, standard error {_standard_error_text(measured)}", err=True)
    if probed.note:
        click.echo(probed.note, err=True)
    if probed.read < max(stage.batch_size for stage in job.pipeline):
        click.echo("note: this is less than one batch of a stage; a larger N measures better", err=True)


def _standard_error_text(measured: Mapping[str, Profile]) -> str:
    """The largest standard error of the stages that take much of the time."""
    from dovetail.runtime.probe_end import MIN_TIME_SHARE

    slowest = min(profile.rate for profile in measured.values())
    errors = [profile.standard_error for profile in measured.values() if MIN_TIME_SHARE * profile.rate <= slowest]
    known = [error for error in errors if error is not None]
    return (
        format_percent(max(known)) if len(known) == len(errors) else "unknown: few batches; a larger N measures better"
    )


def plan_run_spec(
    job: RunSpec, on: TargetCluster, mode: str | None, headroom: float, *, profiled: bool = True
) -> dt.Plan:
    """The plan of a file; errors carry the lines of the file."""
    from dovetail.runtime.run_spec import add_import_path
    from dovetail.runtime.stage_profiles import load_profiles, source_sink_kinds

    profiles = {}
    if profiled:
        add_import_path(job.file.parent)
        profiles = load_profiles(job.pipeline, on.cluster, *source_sink_kinds(job))
    make = partial(dt.plan, job.pipeline, mode=mode or job.mode, headroom=headroom, profiles=profiles)
    try:
        return job.complete_plan(on.plan(make))
    except dt.InfeasibleError as error:
        raise infeasible_error_for_file(error, job, on.cluster, mode, on_ray=on.on_ray) from None


def is_pipeline(file: str) -> bool:
    """Whether a JSON file describes a pipeline, a recipe or actors. Not read by `documents`, which is slow for large
    plans."""
    try:
        data = json.loads(Path(file).read_text(errors="replace"))
    except OSError:
        return True  # the pipeline reader reports the error
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and not {"stages", "process", "roles"}.isdisjoint(data)
