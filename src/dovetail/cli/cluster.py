"""dovetail cluster: what there is, and what would fit."""

from __future__ import annotations

import json
from typing import Any

import click

import dovetail as dt
from dovetail.cli.engines import contradiction, engine_option, used
from dovetail.cli.picture import picture, summary
from dovetail.cli.request import EXAMPLE, parse_request
from dovetail.resources.sizes import exact_size
from dovetail.scheduling.explain import Wish, largest_count, require
from dovetail.scheduling.largest import largest_worker

DRAWN_LIMIT = 10_000


@click.group()
def cluster() -> None:
    """What there is: nodes, cards, codecs, and what would fit."""


@cluster.command(
    epilog="""\b
Examples:
  dovetail cluster show
  dovetail cluster show "4x(32cpu, 128GB, 2xA100:40GB) + 16x(32cpu, 64GB){pool=cpu}"
  dovetail cluster show cluster.yaml --json
  dovetail cluster show "1x(32cpu, 128GB, 2xgpu:20GB)" --fit "gpu_memory=1500MB"
  dovetail cluster show --engine ray:auto
"""
)
@click.argument("spec", default="auto")
@engine_option("local")
@click.option("--fit", metavar="REQUEST", help=f"Fill it with workers of one kind, such as '{EXAMPLE}'.")
@click.option("--keep-back", metavar="SHARE", type=float, help="Keep this share of the CPUs for the system: 0.05.")
@click.option("--json", "as_json", is_flag=True, help="Print data instead of a picture.")
def show(spec: str, engine: str, fit: str | None, keep_back: float | None, as_json: bool) -> None:
    """Show this machine, the cluster described by SPEC (a text, or a YAML or JSON file), or with --engine ray:... that
    of Ray: what there is of it, what is used, who sits where, and who waits."""
    problems = contradiction(engine, spec, "SPEC")
    if problems:
        raise dt.ConfigError(problems)
    described, taken, using = (dt.Cluster.of(spec), (), None) if engine == "local" else used(engine)
    if keep_back is not None:
        described = described.keeping_back(keep_back)
    ledger = dt.Ledger(described)
    sitting = [(seat,) for seat in taken if ledger.takes(seat)]
    shape = parse_request(fit) if fit is not None else None
    count = 0
    workers: list[tuple[dt.Seat, ...]] = []
    if shape is not None and fit is not None:
        require([Wish("one worker", shape)], ledger)
        count = largest_count(shape, ledger)
        workers = dt.Placer(ledger, dt.FragmentationScore(dt.Workload({shape: 1}))).fill(shape, DRAWN_LIMIT)
    for note in described.notes:
        click.echo(f"note: {note}", err=True)
    drawn = ({"in use": sitting} if sitting else {}) | ({fit: workers} if fit is not None else {})
    if as_json:
        data = _data(described, ledger) | ({"fit": {"request": fit, "workers": count}} if fit is not None else {})
        data |= {"ray": using.to_dict()} if using is not None else {}
        click.echo(json.dumps(data, indent=2))
        return
    click.echo(summary(described))
    click.echo()
    click.echo("\n".join(picture(ledger, drawn)))
    click.echo()
    if len(workers) < count:
        click.echo(f"drawn: the first {len(workers)}")
    if fit is not None:
        click.echo(f"{count} workers fit ({shape.describe() if shape else ''})")
    else:
        click.echo(f"largest worker: {largest_worker(ledger).describe()}")
    for line in using.lines() if using is not None else []:
        click.echo(line)


def _data(described: dt.Cluster, ledger: dt.Ledger) -> dict[str, Any]:
    nodes = described.nodes
    largest = largest_worker(ledger)
    return {
        **described.to_dict(),
        "spec": described.spec(),
        "totals": {
            "nodes": len(nodes),
            "cpus": sum(node.usable_cpu_milli for node in nodes) / 1000,
            "memory_bytes": sum(node.memory_bytes for node in nodes),
            "gpus": sum(len(node.gpus) for node in nodes),
            "gpu_memory_bytes": sum(gpu.memory_bytes for node in nodes for gpu in node.gpus),
            "nvdecs": sum(gpu.nvdecs for node in nodes for gpu in node.gpus),
            "nvencs": sum(gpu.nvencs for node in nodes for gpu in node.gpus),
        },
        "largest": {
            "node": largest.node,
            "gpus": largest.whole_gpus or largest.gpu_share_milli / 1000,
            "gpu_memory": exact_size(largest.gpu_memory_bytes),
            "cpus": largest.cpu_milli / 1000,
            "memory": exact_size(largest.memory_bytes),
        },
        "notes": list(described.notes),
    }
