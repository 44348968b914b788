"""dovetail demo: a real pipeline over generated documents on this machine, then a cluster that nobody has."""

from __future__ import annotations

import json
import shlex
import textwrap
import time
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.cli.demo_files import DOCUMENTS, PIPELINE_FILE, RESULTS, STEPS, prepared
from dovetail.cli.engines import there
from dovetail.cli.picture import summary
from dovetail.cli.plan import planned
from dovetail.observe.naming import name_for
from dovetail.observe.summary_lines import headline as run_headline
from dovetail.observe.summary_lines import rate_lines, result_lines
from dovetail.running import job as jobs
from dovetail.running.probing import probe
from dovetail.scheduling.largest import largest_worker
from dovetail.scheduling.narrate import headline, unit_table
from dovetail.scheduling.planner import HEADROOM

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLE_CLUSTER = "1x(32cpu, 128GB, 2xL40S:48GB)"
EXAMPLE_ITEMS = 2000
WITHOUT_ENCODERS = "1x(32cpu, 128GB, 2xH100)"
PROBED = 200
SHOWN = 160
"""Letters of a document."""


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


@click.command(
    epilog="""\b
Examples:
  dovetail demo
  dovetail demo --folder my-demo      # keeps the documents, the pipeline file and its functions there
"""
)
@click.option("--folder", metavar="DIR", help="Write the files there; default: a new temporary folder.")
@click.option(
    "--documents", type=click.IntRange(1, 1_000_000), default=4000, show_default=True, help="How many to generate."
)
def demo(folder: str | None, documents: int) -> None:
    """Run a real pipeline over generated documents here, then plan one for a cluster that nobody has."""
    _heading("This machine")
    here = dt.Cluster.local()
    for note in here.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(summary(here))
    click.echo(f"largest worker: {largest_worker(dt.Ledger(here)).describe()}")
    where = prepared(folder, documents)
    run = _run_documents(where, documents)
    _on_a_cluster_that_nobody_has()
    click.echo()
    for line in next_lines(where, name_for(run)):
        click.echo(line, err=True)


def _run_documents(where: Path, documents: int) -> Path:
    """Its run folder."""
    file = where / PIPELINE_FILE
    job = jobs.load(file)
    jobs.importable(where)
    names = ", ".join(stage.name for stage in job.pipeline)
    _heading(f"{documents} documents, generated into {where}")
    click.echo(f"{PIPELINE_FILE} says what is done to them ({names}), {STEPS} how")
    if documents >= PROBED:
        probe(job.pipeline, job.source, PROBED)
        _heading(f"The plan, after {PROBED} documents went through every stage to see how fast they are")
    else:
        _heading("The plan")
    click.echo("\n".join(_told(planned(job, there("local", "auto"), None, HEADROOM))))
    _heading("The run")
    run = dt.run(job.pipeline, job.source, sink=job.sink, progress=True, what="dovetail demo")
    click.echo("\n".join(result_lines(run.wait())))
    _heading("One document, before and after")
    for line in one_document(where):
        click.echo(line)
    return run.folder


def _told(plan: dt.Plan) -> list[str]:
    return [*headline(plan), "", *unit_table(plan)]


def one_document(where: Path) -> Iterator[str]:
    """The first of which something was cleaned away, as it was and as it is."""
    with (where / RESULTS).open(encoding="utf-8") as results, (where / DOCUMENTS).open(encoding="utf-8") as documents:
        before = (json.loads(line) for line in documents)
        for line in results:
            row = json.loads(line)
            was = next(it for it in before if it["id"] == row["id"])
            if was["text"].count("http") and not row["text"].count("http"):
                yield f"before  {_short(was)}"
                yield f"after   {_short(row)}"
                return


def _short(row: dict[str, Any]) -> str:
    """The end of its text, where the link was, and what else it has."""
    row = {key: value[:3] if isinstance(value, list) else value for key, value in row.items()}
    row["text"] = f"...{row['text'][-SHOWN // 2 :]}"
    return textwrap.shorten(json.dumps(row, ensure_ascii=False), 2 * SHOWN, placeholder=" ...")


def _on_a_cluster_that_nobody_has() -> None:
    pipeline = example()
    started = time.perf_counter()
    plan = dt.plan(pipeline, EXAMPLE_CLUSTER)
    took_ms = (time.perf_counter() - started) * 1000
    _heading(f"And a cluster that is not here: a video pipeline on {EXAMPLE_CLUSTER}, planned in {took_ms:.0f} ms")
    click.echo("\n".join(_told(plan)))
    click.echo()
    simulated = dt.simulate(pipeline, plan=plan, items=EXAMPLE_ITEMS, progress=True, what="dovetail demo")
    click.echo("\n".join([*run_headline(simulated.summary), *rate_lines(simulated.summary)]))
    _heading(f"The same on {WITHOUT_ENCODERS} does not fit, and why")
    try:
        dt.plan(pipeline, WITHOUT_ENCODERS)
    except dt.InfeasibleError as error:
        click.echo(str(error))


def next_lines(where: Path, run: str) -> list[str]:
    """What to type next."""
    file = shlex.quote(str(where / PIPELINE_FILE))
    commands = {
        f"head -n 3 {shlex.quote(str(where / RESULTS))}": "what came out",
        f"dovetail run {file}": "the same again",
        f"dovetail status {run}": "how it went",
        f"dovetail logs {run}": "what its workers printed",
        f"dovetail trace {run} -o trace.json": "its time line, for ui.perfetto.dev",
        f"dovetail explain {file}": "why so many workers, and what one more CPU would bring",
        "dovetail init pipeline": "a file of your own to start from",
    }
    lines = [f"{command}   # {meaning}" for command, meaning in commands.items()]
    return [f"{'' if number else 'Next:':7}{line}" for number, line in enumerate(lines)]


def _heading(text: str) -> None:
    click.echo()
    click.echo(click.style(text, bold=True))
