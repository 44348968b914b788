"""`dovetail recipe`: reference of worker counts and resource shares for recipe operators on a machine."""

from __future__ import annotations

import json

import click

import dovetail as dt
from dovetail.observe.text_format import align_table


@click.group(
    epilog="""\b
Examples:
  dovetail recipe advise
  dovetail recipe advise --cluster "1x(32cpu, 128GB, 2xgpu:20GB)"
"""
)
def recipe() -> None:
    """What a machine can do for recipes. To plan and run one: dovetail plan FILE, dovetail run FILE."""


@recipe.command(
    epilog="""\b
Examples:
  dovetail recipe advise
  dovetail recipe advise --cluster "1x(32cpu, 128GB, 2xgpu:20GB)"
  dovetail recipe advise --cluster cluster.yaml --json

\b
Every row is a plan of one operator that has the machine to itself; "7 at once" is one of seven such operators that
stream together. You need none of it where auto_op_parallelism is true (the default): say `memory`, and the rest is
worked out for the operators that you really have.
"""
)
@click.option("--cluster", "cluster_spec", default="auto", metavar="SPEC", help="A spec, a file, or auto (here).")
@click.option("--json", "as_json", is_flag=True, help="Print data instead of text.")
def advise(cluster_spec: str, as_json: bool) -> None:
    """Print a quick reference: workers, share of a card and CPUs for light, heavy and CPU operators."""
    from dovetail.recipes.recommendations import CONCURRENT_OPERATORS, recommend

    cluster = dt.Cluster.of(cluster_spec)
    rows = recommend(cluster)
    if as_json:
        click.echo(json.dumps([row.to_dict() for row in rows], indent=2))
        return
    click.echo(f"operators on {cluster.spec()}\n")
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
    for line in align_table([header, *cells]):
        click.echo(line)
    if not any(row.gpus for row in rows):
        click.echo("\nno GPU: operators that would like one run on CPUs, unless they say accelerator: cuda", err=True)
    example = next((row for row in rows if row.memory == "1500MB"), rows[-1])
    click.echo(f"\nby hand:  {example.lines}")
    if example.memory:
        click.echo(f"or only:  memory: '{example.memory}'   # and the rest is worked out")


def _range_text(counts: tuple[int, ...]) -> str:
    if not counts:
        return "-"
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"
