"""dovetail demo: this machine, and an example cluster being filled."""

from __future__ import annotations

import time

import click

import dovetail as dt
from dovetail.cli.picture import picture, summary
from dovetail.scheduling.explain import Wish, problems_of
from dovetail.scheduling.largest import largest_worker

EXAMPLE_CLUSTER = "2x(64cpu, 256GB, 4xL40S) + 1x(32cpu, 128GB, 2xH100)"
STAGES = {
    "download": (dt.Resources(cpus=2, memory="2GB"), 8),
    "decode (NVDEC)": (dt.Resources(cpus=2, nvdecs=1), 12),
    "caption (quarter GPU)": (dt.Resources(cpus=1, gpus=0.25, gpu_memory="10GB"), 14),
    "embed (whole GPU)": (dt.Resources(cpus=4, gpus=1), 5),
    "encode (NVENC)": (dt.Resources(cpus=2, nvencs=1), 6),
}


@click.command(epilog="Example:\n\n  dovetail demo")
def demo() -> None:
    """Show this machine, then fill an example cluster and explain what does not fit."""
    _heading("This machine")
    here = dt.Cluster.local()
    for note in here.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(summary(here))
    click.echo(f"largest worker: {largest_worker(dt.Ledger(here)).describe()}")

    _heading(f"An example cluster: {EXAMPLE_CLUSTER}")
    cluster = dt.Cluster.parse(EXAMPLE_CLUSTER)
    ledger = dt.Ledger(cluster)
    click.echo(summary(cluster))

    shapes = {name: resources.shape() for name, (resources, _) in STAGES.items()}
    workload = dt.Workload([(shapes[name], count) for name, (_, count) in STAGES.items()])
    placer = dt.Placer(ledger, dt.FragmentationScore(workload))
    started = time.perf_counter()
    seated = {name: placer.fill(shapes[name], count) for name, (_, count) in STAGES.items()}
    took_ms = (time.perf_counter() - started) * 1000
    workers = sum(map(len, seated.values()))
    _heading(f"{workers} workers of a video pipeline, placed in {took_ms:.1f} ms")
    click.echo("\n".join(picture(ledger, seated)))

    _heading("And what does not fit is explained")
    for problem in problems_of(
        [Wish("stage 'train'", dt.Resources(cpus=8, gpus=2, accelerator="H100").shape(), 2)], ledger
    ):
        click.echo(problem.render())
    click.echo()
    click.echo("Next:  dovetail cluster show    dovetail cluster show --help")


def _heading(text: str) -> None:
    click.echo()
    click.echo(click.style(text, bold=True))
