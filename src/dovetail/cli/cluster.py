"""`dovetail cluster`: nodes, GPUs and codecs of a cluster, and how many workers of a requested shape fit."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields
from typing import Any

import click

import dovetail as dt
from dovetail.cli import SuggestingGroup
from dovetail.cli.cluster_diagram import cluster_summary, draw_cluster
from dovetail.cli.engine_option import engine_conflicts, engine_option, ray_cluster_usage
from dovetail.cli.largest_worker import largest_worker
from dovetail.cli.options import FILE_PATH, json_option
from dovetail.errors import did_you_mean
from dovetail.resources.sizes import format_exact_size
from dovetail.scheduling.diagnose.feasibility import WorkerRequest, count_that_fit, require_fit

REQUEST_EXAMPLE = "cpus=2, gpus=0.25, gpu_memory=4GB"


def parse_request(text: str) -> dt.Shape:
    """A shape from comma-separated name=value pairs; names are the fields of dt.Resources, and `ranks`."""
    given = parse_amounts(text)
    ranks = given.pop("ranks", 1)
    return dt.Resources(**given).shape(ranks)


def parse_amounts(text: str) -> dict[str, Any]:
    """Arguments of dt.Resources, and `ranks`, from comma-separated name=value pairs."""
    known = [item.name for item in fields(dt.Resources)]
    known = [name for name in known if name not in ("labels", "custom")] + ["ranks", "labels.NAME", "custom.NAME"]
    given: dict[str, Any] = {"labels": {}, "custom": {}}
    problems = []
    parts = [part.strip() for part in re.split(r",(?![^{]*})", text) if part.strip()]
    if not parts:
        problems.append(dt.Problem("DT024", "the request is empty", fixes=(f"write '{REQUEST_EXAMPLE}'",)))
    for part in parts:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        value = value.strip("'\"") if not value.startswith("{") else value
        group, dot, item = name.partition(".")
        if not equals or not value:
            problems.append(dt.Problem("DT024", f"{part!r} is not name=value", fixes=(f"write '{REQUEST_EXAMPLE}'",)))
        elif dot and group in ("labels", "custom") and item:
            given[group][item] = _parse_value(value) if group == "custom" else value
        elif name in ("labels", "custom") and value.startswith("{"):
            problems += _parse_mapping(given[name], part, value)
        elif name not in known:
            message = f"unknown name {name!r}{did_you_mean(name, known)}"
            problems.append(
                dt.Problem("DT024", message, (f"names: {', '.join(known)}",), (f"write '{REQUEST_EXAMPLE}'",))
            )
        elif name in given:
            problems.append(dt.Problem("DT024", f"{name!r} is given twice", fixes=("remove one of the two",)))
        else:
            given[name] = value if name in ("memory", "gpu_memory", "accelerator") else _parse_value(value)
    if problems:
        raise dt.ConfigError(problems)
    return {name: value for name, value in given.items() if value != {}}


def _parse_mapping(given: dict[str, Any], part: str, value: str) -> list[dt.Problem]:
    """'{"pool": "gpu"}', the Python spelling that fixes use."""
    try:
        given.update(ast.literal_eval(value))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return [dt.Problem("DT024", f"{part!r} is not a mapping", fixes=("write 'labels.pool=gpu, custom.licence=1'",))]
    return []


def _parse_value(text: str) -> object:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


MAX_DRAWN_WORKERS = 10_000


@click.group(cls=SuggestingGroup)
def cluster() -> None:
    """Show nodes, GPUs and codecs, and how many workers fit."""


@cluster.command(
    epilog="""\b
Examples:
  dovetail cluster show
  dovetail cluster show "4x(32cpu, 128GB, 2xA100) + 8x(32cpu, 64GB){pool=cpu}"
  dovetail cluster show cluster.yaml --json
  dovetail cluster show "1x(32cpu, 128GB, 2xgpu:20GB)" --fit "gpu_memory=2GB"
  dovetail cluster show --engine ray:auto
"""
)
@click.argument("spec", default="auto", type=FILE_PATH)
@engine_option("local")
@click.option("--fit", metavar="REQUEST", help=f"Count the workers that fit, for example '{REQUEST_EXAMPLE}'.")
@click.option("--keep-back", metavar="SHARE", type=float, help="Reserve this fraction of the CPUs for the system.")
@json_option()
def show(spec: str, engine: str, fit: str | None, keep_back: float | None, as_json: bool) -> None:
    """Show this machine or the cluster described by SPEC (a text, or a YAML or JSON file).

    With --engine ray:..., show the Ray cluster: capacity, use, holders of resources, and waiting runs.
    """
    problems = engine_conflicts(engine, spec, "SPEC")
    if problems:
        raise dt.ConfigError(problems)
    described, taken, using = (dt.Cluster.of(spec), (), None) if engine == "local" else ray_cluster_usage(engine)
    if keep_back is not None:
        described = described.keeping_back(keep_back)
    ledger = dt.Ledger(described)
    sitting = [(seat,) for seat in taken if ledger.try_take(seat)]
    shape = parse_request(fit) if fit is not None else None
    count = 0
    workers: list[tuple[dt.Seat, ...]] = []
    if shape is not None and fit is not None:
        require_fit([WorkerRequest("one worker", shape)], ledger)
        count = count_that_fit(shape, ledger)
        workers = dt.Placer(ledger, dt.FragmentationScore(dt.Workload({shape: 1}))).fill(shape, MAX_DRAWN_WORKERS)
    for note in described.notes:
        click.echo(f"note: {note}", err=True)
    drawn = ({"in use": sitting} if sitting else {}) | ({fit: workers} if fit is not None else {})
    if as_json:
        data = _cluster_json(described, ledger) | (
            {"fit": {"request": fit, "workers": count}} if fit is not None else {}
        )
        data |= {"ray": using.to_dict()} if using is not None else {}
        click.echo(json.dumps(data, indent=2))
        return
    click.echo(cluster_summary(described))
    click.echo()
    click.echo("\n".join(draw_cluster(ledger, drawn)))
    click.echo()
    if len(workers) < count:
        click.echo(f"the diagram shows the first {len(workers)}")
    if fit is not None:
        click.echo(f"{count} workers fit ({shape.describe() if shape else ''})")
    else:
        click.echo(f"largest worker: {largest_worker(ledger).describe()}")
    for line in using.lines() if using is not None else []:
        click.echo(line)


def _cluster_json(described: dt.Cluster, ledger: dt.Ledger) -> dict[str, Any]:
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
            "gpu_memory": format_exact_size(largest.gpu_memory_bytes),
            "cpus": largest.cpu_milli / 1000,
            "memory": format_exact_size(largest.memory_bytes),
        },
        "notes": list(described.notes),
    }
