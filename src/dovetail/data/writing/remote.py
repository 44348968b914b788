"""How do finished files reach a store behind a URL (s3://, gs://, az://)? By an upload; it shows them when complete."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from dovetail.control.splits import Unusable
from dovetail.data.writing.naming import shard_name, shard_numbers
from dovetail.data.writing.trouble import missing, resume
from dovetail.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pathlib import Path


class Remote:
    """One address in such a store."""

    def __init__(self, url: str, run_id: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise missing("fsspec", "files", url) from None
        self.url = url
        self._run_id = run_id
        try:
            self._fs, self._path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise ConfigError(
                Problem("DT358", f"a package is needed for this address: {error}", fixes=(_install(url),), place=url)
            ) from None
        except ValueError as error:
            known = "write s3://bucket/name, gs://bucket/name, az://container/name, or a path"
            raise ConfigError(
                Problem("DT350", f"this address is not known: {error}", fixes=(known,), place=url)
            ) from None
        self._folder, _, self.name = self._path.rpartition("/")

    def check(self) -> None:
        """Whether something can be written there; by writing something."""
        probe = f"{self._path}.{self._run_id}.probe"
        try:
            self._fs.pipe_file(probe, b"dovetail")
            self._fs.rm_file(probe)
        except Exception as error:  # every store raises its own
            fix = "see that the bucket exists, and that your credentials may write to it"
            problem = Problem("DT351", f"nothing can be written there: {_said(error)}", fixes=(fix,), place=self.url)
            raise ConfigError(problem) from None

    def size(self) -> int | None:
        """Bytes of what is there, or None."""
        try:
            return int(self._fs.size(self._path))
        except FileNotFoundError:
            return None

    def shards(self) -> list[int]:
        try:
            found = self._fs.ls(self._folder, detail=False)
        except FileNotFoundError:
            return []
        return shard_numbers([path.rpartition("/")[2] for path in found], self.name)

    def fetch(self, path: Path) -> None:
        self._fs.get_file(self._path, str(path))

    def place(self, made: list[Path], *, sharded: bool, first: int = 0) -> list[str]:
        try:
            return self._place(made, sharded=sharded, first=first)
        except Exception as error:  # every store raises its own
            fix = f"see that it can be reached and written to, then go on with: {resume(self._run_id)}"
            raise Unusable("DT359", f"the results cannot be uploaded: {_said(error)}", fix, self.url) from None

    def _place(self, made: list[Path], *, sharded: bool, first: int) -> list[str]:
        names = [shard_name(self.name, first + at) for at in range(len(made))] if sharded else [self.name]
        for path, name in zip(made, names, strict=True):
            self._fs.put_file(str(path), f"{self._folder}/{name}")
        if sharded:
            for number in self.shards():
                if number >= first + len(made):
                    self._fs.rm_file(f"{self._folder}/{shard_name(self.name, number)}")
        return [f"{self.url.removesuffix(self.name)}{name}" for name in names]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._fs.invalidate_cache()


def is_remote(path: str) -> bool:
    return "://" in path and not path.startswith("file://")


def _install(url: str) -> str:
    packages = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
    return f"pip install {packages.get(url.partition('://')[0], 'fsspec[full]')}"


def _said(error: Any) -> str:
    return f"{type(error).__name__}: {error}"
