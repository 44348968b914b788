"""File sinks (JSONL, CSV, Parquet, Lance): prepare, write by workers, commit, and publish the final files exactly once.

Workers append to part files (`writers/`), the run commits them, and the final files are built at the end:

    x.jsonl  .jsonl.gz  .jsonl.zst     one JSON value per line, exactly as json.dumps(row, ensure_ascii=False) writes it
    x.csv    .csv.gz  .tsv  ...        rows are dicts; nested values are JSON text, None and missing values are empty
    x.parquet                          rows are dicts; types are inferred and unified at the end
    x.lance                            a dataset, in one version

With `shard_size`, x.jsonl becomes x-00000.jsonl, x-00001.jsonl, ... in the same folder, each of at most that size
(uncompressed; a larger row gets its own shard) or, for Parquet, about that size. All shards appear at the end. Shards
of an earlier run are replaced one by one, then surplus ones are removed: each shard is always complete, but for a
moment old and new shards exist side by side, because a file system cannot rename several files atomically. A Lance
dataset stays one dataset; its data files get that size. `exists="append"` keeps old shards and continues the numbers.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from dovetail.control.payload import SourceSinkError
from dovetail.data.io_errors import results_missing, write_failed
from dovetail.data.sink_spec import SinkSpec, as_sink_spec, check_sink_spec, missing_packages, sink
from dovetail.data.writers import output_files
from dovetail.data.writers.output_files import RemoteStore, is_remote_sink
from dovetail.data.writers.piece_merge import MergeJob, OldFile
from dovetail.data.writers.worker_parts import PartReader, PartSyncer, sync_folder, which_pieces_exist
from dovetail.errors import Change, ConfigError, Problem
from dovetail.machine.private_files import foreign_access, make_private_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dovetail.control.payload import PartFileRange, Writer

__all__ = ["FileSink", "SinkSpec", "open_sink", "sink", "as_sink_spec"]

OUT_FOLDER = ".out"
BASE_FILE = ".base"
PLACED_FILE = ".placed"
"""File name in the folder of part files; no part has such a name."""


def open_sink(spec: SinkSpec, run_id: str, spare: Path) -> FileSink:
    """`spare`: a folder of the run, for the part files of a sink that is not in the local file system.

    A relative path is resolved against the current folder; links are followed, so that the target is replaced, not the
    link.
    """
    check_sink_spec(spec)
    problems = missing_packages(spec)
    if problems:
        raise ConfigError(problems)
    if not is_remote_sink(spec.path):
        spec = replace(spec, path=_local_path(spec.path), format=".".join(filter(None, spec.form)))
    return FileSink(spec, run_id, spare)


def find_replaced_input(spec: SinkSpec, files: Iterable[str]) -> str | None:
    """The input file or table that the output would replace, if any."""
    if is_remote_sink(spec.path):
        return next((path for path in files if path.rstrip("/") == spec.path.rstrip("/")), None)
    final = Path(_local_path(spec.path))
    for path in files:
        if is_remote_sink(path):
            continue
        real = Path(os.path.realpath(path))
        if real == final:
            return path
        if spec.shard_bytes and real.parent == final.parent and output_files.shard_numbers([real.name], final.name):
            return path
    return None


def canonical_path(spec: SinkSpec) -> str:
    """The same value for the same file, however it is spelled."""
    return spec.path.rstrip("/") if is_remote_sink(spec.path) else _local_path(spec.path)


def _local_path(path: str) -> str:
    path = unquote(path.removeprefix("file://")) if path.startswith("file://") else path
    return os.path.realpath(Path(path).expanduser())


class FileSink:
    """A file sink in the driver: prepare, writers for the workers, sync, finish, discard."""

    def __init__(self, spec: SinkSpec, run_id: str, spare: Path) -> None:
        self.spec = spec
        self.kind, self._packing = spec.form
        self._run_id = run_id
        self._shards = spec.shard_bytes if self.kind != "lance" else None
        self._remote = RemoteStore(spec.path, run_id) if is_remote_sink(spec.path) and self.kind != "lance" else None
        self._final = None if is_remote_sink(spec.path) else Path(spec.path)
        name = output_files.parts_folder_name(spec.path.rpartition("/")[2], run_id)
        self.parts = spare / name if self._final is None else self._final.parent / name
        self._syncer = PartSyncer(self.parts)
        self._base: Any = None

    # --- before the run

    def prepare(self, *, resumed: bool) -> None:
        """Check that results can be written, and create the folder of part files. Raises ConfigError."""
        try:
            self._check_path()
        except OSError as error:  # a name that is too long, a loop of links, ...
            raise self._refused_error(f"not writable: {error.strerror or error}") from None
        if not resumed and self._final is None:
            self._probe()
        if not resumed and self.spec.exists == "fail" and self._exists():
            fixes = (
                Change({"sink": output_files.unused_name(self.spec.path)}, (self.spec.subject,)),
                Change({"exists": "append"}, (self.spec.subject,)),
            )
            raise ConfigError(Problem("DT352", "the file exists, and `exists` is `fail`", (), fixes, self.spec.path))
        try:
            self._make_parts_folder()
            sync_folder(self.parts.parent)
            if not resumed and self.spec.exists == "append":
                self._base = self._read_base()
                if self._final is not None:
                    self._keep_old_file()
                    self._check_old_readable()
        except OSError as error:
            raise self._refused_error(f"not writable: {error.strerror or error}") from None
        except SourceSinkError as error:
            raise self._refused_error(error.message) from None

    def _make_parts_folder(self) -> None:
        """A folder that another user made, or can write to, is refused: its files would become results."""
        make_private_folder(self.parts)
        reason = foreign_access(self.parts)
        if reason:
            raise self._refused_error(f"the folder of its part files, {self.parts}, {reason}")

    def _probe(self) -> None:
        """Check that the store is writable. Lance has its own client, so fsspec's may be missing."""
        try:
            remote = self._remote or RemoteStore(self.spec.path, self._run_id)
        except ConfigError:
            return
        remote.check()

    def _check_path(self) -> None:
        """Check that a file is not a folder, a folder not a file, and neither a device."""
        final = self._final
        if final is None:
            return
        for folder in final.parents:
            if folder.exists() and not folder.is_dir():
                raise self._refused_error(f"{folder} is a file, not a folder")
        with suppress(FileNotFoundError, NotADirectoryError):
            mode = final.stat().st_mode
            if self.kind == "lance":
                if not stat.S_ISDIR(mode):
                    raise self._refused_error("a file exists there, and a Lance dataset is a folder")
                if not (final / "_versions").is_dir() and any(final.iterdir()):
                    raise self._refused_error("a folder exists there that is not a Lance dataset; it is not replaced")
            elif self._shards is None and stat.S_ISDIR(mode):
                raise self._refused_error("a folder of that name exists: specify a file in it")
            elif self._shards is None and not stat.S_ISREG(mode):
                raise self._refused_error("not a regular file")

    def _refused_error(self, message: str) -> ConfigError:
        fixes = ("choose a file in a folder that you can write to",)
        return ConfigError(Problem("DT351", message, (), fixes, self.spec.path))

    def _exists(self) -> bool:
        if self.kind == "lance" and self._final is None:
            from dovetail.data.writers import lance_dataset

            return lance_dataset.dataset_version(self.spec.path) is not None
        if self._shards is not None:
            return bool(self._shard_numbers())
        return self._final.exists() if self._final is not None else self._size() is not None

    def _shard_numbers(self) -> list[int]:
        if self._remote is not None:
            return self._remote.list_shards()
        assert self._final is not None
        if not self._final.parent.is_dir():
            return []
        return output_files.shard_numbers([path.name for path in self._final.parent.iterdir()], self._final.name)

    def _size(self) -> int | None:
        if self._remote is not None:
            return self._remote.size()
        assert self._final is not None
        return self._final.stat().st_size if self._final.exists() else None

    # --- existing output

    def base(self) -> Any:
        """JSON: the existing rows that count, as of the start of the run (`append`). Kept until the end."""
        return self._base

    def set_base(self, base: Any) -> None:
        self._base = base

    def _read_base(self) -> dict[str, Any]:
        if self.kind == "lance":
            from dovetail.data.writers import lance_dataset

            return {"version": lance_dataset.dataset_version(self.spec.path) if self._exists() else None}
        if self._shards is not None:
            return {"shards": max(self._shard_numbers(), default=-1) + 1}
        stamp = _size_and_mtime(self._final) if self._final is not None else None
        return {"size": self._size(), **({} if self._final is None else {"stamp": stamp})}

    def _keep_old_file(self) -> OldFile | None:
        """A link to the old file under a private name, so that the end can be repeated after the new one replaced
        it."""
        size = self._base.get("size")
        if size is None:
            return None
        kept = self.parts / BASE_FILE
        if not kept.exists():
            if self._size() != size:
                raise self._changed_error()
            fresh = self.parts / f"{BASE_FILE}.new"
            fresh.unlink(missing_ok=True)
            if self._remote is not None:
                self._remote.download(fresh)
            else:
                _link_or_copy(self.spec.path, fresh)
            fresh.replace(kept)
        if kept.stat().st_size != size:
            raise self._changed_error()
        return OldFile(kept, size)

    def _check_unchanged(self, made: list[Path], first: int) -> None:
        """Check that no other process wrote there since: the same file, another file, or more shards. The names to be
        published are recorded first, so that the end can be repeated."""
        assert self._final is not None
        notes = self.parts / PLACED_FILE
        placed = set(json.loads(notes.read_text())) if notes.exists() else set()
        if self._shards is not None:
            there = [
                self._final.with_name(output_files.shard_name(self._final.name, at)) for at in self._shard_numbers()
            ]
            changed = any(path.stat().st_ino not in placed for path in there[first:])
        else:
            stamp = _size_and_mtime(self._final)
            ours = stamp is not None and self._final.stat().st_ino in placed
            changed = not ours and stamp != self._base.get("stamp", stamp)
        if changed:
            raise self._changed_error()
        fresh = self.parts / f"{PLACED_FILE}.new"
        fresh.write_text(json.dumps(sorted(placed | {path.stat().st_ino for path in made})))
        fresh.replace(notes)

    def _check_old_readable(self) -> None:
        """Check that the existing output is readable, as far as a quick check shows."""
        if self.kind == "parquet" and self._shards is None and self._base.get("size") is not None:
            import pyarrow.parquet as pq

            try:
                pq.read_schema(self.parts / BASE_FILE)
            except Exception as error:
                raise self._refused_error(f"cannot append, because the file cannot be read: {error}") from None

    def _changed_error(self) -> SourceSinkError:
        message = "the file to append to was changed by another process since the run started"
        return SourceSinkError(
            "DT357", message, "run it again from the beginning, or with `exists: replace`", self.spec.path
        )

    # --- during the run

    def writer(self) -> Writer:
        """The writer for workers; picklable."""
        ordered = self.spec.ordered
        if self.kind == "jsonl":
            from dovetail.data.writers.encoders import JsonlWriter

            return JsonlWriter(self.parts, ordered=ordered)
        columns = self.spec.columns
        if self.kind in ("csv", "tsv"):
            from dovetail.data.writers.encoders import CSV_DELIMITERS, CsvWriter

            delimiter = CSV_DELIMITERS[self.kind]
            return CsvWriter(self.parts, ordered=ordered, delimiter=delimiter, columns=columns)
        from dovetail.data.writers.encoders import ArrowWriter

        lance = self.kind == "lance"
        return ArrowWriter(self.parts, ordered=ordered, columns=columns, lance=lance)

    def sync(self, parts: Iterable[str]) -> None:
        """Make these part files durable. Raises SourceSinkError."""
        self._syncer.sync(parts)

    def which_exist(self, pieces: Iterable[PartFileRange]) -> list[bool]:
        """For each piece, whether it still exists; a resume computes missing pieces again."""
        return which_pieces_exist(self.parts, pieces)

    # --- end of the run

    def finish(self, pieces: Sequence[PartFileRange]) -> list[str]:
        """Build the final files from these pieces, publish them and return their names. Can be repeated after a crash
        at any moment, and after an error when its cause is fixed: part files stay until `discard`."""
        reader = PartReader(self.parts)
        out = self.parts / OUT_FOLDER
        try:
            if not all(which_pieces_exist(self.parts, pieces)):
                raise results_missing(str(self.parts))
            output_files.remove_folder(out)
            out.mkdir(parents=True)
            return self._finish(reader, pieces, out)
        except OSError as error:
            raise write_failed(error, self.spec.path) from None
        except (ValueError, RuntimeError) as error:  # errors of pyarrow and lance for values that they cannot write
            message = f"the results cannot be written: {type(error).__name__}: {error}"
            fix = "try a newer version (pip install -U pyarrow pylance), then resume"
            raise SourceSinkError("DT355", message, fix, self.spec.path) from error
        finally:
            reader.close()
            output_files.remove_folder(out)

    def _finish(self, reader: PartReader, pieces: Sequence[PartFileRange], out: Path) -> list[str]:
        appends = self.spec.exists == "append"
        if appends and self._base is None:
            self._base = self._read_base()
        job = MergeJob(
            reader,
            pieces,
            out,
            self._run_id,
            self.spec.path,
            self.kind,
            self._packing,
            self.spec.ordered,
            self.spec.shard_bytes,
            self.spec.columns,
            self.spec.compression,
            self._keep_old_file() if appends else None,
        )
        if self.kind == "lance":
            return self._finish_lance(job)
        made = self._make_files(job)
        sync_folder(out)
        first = (self._base or {}).get("shards") or 0
        if self._remote is not None:
            return self._remote.upload(made, sharded=self._shards is not None, first=first)
        assert self._final is not None
        if appends:
            self._check_unchanged(made, first)
        return [
            str(path)
            for path in output_files.publish_files(made, self._final, sharded=self._shards is not None, first=first)
        ]

    def _make_files(self, job: MergeJob) -> list[Path]:
        if self.kind != "parquet":
            from dovetail.data.writers.line_files import write_line_files

            return write_line_files(job)
        from dovetail.data.writers.parquet import write_parquet

        return write_parquet(job)

    def _finish_lance(self, job: MergeJob) -> list[str]:
        from dovetail.data.writers import lance_dataset

        base = (self._base or {}).get("version")
        if self.spec.exists == "append" and base is not None:
            lance_dataset.append_rows(job, self.spec.path, base)
        elif self._final is None:
            lance_dataset.write_dataset(job, self.spec.path, mode="overwrite")
        else:
            made = job.out / "dataset.lance"
            lance_dataset.write_dataset(job, str(made), mode="create")
            lance_dataset.sync_tree(made)
            output_files.replace_folder(made, self._final, job.out / "old")
            sync_folder(self._final.parent)
        return [self.spec.path]

    def discard(self) -> None:
        """Remove the part files; nothing else."""
        self._syncer.close()
        output_files.remove_folder(self.parts)

    def close(self) -> None:
        self._syncer.close()


def _size_and_mtime(path: Path) -> list[int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return [found.st_size, found.st_mtime_ns]


def _link_or_copy(source: str, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:
        from shutil import copyfile

        copyfile(source, target)
