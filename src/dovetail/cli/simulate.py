"""`dovetail simulate`: simulate a pipeline, actors or a queue of jobs on hypothetical machines."""

from __future__ import annotations

import json
import sys

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
    run_dir_option,
    set_option,
    source_option,
)
from dovetail.cli.run_spec_loader import fit_to_cluster, infeasible_error_for_file, load_run_spec
from dovetail.documents.parser import read_document
from dovetail.jobs import is_job_simulation
from dovetail.observe.summary_text import next_step_lines, result_lines
from dovetail.pipeline.option_renderer import OptionRenderer
from dovetail.runtime.run_spec import add_import_path
from dovetail.runtime.simulation import DEFAULT_SETUP_S, DEFAULT_SPREAD, Simulation
from dovetail.runtime.simulation import simulate as run_simulated
from dovetail.runtime.stage_profiles import load_profiles, source_sink_kinds

OPTION_NAMES = {
    "items": "limit",
    "setup_s": "setup",
    "deaths_per_hour": "deaths",
    "node_losses_per_hour": "node_losses",
}
"""Arguments of dt.simulate whose option has another name."""
JOB_PARAMETERS = ("file", "sets", "seed", "as_json", "color")
"""Parameters that apply to a jobs file."""


@click.command(
    epilog="""\b
Examples:
  dovetail simulate examples/video.yaml --cluster "4x(128cpu, 1TB, 8xL40S)"
  dovetail simulate pipeline.yaml --cluster "100x(64cpu, 256GB, 8xA100)" \\
    --node-losses 0.5 --deaths 2
  dovetail simulate pipeline.yaml --limit 5000 --json | jq .steady_rate
  dovetail simulate examples/actors/scaled.yaml --cluster "1x(16cpu, 32GB)"
  dovetail simulate examples/jobs.yaml --set workers.gpu.count=3
"""
)
@file_argument()
@cluster_option()
@click.option(
    "--limit",
    type=int,
    metavar="N",
    help="Number of source items.  [default: one minute of work, at most 100,000]",
)
@mode_option()
@engine_option("local")
@set_option()
@source_option("Use the speeds that were measured with this source.")
@click.option(
    "--seed", metavar="N", type=int, default=0, show_default=True, help="Random seed; the same seed gives the same run."
)
@click.option(
    "--spread",
    type=float,
    default=DEFAULT_SPREAD,
    show_default=True,
    metavar="SIGMA",
    help="Variation of call times: sigma of a lognormal distribution.",
)
@click.option(
    "--setup",
    "setup_s",
    type=float,
    metavar="SECONDS",
    help=f"Setup time of a worker.  [default: as measured in earlier runs, else {DEFAULT_SETUP_S:g}]",
)
@click.option("--deaths", type=float, default=0.0, metavar="N", help="Crashes per worker and hour.")
@click.option("--node-losses", type=float, default=0.0, metavar="N", help="Losses per node and hour.")
@no_profiles_option()
@run_dir_option()
@click.option("--record", is_flag=True, help="Record the controller's input for dovetail replay.")
@json_option("Print the summary as JSON.")
def simulate(
    file: str,
    cluster_spec: str,
    limit: int | None,
    source: str | None,
    engine: str,
    mode: str | None,
    sets: tuple[str, ...],
    seed: int,
    spread: float,
    setup_s: float | None,
    deaths: float,
    node_losses: float,
    no_profiles: bool,
    run_dir: str | None,
    record: bool,
    as_json: bool,
) -> None:
    """Simulate the pipeline, recipe, actors or jobs in FILE in virtual time.

    Plan and controller are those of a real run; no work is done. Speeds are those of earlier runs, as for dovetail
    plan. Actors have a call pattern and service times in FILE (key simulate), and their scaling is simulated. A jobs
    file has workers and jobs that arrive, and the decisions are those of a real queue; of the options, --set, --seed
    and --json apply to it.
    """
    problems = engine_conflicts(engine, cluster_spec)
    if problems:
        raise dt.ConfigError(problems)
    data = read_document(file).data
    if is_job_simulation(data):
        _print_job_simulation(file, sets, seed, as_json)
        return
    cluster = target_cluster(engine, cluster_spec).cluster
    if is_actors_file(data):
        from dovetail.cli.actors_plan import print_simulation  # late: most files are pipelines

        not_for_actors = {
            "--limit": limit,
            "--mode": mode,
            "--source": source,
            "--spread": spread != DEFAULT_SPREAD,
            "--setup": setup_s,
            "--deaths": deaths > 0,
            "--node-losses": node_losses > 0,
            "--run-dir": run_dir,
            "--record": record,
        }
        print_simulation(file, sets, cluster, seed, as_json, not_for_actors)
        return
    job = fit_to_cluster(load_run_spec(file, sets, source), cluster)
    add_import_path(job.file.parent)  # measured speeds are found by the code of the stages
    try:
        result = run_simulated(
            job.pipeline,
            cluster,
            limit,
            mode=mode or job.mode,
            seed=seed,
            spread=spread,
            setup_s=setup_s,
            deaths_per_hour=deaths,
            node_losses_per_hour=node_losses,
            profiles={} if no_profiles else load_profiles(job.pipeline, cluster, *source_sink_kinds(job)),
            run_dir=run_dir,
            record=record,
            progress=True,
            what=f"dovetail simulate {file}",
        )
    except dt.InfeasibleError as error:
        raise infeasible_error_for_file(error, job, cluster, mode) from None
    except dt.ConfigError as error:
        raise SimulateRenderer().error(error) from None
    _print_result(result, as_json=as_json)
    if result.status != "finished":
        sys.exit(1)


def _print_result(result: Simulation, *, as_json: bool) -> None:
    for note in result.plan.assumptions:
        click.echo(f"note: {note}", err=True)
    if result.plan.rate is None:
        click.echo("note: speeds are unknown: the simulated rate is not a prediction", err=True)
    if as_json:
        click.echo(json.dumps(result.summary.to_dict(), indent=2))
    else:
        for line in result_lines(result.summary):
            click.echo(line)
        for line in ["", *next_step_lines(result.summary)]:
            click.echo(line, err=True)


def _print_job_simulation(file: str, sets: tuple[str, ...], seed: int, as_json: bool) -> None:
    context = click.get_current_context()
    given = [
        one.opts[0]
        for one in context.command.params
        if one.name not in JOB_PARAMETERS
        and context.get_parameter_source(str(one.name)) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        message = f"{' and '.join(given)} cannot be used with a jobs file: workers, times and deaths are in it"
        raise dt.ConfigError(dt.Problem("DT371", message, fixes=(f"remove {' and '.join(given)}",), place=file))
    result = dt.simulate_jobs(file, seed=seed, sets=sets)
    click.echo(json.dumps(result.to_dict(), indent=2) if as_json else str(result))


class SimulateRenderer(OptionRenderer):
    """Problems of arguments of dt.simulate, as options."""

    def name(self, setting: str) -> str:
        return super().name(OPTION_NAMES.get(setting, setting))
