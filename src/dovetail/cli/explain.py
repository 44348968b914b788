"""`dovetail explain`: reasons for a plan, or the cause and remedy of an error code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

import dovetail as dt
from dovetail.cli.engine_option import target_cluster
from dovetail.cli.plan import is_pipeline, plan_run_spec
from dovetail.cli.run_spec_loader import fit_to_cluster, load_run_spec
from dovetail.error_codes import ERROR_CODES, ErrorCode
from dovetail.errors import did_you_mean
from dovetail.scheduling.plan_report import rates_in_other_modes, rates_with_one_more
from dovetail.scheduling.planner import DEFAULT_HEADROOM


@click.command(
    epilog="""\b
Examples:
  dovetail explain examples/video.yaml --cluster "1x(32cpu, 128GB, 2xL40S:48GB)"
  dovetail explain plan.json caption
  dovetail explain DT110
"""
)
@click.argument("file")
@click.argument("stage", required=False)
@click.option("--cluster", "cluster_spec", default="auto", metavar="SPEC", help="A spec, a file, or auto (here).")
@click.option("--mode", metavar="MODE", help="auto, streaming, sequential or waves; not with a plan.json.")
@click.option("--set", "sets", multiple=True, metavar="PATH=VALUE", help="Change a value of the file; may be repeated.")
@click.option("--headroom", type=float, help="As for `dovetail plan`; not with a plan.json.")
@click.option("--json", "as_json", is_flag=True, help="Print data instead of text.")
def explain(
    file: str,
    stage: str | None,
    cluster_spec: str,
    mode: str | None,
    sets: tuple[str, ...],
    headroom: float | None,
    as_json: bool,
) -> None:
    """Explain the plan of FILE (a pipeline, a recipe or a plan.json) or of one STAGE of it; or an error code."""
    if _is_error_code(file):
        entry = _find_error_code(file)
        click.echo(json.dumps(entry.to_dict(), indent=2) if as_json else str(entry))
        return
    if file.endswith(".json") and not is_pipeline(file):
        made = _read_plan(file, cluster_spec, {"--mode": mode, "--set": sets or None, "--headroom": headroom})
    else:
        on = target_cluster("local", cluster_spec)
        job = fit_to_cluster(load_run_spec(file, sets), on.cluster)
        made = plan_run_spec(job, on, mode, DEFAULT_HEADROOM if headroom is None else headroom)
    told = made.explain(stage)
    click.echo(json.dumps(_plan_json(made, stage), indent=2) if as_json else told)


def _is_error_code(text: str) -> bool:
    return text[:2].upper() == "DT" and text[2:].isdecimal() and not Path(text).exists()


def _find_error_code(text: str) -> ErrorCode:
    found = ERROR_CODES.get(text.upper())
    if found is None:
        message = f"there is no error code {text!r}{did_you_mean(text, list(ERROR_CODES))}"
        raise dt.ConfigError(dt.Problem("DT367", message, fixes=("see docs/errors.md for all error codes",)))
    return found


def _read_plan(file: str, cluster_spec: str, options: dict[str, object]) -> dt.Plan:
    given = [name for name, value in options.items() if value is not None]
    if given:
        message = f"{' and '.join(given)} cannot change a plan that is made"
        fix = "leave it out, or explain the pipeline file instead"
        raise dt.ConfigError(dt.Problem("DT036", message, fixes=(fix,), place=file))
    made = dt.Plan.from_json(Path(file).read_text(errors="replace"))
    if cluster_spec != "auto":
        made.require_cluster(dt.Cluster.of(cluster_spec))
    return made


def _plan_json(made: dt.Plan, stage: str | None) -> dict[str, Any]:
    data = made.to_dict()
    if stage is None:
        more = [{"what": what, "rate": rate} for what, rate in rates_with_one_more(made)]
        return {**data, "one_more": more, "other_modes": dict(rates_in_other_modes(made))}
    unit = next(unit for unit in data["units"] if stage in unit["stages"])
    return {
        "stage": stage,
        "unit": unit,
        "seats": data["seats"][stage],
        "rate": made.rate,
        "bottleneck": made.bottleneck,
    }
