"""Input and output of recipes, checks before the run, stats, traces and monitor."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from recipes.recipe_aids import HERE, load, read_rows, run, some_rows, write_rows

if TYPE_CHECKING:
    from pathlib import Path

# --- input


def test_text_files_have_a_row_per_line(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a first line of text\nshort\nanother line of text\n")
    for number, (path, first) in enumerate(
        [
            ("in.txt", "text_length_filter"),
            ("in.txt", "document_deduplicator, text_length_filter"),
            ("*.txt", "clean_ip_mapper, text_length_filter"),
        ]
    ):
        run(tmp_path, f"[{first}]", f"dataset_path: '{path}'", run_dir=str(tmp_path / f"run{number}"))
        found = read_rows(tmp_path / "out.jsonl")
        assert found == [{"text": "a first line of text"}, {"text": "another line of text"}]
    head = "dataset_path: in.txt\ntext_keys: [content, other]"
    run(tmp_path, "[text_length_filter]", head, run_dir=str(tmp_path / "last"))
    assert read_rows(tmp_path / "out.jsonl")[0] == {"content": "a first line of text"}


def test_a_folder_of_text_files_has_a_row_per_line(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a first line of text\n")
    (tmp_path / "texts" / "b.txt").write_text("another line of text\n")
    for number, head in enumerate(("dataset_path: texts", "dataset_path: [texts/a.txt, texts/b.txt]")):
        run(tmp_path, "[text_length_filter]", head, run_dir=str(tmp_path / f"run{number}"))
        assert [row["text"] for row in read_rows(tmp_path / "out.jsonl")] == [
            "a first line of text",
            "another line of text",
        ]


def written_as(folder: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    """Rows in a file of this kind; its path."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    match kind:
        case "jsonl.gz":
            (folder / "x.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        case "jsonl.zst":
            zstandard = pytest.importorskip("zstandard")
            (folder / "x.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
        case "csv":
            with (folder / "x.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
        case "parquet":
            table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
            pytest.importorskip("pyarrow.parquet").write_table(table, folder / "x.parquet")
        case "folder":
            (folder / "x").mkdir()
            write_rows(folder / "x" / "a.jsonl", rows[:10])
            write_rows(folder / "x" / "b.jsonl", rows[10:])
            return "x"
        case "glob":
            write_rows(folder / "part-1.jsonl", rows[:10])
            write_rows(folder / "part-2.jsonl", rows[10:])
            return "part-*.jsonl"
        case _:
            (folder / f"x.{kind}").write_text(lines)
    return f"x.{kind}"


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "jsonl.zst", "csv", "parquet", "folder", "glob"])
def test_rows_are_read_from_files_of_many_kinds(tmp_path: Path, kind: str) -> None:
    rows = some_rows(30)
    path = written_as(tmp_path, kind, rows)
    run(tmp_path, "[{text_length_filter: {min_len: 30}}]", f"dataset_path: '{path}'")
    found = read_rows(tmp_path / "out.jsonl")
    assert [(row["text"], int(row["n"])) for row in found] == [
        (row["text"], row["n"]) for row in rows if len(row["text"]) >= 30
    ]


def test_a_json_array_is_read_as_rows(tmp_path: Path) -> None:
    rows = some_rows(30)
    for number, text in enumerate((json.dumps(rows), json.dumps(rows, indent=2))):
        (tmp_path / "in.json").write_text(text)
        run(tmp_path, "[text_length_filter]", "dataset_path: in.json", run_dir=str(tmp_path / f"run{number}"))
        assert len(read_rows(tmp_path / "out.jsonl")) == sum(len(row["text"]) >= 10 for row in rows)


def test_the_key_dataset_is_read(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", some_rows(5))
    write_rows(tmp_path / "b.jsonl", some_rows(5))
    head = "dataset: {configs: [{type: local, path: a.jsonl}, {type: local, path: b.jsonl}]}\nexport_path: out.jsonl\n"
    load(tmp_path, f"{head}process: [{{text_length_filter: {{min_len: 0}}}}]").run(cluster=HERE, probe=False)
    assert len(read_rows(tmp_path / "out.jsonl")) == 10


def test_relative_paths_start_at_the_file_or_at_the_current_folder_as_in_data_juicer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes, here = tmp_path / "recipes", tmp_path / "here"
    for folder in (recipes, here / "data"):
        folder.mkdir(parents=True)
    write_rows(here / "data" / "in.jsonl", some_rows(5))
    monkeypatch.chdir(here)
    text = "dataset_path: data/in.jsonl\nexport_path: out/clean.jsonl\nprocess: [clean_links_mapper]\n"
    recipe = load(recipes, text)
    (note,) = recipe.notes
    assert note.startswith(f"relative paths start at {here}")
    recipe.run(cluster=HERE, probe=False)
    assert len(read_rows(here / "out" / "clean.jsonl")) == 5
    (recipes / "data").mkdir()
    write_rows(recipes / "data" / "in.jsonl", some_rows(3))
    recipe = load(recipes, text)
    assert recipe.notes == ()
    recipe.run(cluster=HERE, probe=False)
    assert len(read_rows(recipes / "out" / "clean.jsonl")) == 3


# --- output


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ("export_path: x.jsonl", "x.jsonl"),
        ("export_path: x.json", "x.json"),
        ("export_path: x.jsonl.gz", "x.jsonl.gz"),
        ("export_path: x.csv", "x.csv"),
        ("export_path: x.parquet", "x.parquet"),
        ("export_path: x\nexport_type: jsonl", "x"),
        ("export_path: x.data\nexport_type: parquet", "x.data"),
        ("export_path: x.txt\nexport_type: csv", "x.txt"),
    ],
)
def test_the_output_format_is_that_of_the_name_or_of_export_type(tmp_path: Path, head: str, name: str) -> None:
    rows = [{"n": row["n"], "text": row["text"]} for row in some_rows(30)]
    run(tmp_path, "[{text_length_filter: {min_len: 0}}]", head, rows)
    raw = (tmp_path / name).read_bytes()
    found: list[Any]
    if "parquet" in head:
        found = pytest.importorskip("pyarrow.parquet").read_table(io.BytesIO(raw)).to_pylist()
    elif "csv" in head:
        found = [{**row, "n": int(row["n"])} for row in csv.DictReader(io.StringIO(raw.decode(), newline=""))]
    else:
        lines = gzip.decompress(raw) if name.endswith(".gz") else raw
        found = [json.loads(line) for line in lines.splitlines()]
    assert found == rows


def test_export_shard_size_splits_the_results(tmp_path: Path) -> None:
    for number, size in enumerate(("2KB", "2048")):
        folder = tmp_path / f"out{number}"
        folder.mkdir()
        head = f"export_path: out{number}/x.jsonl\nexport_shard_size: {size}"
        run(
            tmp_path, "[{text_length_filter: {min_len: 0}}]", head, some_rows(100), run_dir=str(tmp_path / f"r{number}")
        )
        shards = sorted(folder.glob("*.jsonl"))
        assert len(shards) > 2
        assert all(shard.stat().st_size <= 2048 for shard in shards)
        assert [row["n"] for shard in shards for row in read_rows(shard)] == list(range(100))


def test_without_an_export_path_no_stats_are_exported(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", some_rows(5))
    recipe = load(tmp_path, "dataset_path: in.jsonl\nexport_stats: true\nprocess: [text_length_filter]\n")
    assert recipe.sink is None
    assert [stage.name for stage in recipe.pipeline()] == ["text_length_filter"]


# --- images


def test_images_are_read_by_path_and_by_bytes(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, size in (("small.png", (10, 10)), ("large.png", (80, 60))):
        image.new("RGB", size, (200, 10, 10)).save(tmp_path / name)
    by_path = [{"text": name, "images": [str(tmp_path / name)]} for name in ("small.png", "large.png")]
    process = "[{image_shape_filter: {min_width: 50, min_height: 50}}]"
    run(tmp_path, process, rows=by_path)
    assert [row["text"] for row in read_rows(tmp_path / "out.jsonl")] == ["large.png"]
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(
        [{"text": name, "pics": [], "raw": [(tmp_path / name).read_bytes()]} for name in ("small.png", "large.png")]
    )
    parquet.write_table(table, tmp_path / "in.parquet")
    head = "dataset_path: in.parquet\nexport_path: out.parquet\nimage_bytes_key: raw\nimage_key: pics"
    run(tmp_path, process, head, run_dir=str(tmp_path / "second"))
    (row,) = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["text"] == "large.png"
    assert base64.b64encode(row["raw"][0]) == base64.b64encode((tmp_path / "large.png").read_bytes())
