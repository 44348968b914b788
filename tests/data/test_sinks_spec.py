"""Problems of a sink are reported together, before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data.sink_aids import opened, rows_of, written
from dovetail.data.sinks import SinkSpec, as_sink_spec, open_sink, sink
from dovetail.errors import ConfigError


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("x.jsonl", ("jsonl", None)),
        ("a.b/x.y.JSONL.GZ", ("jsonl", "gz")),
        ("x.ndjson", ("jsonl", None)),
        ("x.csv.zst", ("csv", "zst")),
        ("x.tsv", ("tsv", None)),
        ("s3://b/x.parquet", ("parquet", None)),
        ("x.lance", ("lance", None)),
    ],
)
def test_the_suffix_selects_the_format(path: str, form: tuple[str, str | None]) -> None:
    assert sink(path).form == form
    assert sink(Path("x.data"), format=".".join(filter(None, form))).form == form


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("x.json", "did you mean 'jsonl'"),
        ("x", "has no known format suffix"),
        ("", "the path of a sink is ''"),
        ("out/", "is a folder: name a file in it"),
        (".", "is a folder"),
        ("s3://bucket", "names no file"),
        ({"path": 5}, "the path of a sink is 5"),
        ({"path": "x.jsonl", "orderd": True}, "unknown setting 'orderd' (did you mean 'ordered'?)"),
        ({"path": "x.jsonl", 5: True}, "unknown setting 5"),
        ({"ordered": True}, "a sink without `path`"),
        ({"path": "x.jsonl", "ordered": "yes"}, "`ordered` is 'yes'"),
        ({"path": "x.jsonl", "exists": "replce"}, "did you mean 'replace'"),
        ({"path": "x.jsonl", "exists": 3}, "`exists` is 3"),
        ({"path": "x.jsonl", "format": "jsnl"}, "did you mean 'jsonl'"),
        ({"path": "x.jsonl", "format": ["jsonl"]}, "unknown format ['jsonl']"),
        ({"path": "x.jsonl", "shard_size": 5}, "5 has no unit"),
        ({"path": "x.jsonl", "shard_size": "1B"}, "less than 1KB"),
        ({"path": "x.jsonl", "columns": ["a"]}, "`columns` is a setting of tables"),
        ({"path": "x.csv", "columns": "a"}, "`columns` is 'a'"),
        ({"path": "x.csv", "columns": []}, "`columns` is ()"),
        ({"path": "x.csv", "columns": ["a", 1]}, "`columns` is ('a', 1)"),
        ({"path": "x.csv", "columns": ["a", "b", "a"]}, "`columns` has 'a' twice"),
        ({"path": "x.csv", "compression": "zstd"}, "name it x.csv.gz or .zst"),
        ({"path": "x.parquet", "compression": "lzma"}, "`compression` is 'lzma'"),
        ({"path": "new\nline.lance"}, "control characters"),
    ],
)
def test_what_makes_no_sense_is_refused(value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        as_sink_spec(value)
    assert says in str(caught.value)
    assert all(problem.code == "DT350" and problem.fix_texts for problem in caught.value.problems)


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        sink("x.csv", exists="no", shard_size="x", columns=["a", "a"], compression="zstd", speed=1, ordered=3)
    assert len(caught.value.problems) == 6


def test_what_is_not_a_sink_is_none_of_ours() -> None:
    for value in (None, 5, print, ["x.jsonl"], {"stage": "x.jsonl"}, {}):
        assert as_sink_spec(value) is None
    assert (
        as_sink_spec(SinkSpec("x.jsonl"))
        == sink("x.jsonl")
        == as_sink_spec({"path": "x.jsonl"})
        == as_sink_spec(Path("x.jsonl"))
    )
    with pytest.raises(ConfigError):
        as_sink_spec(SinkSpec("x.json"))


def refused(path: Path | str, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        opened(path, **settings)
    assert all(problem.fix_texts and problem.place for problem in caught.value.problems)
    return str(caught.value)


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "file.lance").touch()
    (tmp_path / "mine.lance").mkdir()
    (tmp_path / "mine.lance" / "thesis.txt").touch()
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "DT351" in refused(tmp_path / "file" / "below" / "x.jsonl")
    assert "is a file, not a folder" in refused(tmp_path / "file" / "x.jsonl")
    assert "a folder of that name exists" in refused(tmp_path / "folder.jsonl")
    assert "a file exists there, and a Lance dataset is a folder" in refused(tmp_path / "file.lance")
    assert "not a Lance dataset" in refused(tmp_path / "mine.lance")
    assert "not a regular file" in refused(tmp_path / "pipe.jsonl")
    assert "not a regular file" in refused("/dev/null", format="jsonl")
    assert "not writable" in refused("/proc/x.jsonl")
    assert (tmp_path / "mine.lance" / "thesis.txt").exists()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "lance"])
def test_exists_fail_is_refused_before_anything_starts(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    first = opened(path, exists="fail")
    first.finish(written(first, [0], [{"a": 1}]))
    first.discard()
    assert "DT352" in refused(path, exists="fail")
    assert "replace" not in refused(path, exists="fail"), "a fix must not risk data"
    assert list(tmp_path.iterdir()) == [path]
    again = open_sink(sink(path, exists="fail"), "r1", tmp_path)
    again.prepare(resumed=True)  # it is ours
    if kind != "lance":
        target = opened(path, exists="fail", shard_size="1MB")  # other files
        target.finish(written(target, [0], [{"a": 1}]))
        assert "DT352" in refused(path, exists="fail", shard_size="1MB")


@pytest.mark.parametrize(
    "name", ["a b.jsonl", "new\nline.jsonl", "ü☃.csv", "-x.parquet", "x" * 240 + ".jsonl", "[*].csv"]
)
def test_odd_names_and_relative_paths(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for settings in ({}, {"shard_size": "1MB"}) if len(name) < 200 else ({},):
        target = opened(f"new/{name}", **settings)
        monkeypatch.chdir("/")
        (final,) = target.finish(written(target, [0], [{"a": "1"}]))
        monkeypatch.chdir(tmp_path)
        target.discard()
        assert Path(final).parent == tmp_path / "new"
        assert rows_of(final) == [{"a": "1"}]
        Path(final).unlink()
        assert list((tmp_path / "new").iterdir()) == []


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    (tmp_path / "real.jsonl").write_text("old\n")
    (tmp_path / "real.jsonl").chmod(0o600)
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    target = opened(tmp_path / "link.jsonl")
    assert target.finish(written(target, [0], [{"a": 1}])) == [str(tmp_path / "real.jsonl")]
    assert (tmp_path / "link.jsonl").is_symlink()
    assert rows_of(tmp_path / "link.jsonl") == [{"a": 1}]
    assert (tmp_path / "real.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_url_of_a_file_is_a_path(tmp_path: Path) -> None:
    target = opened(f"file://{tmp_path}/a%20b.jsonl")
    assert target.finish([]) == [str(tmp_path / "a b.jsonl")]


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('pyarrow', 'lance', 'zstandard', 'fsspec'): sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "from dovetail.data.sinks import open_sink, sink\n"
        "for name in ('x.parquet', 'x.lance', 'x.jsonl.zst', 's3://b/x.jsonl'):\n"
        "    try: open_sink(sink(name), 'r', Path('.'))\n"
        "    except Exception as error: print(error)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    for extra in ("tables", "lance", "files"):
        assert f"pip install 'dovetail-ml[{extra}]'" in shown.stdout
    assert shown.stdout.count("DT358") == 5


def test_a_sink_costs_no_heavy_imports() -> None:
    code = (
        "import sys; from dovetail.data.sinks import open_sink, sink; from pathlib import Path\n"
        "open_sink(sink('x.jsonl'), 'r', Path('.')).writer()\n"
        "heavy = ('pyarrow', 'lance', 'numpy', 'fsspec', 'pydantic', 'asyncio')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"
