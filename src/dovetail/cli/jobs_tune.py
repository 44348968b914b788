"""`dovetail jobs tune`: measure a job function at several numbers of slots, and say which number to use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.cli.jobs_submit import find_function
from dovetail.cli.options import FILE_PATH, SuggestingChoice, json_option
from dovetail.cli.queue_option import BAD_JOBS_ARGUMENT
from dovetail.cli.worker import ISOLATIONS, WorkerRenderer
from dovetail.documents.parser import parse_document, read_document
from dovetail.errors import did_you_mean, nearest_word, short_repr
from dovetail.jobs.application import Application
from dovetail.resources.sizes import format_size
from dovetail.text_format import align_table, format_count, format_duration, format_rate, wrap_labelled

if TYPE_CHECKING:
    from dovetail.jobs.workers.tuning import ArgumentSample, SlotMeasurement, SlotRecommendation

FILE_KEYS = ("function", "samples", "resources", "isolation", "timeout")
EXAMPLE_FILE = "{function: 'tasks:train', samples: [{rate: 0.1}, {rate: 0.2}]}"
DEFAULT_SLOTS = "1,2,4,8"
MAX_SLOTS = 10_000
WIDTH = 80


@click.command(
    epilog="""\b
Examples:
  dovetail jobs tune tasks:train --args-file samples.jsonl --slots 1,2,4,8
  dovetail jobs tune tune.yaml --jobs 100
  dovetail jobs tune tune.yaml --resources "8cpu, 32GB" --json | jq .use

\b
FILE is YAML:
  function: tasks:train
  samples: [{rate: 0.1}, {rate: 0.2}]
  resources: {cpus: 2}     # as in submit, like isolation and timeout
A sample is a mapping (arguments by name) or a list (positional arguments).
With MODULE:FUNCTION, --args-file has one sample per line, as JSON or YAML;
without it, the function is called without arguments.

\b
Every setting runs the samples in a worker of its own, with a store in memory.
Nothing is submitted to a queue, but side effects of the jobs (files,
requests) do happen. Failed jobs are not retried.

\b
Exit codes: 0 measured, 1 all jobs of a setting failed, 2 usage or
configuration, 3 a job does not fit.
"""
)
@click.argument("file", metavar="FILE|MODULE:FUNCTION", type=FILE_PATH)
@click.option("--args-file", metavar="FILE", type=FILE_PATH, help="One sample per line, with MODULE:FUNCTION.")
@click.option("--slots", default=DEFAULT_SLOTS, show_default=True, metavar="N,N", help="Numbers of slots to measure.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Jobs per setting.  [default: all samples, and at least 4 per slot of the largest setting]",
)
@click.option(
    "--isolation",
    type=SuggestingChoice(ISOLATIONS),
    help="Isolation of jobs that neither set nor need one.  [default: as dovetail worker]",
)
@click.option(
    "--resources", metavar="SPEC", help="What jobs may use: '8cpu, 32GB'.  [default: this machine, shared by a claim]"
)
@json_option("Print the figures and the choice as JSON.")
def tune(
    file: str,
    args_file: str | None,
    slots: str,
    jobs: int | None,
    isolation: str | None,
    resources: str | None,
    as_json: bool,
) -> None:
    """Measure a job function at several numbers of slots of a worker, and recommend one.

    The choice is the smallest number whose rate is within 5 % of the best one.
    """
    from dovetail.jobs.workers.tuning import TunedFunction, default_jobs, measure, recommend

    settings = _settings(slots)
    reference, samples, options = _samples_of(file, args_file)
    function = find_function(reference)
    application = Application.load([reference.rpartition(":")[0]])
    tuned = TunedFunction(function, application, samples, options)
    count = jobs or default_jobs(max(settings), len(samples))
    given: dict[str, Any] = {"isolation": isolation, "resources": resources}
    worker_options = {name: value for name, value in given.items() if value is not None}
    measured = []
    for number in settings:
        click.echo(f"{format_count(number, 'slot')}: {format_count(count, 'job')}", err=True)
        try:
            measured.append(measure(tuned, number, count, worker_options))
        except dt.ConfigError as error:
            raise WorkerRenderer().error(error) from None
    chosen = recommend(measured)
    if as_json:
        click.echo(json.dumps(_json(reference, measured, chosen), indent=2))
        return
    for line in report(measured, chosen):
        click.echo(line)


def report(measured: list[SlotMeasurement], chosen: SlotRecommendation) -> list[str]:
    """The table, the choice and the notes, at most 80 columns wide."""
    rows = [("slots", "jobs", "failed", "took", "rate", "p95", "CPU/job", "memory")]
    for one in measured:
        cpu = "-" if one.cpu_s is None else _seconds(one.cpu_s)
        sizes = (format_duration(one.seconds), format_rate(one.rate), _seconds(one.p95_s), cpu)
        rows.append((str(one.slots), str(one.jobs), str(one.failed or "-"), *sizes, format_size(one.peak_bytes)))
    use = wrap_labelled(f"use   {chosen.slots}: {chosen.reason}", WIDTH, 6)
    notes = [line for note in chosen.notes for line in wrap_labelled(f"note: {note}", WIDTH, 6)]
    return [*align_table(rows, 0), *use, *notes]


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else format_duration(seconds)


def _json(reference: str, measured: list[SlotMeasurement], chosen: SlotRecommendation) -> dict[str, Any]:
    return {
        "function": reference,
        "settings": [asdict(one) for one in measured],
        "use": chosen.slots,
        "reason": chosen.reason,
        "notes": list(chosen.notes),
    }


# --- arguments


def _settings(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and 1 <= int(word) <= MAX_SLOTS for word in words):
        message = f"--slots {short_repr(text)} is not a list of whole numbers from 1 to {MAX_SLOTS:,}"
        raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, message, fixes=(f"--slots {DEFAULT_SLOTS}",)))
    return sorted({int(word) for word in words})


def _samples_of(file: str, args_file: str | None) -> tuple[str, list[ArgumentSample], dict[str, Any]]:
    """Reference of the function, samples, and options of its jobs."""
    from dovetail.jobs.workers.tuning import ArgumentSample

    if ":" in file and not Path(file).exists():
        return file, [ArgumentSample()] if args_file is None else _read_samples(args_file), {}
    if args_file is not None:
        message = "--args-file is for MODULE:FUNCTION; a file has its samples itself"
        raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, message, fixes=("leave out --args-file",)))
    data = read_document(file).data
    problems = _file_problems(data, file)
    if problems:
        raise dt.ConfigError(problems)
    options = {name: data[name] for name in FILE_KEYS[2:] if name in data}
    return str(data["function"]), [_sample(one) for one in data.get("samples", [{}])], options


def _file_problems(data: object, file: str) -> list[dt.Problem]:
    if not isinstance(data, Mapping):
        return [dt.Problem(BAD_JOBS_ARGUMENT, "is not a mapping", fixes=(EXAMPLE_FILE,), place=file)]
    problems = []
    for key in data:
        if key not in FILE_KEYS:
            message = f"unknown key {key!r}{did_you_mean(str(key), FILE_KEYS)}"
            fixes = (f"{nearest_word(str(key), FILE_KEYS) or 'samples'}: ...",)
            problems.append(dt.Problem(BAD_JOBS_ARGUMENT, message, fixes=fixes, place=file))
    if not isinstance(data.get("function"), str):
        message = "function is not the name of a job function"
        problems.append(dt.Problem(BAD_JOBS_ARGUMENT, message, fixes=("function: tasks:train",), place=file))
    samples = data.get("samples", [{}])
    if not isinstance(samples, list) or not samples or not all(map(_is_sample, samples)):
        message = "samples is not a list of mappings or lists"
        problems.append(dt.Problem(BAD_JOBS_ARGUMENT, message, fixes=("samples: [{rate: 0.1}]",), place=file))
    return problems


def _read_samples(file: str) -> list[ArgumentSample]:
    """One sample per line, as JSON or YAML."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, reason, fixes=("--args-file FILE",), place=file)) from None
    found: list[ArgumentSample] = []
    problems: list[dt.Problem] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            data = parse_document(line, place).data
        except dt.ConfigError as error:
            problems += error.problems
            continue
        if _is_sample(data):
            found.append(_sample(data))
        else:
            message = f"{short_repr(data)} is neither a mapping (arguments by name) nor a list"
            problems.append(dt.Problem(BAD_JOBS_ARGUMENT, message, fixes=('{"rate": 0.1}',), place=place))
    if not (found or problems):
        problems.append(dt.Problem(BAD_JOBS_ARGUMENT, "has no samples", fixes=('{"rate": 0.1}',), place=file))
    if problems:
        raise dt.ConfigError(problems)
    return found


def _is_sample(data: object) -> bool:
    return isinstance(data, list) or (isinstance(data, Mapping) and all(isinstance(name, str) for name in data))


def _sample(data: Any) -> ArgumentSample:
    from dovetail.jobs.workers.tuning import ArgumentSample

    return ArgumentSample((), dict(data)) if isinstance(data, Mapping) else ArgumentSample(tuple(data))
