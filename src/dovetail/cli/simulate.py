"""dovetail simulate: the same pipeline on a cluster that nobody has."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import click

import dovetail as dt
from dovetail.cli.loading import explained, load_job, on_cluster
from dovetail.observe.summary_lines import next_lines, result_lines
from dovetail.running.simulating import SETTING_UP_S, SPREAD
from dovetail.running.simulating import simulate as run_simulated
from dovetail.scheduling.modes import MODES

OPTIONS = {
    "items": "--items",
    "seed": "--seed",
    "spread": "--spread",
    "setup_s": "--setup",
    "deaths_per_hour": "--deaths",
    "node_losses_per_hour": "--node-losses",
}


@click.command(
    epilog="""\b
Examples:
  dovetail simulate examples/video.yaml --cluster "4x(128cpu, 1TB, 8xL40S:48GB)" --items 20000
  dovetail simulate pipeline.yaml --cluster "100x(64cpu, 256GB, 8xA100:80GB)" --node-losses 0.5 --deaths 2
  dovetail simulate pipeline.yaml --items 5000 --seed 7 --json | jq .steady_rate
"""
)
@click.argument("file")
@click.option("--cluster", "cluster_spec", default="auto", metavar="SPEC", help="A spec, a file, or auto (here).")
@click.option("--items", type=int, metavar="N", help="Source items; default: a minute's work, at most 100,000.")
@click.option("--mode", metavar="MODE", help=f"One of {', '.join(MODES)}; by default as FILE says, or auto.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same run.")
@click.option(
    "--spread", type=float, default=SPREAD, show_default=True, help="How much calls differ: sigma, lognormal."
)
@click.option("--setup", "setup_s", type=float, default=SETTING_UP_S, show_default=True, help="Seconds per worker.")
@click.option("--deaths", type=float, default=0.0, metavar="N", help="Deaths of each worker per hour.")
@click.option("--node-losses", type=float, default=0.0, metavar="N", help="Losses of each node per hour.")
@click.option("--run-dir", metavar="DIR", help="Write the run folder here.")
@click.option("--record", is_flag=True, help="Keep the controller's exact input, for dovetail replay.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def simulate(
    file: str,
    cluster_spec: str,
    items: int | None,
    mode: str | None,
    seed: int,
    spread: float,
    setup_s: float,
    deaths: float,
    node_losses: float,
    run_dir: str | None,
    record: bool,
    as_json: bool,
) -> None:
    """Run the pipeline in FILE on a simulated cluster, in virtual time: same plan, same controller, no work done."""
    cluster = dt.Cluster.of(cluster_spec)
    job = on_cluster(load_job(file), cluster)
    try:
        result = run_simulated(
            job.pipeline,
            cluster,
            items,
            mode=mode or job.mode,
            seed=seed,
            spread=spread,
            setup_s=setup_s,
            deaths_per_hour=deaths,
            node_losses_per_hour=node_losses,
            run_dir=run_dir,
            record=record,
            progress=True,
            what=f"dovetail simulate {file}",
        )
    except dt.InfeasibleError as error:
        raise explained(error, job, cluster, mode) from None
    except dt.ConfigError as error:
        raise dt.ConfigError(_as_options(problem) for problem in error.problems) from None
    if as_json:
        click.echo(json.dumps(result.summary.to_dict(), indent=2))
    else:
        for line in result_lines(result.summary):
            click.echo(line)
        for line in ["", *next_lines(result.summary)]:
            click.echo(line, err=True)
    if result.status != "finished":
        sys.exit(1)


def _as_options(problem: dt.Problem) -> dt.Problem:
    """In the words of the command line instead of Python's."""
    message, fixes = problem.message, problem.fixes
    for keyword, option in OPTIONS.items():
        if message.startswith(f"{keyword}="):
            message = message.replace(f"{keyword}=", f"{option} ", 1)
            fixes = tuple(fix.replace(f"{keyword}=", f"{option} ", 1) for fix in fixes)
    return replace(problem, message=message, fixes=fixes)
