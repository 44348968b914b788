"""Names of output files and shards, atomic rename, and upload to remote stores."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import Any

from dovetail.control.payload import SourceSinkError
from dovetail.data.io_errors import missing_sink_package
from dovetail.data.writers.worker_parts import sync_folder
from dovetail.errors import ConfigError, Problem

COMPRESSION_SUFFIXES = ("gz", "zst")


def stem_and_suffix(name: str) -> tuple[str, str]:
    """'x' and '.jsonl.gz' of 'x.jsonl.gz'."""
    cut = name.rfind(".")
    if name[cut + 1 :].lower() in COMPRESSION_SUFFIXES:
        cut = name.rfind(".", 0, cut) if name.rfind(".", 0, cut) > 0 else cut
    return (name[:cut], name[cut:]) if cut > 0 else (name, "")


def unused_name(path: str) -> str:
    """A name like this one that no file has: x-2.jsonl for x.jsonl. Files behind a URL are not looked for."""
    folder, slash, name = path.rpartition("/")
    stem, suffix = stem_and_suffix(name)
    number = 2
    while not is_remote_sink(path) and Path(f"{folder}{slash}{stem}-{number}{suffix}").exists():
        number += 1
    return f"{folder}{slash}{stem}-{number}{suffix}"


def shard_name(name: str, number: int) -> str:
    stem, suffix = stem_and_suffix(name)
    return f"{stem}-{number:05d}{suffix}"


def shard_numbers(names: list[str], name: str) -> list[int]:
    """Numbers of the files that are shards of `name`."""
    stem, suffix = stem_and_suffix(name)
    form = re.compile(re.escape(stem) + r"-(\d{5,})" + re.escape(suffix), re.DOTALL)
    found = [match for match in map(form.fullmatch, names) if match]
    return sorted(int(match[1]) for match in found if shard_name(name, int(match[1])) == match[0])


def parts_folder_name(name: str, run_id: str) -> str:
    """Name of the folder of part files beside the final file; limited to the maximum name length."""
    if len(os.fsencode(name)) > 120:
        name = f"{name[:24]}-{hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()}"
    return f".{name}.{run_id}.parts"


def replace_file(made: Path, final: Path) -> None:
    """Replace the target atomically by a complete file. Keeps its permissions."""
    with contextlib.suppress(OSError):
        made.chmod(final.stat().st_mode & 0o7777)
    made.replace(final)


def replace_folder(made: Path, final: Path, aside: Path) -> None:
    """Replace a folder. Atomic if the kernel supports it; otherwise the name is missing for a moment. `aside`: a name
    for the old folder."""
    if not final.exists():
        made.rename(final)
    elif not _exchange_paths(made, final):
        final.rename(aside)
        made.rename(final)


def _exchange_paths(one: Path, other: Path) -> bool:
    import ctypes

    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange)
    except (OSError, AttributeError):
        return False
    return bool(done == 0)


def publish_files(made: list[Path], final: Path, *, sharded: bool, first: int = 0) -> list[Path]:
    """Rename the files to their final names. Each appears atomically; shards appear one after another, and old shards
    that were not replaced are removed last."""
    names = [final.with_name(shard_name(final.name, first + at)) for at in range(len(made))] if sharded else [final]
    for path, name in zip(made, names, strict=True):
        replace_file(path, name)
    if sharded:
        present = [path.name for path in final.parent.iterdir()]
        for number in shard_numbers(present, final.name):
            if number >= first + len(made):
                final.with_name(shard_name(final.name, number)).unlink(missing_ok=True)
    sync_folder(final.parent)
    return names


def remove_folder(folder: Path) -> None:
    from shutil import rmtree

    rmtree(folder, ignore_errors=True)


class RemoteStore:
    """One URL in a remote store."""

    def __init__(self, url: str, run_id: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise missing_sink_package("fsspec", "files", url) from None
        self.url = url
        self._run_id = run_id
        try:
            self._fs, self._path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise ConfigError(
                Problem("DT358", f"missing package for this URL: {error}", fixes=(_install_command(url),), place=url)
            ) from None
        except ValueError as error:
            known = "write s3://bucket/name, gs://bucket/name, az://container/name, or a path"
            raise ConfigError(Problem("DT350", f"unknown URL scheme: {error}", fixes=(known,), place=url)) from None
        self._folder, _, self.name = self._path.rpartition("/")

    def check(self) -> None:
        """Check that the store is writable, by writing an object."""
        probe = f"{self._path}.{self._run_id}.probe"
        try:
            self._fs.pipe_file(probe, b"dovetail")
            self._fs.rm_file(probe)
        except Exception as error:  # every store raises its own type
            fix = "check that the bucket exists and that your credentials can write to it"
            problem = Problem("DT351", f"not writable: {_error_text(error)}", fixes=(fix,), place=self.url)
            raise ConfigError(problem) from None

    def size(self) -> int | None:
        """Size of the object, or None."""
        try:
            return int(self._fs.size(self._path))
        except FileNotFoundError:
            return None

    def list_shards(self) -> list[int]:
        try:
            found = self._fs.ls(self._folder, detail=False)
        except FileNotFoundError:
            return []
        return shard_numbers([path.rpartition("/")[2] for path in found], self.name)

    def download(self, path: Path) -> None:
        self._fs.get_file(self._path, str(path))

    def upload(self, made: list[Path], *, sharded: bool, first: int = 0) -> list[str]:
        try:
            return self._place(made, sharded=sharded, first=first)
        except Exception as error:  # every store raises its own type
            fix = "check that it can be reached and written to, then resume"
            raise SourceSinkError(
                "DT359", f"the results cannot be uploaded: {_error_text(error)}", fix, self.url
            ) from None

    def _place(self, made: list[Path], *, sharded: bool, first: int) -> list[str]:
        names = [shard_name(self.name, first + at) for at in range(len(made))] if sharded else [self.name]
        for path, name in zip(made, names, strict=True):
            self._fs.put_file(str(path), f"{self._folder}/{name}")
        if sharded:
            for number in self.list_shards():
                if number >= first + len(made):
                    self._fs.rm_file(f"{self._folder}/{shard_name(self.name, number)}")
        return [f"{self.url.removesuffix(self.name)}{name}" for name in names]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._fs.invalidate_cache()


def is_remote_sink(path: str) -> bool:
    return "://" in path and not path.startswith("file://")


def _install_command(url: str) -> str:
    packages = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
    return f"pip install {packages.get(url.partition('://')[0], 'fsspec[full]')}"


def _error_text(error: Any) -> str:
    return f"{type(error).__name__}: {error}"
