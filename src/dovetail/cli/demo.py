"""`dovetail demo`: run a pipeline over generated documents, then plan and simulate a video pipeline on a cluster."""

from __future__ import annotations

import json
import shlex
import tempfile
import textwrap
import time
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.cli.cluster_diagram import cluster_summary
from dovetail.cli.engine_option import target_cluster
from dovetail.cli.largest_worker import largest_worker
from dovetail.cli.options import FOLDER_PATH
from dovetail.cli.output_file import file_error, write_file
from dovetail.cli.plan import plan_run_spec
from dovetail.observe.run_folder import run_reference, short_run_id
from dovetail.observe.summary_text import headline_lines as run_headline
from dovetail.observe.summary_text import rate_lines
from dovetail.runtime import run_spec as jobs
from dovetail.runtime.probe import probe
from dovetail.scheduling.plan_report import headline_lines, unit_table
from dovetail.scheduling.planner import DEFAULT_HEADROOM

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PIPELINE_TEXT = """\
# The pipeline of `dovetail demo`. Run it again:  dovetail run pipeline.yaml
# All keys: dovetail schema pipeline
name: documents
source: documents.jsonl
sink: {path: clean.jsonl, ordered: true}

stages:
  - name: clean
    run: steps:clean              # module:name; steps.py is beside this file
    resources: {cpus: 1}
  - name: judge                   # same resources as the stage before: both run in the same workers
    run: steps:judge
    resources: {cpus: 1}
  - name: describe
    run: steps:Describe           # a class: set up once per worker, then lists in, lists out
    resources: {cpus: 1}
    batch_size: 32
"""
DOCUMENTS, RESULTS, PIPELINE_FILE, STEPS = "documents.jsonl", "clean.jsonl", "pipeline.yaml", "steps.py"
SUBJECTS = {
    "gardens": "soil seed root leaf rain shade prune compost tomato hedge orchard frost bloom harvest spade",
    "harbours": "boat tide rope quay cargo crane pilot anchor storm lighthouse ferry net dock hull sailor",
    "kitchens": "flour salt oven knife stew onion butter yeast dough simmer taste pan recipe spice sugar",
    "planets": "orbit moon crater dust probe telescope gravity ring comet star rocket lens signal ice axis",
    "railways": "train track signal bridge station engine tunnel freight guard timetable whistle coal platform axle",
}
FILLER_WORDS = "the of and to in a is that for it as was with by on not at are this have from or had an which one"


def write_demo_files(folder: str | None, documents: int) -> Path:
    """Writes the files of the demo to this folder, or to a new temporary one."""
    try:
        where = Path(tempfile.mkdtemp(prefix="dovetail-demo-") if folder is None else folder).absolute()
        where.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fix = "dovetail demo --folder /a/folder/of/yours"
        raise file_error(folder or "a temporary folder", f"cannot be created: {reason}", fix) from None
    again = f"dovetail demo --folder {shlex.quote(f'{where}-2')}"
    steps = files("dovetail.cli").joinpath("demo_steps.py").read_text(encoding="utf-8")
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in generate_documents(documents))
    for name, text in ((PIPELINE_FILE, PIPELINE_TEXT), (STEPS, steps), (DOCUMENTS, rows)):
        write_file(str(where / name), text, fix=again, fix_if_there=again)
    return where


def generate_documents(count: int) -> Iterator[dict[str, Any]]:
    """Deterministic documents; three in ten are of low quality."""
    chance = Random(7)  # noqa: S311
    subjects = {name: [*words.split(), *words.split(), *FILLER_WORDS.split()] for name, words in SUBJECTS.items()}
    for number in range(count):
        subject = chance.choice(list(subjects))
        yield {"id": number, "subject": subject, "text": _random_text(chance, subjects[subject], chance.random())}


def _random_text(chance: Random, words: list[str], kind: float) -> str:
    if kind < 0.1:
        return " ".join(chance.choices(words, k=chance.randint(2, 12)))
    if kind < 0.2:
        return "".join(chance.choices("#$%^&*()_+=-[]{}<>/|~ abc123", k=chance.randint(200, 600)))
    if kind < 0.3:
        return f"{' '.join(chance.choices(words, k=5))} " * chance.randint(20, 60)
    sentences = [" ".join(chance.choices(words, k=chance.randint(8, 18))).capitalize() for _ in range(20)]
    link = f" see  https://example.org/{chance.randrange(10**6)} \u00a0" if kind > 0.8 else ""
    return ".  ".join(sentences) + f".{link}"


EXAMPLE_CLUSTER = "1x(32cpu, 128GB, 2xL40S:48GB)"
EXAMPLE_ITEMS = 2000
CLUSTER_WITHOUT_ENCODERS = "1x(32cpu, 128GB, 2xH100)"
PROBE_ITEMS = 200
MAX_COLUMNS = 80
MAX_TEXT_CHARS = 160
"""Shown of a document."""


def example_pipeline() -> dt.Pipeline:
    """The pipeline of examples/video.yaml, which is not part of the wheel."""
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
  dovetail demo --folder my-demo   # keep the documents, the file and its code
"""
)
@click.option(
    "--folder",
    metavar="DIR",
    type=FOLDER_PATH,
    help="Folder for the files.  [default: a new temporary folder]",
)
@click.option(
    "--documents",
    type=click.IntRange(1, 1_000_000),
    default=4000,
    show_default=True,
    metavar="N",
    help="Number of documents to generate.",
)
def demo(folder: str | None, documents: int) -> None:
    """Run a sample pipeline on this machine, then plan and simulate a video pipeline on a hypothetical cluster."""
    _heading("This machine")
    here = dt.Cluster.local()
    for note in here.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(cluster_summary(here))
    click.echo(f"largest worker: {largest_worker(dt.Ledger(here)).describe()}")
    where = write_demo_files(folder, documents)
    run = _run_documents(where, documents)
    _show_simulated_cluster()
    click.echo()
    for line in next_lines(where, _short_reference(run)):
        click.echo(line, err=True)


def _run_documents(where: Path, documents: int) -> Path:
    """Runs the demo pipeline; returns the run folder."""
    file = where / PIPELINE_FILE
    job = jobs.load_pipeline_spec(file)
    jobs.add_import_path(where)
    names = ", ".join(stage.name for stage in job.pipeline)
    _heading(f"{documents} generated documents")
    click.echo(f"folder    {where}")
    click.echo(f"pipeline  {PIPELINE_FILE} ({names}), code in {STEPS}")
    if documents >= PROBE_ITEMS:
        probe(job.pipeline, job.source, PROBE_ITEMS)
        _heading(f"Plan, after measuring every stage with {PROBE_ITEMS} documents")
    else:
        _heading("Plan")
    _print_lines(_plan_lines(plan_run_spec(job, target_cluster("local", "auto"), None, DEFAULT_HEADROOM)))
    _heading("Run")
    run = dt.run(job.pipeline, job.source, sink=job.sink, progress=True, what="dovetail demo")
    summary = run.wait()
    _print_lines([*run_headline(summary), *rate_lines(summary)])
    _heading("A document, before and after")
    _print_lines(before_and_after(where))
    return run.folder


def _plan_lines(plan: dt.Plan) -> list[str]:
    """The plan of one node; the column of nodes is left out for terminals of 80 columns."""
    table = unit_table(plan)
    end = table[0].index("nodes")
    return [*headline_lines(plan), "", *(line[:end].rstrip() if len(line) > end else line for line in table)]


def _print_lines(lines: Iterable[str]) -> None:
    """Prints lines, wrapped at 80 columns."""
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        click.echo(
            "\n".join(textwrap.wrap(line, MAX_COLUMNS, subsequent_indent=indent)) if len(line) > MAX_COLUMNS else line
        )


def before_and_after(where: Path) -> Iterator[str]:
    """The first document from which a link was removed."""
    with (where / RESULTS).open(encoding="utf-8") as results, (where / DOCUMENTS).open(encoding="utf-8") as documents:
        before = (json.loads(line) for line in documents)
        for line in results:
            row = json.loads(line)
            was = next(it for it in before if it["id"] == row["id"])
            if was["text"].count("http") and not row["text"].count("http"):
                yield f"before  {_shortened(was)}"
                yield f"after   {_shortened(row)}"
                return


def _shortened(row: dict[str, Any]) -> str:
    """The end of the text, where the link was, and the other fields."""
    row = {key: value[:3] if isinstance(value, list) else value for key, value in row.items()}
    row["text"] = f"...{row['text'][-MAX_TEXT_CHARS // 2 :]}"
    return textwrap.shorten(json.dumps(row, ensure_ascii=False), 2 * MAX_TEXT_CHARS, placeholder=" ...")


def _show_simulated_cluster() -> None:
    pipeline = example_pipeline()
    started = time.perf_counter()
    plan = dt.plan(pipeline, EXAMPLE_CLUSTER)
    took_ms = (time.perf_counter() - started) * 1000
    _heading(f"A video pipeline on a hypothetical cluster, planned in {took_ms:.0f} ms")
    click.echo(f"cluster  {EXAMPLE_CLUSTER}")
    _print_lines(_plan_lines(plan))
    click.echo()
    simulated = dt.simulate(pipeline, plan=plan, items=EXAMPLE_ITEMS, progress=True, what="dovetail demo")
    _print_lines([*run_headline(simulated.summary), *rate_lines(simulated.summary)])
    _heading(f"The same pipeline does not fit on {CLUSTER_WITHOUT_ENCODERS}")
    try:
        dt.plan(pipeline, CLUSTER_WITHOUT_ENCODERS)
    except dt.InfeasibleError as error:
        _print_lines(str(error).splitlines())


def _short_reference(run: Path) -> str:
    """Date, time and random part of the id, which are unique without the name; a path where an id would not do."""
    reference = run_reference(run)
    return reference if "/" in reference else short_run_id(reference)


def next_lines(where: Path, run: str) -> list[str]:
    """Next commands to try."""
    file = shlex.quote(str(where / PIPELINE_FILE))
    commands = {
        f"head -n 3 {shlex.quote(str(where / RESULTS))}": "the results",
        f"dovetail run {file}": "run it again",
        f"dovetail status {run}": "the summary",
        f"dovetail logs {run}": "the output of workers",
        f"dovetail trace {run} -o trace.json": "Perfetto timeline",
        f"dovetail explain {file}": "reasons",
        "dovetail init pipeline": "start your own pipeline",
    }
    lines = [f"{command}  # {meaning}" for command, meaning in commands.items()]
    return [f"{'' if number else 'Next:':7}{line}" for number, line in enumerate(lines)]


def _heading(text: str) -> None:
    click.echo()
    click.echo(click.style(text, bold=True))
