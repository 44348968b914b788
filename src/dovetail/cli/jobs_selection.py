"""Selection of jobs by queue, function, schedule and state, for the commands that list or change several jobs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

import dovetail as dt
from dovetail.cli.options import SuggestingChoice
from dovetail.cli.queue_option import BAD_JOBS_ARGUMENT, check_queue_name, find_jobs
from dovetail.jobs.job import JobState
from dovetail.jobs.store import JobFilter
from dovetail.jobs.submission import checked_reference
from dovetail.text_format import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dovetail.cli.options import Decorator
    from dovetail.jobs.job import JobRecord
    from dovetail.jobs.store import Store

PAGE = 1_000
STATES = tuple(state.value for state in JobState)
UNFINISHED = tuple(state.value for state in JobState if not state.is_finished)


@dataclass(frozen=True, slots=True)
class JobSelection:
    """Conditions that jobs must meet; an empty one is met by all."""

    queue: str | None = None
    function: str | None = None
    schedule: str | None = None
    states: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_queue_name(self.queue)

    def __bool__(self) -> bool:
        return any((self.queue, self.function, self.schedule, self.states))

    def filter(self, otherwise: Iterable[str] = ()) -> JobFilter:
        """`otherwise`: the states if none are given."""
        states = frozenset(map(JobState, self.states or otherwise))
        function = checked_reference(self.function) if self.function else None
        return JobFilter(states, self.queue, function, self.schedule)

    def options(self) -> Iterator[str]:
        """The options as words of a command."""
        pairs = [("--queue", self.queue), ("--function", self.function), ("--schedule", self.schedule)]
        for option, value in (*pairs, *(("--state", state) for state in self.states)):
            if value is not None:
                yield from (option, value)


def selection_options(states: Iterable[str] = STATES, verb: str = "Only jobs", *, schedule: bool = True) -> Decorator:
    """--queue, --function, --schedule and --state; the command gets `queue`, `function`, `schedule`, `states`."""
    options = [
        click.option("--queue", metavar="NAME", help=f"{verb} of this queue."),
        click.option("--function", metavar="NAME", help=f"{verb} of this function, as in pkg.module:name."),
        *(
            [click.option("--schedule", metavar="NAME", help=f"{verb} that this schedule submitted.")]
            if schedule
            else []
        ),
        click.option(
            "--state",
            "states",
            multiple=True,
            type=SuggestingChoice(tuple(states)),
            help=f"{verb} in this state; may be repeated.",
        ),
    ]

    def decorate(function: object) -> object:
        for option in reversed(options):
            function = option(function)  # type: ignore[type-var]
        return function

    return decorate


def jobs_of(
    store: Store, chosen: JobFilter, limit: int | None = None, before: str | None = None
) -> Iterator[JobRecord]:
    """Jobs of a filter, newest first, read in pages."""
    remaining = limit
    while remaining is None or remaining > 0:
        page = store.find(chosen, limit=PAGE if remaining is None else min(PAGE, remaining), before=before)
        yield from page.jobs
        before = page.next_id
        if before is None:
            return
        if remaining is not None:
            remaining -= len(page.jobs)


def selected_jobs(
    store: Store, jobs: list[str], selection: JobSelection, otherwise: Iterable[str], verb: str, *, yes: bool
) -> dict[str, JobState]:
    """Ids and states of the jobs that a command changes: the given ones, or those of a selection once the user has
    confirmed."""
    if bool(jobs) == bool(selection):
        message = "JOB and options that select jobs cannot be combined" if jobs else "no jobs were selected"
        fixes = (f"dovetail jobs {verb} JOB", f"dovetail jobs {verb} --queue default --yes")
        raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, message, fixes=fixes))
    if jobs:
        return {record.id: record.state for record in find_jobs(store, jobs)}
    found = {record.id: record.state for record in jobs_of(store, selection.filter(otherwise))}
    if found and not yes:
        confirm(f"{verb} {format_count(len(found), 'job')}")
    return found


def confirm(what: str) -> None:
    """Ask in a terminal; elsewhere, an error that names --yes."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        message = f"this would {what}, and stdin is not a terminal"
        raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, message, fixes=("--yes",)))
    click.confirm(f"{what}?", abort=True, err=True)
