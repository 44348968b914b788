"""dovetail demo: this machine, an example pipeline planned and simulated, and a misfit explained."""

from __future__ import annotations

import time

import click

import dovetail as dt
from dovetail.cli.picture import picture, summary
from dovetail.observe.summary_lines import result_lines
from dovetail.scheduling.largest import largest_worker
from dovetail.scheduling.narrate import headline, unit_table, use_lines, what_more_would_bring

EXAMPLE_CLUSTER = "1x(32cpu, 128GB, 2xL40S:48GB)"
EXAMPLE_ITEMS = 2000
WITHOUT_ENCODERS = "1x(32cpu, 128GB, 2xH100)"


def example() -> dt.Pipeline:
    """The pipeline of examples/video.yaml, which is not there when Dovetail was installed from a wheel."""
    stages = {
        "download": (dt.Resources(cpus=1, memory="1GB"), 4),
        "decode": (dt.Resources(cpus=1, nvdecs=1), 6),
        "caption": (dt.Resources(cpus=1, gpus=0.25, gpu_memory="10GB"), 3.5),
        "embed": (dt.Resources(cpus=2, gpus=1), 15),
        "encode": (dt.Resources(cpus=1, nvencs=1), 5),
        "write": (dt.Resources(cpus=0.5), 40),
    }
    return dt.Pipeline(
        [dt.Stage(name, f"video:{name}", resources, rate=rate) for name, (resources, rate) in stages.items()],
        name="video",
    )


@click.command(epilog="Example:\n\n  dovetail demo")
def demo() -> None:
    """Show this machine, plan and simulate an example pipeline, and explain what does not fit."""
    _heading("This machine")
    here = dt.Cluster.local()
    for note in here.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(summary(here))
    click.echo(f"largest worker: {largest_worker(dt.Ledger(here)).describe()}")

    pipeline = example()
    started = time.perf_counter()
    plan = dt.plan(pipeline, EXAMPLE_CLUSTER)
    took_ms = (time.perf_counter() - started) * 1000
    _heading(f"A video pipeline on {EXAMPLE_CLUSTER}, planned in {took_ms:.0f} ms")
    click.echo("\n".join([*headline(plan), "", *unit_table(plan), "", *use_lines(plan)]))

    _heading("Who sits where")
    ledger = dt.Ledger(plan.cluster, (seat for seats in plan.seats.values() for seat in seats))
    click.echo("\n".join(picture(ledger, {name: [(seat,) for seat in seats] for name, seats in plan.seats.items()})))

    _heading("What one more would bring")
    for what, rate in what_more_would_bring(plan):
        click.echo(f"  {what}: {rate:.4g} items/s")

    _heading(f"The same, run in virtual time: {EXAMPLE_ITEMS} items")
    simulated = dt.simulate(pipeline, plan=plan, items=EXAMPLE_ITEMS, progress=True, what="dovetail demo")
    click.echo("\n".join(result_lines(simulated.summary)))

    _heading(f"And a plan for {WITHOUT_ENCODERS}")
    try:
        dt.plan(pipeline, WITHOUT_ENCODERS)
    except dt.InfeasibleError as error:
        click.echo(str(error))
    click.echo()
    click.echo("Next:  dovetail status last", err=True)
    click.echo("       dovetail init pipeline", err=True)
    click.echo(f'       dovetail explain pipeline.yaml --cluster "{EXAMPLE_CLUSTER}"', err=True)


def _heading(text: str) -> None:
    click.echo()
    click.echo(click.style(text, bold=True))
