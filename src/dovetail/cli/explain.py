"""`dovetail explain`: reasons for a plan, or the cause and remedy of an error code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.actors import is_actors_file
from dovetail.cli.engine_option import engine_conflicts, engine_option, target_cluster
from dovetail.cli.options import (
    cluster_option,
    complete_stages_of_file,
    file_argument,
    json_option,
    mode_option,
    no_profiles_option,
    set_option,
    source_option,
)
from dovetail.cli.plan import is_pipeline, plan_run_spec
from dovetail.cli.run_spec_loader import fit_to_cluster, load_run_spec, recipe_of
from dovetail.documents.configuration import ConfiguredText
from dovetail.documents.parser import read_document
from dovetail.error_codes import ERROR_CODES, ErrorCode
from dovetail.errors import did_you_mean
from dovetail.observe.terminal import terminal_width
from dovetail.pipeline.option_renderer import OptionRenderer
from dovetail.scheduling.plan_report import plan_text, rates_in_other_modes, rates_with_one_more
from dovetail.scheduling.planner import DEFAULT_HEADROOM

if TYPE_CHECKING:
    from dovetail.runtime.run_spec import RunSpec
    from dovetail.scheduling.improvements import Improvement


@click.command(
    epilog="""\b
Examples:
  dovetail explain examples/video.yaml --cluster "1x(32cpu, 128GB, 2xL40S)"
  dovetail explain pipeline.yaml --set stages.caption.resources.gpus=1
  dovetail explain plan.json caption
  dovetail explain actors.yaml trainer
  dovetail explain DT110
"""
)
@file_argument()
@click.argument("stage", required=False, shell_complete=complete_stages_of_file)
@cluster_option()
@engine_option("local")
@mode_option()
@click.option("--headroom", type=float, metavar="FACTOR", help="See dovetail plan.")
@set_option()
@source_option("Use the speeds that were measured with this source.")
@no_profiles_option()
@json_option()
def explain(
    file: str,
    stage: str | None,
    cluster_spec: str,
    engine: str,
    mode: str | None,
    headroom: float | None,
    sets: tuple[str, ...],
    source: str | None,
    no_profiles: bool,
    as_json: bool,
) -> None:
    """Explain the plan of FILE (a pipeline, recipe, actors or plan.json), or of one STAGE or role; or an error code.

    Shows the reasons for worker counts and placement, and the gain from one more node, GPU or CPU.
    """
    if _is_error_code(file):
        entry = _find_error_code(file)
        click.echo(json.dumps(entry.to_dict(), indent=2) if as_json else str(entry))
        return
    problems = engine_conflicts(engine, cluster_spec)
    if problems:
        raise dt.ConfigError(problems)
    if not file.endswith(".json") and is_actors_file(read_document(file).data):
        from dovetail.cli.actors_plan import print_explanation  # late: most files are pipelines

        options = {"--mode": mode, "--headroom": headroom, "--source": source}
        print_explanation(file, sets, stage, target_cluster(engine, cluster_spec), as_json, options)
        return
    improvements: list[Improvement] = []
    if file.endswith(".json") and not is_pipeline(file):
        given: dict[str, object] = {"--mode": mode, "--headroom": headroom, "--set": sets or None, "--source": source}
        made = _read_plan(file, cluster_spec, given | {"--no-profiles": no_profiles or None})
    else:
        on = target_cluster(engine, cluster_spec)
        job = fit_to_cluster(load_run_spec(file, sets, source), on.cluster)
        spare = DEFAULT_HEADROOM if headroom is None else headroom
        made = plan_run_spec(job, on, mode, spare, profiled=not no_profiles)
        if stage is None and recipe_of(job) is None and not no_profiles:
            improvements = _find_improvements(job, made)
    text = plan_text(made, terminal_width()) if stage is None else made.explain(stage)
    renderer = OptionRenderer(made.cluster)
    if as_json:
        data = _plan_json(made, stage) | {"improvements": [one.to_dict(renderer) for one in improvements]}
        click.echo(json.dumps(data, indent=2))
        return
    click.echo(text)
    if improvements:
        click.echo("\nchanges with the largest gains")
    for line in [line for one in improvements for line in one.lines(renderer)]:
        click.echo(f"  {line}")


def _find_improvements(job: RunSpec, made: dt.Plan) -> list[Improvement]:
    from dovetail.runtime.stage_profiles import load_profiles, source_sink_kinds
    from dovetail.scheduling.improvements import find_improvements

    return find_improvements(job.pipeline, made, load_profiles(job.pipeline, made.cluster, *source_sink_kinds(job)))


def _is_error_code(text: str) -> bool:
    return text[:2].upper() == "DT" and text[2:].isdecimal() and not Path(text).exists()


def _find_error_code(text: str) -> ErrorCode:
    found = ERROR_CODES.get(text.upper())
    if found is None:
        message = f"unknown error code {text!r}{did_you_mean(text, list(ERROR_CODES))}"
        raise dt.ConfigError(dt.Problem("DT367", message, fixes=("see docs/errors.md for all error codes",)))
    return found


def _read_plan(file: str, cluster_spec: str, options: dict[str, object]) -> dt.Plan:
    given = [name for name, value in options.items() if value is not None]
    if given:
        message = f"{' and '.join(given)} cannot change an existing plan"
        fix = "remove the option, or explain the pipeline file instead"
        raise dt.ConfigError(dt.Problem("DT036", message, fixes=(fix,), place=file))
    made = dt.Plan.from_json(Path(file).read_text(errors="replace"))
    if cluster_spec != "auto" and not isinstance(cluster_spec, ConfiguredText):
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
