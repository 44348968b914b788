"""Open Lance datasets and file sessions, and translate errors of Lance and of the object store."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.data.readers.file_discovery import is_remote, local_path
from dovetail.errors import (
    Change,
    ConfigError,
    DovetailError,
    Problem,
    RunError,
    Setting,
    Text,
    did_you_mean,
    nearest_word,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dovetail.errors import Fix

os.environ.setdefault("LANCE_LOG", "error")
"""Read when lance is imported: without it every commit warns that replacing files is experimental."""

CANNOT_WRITE = "DT433"
CANNOT_OPEN = "DT430"
LANCE_NOT_INSTALLED = "DT431"
MAX_FILES_COMPARED = 10_000
LEGACY_VERSION = "0.1"
"""data_storage_version of the legacy Lance format."""
MAX_OPEN_VERSIONS = 4
"""Table versions that a process caches: a worker needs one, a driver that one and the newest."""
_open_datasets: dict[tuple[int, str, tuple[tuple[str, str], ...], int], Any] = {}
"""Open datasets by process id, because a forked child must not use those of its parent."""


def normalize_uri(uri: str) -> str:
    """Canonical form: without `file://`, `~` and relative paths."""
    local = local_path(str(uri))
    return (local if is_remote(local) else str(Path(local).absolute())).rstrip("/")


def open_file_session(uri: str, storage: Mapping[str, str]) -> Any:
    """Client that reads and writes files of an object store below that address."""
    import_lance()
    from lance.file import LanceFileSession

    return LanceFileSession(uri, dict(storage) or None)


def error_text(error: BaseException) -> str:
    """The message of Lance without its source locations."""
    text = re.sub(r",? /\S+\.rs:\d+:\d+", "", str(error) or repr(error))
    text = re.sub(r"^(?:Invalid user input: |LanceError\(\w+\): )+", "", text)
    return " ".join(text.split()).rstrip(".")[:600]


@contextlib.contextmanager
def as_os_error() -> Iterator[None]:
    """Raise every error of Lance's client as OSError; some calls raise RuntimeError."""
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
    """Open a version, cached because versions never change; the newest version is always looked up."""
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
    """Raise if the folder of the table was removed; the writer of Lance would create it again."""
    if not is_remote(uri) and not Path(uri, "_versions").is_dir():
        raise FileNotFoundError(errno.ENOENT, "the table no longer exists", uri)


def legacy_fix(dataset: Any, message: str) -> str:
    """Fix for a table in the legacy format, which accepts no new columns; "" if that is not the cause."""
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
    fixes: list[Fix] = ["check the name: a table is a folder with _versions/ in it"]
    if version is not None:
        fixes = ["use the newest version: this one may have been cleaned up"]
    if is_remote(uri):
        fixes.append(
            Text("check ", Change({"storage_options": {"aws_region": "us-east-1"}}), " and the variables AWS_*")
        )
    reason = error_text(error)
    if not is_remote(uri) and not Path(uri).exists():
        beside = _tables_beside(uri)
        reason = f"not found{did_you_mean(Path(uri).name, beside)}"
        if near := nearest_word(Path(uri).name, beside):
            fixes = [str(Path(uri).with_name(near))]
    message = f"the Lance table{which} cannot be opened: {reason}"
    return Problem(CANNOT_OPEN, message, fixes=tuple(fixes), place=uri)


def _tables_beside(uri: str) -> list[str]:
    """Names of the tables in the same folder."""
    try:
        names = [path.name for path in islice(Path(uri).parent.iterdir(), MAX_FILES_COMPARED)]
    except OSError:
        return []
    return [name for name in names if (Path(uri).parent / name / "_versions").is_dir()]


def write_error(uri: str, message: str, *fixes: str) -> RunError:
    fixes = fixes or ((write_permission_fix(uri),) if is_permission_error(message) else ("repeat the backfill",))
    return RunError(Problem(CANNOT_WRITE, message, fixes=fixes, place=uri))


def write_permission_fix(uri: str) -> str:
    if is_remote(uri):
        return Text("use ", Setting("storage_options"), " with write permission")
    return f"chmod -R u+w {shlex.quote(uri)}, or copy the table to a writable location"


def is_permission_error(text: str) -> bool:
    return any(words in text.casefold() for words in ("permission denied", "read-only file system", "accessdenied"))


@contextmanager
def translate_write_errors(uri: str) -> Iterator[None]:
    """Raise errors of the disk or the object store as RunError with a fix."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DovetailError):  # raised by user code, with its own type
            raise
        raise write_error(uri, f"cannot write beside the table: {error_text(error)}") from error
