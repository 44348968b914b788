"""Store: files below <table>/_dovetail, on a local disk or in the table's object store, written atomically."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from dovetail.backfill.lance_client import as_os_error, normalize_uri, open_file_session
from dovetail.claims.owner import this_process
from dovetail.data.readers.file_discovery import is_remote
from dovetail.machine.processes import process_start_time

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER_NAME = "_dovetail"
MAX_SYNC_BYTES = 1 << 20
"""Files up to this size (records) are synced to disk before `put` returns. Larger ones (parts) are not, to avoid
waiting for slow disks: a killed process loses none of them, a crashed machine may."""
_TEMPORARY_PREFIX = ".tmp-"
_MAX_NAME_CHARS = 255 - len(".json")
"""Limit of file names on common file systems."""
_SHORT_NAME_CHARS = 100


def column_folder(column: str) -> str:
    """Folder name of a column with any name; never `columns`."""
    name = "c-" + quote(column, safe="")
    if len(name) <= _MAX_NAME_CHARS:
        return name
    short = re.sub("%.?$", "", name[:_SHORT_NAME_CHARS])  # not part of a quoted character
    return f"{short}={hashlib.sha256(column.encode()).hexdigest()[:32]}"  # a quoted name contains no =


@functools.cache
def _process_space() -> str:
    """Short name of the boot and pid namespace in which pids of this process are valid; empty: unknown."""
    space = this_process().space
    return space and hashlib.sha256(space.encode()).hexdigest()[:16]


def _is_writer_gone(temporary: str) -> bool:
    """Whether the process that wrote a temporary file is known to have ended. Its pid may belong to another one now."""
    space, _, rest = temporary.removeprefix(_TEMPORARY_PREFIX).partition("-")
    pid = rest.partition("-")[0]
    return bool(space) and space == _process_space() and pid.isdigit() and process_start_time(int(pid)) is None


class Store:
    """Files by name, written atomically. Pickling keeps only the address."""

    def __init__(self, uri: str, storage: Mapping[str, str] | None = None) -> None:
        """`uri`: address of the table."""
        self.uri = normalize_uri(uri)
        self.storage = dict(storage or {})
        self.is_local = not is_remote(self.uri)
        root = f"{self.uri}/{FOLDER_NAME}"
        self._files: _LocalFiles | _RemoteFiles = (
            _LocalFiles(root) if self.is_local else _RemoteFiles(root, self.storage)
        )

    def __reduce__(self) -> tuple[type[Store], tuple[str, dict[str, str]]]:
        return type(self), (self.uri, self.storage)

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"  # storage may contain secrets

    def names(self, folder: str) -> list[str]:
        """Names of the files in the folder, sorted; empty if it does not exist."""
        return sorted(self._files.list_entries(folder)[1])

    def folders(self, folder: str) -> list[str]:
        return sorted(self._files.list_entries(folder)[0])

    def put(self, path: str, data: bytes) -> None:
        """Write a file atomically, replacing an existing one."""
        self._files.put(path, data)

    def get(self, path: str) -> bytes | None:
        return self._files.get(path)

    def create(self, path: str, data: bytes) -> bool:
        """Create a file; False if it exists. On a local disk exactly one of several concurrent calls returns True. In
        an object store, for which Lance has no such call, two may; the last one's data remains."""
        return self._files.create(path, data)

    def delete(self, *paths: str) -> None:
        """Delete files; missing ones are ignored."""
        for path in paths:
            self._files.delete(path)

    def delete_folder(self, folder: str) -> None:
        self._files.delete_folder(folder)

    def delete_temporary(self, folder: str, older_than_s: float) -> None:
        """Delete temporary files that processes which were killed left in the folder: at once if they ran on this
        machine, otherwise when the files are older than this."""
        if isinstance(self._files, _LocalFiles):
            self._files.delete_temporary(folder, older_than_s)

    def local_folder(self, folder: str) -> str:
        """Path of a folder on a local disk; empty in an object store."""
        return f"{self.uri}/{FOLDER_NAME}/{folder}" if self.is_local else ""

    def describe(self) -> str:
        return f"{self.uri}/{FOLDER_NAME}"


class _LocalFiles:
    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def list_entries(self, folder: str) -> tuple[list[str], list[str]]:
        folders: list[str] = []
        files: list[str] = []
        try:
            with os.scandir(self._root / folder) as entries:
                for entry in entries:
                    if entry.is_dir():
                        folders.append(entry.name)
                    elif not entry.name.startswith(_TEMPORARY_PREFIX):
                        files.append(entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return [], []
        return folders, files

    def delete_temporary(self, folder: str, older_than_s: float) -> None:
        before = time.time() - older_than_s
        for path in (self._root / folder).glob(f"{_TEMPORARY_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):
                if _is_writer_gone(path.name) or path.stat().st_mtime < before:
                    path.unlink()

    def put(self, path: str, data: bytes) -> None:
        temporary = self._write_temporary(path, data)
        try:
            temporary.replace(self._root / path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def create(self, path: str, data: bytes) -> bool:
        if (self._root / path).exists():
            return False
        temporary = self._write_temporary(path, data)
        try:
            os.link(temporary, self._root / path)  # atomic; fails if the file exists
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _write_temporary(self, path: str, data: bytes) -> Path:
        target = self._root / path
        temporary = target.parent / f"{_TEMPORARY_PREFIX}{_process_space()}-{os.getpid()}-{uuid.uuid4().hex}"
        try:
            with self._open_new(temporary) as file:
                file.write(data)
                file.flush()
                if 0 < len(data) <= MAX_SYNC_BYTES:
                    os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _open_new(self, path: Path) -> Any:
        """Open a new file. Another process may remove the empty folder between its creation and that of the file."""
        for _ in range(100):
            with contextlib.suppress(FileNotFoundError):
                self._make_folder(path.parent)
                return path.open("xb")
            if not self._root.parent.is_dir():
                raise FileNotFoundError(errno.ENOENT, "the table no longer exists", str(self._root.parent))
        return path.open("xb")

    def _make_folder(self, folder: Path) -> None:
        """Create the folder and its parents, but not that of the table: a removed table stays removed."""
        try:
            folder.mkdir(exist_ok=True)
        except FileNotFoundError:
            if folder == self._root:
                raise
            self._make_folder(folder.parent)
            folder.mkdir(exist_ok=True)

    def get(self, path: str) -> bytes | None:
        try:
            return (self._root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self._root / path).unlink()

    def delete_folder(self, folder: str) -> None:
        shutil.rmtree(self._root / folder, ignore_errors=True)


class _RemoteFiles:
    """Files of an object store by the client of Lance, which needs only the table's storage options. It encodes names
    (`%` becomes `%25`) when writing and does not decode them when listing."""

    def __init__(self, root: str, storage: dict[str, str]) -> None:
        self._root = root
        self._storage = storage
        self._kept: tuple[int, Any] | None = None

    @property
    def _session(self) -> Any:
        if self._kept is None or self._kept[0] != os.getpid():
            self._kept = (os.getpid(), open_file_session(self._root, self._storage))
        return self._kept[1]

    def list_entries(self, folder: str) -> tuple[list[str], list[str]]:
        with as_os_error():
            found = self._session.list_with_delimiter(folder or None)
        return [_last_component(name) for name in found.common_prefixes], [
            _last_component(name) for name in found.objects
        ]

    def put(self, path: str, data: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="dovetail-") as folder:
            local = Path(folder) / "up"
            local.write_bytes(data)
            with as_os_error():
                self._session.upload_file(str(local), path)

    def create(self, path: str, data: bytes) -> bool:
        if self._exists(path):
            return False
        self.put(path, data)
        return True

    def get(self, path: str) -> bytes | None:
        with tempfile.TemporaryDirectory(prefix="dovetail-") as folder:
            local = Path(folder) / "down"
            try:
                self._session.download_file(path, str(local))
            except OSError:
                if self._exists(path):
                    raise
                return None
            return local.read_bytes()

    def delete(self, path: str) -> None:
        try:
            self._session.delete_file(path)
        except OSError:
            if self._exists(path):  # S3 ignores missing files, other stores do not
                raise

    def delete_folder(self, folder: str) -> None:
        with as_os_error():
            names = self._session.list(folder)
        for name in names:
            self.delete(unquote(name))

    def _exists(self, path: str) -> bool:
        with as_os_error():
            return bool(self._session.contains(path))


def _last_component(path: str) -> str:
    return unquote(path.rstrip("/").rpartition("/")[2])
