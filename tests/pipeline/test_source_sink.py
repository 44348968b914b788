"""Source and sink sections of a pipeline file: errors with line and column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dovetail.errors import PipelineError
from dovetail.pipeline import pipeline_file
from dovetail.pipeline.pipeline import Pipeline
from dovetail.pipeline.pipeline_file import schema
from dovetail.pipeline.source_sink import JOB, MODES
from pipeline.test_pipeline_file import allows

if TYPE_CHECKING:
    from pathlib import Path

STAGES = "stages: [{name: a, run: 'm:f'}, {name: good, run: 'm:g'}, {name: bad, run: 'm:h', after: [a]}]\n"
ONE = {"stages": [{"name": "s", "run": "m:f"}]}


def problems(tmp_path: Path, text: str) -> list[tuple[str, str, str]]:
    file = tmp_path / "p.yaml"
    file.write_text(text + STAGES)
    with pytest.raises(PipelineError) as found:
        Pipeline.load(file)
    return [(one.code, one.place.removeprefix(f"{file}:"), one.message) for one in found.value.problems]


def test_a_pipeline_ignores_what_is_for_the_run(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    text = "source: a.jsonl\nsink: {stages: {good: g.jsonl, bad: {run: 'm:keep'}}}\nmode: waves\nordered: true\n"
    file.write_text(text + "max_errors: 5\n" + STAGES)
    assert [stage.name for stage in Pipeline.load(file)] == ["a", "good", "bad"]
    job = pipeline_file.read_pipeline_file(file).job
    assert set(job) == set(JOB.names)
    assert job["source"] == "a.jsonl"
    assert "source" not in Pipeline.load(file).to_dict()


@pytest.mark.parametrize(
    ("text", "code", "place", "words"),
    [
        ("source: 5", "DT013", "1:1", "source should be a path, or a list of paths, or a mapping"),
        ("source:", "DT013", "1:1", "not None"),
        ("source: ''", "DT013", "1:1", "not ''"),
        ("source: []", "DT013", "1:1", "not []"),
        ("source: [a, a]", "DT013", "1:1", "not ['a', 'a']"),
        ("source: {}", "DT012", "1:1", "source.path is missing"),
        ("source: {format: csv}", "DT012", "1:1", "source.path is missing"),
        ("source: {path: a, fromat: csv}", "DT011", "1:19", "unknown key 'fromat' (did you mean 'format'?)"),
        ("source: {path: a, limit: -1}", "DT013", "1:19", "source.limit should be a whole number from 0 on, not -1"),
        ("source: {path: a, header: 1}", "DT013", "1:19", "source.header should be true or false, not 1"),
        ("source: {path: a, run: 'm:f'}", "DT035", "1:1", "source has both a path and a function"),
        ("source: {run: m.f}", "DT013", "1:10", "source.run should be 'package.module:name', not 'm.f'"),
        ("source: {run: 'm:f', args: [1]}", "DT013", "1:22", "source.args should be a mapping"),
        ("source: {run: 'm:f', format: csv}", "DT011", "1:22", "unknown key 'format'"),
        ("sink: [a, b]", "DT013", "1:1", "sink should be a path, or a mapping"),
        ("sink: {path: [a]}", "DT013", "1:8", "sink.path should be a path"),
        ("sink: {path: a, exists: maybe}", "DT013", "1:17", "one of replace, fail, append, not 'maybe'"),
        ("sink: {path: a, shard_size: 5}", "DT013", "1:17", "sink.shard_size should be a size, not 5"),
        ("sink: {stages: {}}", "DT013", "1:8", "sink.stages should be a mapping of stages to sinks"),
        ("sink: {stages: {good: a}}", "DT035", "1:8", "results also leave at stage 'bad'"),
        ("sink: {stages: {good: a, bad: b, badd: c}}", "DT032", "1:34", "no results leave at stage 'badd' (did you"),
        ("sink: {stages: {good: a, bad: 7}}", "DT013", "1:26", "sink.stages.bad should be a path"),
        ("sink: {path: a, stages: {good: a, bad: b}}", "DT011", "1:8", "unknown key 'path'"),
        ("mode: fast", "DT013", "1:1", "mode should be one of auto, streaming, sequential, waves, not 'fast'"),
        ("ordered: yes please", "DT013", "1:1", "ordered should be true or false"),
        ("max_errors: -1", "DT013", "1:1", "max_errors should be a number of items or a percentage of them"),
        ("sorce: a.jsonl", "DT011", "1:1", "unknown key 'sorce' (did you mean 'source'?)"),
    ],
)
def test_a_mistake_is_reported_with_its_place(tmp_path: Path, text: str, code: str, place: str, words: str) -> None:
    (found,) = problems(tmp_path, f"{text}\n")
    assert (code, place) == found[:2]
    assert words in found[2]


def test_all_mistakes_come_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    found = problems(tmp_path, "mode: fast\nsink: {path: 5, x: 1}\nsource: {pth: a}\nmax_errors: lots\n")
    assert [place.split(":")[0] for _, place, _ in found] == ["1", "2", "2", "3", "3", "4"]


AGREED: list[tuple[str, list[Any]]] = [
    ("source", ["a", ["a", "b"], {"path": "a"}, {"path": ["a", "b"]}, "", [], ["a", "a"], 5, None, {}, {"run": "m:f"}]),
    ("source", [{"run": "m"}, {"run": "m:f", "args": {"a": 1}}, {"run": "m:f", "args": 1}, {"path": "a", "x": 1}]),
    ("source", [{"path": "a", "limit": 0}, {"path": "a", "limit": None}, {"path": "a", "limit": 1.5}]),
    ("source", [{"path": "a", "columns": ["x"]}, {"path": "a", "columns": "x"}, {"path": "a", "header": False}]),
    ("source", [{"path": "a", "encoding": None}, {"path": "a", "delimiter": None}, {"path": "a", "delimiter": ";"}]),
    ("sink", ["a", None, {"path": "a"}, {"path": ["a"]}, ["a"], 5, {"run": "m:f"}, {"stages": {"s": "a"}}]),
    ("sink", [{"stages": {}}, {"stages": {"s": {"path": "a"}}}, {"stages": {"s": None}}, {"stages": "a"}]),
    ("sink", [{"path": "a", "ordered": True}, {"path": "a", "ordered": 1}, {"path": "a", "shard_size": "256MB"}]),
    ("sink", [{"path": "a", "shard_size": "x"}, {"path": "a", "exists": "fail"}, {"path": "a", "exists": "x"}]),
    ("mode", [*MODES, "x", None, 5]),
    ("ordered", [True, False, None, 1, "yes"]),
    ("max_errors", [0, 5, None, "1%", "0.5 %", -1, 0.01, 1.5, True, "5", "101%", "x%"]),
]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in AGREED for value in values], ids=str)
def test_the_schema_and_the_reader_agree(key: str, value: Any) -> None:
    data = {**ONE, key: value}
    try:
        accepted = bool(Pipeline.from_dict(data))
    except PipelineError:
        accepted = False
    assert allows(schema(), data, schema()) is accepted
