"""How is a Lance table opened? Once per process and version; which version is the newest is always looked up."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.data.reading.files import as_local, is_remote
from dovetail.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

os.environ.setdefault("LANCE_LOG", "error")
"""Read when lance is imported: without it every commit warns that replacing files is new."""

NOT_A_TABLE = "DT430"
NO_LANCE = "DT431"
LEGACY = "0.1"
"""The data_storage_version of Lance's first format."""
KEPT_OPEN = 4
"""Versions of tables that a process keeps open: a worker needs one, a driver that and the newest."""
_opened: dict[tuple[int, str, tuple[tuple[str, str], ...], int], Any] = {}
"""What this process has open; by process, because a child that was forked must not use what its parent opened."""


def address(uri: str) -> str:
    """The same for every process: without `file://`, `~` and a relative path."""
    local = as_local(str(uri))
    return (local if is_remote(local) else str(Path(local).absolute())).rstrip("/")


def file_session(uri: str, storage: Mapping[str, str]) -> Any:
    """Who reads and writes files of an object store below that address."""
    lance_module()
    from lance.file import LanceFileSession

    return LanceFileSession(uri, dict(storage) or None)


def one_line(error: BaseException) -> str:
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
        raise OSError(one_line(error)) from None


def lance_module() -> Any:
    try:
        import lance
    except ImportError:
        fix = "pip install 'dovetail-ml[lance]'"
        message = "a Lance table needs the package pylance, which is not installed"
        raise ConfigError(Problem(NO_LANCE, message, fixes=(fix,))) from None
    return lance


def opened(uri: str, storage: dict[str, str], version: int | None) -> Any:
    """Versions do not change, so that one which is open is good for ever; which is the newest is always looked up."""
    key = (os.getpid(), uri, tuple(sorted(storage.items())))
    if version is not None and (known := _opened.get((*key, version))) is not None:
        return known
    dataset = opened_anew(uri, storage, version)
    _opened.pop((*key, int(dataset.version)), None)
    _opened[(*key, int(dataset.version))] = dataset
    for old in list(_opened)[:-KEPT_OPEN]:
        _opened.pop(old, None)
    return dataset


def opened_anew(uri: str, storage: dict[str, str], version: int | None = None) -> Any:
    lance = lance_module()
    try:
        return lance.dataset(uri, version=version, storage_options=storage or None)
    except Exception as error:
        raise ConfigError(_cannot_open(uri, version, error)) from None


def check_there(uri: str) -> None:
    """Lance's writer would make the folder of a table again that somebody has removed."""
    if not is_remote(uri) and not Path(uri, "_versions").is_dir():
        raise FileNotFoundError(errno.ENOENT, "the table is not there any more", uri)


def legacy_fix(dataset: Any, message: str) -> str:
    """What to do with a table of Lance's first format, which takes no new columns; nothing if that is not why."""
    if dataset.data_storage_version != LEGACY or "legacy" not in message:
        return ""
    uri, options = str(dataset.uri), ", storage_options=storage_options" if is_remote(str(dataset.uri)) else ""
    new = f"{uri.removesuffix('.lance')}-new.lance"
    copied = f'lance.write_dataset(lance.dataset({uri!r}{options}), {new!r}, data_storage_version="stable"{options})'
    return f"columns are added to tables of data_storage_version 2.0 or newer; copy this one ({LEGACY}): {copied}"


def _cannot_open(uri: str, version: int | None, error: Exception) -> Problem:
    which = "" if version is None else f", version {version},"
    fixes = ["check the name: a table is a folder with _versions/ in it"]
    if version is not None:
        fixes = ["begin again with the newest version: this one may have been cleaned up"]
    if is_remote(uri):
        fixes.append(
            "check storage_options, e.g. {'aws_region': ..., 'aws_access_key_id': ...}, or the variables AWS_*"
        )
    message = f"the Lance table{which} cannot be opened: {one_line(error)}"
    return Problem(NOT_A_TABLE, message, fixes=tuple(fixes), place=uri)
