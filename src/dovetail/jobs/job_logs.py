"""Output of jobs that run in processes: one file per attempt and rank, among the files of the queue.

The jobs of a batch share one file, which has a name for each of them (hard links): each job shows the output of the
call, also after the others were removed.

If the queue keeps its files in a folder, the process writes there. Files behind a URL are uploaded when the attempt has
ended. For a queue without files, the output stays in a folder of the worker's machine, limited in size and age.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import DovetailError
from dovetail.jobs.payload_files import LocalFiles, log_name
from dovetail.machine.private_files import FILE_MODE, make_private_folder, open_private
from dovetail.observe.run_folder import home_folder
from dovetail.resources.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.jobs.payload_files import PayloadFiles

LOG_LIMIT_BYTES = 8 << 20
"""Maximum size of one file. If it grows larger, its first half and its newest lines are kept."""
FOLDER_LIMIT_BYTES = 1 << 30
FOLDER_LIMIT_S = 14 * 86_400.0


def default_log_folder() -> Path:
    """Folder of all workers of this user on this machine."""
    return home_folder() / "jobs" / "logs"


class JobLog:
    """The file of one attempt, or of the call for a batch. It gets its names when something has been written."""

    __slots__ = ("fd", "names", "unpublished")

    def __init__(self, fd: int, names: Sequence[str], unpublished: Sequence[str]) -> None:
        self.fd = fd
        self.names = names
        """One per job."""
        self.unpublished = unpublished
        """Names that the file does not have yet."""

    def publish(self, files: LocalFiles) -> None:
        """Give the file its names."""
        for name in self.unpublished:
            path = files.path_of(name)
            make_private_folder(path.parent)
            try:
                # follows the link in /proc only if a folder is given, which has no meaning for an absolute path
                os.link(f"/proc/self/fd/{self.fd}", path, src_dir_fd=self.fd, follow_symlinks=True)
            except FileExistsError:
                continue  # of an attempt with the same number, which did not count
            except OSError:
                if name == self.names[0]:
                    raise
                files.put(name, self.reference())  # a file system without hard links
        self.unpublished = ()

    def reference(self) -> bytes:
        """The content of the other names if they cannot be names of this file."""
        _, job_id, file = self.names[0].split("/")
        command = f"dovetail jobs logs {job_id} --attempt {file.partition('.')[0]}"
        return f"[dovetail: one call for {len(self.names)} jobs; its output: {command}]\n".encode()


class JobLogs:
    """The log files of a worker. Thread: one at a time."""

    def __init__(
        self, files: PayloadFiles | None, folder: str | os.PathLike[str] | None, limit_bytes: int = LOG_LIMIT_BYTES
    ) -> None:
        """`folder`: where the processes write; None: the folder of the queue's files, or that of this machine."""
        self._local = (
            files if isinstance(files, LocalFiles) and folder is None else LocalFiles(folder or default_log_folder())
        )
        self._remote = None if self._local is files else files
        """Files to which the output is copied at the end of an attempt."""
        self._is_of_queue = self._local is files
        self._limit_bytes = limit_bytes
        self._has_folder = False
        self._unused: list[int] = []
        """Descriptors of empty files that have no name and no writer, for later attempts: making such a file takes a
        quarter of the time that the worker spends on a process."""

    @property
    def folder(self) -> str:
        return self._local.location

    def open(self, names: Sequence[str]) -> JobLog:
        """A file to append to; /dev/null if the folder cannot be written. `names`: of the logs of its jobs."""
        if self._unused:
            return JobLog(self._unused.pop(), names, names)
        try:
            if not self._has_folder:
                make_private_folder(self._local.location)
                self._has_folder = True
            try:
                flags = os.O_TMPFILE | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
                return JobLog(os.open(self._local.location, flags, FILE_MODE), names, names)
            except OSError:  # a file system without files that have no name
                path = self._local.path_of(names[0])
                make_private_folder(path.parent)
                return JobLog(open_private(path, os.O_RDWR | os.O_APPEND), names, names[1:])
        except OSError:
            return JobLog(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), names, ())

    def check(self, log: JobLog) -> None:
        """Make new output visible, and shorten a file that is too large."""
        with contextlib.suppress(DovetailError, OSError):
            if os.fstat(log.fd).st_size:
                log.publish(self._local)
                _shorten(log.fd, self._limit_bytes)

    def close(self, log: JobLog, *, has_writers: bool = True) -> None:
        """Close the file after the end of the attempt. `has_writers`: a process may still have the file open."""
        size = os.fstat(log.fd).st_size
        if not (size or has_writers) and log.unpublished == log.names:
            self._unused.append(log.fd)
            return
        try:
            self.check(log)
            if self._remote is not None and size:
                with contextlib.suppress(DovetailError, OSError):  # the result is recorded even if this fails
                    self._upload(log, self._remote)
        finally:
            os.close(log.fd)

    def _upload(self, log: JobLog, remote: PayloadFiles) -> None:
        """Copy the output, for each job if that is not too much."""
        output = os.pread(log.fd, 2 * self._limit_bytes, 0)
        is_small = len(output) * len(log.names) <= self._limit_bytes
        for name in log.names:
            remote.put(name, output if is_small or name == log.names[0] else log.reference())

    def close_unused(self) -> None:
        while self._unused:
            os.close(self._unused.pop())

    def read(self, job_id: str, attempt: int, rank: int = 0) -> str:
        """Output of an attempt that ran on this machine; "" if it printed nothing."""
        try:
            return self._local.path_of(log_name(job_id, attempt, rank)).read_text(errors="replace")
        except OSError:
            return ""

    def clean(self, max_bytes: int = FOLDER_LIMIT_BYTES, max_age_s: float = FOLDER_LIMIT_S) -> int:
        """Remove the oldest files beyond the limits of a folder that belongs to no queue; returns how many. Files of a
        queue are removed with their jobs."""
        if self._is_of_queue:
            return 0
        oldest = time.time() - max_age_s
        total = removed = 0
        for changed, size, path in sorted(self._files(), reverse=True):
            total += size
            if total > max_bytes or changed < oldest:
                with contextlib.suppress(OSError):
                    path.unlink()
                    removed += 1
                    path.parent.rmdir()
        return removed

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for path in Path(self._local.location).glob("*/*/*.log"):
            with contextlib.suppress(OSError):
                found = path.stat()
                yield found.st_mtime, found.st_size // found.st_nlink, path


def _shorten(fd: int, limit_bytes: int) -> None:
    """Keep the first half, a mark, and the last quarter of a file that is too large. What is written meanwhile may be
    lost."""
    size = os.fstat(fd).st_size
    if size <= limit_bytes:
        return
    head, tail = limit_bytes // 2, limit_bytes // 4
    newest = os.pread(fd, tail, size - tail)
    newest = newest[newest.find(b"\n") + 1 :]
    os.ftruncate(fd, head)
    os.write(fd, f"\n[dovetail: {format_size(size - head - len(newest))} of output omitted]\n".encode())
    os.write(fd, newest)
