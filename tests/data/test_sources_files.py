"""Files of a source: patterns, errors, and changes since a run began."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from data.aids import check_seeks, opened, plain, rows_of
from dovetail.data.readers import fingerprint, path_list
from dovetail.data.sources import SourceSpec, as_source_spec, source, source_changes
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ["a b.png", "new\nline.png", "sub/ü.png", "sub/_under.png", "z[1].png"]


def folder(path: Path) -> list[str]:
    for name in NAMES:
        (path / name).parent.mkdir(exist_ok=True, parents=True)
        (path / name).write_bytes(name.encode() * 3)
    (path / ".hidden").touch()
    return sorted(str(path / name) for name in NAMES)


def test_paths_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = folder(tmp_path / "media")
    assert rows_of(source(tmp_path / "media", format="paths")) == paths
    assert rows_of(source(str(tmp_path / "media/sub/*"), format="paths")) == [path for path in paths if "/sub/" in path]
    contents = [{"path": path, "bytes": path[len(str(tmp_path / "media")) + 1 :].encode() * 3} for path in paths]
    assert rows_of(source(tmp_path / "media", format="bytes"), [1, 2]) == contents
    assert rows_of(source(tmp_path / "media" / "z[1].png", format="bytes")) == contents[-1:]
    check_seeks(source(tmp_path / "media", format="paths"), [2], [(at, []) for at in range(7)])
    monkeypatch.setattr(path_list, "MAX_CONTENT_BYTES_PER_SPLIT", 50)
    first = opened(source(tmp_path / "media", format="bytes")).take(100)
    assert first is not None
    assert first.items < len(NAMES)


def test_a_file_that_went_away_is_one_bad_row(tmp_path: Path) -> None:
    paths = folder(tmp_path / "media")
    split = opened(source(tmp_path / "media", format="bytes")).take(10)
    assert split is not None
    (tmp_path / "media" / "a b.png").unlink()
    rows = split.read()
    assert plain(rows[0]) == ("bad", paths[0])
    assert "No such file" in rows[0].error_text
    assert len(rows) == len(NAMES)


@pytest.mark.parametrize(
    ("options", "codes", "words"),
    [
        ({"path": "x.jsonl", "colums": ["a"]}, ["DT340"], "did you mean 'columns'"),
        ({"format": "jsn", "path": 3, "limit": -1}, ["DT340"] * 3, "did you mean 'jsonl'"),
        ({"path": "x.csv", "delimiter": ";;", "encoding": "klingon", "header": 1}, ["DT340"] * 3, "does not support"),
        ({"path": ["a.jsonl", None]}, ["DT340"], "path is None"),
        ({"path": []}, ["DT340"], "empty list"),
        ({"path": ""}, ["DT340"], "path is ''"),
        ({"path": "a\0b"}, ["DT340"], "not the name"),
        ({"path": "a.jsonl", "columns": ["a", "a"]}, ["DT340"], "different names"),
        ({"path": "a.jsonl", "columns": "a"}, ["DT340"], "not a list of names"),
        ({"path": "a", "format": "text", "columns": ["a"], "delimiter": ";"}, ["DT340"] * 2, "not supported for text"),
        ({"path": "a", "limit": True}, ["DT340"], "not a number of rows"),
    ],
)
def test_all_problems_of_a_source_are_reported_together(options: dict[Any, Any], codes: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        as_source_spec(options)
    assert list(caught.value.codes) == codes
    assert all(problem.fix_texts for problem in caught.value.problems)


def test_specs() -> None:
    assert as_source_spec("a.jsonl") == source("a.jsonl") == SourceSpec("a.jsonl")
    assert source(["a", "b"], format="text", columns=None) == SourceSpec(("a", "b"), "text")
    assert as_source_spec({"path": "a", "encoding": "utf-8-sig"}) == SourceSpec("a")
    assert as_source_spec([1, 2]) is None


def test_what_cannot_be_found(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").touch()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    paths = ["dat.jsonl", "*.csv", "photos", "photos/a.jpg", "gone.jsonl"]
    with pytest.raises(ConfigError) as caught:
        opened(source([str(tmp_path / path) for path in paths]))
    assert caught.value.codes == ("DT341",) * 4
    assert "did you mean 'data.jsonl'" in str(caught.value)
    with pytest.raises(ConfigError, match="unknown format by file name") as caught:
        opened(tmp_path / "photos" / "a.jpg")
    assert caught.value.codes == ("DT342",)
    (tmp_path / "x.csv").write_text("a\n")
    (tmp_path / "gone.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"several formats: 1 jsonl .* 1 csv"):
        opened(tmp_path)
    with pytest.raises(ConfigError, match="named twice"):
        opened(source([str(tmp_path / "*.jsonl"), str(tmp_path / "data.jsonl")]))
    with pytest.raises(ConfigError, match="not a regular file"):
        opened(source("/dev/null", format="text"))
    with pytest.raises(ConfigError, match="columns is not supported for jsonl"):
        opened(source(tmp_path / "data.jsonl", columns=["a"]))


def test_a_json_document_is_not_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"a": 1}, {"a": 2}], indent=1))
    with pytest.raises(ConfigError, match="one JSON document") as caught:
        opened(tmp_path / "a.json")
    assert "jq -c" in caught.value.problems[0].fix_texts[0]
    (tmp_path / "b.json").write_text('{"a": 1}\n{"a": 2}\n')
    assert rows_of(tmp_path / "b.json") == [{"a": 1}, {"a": 2}]
    (tmp_path / "c.json").write_text("[1, 2]\n[3, 4]\n")
    assert rows_of(tmp_path / "c.json") == [[1, 2], [3, 4]]


def test_urls_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "a b.jsonl").write_text("1\n2\n")
    assert rows_of((tmp_path / "a b.jsonl").as_uri()) == [1, 2]


def test_what_changed_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text("1\n" * 2000)
    before = json.loads(json.dumps(opened(tmp_path).fingerprint()))
    assert source_changes(before, opened(tmp_path).fingerprint()) == []
    assert source_changes(before, opened(source(tmp_path, limit=3)).fingerprint()) == [
        "limit was not given and is 3 now"
    ]
    (tmp_path / "a.jsonl").write_text("1\n" * 5)
    (tmp_path / "b.jsonl").rename(tmp_path / "d.jsonl")
    (tmp_path / "c.jsonl").write_text("2\n" * 2000)
    assert source_changes(before, opened(tmp_path).fingerprint()) == [
        f"{tmp_path / 'b.jsonl'} is gone",
        f"{tmp_path / 'd.jsonl'} was not there",
        f"{tmp_path / 'a.jsonl'} was 3.91KB and is 10B now",
        f"{tmp_path / 'c.jsonl'} was written to or replaced (same size, another time)",
    ]
    assert source_changes({"kind": "csv"}, {"kind": "jsonl"}) == ["the source was csv and is jsonl now"]
    monkeypatch.setattr(fingerprint, "MAX_FILES_LISTED", 2)
    many = opened(tmp_path).fingerprint()
    (tmp_path / "e.jsonl").write_text("1")
    assert source_changes(many, opened(tmp_path).fingerprint()) == [
        "the bytes of all files together was 8,010 and is 8,011 now",
        "the number of files was 3 and is 4 now",
        "the list of files changed",
    ]
