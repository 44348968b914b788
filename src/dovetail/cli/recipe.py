"""`dovetail recipe`: reference of worker counts and resource shares for recipe operators on a machine."""

from __future__ import annotations

import json

import click

from dovetail.cli import SuggestingGroup
from dovetail.cli.options import cluster_option, json_option
from dovetail.observe.terminal import terminal_width
from dovetail.runtime.configured_engine import described_cluster
from dovetail.text_format import fit_table


@click.group(
    cls=SuggestingGroup,
    epilog="""\b
Examples:
  dovetail recipe advise
  dovetail recipe advise --cluster "1x(32cpu, 128GB, 2xgpu:20GB)"
""",
)
def recipe() -> None:
    """Recommendations for recipes. To plan or run a recipe: dovetail plan FILE, dovetail run FILE."""


@recipe.command(
    epilog="""\b
Examples:
  dovetail recipe advise
  dovetail recipe advise --cluster "1x(32cpu, 128GB, 2xgpu:20GB)"
  dovetail recipe advise --cluster cluster.yaml --json

\b
Each row is the plan of one operator that runs alone; "7 at once" is one of
seven such operators that stream together. With auto_op_parallelism: true (the
default), set only `memory`: the other values are computed for the recipe.
"""
)
@cluster_option()
@json_option()
def advise(cluster_spec: str, as_json: bool) -> None:
    """Recommend workers, GPU share and CPUs for light, heavy and CPU-only operators."""
    from dovetail.recipes.recommendations import CONCURRENT_OPERATORS, recommend

    cluster = described_cluster(cluster_spec)
    rows = recommend(cluster)
    if as_json:
        click.echo(json.dumps([row.to_dict() for row in rows], indent=2))
        return
    click.echo(f"operators on {cluster.spec(exact=False)}\n")
    header = ("operator", "num_proc", "per card", "num_gpus", "num_cpus", f"{CONCURRENT_OPERATORS} at once")
    cells = [
        (
            row.what,
            str(row.workers),
            _range_text(row.workers_per_card),
            f"{row.gpus:g}" if row.gpus else "-",
            str(row.cpus),
            f"{_range_text(row.concurrent_workers)} each" if row.concurrent_workers else "do not fit",
        )
        for row in rows
    ]
    for line in fit_table([header, *cells], terminal_width()):
        click.echo(line)
    if not any(row.gpus for row in rows):
        click.echo("\nno GPU: GPU operators run on CPUs, except those with accelerator: cuda", err=True)
    example = next((row for row in rows if row.memory == "1500MB"), rows[-1])
    click.echo(f"\nexplicit:  {example.lines}")
    if example.memory:
        click.echo(f"or only:   memory: '{example.memory}'   # the other values are computed")


def _range_text(counts: tuple[int, ...]) -> str:
    if not counts:
        return "-"
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"
