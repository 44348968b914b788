"""`dovetail run`: run a pipeline file or recipe, resume a run, or retry its failed items."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.cli.engine_option import (
    AUTO,
    LOCAL,
    SIMULATED,
    check_engine,
    engine_conflicts,
    engine_option,
    target_cluster,
)
from dovetail.cli.options import (
    FILE_PATH,
    ErrorLimit,
    cluster_option,
    complete_runs,
    file_argument,
    json_option,
    mode_option,
    run_dir_option,
    set_option,
)
from dovetail.cli.run_spec_loader import fit_to_cluster, infeasible_error_for_file, load_run_spec, recipe_of
from dovetail.cli.saved_arguments import (
    RunArguments,
    arguments_for_header,
    check_not_backfill,
    merge_saved_arguments,
)
from dovetail.cli.saved_plan import read_plan
from dovetail.documents.configuration import QUIET, VERBOSE, configured
from dovetail.documents.yaml_writer import yaml_literal
from dovetail.engines.ray.address import is_ray_engine
from dovetail.pipeline.option_renderer import OptionRenderer
from dovetail.runtime.arguments import check_share
from dovetail.runtime.configured_engine import configured_engine, described_cluster
from dovetail.runtime.run_spec import add_import_path, data_beside, leaf_sinks, missing_code

if TYPE_CHECKING:
    from dovetail.recipes.runner import RecipeStart
    from dovetail.runtime.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one invocation; they are not stored with the run."""

    engine: str
    plan: str | None
    dry_run: bool
    resume: str | None
    retry_errors: str | None
    force_resume: bool
    record: bool
    wait: bool
    run_dir: str | None
    verbose: bool
    as_json: bool
    pin_cpus: bool
    share: float | None
    env_from: tuple[str, ...]
    probe: bool = True


@click.command(
    epilog="""\b
Examples:
  dovetail run pipeline.yaml
  dovetail run pipeline.yaml --dry-run
  dovetail run pipeline.yaml --source 'data/*.jsonl' --sink out.parquet
  dovetail run pipeline.yaml --limit 1000 --set stages.caption.workers=4
  dovetail run pipeline.yaml --set 'stages.*.on_error=skip'
  dovetail run pipeline.yaml | jq .text | head
  dovetail run pipeline.yaml --engine ray:auto --share 0.5 --env-from HF_TOKEN
  dovetail run --resume last
  dovetail run recipe.yaml --set process.3.num_proc=4

\b
FILE specifies source and sink, for example
  source: data/*.jsonl
  sink: out.jsonl
Paths in FILE are relative to its folder, and modules in that folder can be
imported. Paths on the command line are relative to the current folder.
Without a sink, results are written to stdout, one JSON value per line.

\b
Ctrl-C or SIGTERM: stop at the next epoch. A second time: stop immediately.
In both cases, --resume continues the run.

\b
A run prints five lines at its end; dovetail status shows all figures.

\b
Exit codes: 0 finished, 1 the run failed, 2 usage or configuration error,
3 does not fit, 5 engine unreachable, 130 stopped before the end (Ctrl-C,
dovetail drain or cancel), 143 stopped by SIGTERM.
"""
)
@file_argument(required=False)
@engine_option(LOCAL, SIMULATED, or_none=True)
@cluster_option("cluster", default=None)
@mode_option()
@click.option(
    "--plan",
    metavar="PLAN.JSON",
    type=FILE_PATH,
    help="Run this plan; fails if the cluster or the stages have changed.",
)
@set_option()
@click.option(
    "--source", metavar="PATH", type=FILE_PATH, help="Read this instead of FILE's source; - is JSON lines on stdin."
)
@click.option("--sink", metavar="PATH", type=FILE_PATH, help="Write this instead of FILE's sink; - is stdout.")
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="Read at most N items of the source.")
@click.option("--ordered", is_flag=True, help="Write results in the order of the source.")
@click.option(
    "--max-errors",
    type=ErrorLimit(),
    metavar="N|P%",
    help="Fail the run if more items, or a larger percentage of them, fail.",
)
@click.option("--dry-run", is_flag=True, help="Check code, source and sink, print the plan, and start nothing.")
@click.option("--resume", metavar="RUN", shell_complete=complete_runs, help="Resume a run; FILE is optional.")
@click.option(
    "--retry-errors", metavar="RUN", shell_complete=complete_runs, help="Process only the failed items of RUN."
)
@click.option(
    "--force-resume", is_flag=True, help="Resume although the source has changed; rows may be lost or duplicated."
)
@click.option("--record", is_flag=True, help="Record the controller's input for dovetail replay.")
@click.option("--no-probe", is_flag=True, help="Do not measure a recipe with a few rows first.")
@click.option("--no-wait", is_flag=True, help="Exit with code 3 instead of waiting for resources.")
@run_dir_option()
@click.option("--pin-cpus", is_flag=True, help="Bind each worker to its own CPUs.")
@click.option("--share", type=float, metavar="FRACTION", help="Use at most this fraction of a Ray cluster.")
@click.option(
    "--env-from", multiple=True, metavar="NAME", help="Pass this environment variable to Ray workers; may be repeated."
)
@click.option("--verbose", "-v", is_flag=True, help="Print the output of workers.")
@json_option("Print the summary as JSON; with --dry-run, the plan, source and sinks.")
def run(file: str | None, **options: Any) -> None:
    """Run the pipeline or recipe in FILE: read its source, write its sink, print a summary."""
    place = {key: options.pop(key) for key in ("engine", "share", "env_from")}
    how = RunOptions(
        **place | {"engine": place["engine"] or LOCAL},
        wait=not options.pop("no_wait"),
        probe=not options.pop("no_probe"),
        **{key: options.pop(key) for key in RunOptions.__slots__ if key not in ("wait", "probe") and key not in place},
    )
    asked = _run_arguments(file, how, options | place | {"env_from": how.env_from or None})
    job = load_run_spec(asked.file, asked.sets, asked.source, asked.sink, Path(asked.folder) if asked.folder else None)
    asked = _with_place(asked, job)
    how = replace(how, engine=asked.engine or LOCAL, share=asked.share, env_from=asked.env_from or ())
    _check_runnable(job, asked, how)
    if how.dry_run:
        from dovetail.cli.dry_run import dry_run  # late, like all that most runs do not need

        again = _plan_command(asked, how.plan or "plan.json", how.engine)
        dry_run(job, asked, how.engine, how.plan, again, as_json=how.as_json)
        return
    if how.engine == SIMULATED:
        _simulate(job, asked, how)
        return
    sys.exit(_run(job, asked, how))


def _with_place(asked: RunArguments, job: RunSpec) -> RunArguments:
    """The arguments with engine and cluster: as given or stored with the run, else those of the recipe, else as
    configured."""
    recipe = recipe_of(job)
    engine = asked.engine
    if engine is None and recipe is not None and recipe.engine != LOCAL:
        engine = recipe.engine
    engine, cluster = configured_engine(engine, asked.cluster)
    assert isinstance(cluster, str), "clusters of the command line are texts"
    check_engine(engine, (LOCAL, SIMULATED))
    return replace(asked, engine=engine, cluster=asked.cluster if cluster == AUTO else cluster)


def _run_arguments(file: str | None, how: RunOptions, options: dict[str, Any]) -> RunArguments:
    problems = list(_option_conflicts(how))
    if problems:
        raise dt.ConfigError(problems)
    options["ordered"] = options["ordered"] or None
    before = how.resume or how.retry_errors
    if before is None and file is None:
        raise click.MissingParameter(param_type="argument", param_hint="FILE")
    if before is not None:
        check_not_backfill(before, "run" if how.resume else "retry")
    sets = options.pop("sets")
    asked = None if file is None else RunArguments(file, sets, **options)
    return asked if before is None and asked is not None else merge_saved_arguments(before or "", asked, sets, options)


def _option_conflicts(how: RunOptions) -> list[dt.Problem]:
    """Options that exclude each other."""
    again = "--resume" if how.resume else "--retry-errors" if how.retry_errors else ""
    pairs = [
        (bool(how.resume and how.retry_errors), "--resume", "--retry-errors"),
        (bool(again and how.run_dir), again, "--run-dir"),
        (bool(again and how.engine == SIMULATED), again, "--engine sim"),
    ]
    found = [f"{one} and {other} cannot be combined" for both, one, other in pairs if both]
    if how.force_resume and not how.resume:
        found.append("--force-resume requires --resume")
    if how.engine == SIMULATED and (how.share is not None or how.env_from):
        found.append("--share and --env-from have no effect with --engine sim")
    return [dt.Problem("DT367", message, fixes=("remove one of them",)) for message in found]


def _check_runnable(job: RunSpec, asked: RunArguments, how: RunOptions) -> None:
    """Checks what the file alone does not show; a simulation needs neither code nor data."""
    if how.engine == SIMULATED:
        return
    try:
        check_share(how.engine, how.share, how.env_from)
    except dt.ConfigError as error:
        raise OptionRenderer().error(error) from None
    add_import_path(job.file.parent)
    problems = engine_conflicts(how.engine, asked.cluster, can_simulate=True)
    problems += [] if how.dry_run else missing_code(job)
    if job.source is None and not how.retry_errors and recipe_of(job) is None:
        found = data_beside(job.file)
        typed = "data.jsonl" if found is None else os.path.relpath(job.file.with_name(found))
        fixes = (f"source: {yaml_literal(found or 'data/*.jsonl')}", f"--source {shlex.quote(typed)}")
        problems.append(
            dt.Problem("DT364", "no source: add `source:` to the file or pass --source", fixes=fixes, place=asked.file)
        )
    if job.sink is None and sys.stdout is None:
        message = "stdout is closed, and there is no other sink for the results"
        problems.append(dt.Problem("DT367", message, fixes=("--sink out.jsonl",)))
    if how.as_json and job.sink is None and not how.dry_run:
        fixes = ("--sink out.jsonl", "remove --json")
        problems.append(dt.Problem("DT367", "results and --json would both be written to stdout", fixes=fixes))
    if problems:
        raise dt.ConfigError(problems)


def _run(job: RunSpec, asked: RunArguments, how: RunOptions) -> int:
    from dovetail.cli.run_report import report_run, wait_for_results
    from dovetail.cli.signals import SignalHandler

    prepared = _prepare_recipe(job, how)
    stops = SignalHandler()
    try:
        with stops:
            started = _start(job, asked, how, prepared)
            stops.run = started
            if configured("verbosity") != QUIET:
                _show_plan(started.plan)
            error = wait_for_results(started, to_stdout=job.sink is None)
    except KeyboardInterrupt as interrupted:
        if stops.run is None:
            click.echo("interrupted", err=True)
            return stops.exit_code
        error = interrupted
    reports = prepared.report_lines if prepared is not None else ()
    return report_run(stops, job, error, as_json=how.as_json, more=reports)


def _prepare_recipe(job: RunSpec, how: RunOptions) -> RecipeStart | None:
    """Checks a recipe before anything starts; None for a pipeline."""
    recipe = recipe_of(job)
    if recipe is None:
        return None
    from dovetail.recipes.runner import prepare_run

    return prepare_run(
        recipe,
        engine=how.engine,
        resume=how.resume,
        retry_errors=how.retry_errors,
        run_dir=how.run_dir,
        say=partial(click.echo, err=True),
    )


def _start(job: RunSpec, asked: RunArguments, how: RunOptions, prepared: RecipeStart | None) -> dt.Run:
    on = target_cluster(
        how.engine, asked.cluster, start=how.plan is not None
    )  # otherwise dt.run starts Ray after all checks
    job = fit_to_cluster(job, on.cluster)
    plan = None
    if how.plan is not None:
        plan = read_plan(how.plan, job.pipeline, on.cluster, _plan_command(asked, how.plan, how.engine))
    for line in on.usage_lines():
        click.echo(line, err=True)
    rows_in_a_terminal = job.sink is None and sys.stdout.isatty()
    arguments: dict[str, Any] = {
        "mode": asked.mode,
        "plan": plan,
        "force_resume": how.force_resume,
        "ordered": asked.ordered,
        "limit": asked.limit,
        "record": how.record,
        "progress": not rows_in_a_terminal and configured("verbosity") != QUIET,
        "verbose": how.verbose or configured("verbosity") == VERBOSE,
        "wait": how.wait,
        "pin_cpus": how.pin_cpus,
        "share": how.share,
        "env_from": how.env_from,
        "what": f"dovetail run {shlex.quote(asked.file)}",
        "more": arguments_for_header(asked, has_sink=job.sink is not None),
    }
    if asked.max_errors is not None:
        arguments["max_errors"] = asked.max_errors
    if prepared is not None:
        return prepared.start(target=on.cluster, probe=how.probe, **arguments)
    try:
        return job.start(
            engine=how.engine,
            cluster="auto" if on.on_ray else on.cluster,
            resume=how.resume,
            retry_errors=how.retry_errors,
            run_dir=how.run_dir,
            **arguments,
        )
    except dt.InfeasibleError as error:
        raise infeasible_error_for_file(error, job, on.cluster, asked.mode, on_ray=on.on_ray, is_real=True) from None
    except dt.ConfigError as error:
        renderer = OptionRenderer(leaf_sinks=leaf_sinks(job.document.data, job.file.parent))
        raise renderer.error(error) from None


def _plan_command(asked: RunArguments, out: str, engine: str = LOCAL) -> str:
    options = ["--cluster", asked.cluster] if asked.cluster else []
    options += ["--engine", engine] if is_ray_engine(engine) else []
    options += ["--mode", asked.mode] if asked.mode else []
    return shlex.join(["dovetail", "plan", asked.file, *options, "--out", out])


def _show_plan(plan: dt.Plan) -> None:
    """Two lines and the notes; `dovetail plan` shows the table."""
    cluster = plan.cluster.spec(exact=False)
    for line in [f"{plan.name} on {cluster}", f"  {plan.worker_text()}; {plan.rate_text()}"]:
        click.echo(line, err=True)
    waves = [plan.reason] if len(plan.waves) > 1 else []
    for note in [*waves, *plan.warnings, *([] if plan.rate is not None else plan.assumptions[:1])]:
        click.echo(f"note: {note}", err=True)


def _simulate(job: RunSpec, asked: RunArguments, how: RunOptions) -> None:
    from dovetail.cli.colour import paint
    from dovetail.observe.summary_text import short_summary
    from dovetail.runtime.simulation import simulate
    from dovetail.runtime.stage_profiles import load_profiles, source_sink_kinds

    cluster = described_cluster(asked.cluster or AUTO)
    job = fit_to_cluster(job, cluster)
    again = _plan_command(asked, how.plan or "")
    plan = None if how.plan is None else read_plan(how.plan, job.pipeline, cluster, again)
    mode, what = asked.mode or job.mode, f"dovetail run {shlex.quote(asked.file)} --engine sim"
    try:
        made = simulate(
            job.pipeline,
            cluster,
            asked.limit,
            mode=mode,
            plan=plan,
            profiles=load_profiles(job.pipeline, cluster, *source_sink_kinds(job)),
            run_dir=how.run_dir,
            record=how.record,
            progress=True,
            what=what,
        )
    except dt.InfeasibleError as error:
        raise infeasible_error_for_file(error, job, cluster, asked.mode) from None
    text = short_summary(made.summary).lines(paint)
    for line in [json.dumps(made.summary.to_dict(), indent=2)] if how.as_json else text:
        click.echo(line)
    sys.exit(0 if made.status == "finished" else 1)
