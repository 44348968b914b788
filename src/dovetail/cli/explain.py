"""dovetail explain: why this many workers, why there, and what one more of everything would bring."""

from __future__ import annotations

import json

import click

from dovetail.cli.plan import load_plan
from dovetail.scheduling.narrate import what_more_would_bring


@click.command(
    epilog="""\b
Examples:
  dovetail explain examples/video.yaml --cluster "1x(32cpu, 128GB, 2xL40S:48GB)"
  dovetail explain plan.json caption
"""
)
@click.argument("file")
@click.argument("stage", required=False)
@click.option(
    "--cluster", "cluster_spec", default="auto", metavar="SPEC", help="A spec, a file, or auto: this machine."
)
@click.option("--mode", default="auto", metavar="MODE", help="auto, streaming, sequential or waves.")
@click.option("--json", "as_json", is_flag=True, help="Print data instead of text.")
def explain(file: str, stage: str | None, cluster_spec: str, mode: str, as_json: bool) -> None:
    """Explain the plan of FILE, a pipeline or a plan.json, or of one STAGE of it."""
    made = load_plan(file, cluster_spec, mode)
    if as_json:
        more = [{"what": what, "rate": rate} for what, rate in what_more_would_bring(made)]
        click.echo(json.dumps({**made.to_dict(), "one_more": more}, indent=2))
        return
    click.echo(made.explain(stage))
