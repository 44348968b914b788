"""Open Lance datasets and file sessions, and translate errors of Lance and of the object store."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.data.readers.file_discovery import is_remote, local_path
from dovetail.errors import ConfigError, DovetailError, Problem, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

os.environ.setdefault("LANCE_LOG", "error")
"""Read when lance is imported: without it every commit warns that replacing files is new."""

CANNOT_OPEN = "DT430"
LANCE_NOT_INSTALLED = "DT431"
LEGACY_VERSION = "0.1"
"""The data_storage_version of Lance's first format."""
MAX_OPEN_VERSIONS = 4
"""Versions of tables that a process keeps open: a worker needs one, a driver that and the newest."""
_open_datasets: dict[tuple[int, str, tuple[tuple[str, str], ...], int], Any] = {}
"""What this process has open; by process, because a child that was forked must not use what its parent opened."""


def normalize_uri(uri: str) -> str:
    """The same for every process: without `file://`, `~` and a relative path."""
    local = local_path(str(uri))
    return (local if is_remote(local) else str(Path(local).absolute())).rstrip("/")


def open_file_session(uri: str, storage: Mapping[str, str]) -> Any:
    """Who reads and writes files of an object store below that address."""
    import_lance()
    from lance.file import LanceFileSession

    return LanceFileSession(uri, dict(storage) or None)


def error_text(error: BaseException) -> str:
    """Lance's words, without the places in its source."""
    text = re.sub(r",? /\S+\.rs:\d+:\d+", "", str(error) or repr(error))
    text = re.sub(r"^(?:Invalid user input: |LanceError\(\w+\): )+", "", text)
    return " ".join(text.split()).rstrip(".")[:600]


@contextlib.contextmanager
def as_os_error() -> Iterator[None]:
    """Some calls of Lance's client raise RuntimeError when the store does not answer, others OSError."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise OSError(error_text(error)) from None


def import_lance() -> Any:
    try:
        import lance
    except ImportError:
        fix = "pip install 'dovetail-ml[lance]'"
        message = "a Lance table needs the package pylance, which is not installed"
        raise ConfigError(Problem(LANCE_NOT_INSTALLED, message, fixes=(fix,))) from None
    return lance


def open_dataset(uri: str, storage: dict[str, str], version: int | None) -> Any:
    """Versions do not change, so that one which is open is good for ever; which is the newest is always looked up."""
    key = (os.getpid(), uri, tuple(sorted(storage.items())))
    if version is not None and (known := _open_datasets.get((*key, version))) is not None:
        return known
    dataset = open_dataset_uncached(uri, storage, version)
    _open_datasets.pop((*key, int(dataset.version)), None)
    _open_datasets[(*key, int(dataset.version))] = dataset
    for old in list(_open_datasets)[:-MAX_OPEN_VERSIONS]:
        _open_datasets.pop(old, None)
    return dataset


def open_dataset_uncached(uri: str, storage: dict[str, str], version: int | None = None) -> Any:
    lance = import_lance()
    try:
        return lance.dataset(uri, version=version, storage_options=storage or None)
    except Exception as error:
        raise ConfigError(_open_problem(uri, version, error)) from None


def check_table_exists(uri: str) -> None:
    """Lance's writer would make the folder of a table again that somebody has removed."""
    if not is_remote(uri) and not Path(uri, "_versions").is_dir():
        raise FileNotFoundError(errno.ENOENT, "the table is not there any more", uri)


def legacy_fix(dataset: Any, message: str) -> str:
    """What to do with a table of Lance's first format, which takes no new columns; nothing if that is not why."""
    if dataset.data_storage_version != LEGACY_VERSION or "legacy" not in message:
        return ""
    uri, options = str(dataset.uri), ", storage_options=storage_options" if is_remote(str(dataset.uri)) else ""
    new = f"{uri.removesuffix('.lance')}-new.lance"
    copied = f'lance.write_dataset(lance.dataset({uri!r}{options}), {new!r}, data_storage_version="stable"{options})'
    return (
        f"columns are added to tables of data_storage_version 2.0 or newer; copy this one ({LEGACY_VERSION}): {copied}"
    )


def _open_problem(uri: str, version: int | None, error: Exception) -> Problem:
    which = "" if version is None else f", version {version},"
    fixes = ["check the name: a table is a folder with _versions/ in it"]
    if version is not None:
        fixes = ["begin again with the newest version: this one may have been cleaned up"]
    if is_remote(uri):
        fixes.append(
            "check storage_options, e.g. {'aws_region': ..., 'aws_access_key_id': ...}, or the variables AWS_*"
        )
    message = f"the Lance table{which} cannot be opened: {error_text(error)}"
    return Problem(CANNOT_OPEN, message, fixes=tuple(fixes), place=uri)


CANNOT_WRITE = "DT433"


def write_error(uri: str, message: str, *fixes: str) -> RunError:
    fixes = fixes or ((write_permission_fix(uri),) if is_permission_error(message) else ("call backfill again",))
    return RunError(Problem(CANNOT_WRITE, message, fixes=fixes, place=uri))


def write_permission_fix(uri: str) -> str:
    if is_remote(uri):
        return "storage_options of somebody who may write there"
    return f"chmod -R u+w {shlex.quote(uri)}, or copy the table to where you may write"


def is_permission_error(text: str) -> bool:
    return any(words in text.casefold() for words in ("permission denied", "read-only file system", "accessdenied"))


@contextmanager
def translate_write_errors(uri: str) -> Iterator[None]:
    """What a disk or a store says when it does not let us, as an error with a fix."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DovetailError):  # a function's own, of its own type
            raise
        raise write_error(uri, f"cannot write beside the table: {error_text(error)}") from error
