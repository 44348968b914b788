"""File discovery by path, folder, pattern or URL, and detection of changed files."""

from __future__ import annotations

import glob
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from dovetail.data.io_errors import NOT_FOUND, cannot_read, missing_source_package, source_changed
from dovetail.errors import Change, Problem, nearest_word

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.errors import Fix

FileStamp = tuple[int, int, int] | str
"""Identity of a file: size, time and inode; of a remote file its etag, or what the store provides."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


@dataclass(frozen=True, slots=True)
class FileRef:
    path: str
    """A local path or a URL."""
    size: int
    stamp: FileStamp


def is_remote(path: str) -> bool:
    return _URL.match(path) is not None


def local_path(path: str) -> str:
    """Convert file:// URLs and ~ to paths; other URLs are unchanged."""
    if path.lower().startswith("file://"):
        return unquote(path[len("file://") :])
    return path if is_remote(path) else str(Path(path).expanduser())


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise missing_source_package("fsspec", "files", url) from None
    try:
        fs, path = url_to_fs(url)
    except ImportError as error:  # fsspec names the package: 'Install s3fs to access S3'
        found = re.search(r"[Ii]nstall (\S+)", str(error))
        raise missing_source_package(found[1] if found else url.split(":")[0], None, url) from None
    return fs, str(path)


def local_stamp(found: os.stat_result) -> FileStamp:
    return (found.st_size, found.st_mtime_ns, found.st_ino)


def remote_stamp(info: dict[str, Any]) -> str:
    for key in ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "mtime", "updated"):
        if info.get(key):
            return f"{info.get('size')} {key} {info[key]}"
    return str(info.get("size"))


def check_local_unchanged(path: str, stamp: FileStamp) -> None:
    """Raises if the file has changed since the source was opened."""
    try:
        found = os.stat(path)  # noqa: PTH116 - once per split
    except OSError as error:
        raise cannot_read(path, error) from None
    if local_stamp(found) != stamp:
        raise source_changed(path, _stamp_difference(stamp, found))


def check_remote_unchanged(path: str, stamp: FileStamp) -> None:
    fs, name = file_system(path)
    try:
        now = remote_stamp(fs.info(name, refresh=True) if _can_refresh(type(fs)) else fs.info(name))
    except Exception as error:
        raise cannot_read(path, error) from None
    if now != stamp:
        raise source_changed(path, "it was replaced by another object of that name")


def _can_refresh(kind: Any) -> bool:
    """Whether `info` can bypass the cache."""
    import inspect

    method = getattr(kind, "_info", None) or kind.info
    return "refresh" in inspect.signature(method).parameters


def check_unchanged(path: str, stamp: FileStamp) -> None:
    (check_remote_unchanged if is_remote(path) else check_local_unchanged)(path, stamp)


def _stamp_difference(stamp: FileStamp, now: os.stat_result) -> str:
    if stamp[0] != now.st_size:
        return f"it had {stamp[0]} bytes and has {now.st_size} now"
    return "it was replaced by another file" if stamp[2] != now.st_ino else "it was written to"


class FileFinder:
    """Collects files and all problems of the paths."""

    def __init__(self, fits: Callable[[str], bool], *, stamps: bool = True, underscored: bool = False) -> None:
        """`fits`: whether a file in a folder belongs to the source. `stamps`: whether to read size and time of every
        file."""
        self._fits = fits
        self._stamps = stamps
        self._hidden = (".",) if underscored else (".", "_")
        self.files: list[FileRef] = []
        self.problems: list[Problem] = []

    def add(self, path: str) -> None:
        path = local_path(path)
        before = len(self.files), len(self.problems)
        if is_remote(path):
            self._add_remote(path)
        elif os.path.isdir(path):  # noqa: PTH112 - a name with NUL bytes is only 'not there'
            self._add_folder(path)
        elif os.path.lexists(path):
            self._add_file(path)
        elif glob.has_magic(path):
            for found in sorted(glob.glob(path, recursive=True)):  # noqa: PTH207 - keeps the path as written
                if not os.path.isdir(found):  # noqa: PTH112
                    self._add_file(found)
        else:
            self._not_there(path)
        if (len(self.files), len(self.problems)) == before:
            self.problems.append(self._nothing(path))

    def _add_folder(self, folder: str) -> None:
        if os.path.realpath(folder) == os.sep:
            fix = "name a folder with data, or a pattern such as '/data/**/*.jsonl'"
            message = "is the root of the file system, which is not searched"
            self.problems.append(Problem(NOT_FOUND, message, fixes=(fix,), place=folder))
            return
        found: list[str] = []
        for at, folders, files in os.walk(folder, onerror=lambda error: self._cannot(folder, error)):
            folders[:] = [name for name in folders if not name.startswith(self._hidden)]
            kept = [name for name in files if not name.startswith(self._hidden) and self._fits(name)]
            found += [os.path.join(at, name) for name in kept]  # noqa: PTH118 - there may be millions
        for path in sorted(found):
            self._add_file(path)

    def _add_file(self, path: str) -> None:
        if not self._stamps:
            self.files.append(FileRef(path, 0, ""))
            return
        try:
            found = os.stat(path)  # noqa: PTH116
        except OSError as error:
            self._cannot(path, error)
            return
        if not stat.S_ISREG(found.st_mode):
            fix = "for a pipe or a device pass an iterable of its rows as the source"
            self.problems.append(Problem(NOT_FOUND, "is not a regular file", fixes=(fix,), place=path))
        elif not os.access(path, os.R_OK):
            self._cannot(path, PermissionError())
        else:
            self.files.append(FileRef(path, found.st_size, local_stamp(found)))

    def _add_remote(self, url: str) -> None:
        fs, path = file_system(url)
        scheme = url[: url.index("://") + 3]
        try:
            fs.invalidate_cache()
            infos = self._remote_infos(fs, path)
        except Exception as error:
            self._cannot(url, error)
            return
        if infos is None:
            self.problems.append(Problem(NOT_FOUND, "does not exist", fixes=(f"check the name: {url}",), place=url))
            return
        for name in sorted(infos):
            info = infos[name]
            bare = name.removeprefix(scheme)
            self.files.append(FileRef(scheme + bare.lstrip("/"), int(info.get("size") or 0), remote_stamp(info)))

    def _remote_infos(self, fs: Any, path: str) -> dict[str, Any] | None:
        """Name -> its details; None: it does not exist."""
        if fs.isfile(path):
            return {path: fs.info(path)}
        if glob.has_magic(path):
            found = fs.glob(path, detail=True)
            return {name: info for name, info in found.items() if info["type"] == "file"}
        if not fs.isdir(path):
            return None
        found = fs.find(path, detail=True)
        inside = {name: name[len(path) :].strip("/").split("/") for name in found}
        return {
            name: found[name]
            for name, parts in inside.items()
            if parts[-1] and self._fits(parts[-1]) and not any(part.startswith(self._hidden) for part in parts)
        }

    def _cannot(self, path: str, error: BaseException) -> None:
        reading_error = cannot_read(path, error)
        if isinstance(error, FileNotFoundError):
            reading_error.message = "is a link to a missing file"
        self.problems.append(Problem(NOT_FOUND, reading_error.message, fixes=(reading_error.fix,), place=path))

    def _not_there(self, path: str) -> None:
        parent = Path(path).parent
        message = "there is no such file or folder"
        fix: Fix = f"check the name; relative paths start at {str(Path.cwd())!r}"
        try:
            beside = sorted(os.listdir(parent))[:10_000]  # noqa: PTH208 - only names
        except (OSError, ValueError):
            fix = f"check the folder {str(parent)!r}, which cannot be read either"
        else:
            near = nearest_word(Path(path).name, beside)
            if near is not None:
                message += f" (did you mean {near!r}?)"
                fix = Change({"source": str(parent / near)})
        self.problems.append(Problem(NOT_FOUND, message, fixes=(fix,), place=path))

    def _nothing(self, path: str) -> Problem:
        if glob.has_magic(path) and not Path(path).is_dir():
            fix = f"check the pattern; ** matches folders; relative paths start at {str(Path.cwd())!r}"
            return Problem(NOT_FOUND, "no file matches", fixes=(fix,), place=path)
        fix = "set the format (format='bytes' for any file), or a pattern such as 'folder/**/*.jsonl'"
        return Problem(NOT_FOUND, "no file in this folder has a known suffix", fixes=(fix,), place=path)
