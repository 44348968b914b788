"""`dovetail jobs logs`: the output of a job."""

from __future__ import annotations

import socket
from datetime import datetime
from typing import TYPE_CHECKING

import click

import dovetail as dt
from dovetail.cli.logs import local_time
from dovetail.cli.options import FOLDER_PATH
from dovetail.cli.queue_option import (
    BAD_JOBS_ARGUMENT,
    JOB_HELP,
    files_option,
    find_job,
    opened_queue,
    queue_url_option,
)
from dovetail.control.log_lines import split_log_line

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.jobs.job import JobRecord
    from dovetail.jobs.payload_files import PayloadFiles

FOLLOW_S = 0.3
"""Output is looked for this often while a job runs; its end is reported by the store."""
CHUNK_BYTES = 1 << 20


@click.command(
    epilog="""\b
Examples:
  dovetail jobs logs last
  dovetail jobs logs 01kadq3f4 -f
  dovetail jobs logs last --attempt 1
  dovetail jobs logs last --rank 3

\b
The output of jobs in processes is kept with the files of the queue: beside an
SQLite file, or in --files. For a queue without files it is on the machine of
the worker, in $DOVETAIL_HOME/jobs/logs.
"""
)
@click.argument("job")
@click.option(
    "--attempt", type=click.IntRange(min=1), metavar="N", help="Number of the attempt.  [default: the latest]"
)
@click.option("--rank", type=click.IntRange(min=0), default=0, metavar="N", help="Rank of a gang.  [default: 0]")
@click.option("--follow", "-f", is_flag=True, help="Keep printing until the job has finished.")
@click.option("--no-timestamps", is_flag=True, help="Do not print the times.")
@click.option("--log-dir", metavar="DIR", type=FOLDER_PATH, help="The --log-dir of the worker, if it had one.")
@files_option()
@queue_url_option()
def logs(
    job: str,
    attempt: int | None,
    rank: int,
    follow: bool,
    no_timestamps: bool,
    log_dir: str | None,
    files: str | None,
    url: str | None,
) -> None:
    """Print the output of a JOB."""
    with opened_queue(url, files=files) as queue:
        record = find_job(queue.store, job)
        if attempt is not None and attempt > max(1, record.attempt):
            message = f"job {record.id} has had {record.attempt} attempts, not {attempt}"
            raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, message, fixes=(f"--attempt {max(1, record.attempt)}",)))
        ranks = record.spec.shape.ranks
        if rank >= ranks:
            message = f"job {record.id} has {f'ranks 0 to {ranks - 1}' if ranks > 1 else 'no ranks'}, not {rank}"
            raise dt.ConfigError(dt.Problem(BAD_JOBS_ARGUMENT, message, fixes=(f"--rank {ranks - 1}",)))
        output = Output(queue.files, log_dir, rank, times=not no_timestamps)
        if follow and attempt is None:
            printed = _follow(queue, record, output)
        else:
            printed = output.copy(record.id, attempt or record.attempt) > 0
        output.end()
        if not printed:
            click.echo(_no_output(queue, record, attempt or record.attempt, output), err=True)


logs.help = f"{logs.help}\n\n{JOB_HELP}"


class Output:
    """Prints the output of jobs, from where it is, with the times of its lines in the local time zone."""

    def __init__(self, files: PayloadFiles | None, log_dir: str | None, rank: int = 0, *, times: bool) -> None:
        from dovetail.jobs.job_logs import default_log_folder
        from dovetail.jobs.payload_files import LocalFiles

        if isinstance(files, LocalFiles) and log_dir is None:
            self._local, self._remote = files, None
        else:
            self._local, self._remote = LocalFiles(log_dir or default_log_folder()), files
        self._rank = rank
        self._times = times
        self._today = datetime.now().astimezone().date()
        self._begun = b""
        """Start of a line that is not complete yet."""
        self.place = files.location if files is not None and log_dir is None else self._local.location
        """Location of the log files, for messages."""

    def copy(self, job_id: str, attempt: int, offset: int = 0) -> int:
        """Print the output of an attempt from an offset on; the number of bytes."""
        from dovetail.jobs.payload_files import log_name

        name = log_name(job_id, attempt, self._rank)
        copied = self._copy_file(self._local.path_of(name), offset)
        if copied or self._remote is None:
            return copied
        try:
            data = self._remote.read(name)[offset:]
        except dt.ConfigError:
            return 0
        self._print(data)
        return len(data)

    def end(self) -> None:
        """Print a last line without its end."""
        if self._begun:
            self._print(b"\n")

    def _copy_file(self, path: Path, offset: int) -> int:
        copied = 0
        try:
            file = path.open("rb")
        except OSError:
            return 0  # it has printed nothing yet
        with file:
            file.seek(offset)
            while part := file.read(CHUNK_BYTES):
                self._print(part)
                copied += len(part)
        return copied

    def _print(self, data: bytes) -> None:
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            click.echo(self._shown(line.decode(errors="replace")))

    def _shown(self, line: str) -> str:
        time, text = split_log_line(line)
        return f"{local_time(time, self._today)} {text}" if time and self._times else text


def _follow(queue: dt.Queue, record: JobRecord, output: Output) -> bool:
    """Print the output of the latest attempt, and of attempts that follow, until the job has finished."""
    attempt, offset, printed = max(1, record.attempt), 0, False
    while True:
        # the end is asked for first: then the output is complete
        is_finished = bool(queue.store.wait_finished([record.id], FOLLOW_S))
        [latest] = queue.store.get([record.id])
        offset += output.copy(record.id, attempt, offset)
        printed = printed or offset > 0
        if latest is not None and latest.attempt > attempt:
            output.end()
            attempt, offset = attempt + 1, 0
        elif is_finished:
            return printed


def _no_output(queue: dt.Queue, record: JobRecord, attempt: int, output: Output) -> str:
    """Why there is no output."""
    if not record.attempt:
        return f"job {record.id} has not begun: it is {record.state.value}"
    worker = record.worker or next((one.worker for one in record.attempts if one.number == attempt), "")
    hosts = {one.id: str(one.details.get("host", "")) for one in queue.store.workers()}
    host = hosts.get(worker, "")
    if queue.files is None and host and host != socket.gethostname():
        return f"job {record.id} ran on {host}: its output is there, in the log folder of worker {worker}"
    return f"no output of attempt {attempt} of job {record.id} in {output.place}"
