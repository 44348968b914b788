"""Results in an S3 bucket, complete or not at all (a server on this machine)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from data.sink_aids import as_csv, rows_of, written
from dovetail.control.payload import SourceSinkError
from dovetail.data.sinks import FileSink, open_sink, sink
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = [{"id": at, "text": f"row {at}"} for at in range(100)]


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    s3fs = pytest.importorskip("s3fs")

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem(use_listings_cache=False)
    files.mkdir("bucket")
    yield files
    files.rm("bucket", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def at_bucket(name: str, spare: Path, run_id: str = "r1", **settings: Any) -> FileSink:
    target = open_sink(sink(f"s3://bucket/{name}", **settings), run_id, spare)
    target.prepare(resumed=False)
    return target


def downloaded(s3: Any, name: str, folder: Path) -> list[Any]:
    path = folder / Path(name).name
    s3.get_file(f"bucket/{name}", str(path))
    return rows_of(path)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "parquet"])
def test_results_reach_a_bucket(kind: str, s3: Any, tmp_path: Path) -> None:
    spare = tmp_path / "run"
    target = at_bucket(f"some folder/x ü.{kind}", spare, ordered=True)
    assert target.parts.parent == spare
    pieces = written(target, list(range(100)), ROWS)
    assert s3.find("bucket") == []
    assert target.finish(pieces) == [f"s3://bucket/some folder/x ü.{kind}"]
    target.discard()
    assert list(spare.iterdir()) == []
    expected = as_csv(ROWS) if kind == "csv" else ROWS
    assert downloaded(s3, f"some folder/x ü.{kind}", tmp_path) == expected
    assert s3.find("bucket") == [f"bucket/some folder/x ü.{kind}"]
    more = at_bucket(f"some folder/x ü.{kind}", spare, "r2", exists="append", ordered=True)
    base = json.loads(json.dumps(more.base()))
    pieces = written(more, [0, 1], [{"id": 100, "text": "new", "c": "x"}, {"id": 101}])
    for _ in range(2):
        more = open_sink(more.spec, "r2", spare)
        more.set_base(base)
        more.prepare(resumed=True)
        more.finish(pieces)
        found = downloaded(s3, f"some folder/x ü.{kind}", tmp_path)
        assert [int(row["id"]) for row in found] == list(range(102))
        assert found[100]["c"] == "x"


def test_shards_in_a_bucket(s3: Any, tmp_path: Path) -> None:
    target = at_bucket("out/x.jsonl", tmp_path, shard_size="1KB")
    names = target.finish(written(target, list(range(100)), ROWS))
    assert names == [f"s3://bucket/out/x-{at:05d}.jsonl" for at in range(len(names))]
    assert len(names) > 2
    more = at_bucket("out/x.jsonl", tmp_path, "r2", shard_size="1KB", exists="append")
    assert more.finish(written(more, [0], ROWS[:1])) == [f"s3://bucket/out/x-{len(names):05d}.jsonl"]
    few = at_bucket("out/x.jsonl", tmp_path, "r3", shard_size="1KB")
    assert few.finish(written(few, [0], ROWS[:1])) == names[:1]
    assert s3.find("bucket") == ["bucket/out/x-00000.jsonl"]
    with pytest.raises(ConfigError, match="DT352"):
        at_bucket("out/x.jsonl", tmp_path, "r4", shard_size="1KB", exists="fail")


def test_lance_in_a_bucket(s3: Any, tmp_path: Path, s3_server: str) -> None:
    import lance

    def rows() -> list[Any]:
        options = {"aws_endpoint": s3_server, "allow_http": "true"}
        return list(lance.dataset("s3://bucket/x.lance", storage_options=options).to_table().to_pylist())

    target = at_bucket("x.lance", tmp_path, ordered=True)
    pieces = written(target, list(range(100)), ROWS)
    for _ in range(2):
        assert target.finish(pieces) == ["s3://bucket/x.lance"]
        assert rows() == ROWS
    more = at_bucket("x.lance", tmp_path, "r2", exists="append", ordered=True)
    pieces = written(more, [0], [{"id": 100, "text": "new"}])
    for _ in range(2):
        more.finish(pieces)
        assert rows() == [*ROWS, {"id": 100, "text": "new"}]
    with pytest.raises(ConfigError, match="DT352"):
        at_bucket("x.lance", tmp_path, "r4", exists="fail")


def test_a_bucket_that_is_not_there(s3: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DT351"):
        open_sink(sink("s3://no-such-bucket/x.jsonl"), "r1", tmp_path).prepare(resumed=False)
    with pytest.raises(ConfigError, match="DT351"):
        open_sink(sink("s3://no-such-bucket/x.lance"), "r1", tmp_path).prepare(resumed=False)
    with pytest.raises(ConfigError, match="unknown URL scheme"):
        open_sink(sink("nosuch://bucket/x.jsonl"), "r1", tmp_path)


def test_a_bucket_that_vanishes(s3: Any, tmp_path: Path) -> None:
    target = at_bucket("x.jsonl", tmp_path)
    pieces = written(target, list(range(100)), ROWS)
    s3.rmdir("bucket")
    with pytest.raises(SourceSinkError, match="cannot be uploaded") as caught:
        target.finish(pieces)
    assert caught.value.code == "DT359"
    assert target.which_exist(pieces) == [True] * len(pieces)
    s3.mkdir("bucket")
    target.finish(pieces)
    assert sorted(row["id"] for row in downloaded(s3, "x.jsonl", tmp_path)) == list(range(100))
