"""Sources on other machines, read through fsspec: an S3 server of this machine, and memory."""

from __future__ import annotations

import gzip
import json
import logging
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.aids import check_seeks, opened, plain, rows_of
from dovetail.control.payload import SourceSinkError
from dovetail.data.readers import block_reader
from dovetail.data.sources import source, source_changes
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = [{"n": number, "text": "ü" * (number % 50)} for number in range(300)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()


@pytest.fixture(scope="module")
def s3(s3_server: str) -> Iterator[Any]:
    """The file system of fsspec, with a bucket of that server."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", s3_server)
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import fsspec

        fs = fsspec.filesystem("s3", skip_instance_cache=False)
        fs.mkdir("bucket")
        yield fs
        fs.rm("bucket", recursive=True)
        fs.clear_instance_cache()


def put(s3: Any, name: str, raw: bytes) -> str:
    s3.pipe_file(f"bucket/{name}", raw)
    return f"s3://bucket/{name}"


def test_lines_of_s3(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reader, "BLOCK_BYTES", 1000)
    path = put(s3, "a b/a ü.jsonl", LINES)
    put(s3, "a b/z.jsonl.gz", gzip.compress(LINES + b"{bad\n"))
    assert rows_of(path, [1, 70]) == ROWS
    expected = [*ROWS, *ROWS, ("bad", "s3://bucket/a b/z.jsonl.gz:301")]
    assert [plain(row) for row in rows_of("s3://bucket/a b")] == expected
    assert [plain(row) for row in rows_of("s3://bucket/*/*.json*")] == expected
    check_seeks("s3://bucket/a b", [100, 200, 250, 10], [(605, []), (250, [True] * 3), (310, [False, True]), (590, [])])


def test_csv_and_parquet_and_bytes_of_s3(s3: Any) -> None:
    path = put(s3, "c.csv", b'n,t\n1,"a\nb"\n2,c\n')
    assert rows_of(path) == [{"n": "1", "t": "a\nb"}, {"n": "2", "t": "c"}]
    assert rows_of(source(path, header=False, limit=1)) == [{"c0": "n", "c1": "t"}]
    into = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS), into, row_group_size=70)
    put(s3, "p/a.parquet", into.getvalue().to_pybytes())
    assert rows_of("s3://bucket/p", [10, 100]) == ROWS
    put(s3, "m/a.bin", b"\0")
    put(s3, "m/b.bin", b"\1")
    assert rows_of(source("s3://bucket/m", format="bytes")) == [
        {"path": "s3://bucket/m/a.bin", "bytes": b"\0"},
        {"path": "s3://bucket/m/b.bin", "bytes": b"\1"},
    ]
    assert rows_of(source("s3://bucket/m/b*", format="paths")) == ["s3://bucket/m/b.bin"]


def test_objects_that_change_or_are_not_there(s3: Any) -> None:
    path = put(s3, "x.jsonl", b"1\n2\n")
    cursor = opened(path)
    before = cursor.fingerprint()
    assert source_changes(before, opened(path).fingerprint()) == []
    put(s3, "x.jsonl", b"1\n3\n")
    assert source_changes(before, opened(path).fingerprint()) == [
        f"{path} was written to or replaced (same size, another time)"
    ]
    with pytest.raises(SourceSinkError, match="replaced"):
        cursor.take(1)
    with pytest.raises(ConfigError) as caught:
        opened(source([path, "s3://bucket/none.jsonl", "s3://bucket/none/*.jsonl", "s3://nobucket/x.jsonl"]))
    assert caught.value.codes == ("DT341",) * 3
    split = opened(path).take(2)
    assert split is not None
    assert split.read() == [1, 3]


def test_memory_urls() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe_file("/some/a.jsonl", LINES)
    assert rows_of("memory://some/a.jsonl") == ROWS
    assert rows_of("memory://some/*.jsonl") == ROWS
    fs.rm("/some", recursive=True)


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    cases = [
        ("gs://bucket/a.jsonl", "gcsfs", "pip install gcsfs"),
        ("s3://bucket/a.jsonl", "fsspec.core", "pip install 'dovetail-ml[files]'"),
        (str(tmp_path / "a.parquet"), "pyarrow.parquet", "pip install 'dovetail-ml[tables]'"),
        (str(tmp_path / "a.jsonl.zst"), "zstandard", "pip install 'dovetail-ml[files]'"),
        (str(tmp_path / "a.lance"), "lance", "pip install 'dovetail-ml[lance]'"),
    ]
    for path, module, install in cases:
        if str(tmp_path) in path:
            (tmp_path / path).touch()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(ConfigError) as caught:
                rows_of(path)
        assert caught.value.codes == ("DT343",)
        assert caught.value.problems[0].fix_texts == (install,)
