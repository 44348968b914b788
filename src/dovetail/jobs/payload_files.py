"""Files of arguments, results and logs that are too large for a store: in a folder, or behind a URL of fsspec.

A name has the form "ab/JOB/NAME": each job has a folder of its own, which is deleted when the job is purged, in one of
1,024 folders, so that none becomes large. Files of arguments and results are written once, under new names. In a local
folder files appear atomically, with mode 0600 in folders of mode 0700.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.errors import ConfigError, EngineError, Problem, short_repr
from dovetail.machine.private_files import FILE_MODE, make_private_folder

if TYPE_CHECKING:
    from collections.abc import Iterable

FILE_MISSING = "DT607"
BAD_QUEUE = "DT601"
_OWNER = re.compile(r"[0-9a-z]{2,64}")
_NAME = re.compile(r"([0-9a-z]{2})/([0-9a-z]*\1)/[0-9a-z][0-9a-z._-]{0,99}")


class PayloadFiles(Protocol):
    """Files by name. Thread-safe."""

    location: str
    """The folder or URL."""

    def write(self, data: bytes, owner: str = "") -> str:
        """Store data under a new name in the folder of a job; without a job, it is never purged. Raises EngineError if
        it cannot be written."""

    def read(self, name: str) -> bytes:
        """Read a file. Raises ConfigError if it does not exist, or if the name is invalid."""

    def put(self, name: str, data: bytes) -> None:
        """Store data under a given name, replacing an existing file."""

    def may_have_files(self) -> bool:
        """Whether anything was ever written."""

    def delete_of(self, owners: Iterable[str]) -> None:
        """Delete the files of jobs; jobs without files are ignored."""


def open_files(location: str | os.PathLike[str]) -> PayloadFiles:
    """A folder, or a URL such as s3://bucket/jobs."""
    text = os.fspath(location)
    if "://" in text and not text.startswith("file://"):
        return RemoteFiles(text)
    return LocalFiles(text.removeprefix("file://"))


def new_name(owner: str = "") -> str:
    """A name that no other file has."""
    return f"{owner_folder(owner or secrets.token_hex(16))}/{secrets.token_hex(8)}"


def log_name(job_id: str, attempt: int, rank: int = 0) -> str:
    """Name of the file with the output of an attempt; of a gang, with that of one rank."""
    return f"{owner_folder(job_id)}/{attempt}.{rank}.log" if rank else f"{owner_folder(job_id)}/{attempt}.log"


def owner_folder(owner: str) -> str:
    """Folder of the files of a job. Ids of jobs end with random digits."""
    assert _OWNER.fullmatch(owner), owner
    return f"{owner[-2:]}/{owner}"


class LocalFiles:
    """Files in a folder of mode 0700, which is created when it is first written."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.location = os.path.abspath(folder)  # noqa: PTH100 - symbolic links stay

    def write(self, data: bytes, owner: str = "") -> str:
        name = new_name(owner)
        self.put(name, data)
        return name

    def put(self, name: str, data: bytes) -> None:
        path = self.path_of(name)
        try:
            make_private_folder(self.location)
            make_private_folder(path.parent.parent)
            make_private_folder(path.parent)
            _write_atomically(path, data)
        except OSError as error:
            raise _unwritable(self.location, error) from None

    def read(self, name: str) -> bytes:
        try:
            return self.path_of(name).read_bytes()
        except FileNotFoundError:
            raise _missing(name, self.location) from None
        except OSError as error:
            raise EngineError(
                Problem(FILE_MISSING, f"{name} cannot be read: {error}", fixes=("check its permissions",))
            ) from None

    def may_have_files(self) -> bool:
        return os.path.isdir(self.location)  # noqa: PTH112

    def delete_of(self, owners: Iterable[str]) -> None:
        for owner in owners:
            shutil.rmtree(Path(self.location, owner_folder(owner)), ignore_errors=True)

    def path_of(self, name: str) -> Path:
        """The path of a file, which need not exist: logs are appended to."""
        return Path(self.location, _checked(name, self.location))


class RemoteFiles:
    """Files behind a URL, by fsspec."""

    def __init__(self, url: str) -> None:
        self.location = url.rstrip("/")
        self._fs, self._root = _open_url(self.location)

    def write(self, data: bytes, owner: str = "") -> str:
        name = new_name(owner)
        self.put(name, data)
        return name

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        try:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, data)
        except Exception as error:  # every store raises its own type
            raise _unwritable(self.location, error) from None

    def read(self, name: str) -> bytes:
        path = self._path(name)
        try:
            return bytes(self._fs.cat_file(path))
        except FileNotFoundError:
            raise _missing(name, self.location) from None
        except Exception as error:  # every store raises its own type
            message = f"{self.location}/{name} cannot be read: {type(error).__name__}: {error}"
            raise EngineError(Problem(FILE_MISSING, message, fixes=("check your credentials",))) from None

    def may_have_files(self) -> bool:
        return True

    def delete_of(self, owners: Iterable[str]) -> None:
        for owner in owners:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(f"{self._root}/{owner_folder(owner)}", recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{_checked(name, self.location)}"


def _open_url(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        message = f"files={url!r} needs the package fsspec, which is not installed"
        raise ConfigError(Problem(BAD_QUEUE, message, fixes=("pip install 'dovetail-ml[files]'",))) from None
    try:
        filesystem, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:  # they name the package or the protocol
        message = f"files={url!r} cannot be opened: {error}"
        raise ConfigError(Problem(BAD_QUEUE, message, fixes=('files="s3://bucket/jobs"',))) from None
    return filesystem, str(root).rstrip("/")


def _write_atomically(path: Path, data: bytes) -> None:
    """With fsync, because a job whose record is in the store cannot run without its file: the name must not appear
    before the data is on disk."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _checked(name: str, location: str) -> str:
    """The name, if it cannot leave the folder: names come from the store."""
    if not _NAME.fullmatch(name):
        message = f"{short_repr(name)} is not the name of a file in {location}"
        raise ConfigError(Problem(FILE_MISSING, message, fixes=("submit the job again",)))
    return name


def _missing(name: str, location: str) -> ConfigError:
    message = f"the file {name} with the data of the job is not in {location}"
    fixes = ("open the queue and its workers with the same `files=`, a folder that all machines share",)
    return ConfigError(Problem(FILE_MISSING, message, ("it was deleted, or is on another machine",), fixes))


def _unwritable(location: str, error: Exception) -> EngineError:
    message = f"files of jobs cannot be written to {location}: {error}"
    return EngineError(Problem(FILE_MISSING, message, fixes=("free some space, or correct the permissions",)))
