"""The queue of a command: its URL from the option, the environment or the project file, and jobs by a part of an id."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

import dovetail as dt
from dovetail.documents.configuration import SQLITE_PREFIX, at_origin, configured, variable_of
from dovetail.jobs.store import JobFilter
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.pipeline.option_renderer import OptionRenderer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.cli.options import Decorator
    from dovetail.jobs.job import JobRecord
    from dovetail.jobs.store import Store

BAD_JOBS_ARGUMENT = "DT642"
NO_QUEUE = "DT643"
NO_JOB = "DT644"
EXAMPLE_URL = "sqlite:///jobs.db"
LAST_JOB = "last"
JOBS_SEARCHED = 100_000
"""Latest jobs among which a part of an id is looked for."""
PAGE = 1_000
SHOWN_MATCHES = 5
JOB_HELP = "JOB is an id, a part of an id that only one job has, its idempotency key, or `last`."


def queue_url_option(*names: str) -> Decorator:
    """--queue-url; the command gets `url`, None if it is not given."""
    return click.option(
        *(names or ("--queue-url",)),
        "url",
        metavar="URL",
        help="Queue: sqlite:///FILE, or redis://HOST:PORT/DB.  [default: $DOVETAIL_QUEUE, or `queue` of the project "
        "file]",
    )


def queue_url(given: str | None) -> str:
    """The URL of the option, the environment or the project file; ConfigError if there is none."""
    url = given or configured("queue")
    if not url:
        message = "no queue: there is no --queue-url, no DOVETAIL_QUEUE, and no `queue` in the project file"
        fixes = (f"export {variable_of('queue')}={EXAMPLE_URL}", f"--queue-url {EXAMPLE_URL}")
        raise dt.ConfigError(dt.Problem(NO_QUEUE, message, fixes=fixes))
    return url


def files_option() -> Decorator:
    """--files; the command gets `files`, None if it is not given."""
    return click.option(
        "--files",
        envvar="DOVETAIL_JOB_FILES",
        metavar="DIR|URL",
        help="Large arguments and results, and the output of jobs: a shared folder, or s3://bucket/jobs.  [env var: "
        "DOVETAIL_JOB_FILES; default: beside an SQLite file, none on Redis]",
    )


@contextmanager
def opened_queue(
    given: str | None, *, files: str | None = None, create: bool = False, allow_pickle: bool = False
) -> Iterator[dt.Queue]:
    """The queue of a command. Without `create`, an SQLite file that does not exist is an error: it is a typing error,
    or no job was submitted yet."""
    url = queue_url(given)
    if not create:
        check_exists(url)
    try:
        queue = dt.Queue(url, files=files, allow_pickle=allow_pickle, if_no_worker="ignore")
    except dt.ConfigError as error:
        raise at_origin(QueueRenderer().error(error), url) from None
    try:
        if type(queue.store) is MemoryStore:
            message = f"a queue at {url} ends with its program, so that commands cannot share it"
            raise dt.ConfigError(dt.Problem(NO_QUEUE, message, fixes=(f"--queue-url {EXAMPLE_URL}",)))
        yield queue
    finally:
        queue.close()


@contextmanager
def opened_store(given: str | None) -> Iterator[Store]:
    """The store of a queue that exists."""
    with opened_queue(given) as queue:
        yield queue.store


class QueueRenderer(OptionRenderer):
    """Arguments of `dt.Queue` as options: dt.Queue("memory:") is --queue-url memory:."""

    def text(self, text: str) -> str:
        found = re.fullmatch(r'dt\.Queue\("([^"]*)"\)', text)
        return f"--queue-url {found[1]}" if found else super().text(text)


def check_exists(url: str) -> None:
    """ConfigError for an SQLite file that does not exist."""
    if not url.startswith(SQLITE_PREFIX):
        return
    path = Path(url.removeprefix(SQLITE_PREFIX))
    if not path.exists():
        message = f"there is no queue at {url}: no file {path.absolute()}"
        near = sorted(str(one) for one in path.parent.glob("*.db"))[:3] if path.parent.is_dir() else []
        fixes = (
            *(f"--queue-url {SQLITE_PREFIX}{one}" for one in near),
            f"dovetail jobs submit pkg.module:function --queue-url {url}",
        )
        raise dt.ConfigError(dt.Problem(NO_QUEUE, message, fixes=fixes))


def check_queue_name(name: str | None) -> None:
    """ConfigError for a URL in the place of the name of a queue."""
    if name is not None and (":/" in name or name == "memory:"):
        message = f"--queue {name}: this option is the name of a queue, such as default or gpu"
        raise dt.ConfigError(dt.Problem(NO_QUEUE, message, fixes=(f"--queue-url {name}",)))


# --- jobs by a part of an id


def find_jobs(store: Store, words: Sequence[str]) -> list[JobRecord]:
    """Whole records of the jobs that these words name, each once; one error for all that name none or several."""
    problems: list[dt.Problem] = []
    ids: list[str] = []
    for word in dict.fromkeys(words):
        found = _find_id(store, word)
        if isinstance(found, dt.Problem):
            problems.append(found)
        else:
            ids.append(found)
    if problems:
        raise dt.ConfigError(problems)
    return [record for record in store.get(list(dict.fromkeys(ids))) if record is not None]


def find_job(store: Store, word: str) -> JobRecord:
    [record] = find_jobs(store, [word])
    return record


def _find_id(store: Store, word: str) -> str | dt.Problem:
    if store.get([word])[0] is not None:
        return word
    if word == LAST_JOB:
        jobs = store.find(JobFilter(), limit=1).jobs
        if jobs:
            return jobs[0].id
        fixes = ("dovetail jobs submit pkg.module:function",)
        return dt.Problem(NO_JOB, "the queue has no jobs", fixes=fixes)
    by_key = store.id_of_key(word)
    if by_key is not None:
        return by_key
    matches = _ids_with(store, word)
    if len(matches) == 1:
        return matches[0]
    if not matches:
        message = f"there is no job {word!r}"
        return dt.Problem(NO_JOB, message, fixes=("dovetail jobs ls",))
    shown = ", ".join(matches[:SHOWN_MATCHES]) + (" and more" if len(matches) > SHOWN_MATCHES else "")
    message = f"{word!r} is a part of several ids: {shown}"
    return dt.Problem(NO_JOB, message, fixes=(f"use {matches[0]}",))


def _ids_with(store: Store, part: str) -> list[str]:
    """Ids of the latest jobs that contain a text; enough of them to show that there are several."""
    found: list[str] = []
    before: str | None = None
    for _ in range(JOBS_SEARCHED // PAGE):
        page = store.find(JobFilter(), limit=PAGE, before=before)
        found += [record.id for record in page.jobs if part in record.id]
        before = page.next_id
        if before is None or len(found) > SHOWN_MATCHES:
            break
    return found
