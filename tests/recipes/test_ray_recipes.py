"""Recipes on Ray: the same rows, order, traces and monitor as on one machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import dovetail as dt
from engines.ray_runs import NODES, use_only_nodes

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from ray_aids import FakeCluster

RECIPE = """
dataset_path: rows.jsonl
export_path: {out}/clean.jsonl
np: 2
open_monitor: true
open_tracer: true
trace_num: 3
process:
  - whitespace_normalization_mapper:
  - clean_links_mapper: {{repl: <LINK>}}
  - text_length_filter: {{min_len: 20}}
  - special_characters_filter: {{max_ratio: 0.5}}
  - document_deduplicator: {{lowercase: true}}
  - words_num_filter: {{min_num: 3}}
"""
BAD = 77


def write_recipe(folder: Path, out: str) -> dt.Recipe:
    path = folder / f"{out}.yaml"
    path.write_text(RECIPE.format(out=out))
    return dt.Recipe.load(path)


def test_a_recipe_gives_the_same_results_on_ray(
    ray_cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_only_nodes(ray_cluster, monkeypatch, *NODES)
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    words = ["one", "two ", "three\u00a0", "https://example.com/a?b=c", "four", "FIVE"]
    texts = [" ".join(words[: 2 + number % 5]) + f" number {number // 3}" for number in range(300)]
    rows: list[dict[str, object]] = [{"id": number, "text": text} for number, text in enumerate(texts)]
    rows[BAD]["text"] = 7
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = write_recipe(tmp_path, "here").run(progress=False, probe=False)
    there = write_recipe(tmp_path, "there").run(engine=f"ray:{ray_cluster.address}", progress=False, probe=False)
    assert (here.status, there.status) == ("finished", "finished")
    assert (here.failed, there.failed) == (1, 1)
    written = [(tmp_path / out / "clean.jsonl").read_text() for out in ("here", "there")]
    assert written[0] == written[1]
    assert 10 < written[0].count("\n") < 250, "operators drop some rows and keep some"
    for out in ("here", "there"):
        monitor = json.loads((tmp_path / out / "monitor" / "monitor.json").read_text())
        assert len(monitor) == 6
        traces = (tmp_path / out / "trace" / "sample_trace-clean_links_mapper.jsonl").read_text()
        assert traces.count("\n") == 3
