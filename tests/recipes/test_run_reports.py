"""Probe, traces, monitor and table of operators of whole runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from command import run_command
from dovetail.observe.history import RunHistory
from dovetail.observe.stage_counts import count_stages
from dovetail.observe.summary_text import operator_table_lines
from recipes.recipe_aids import own_operator, read_rows, run, some_rows, write

if TYPE_CHECKING:
    from pathlib import Path


def test_traces_have_the_requested_number_of_samples(tmp_path: Path) -> None:
    rows = [{"text": f"see https://example.com/{n} " + "x" * (n % 40), "n": n} for n in range(200)]
    head = "open_tracer: true\ntrace_num: 4\nwork_dir: work"
    process = "[clean_links_mapper, {text_length_filter: {min_len: 20}}, clean_ip_mapper]"
    run(tmp_path, process, head, rows)
    trace = tmp_path / "work" / "trace"
    samples = read_rows(trace / "sample_trace-clean_links_mapper.jsonl")
    assert len(samples) == 4
    assert all(sample["original_text"] != sample["processed_text"] for sample in samples)
    assert len(read_rows(trace / "sample_trace-text_length_filter.jsonl")) == 4
    changed = trace / "sample_trace-clean_ip_mapper.jsonl"
    assert not changed.exists() or read_rows(changed) == []


def test_only_the_listed_operators_are_traced(tmp_path: Path) -> None:
    rows = [{"text": f"see https://example.com/{n}"} for n in range(30)]
    head = "open_tracer: true\nop_list_to_trace: [clean_links_mapper]"
    run(tmp_path, "[clean_links_mapper, {text_length_filter: {min_len: 5}}]", head, rows)
    names = {path.name for path in (tmp_path / "trace").iterdir()}
    assert names == {"sample_trace-clean_links_mapper.jsonl"}
    assert len(read_rows(tmp_path / "trace" / "sample_trace-clean_links_mapper.jsonl")) == 10


def test_the_monitor_is_written_beside_the_results(tmp_path: Path) -> None:
    run(
        tmp_path,
        "[clean_links_mapper, text_length_filter, document_deduplicator]",
        "open_monitor: true",
        some_rows(100),
    )
    monitor = json.loads((tmp_path / "monitor" / "monitor.json").read_text())
    assert len(monitor) == 3
    assert "<html" in (tmp_path / "monitor" / "monitor.html").read_text()
    assert not (tmp_path / "trace").exists()


def test_a_probe_writes_no_samples_and_no_results(tmp_path: Path) -> None:
    rows = [{"text": f"see https://example.com/{n} again"} for n in range(60)]
    head = "open_tracer: true\ntrace_num: 3"
    process = "[clean_links_mapper, {text_length_filter: {num_proc: 1, min_len: 5}}]"
    summary = run(tmp_path, process, head, rows, probe=True)
    assert summary.delivered == 60
    assert len(read_rows(tmp_path / "trace" / "sample_trace-clean_links_mapper.jsonl")) == 3


def test_rows_from_stdin_are_not_lost_to_a_probe(tmp_path: Path) -> None:
    process = "[{text_length_filter: {min_len: 1}}, document_deduplicator, {words_num_filter: {min_num: 1}}]"
    path = write(tmp_path, f"export_path: out.jsonl\nprocess: {process}\n")
    lines = "".join(json.dumps(row) + "\n" for row in some_rows(500))
    ran = run_command("run", str(path), "--source", "-", stdin=lines, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert [row["n"] for row in read_rows(tmp_path / "out.jsonl")] == list(range(500))


def test_the_table_and_the_monitor_have_the_same_counts_if_rows_fail_in_two_fused_operators(tmp_path: Path) -> None:
    own_operator(
        tmp_path,
        "fails_twice",
        "def first(row):\n    assert row['n'] % 50, 'first'\n    return row\n"
        "def second(row):\n    assert row['n'] % 60 != 1, 'second'\n    return row\n",
    )
    process = "['fails_twice:first', 'fails_twice:second', {text_length_filter: {min_len: 1}}]"
    summary = run(tmp_path, process, "open_monitor: true", rows=some_rows(300))
    history = RunHistory.load(summary.folder)
    assert list(history.units) == ["first+second+text_length_filter"]
    counts = count_stages(history).values()
    wanted = [(300, 294, 6), (294, 289, 5), (289, 289, 0)]
    assert [(one.items_in, one.items_out, one.failed) for one in counts] == wanted
    monitor = json.loads((tmp_path / "monitor" / "monitor.json").read_text())
    assert [(one["rows_in"], one["rows_out"], one["failed"]) for one in monitor] == wanted
    table = operator_table_lines(history)
    cells = [line.split() for line in table[1:4]]
    assert [(int(line[1]), int(line[2]), int(line[4])) for line in cells] == wanted
