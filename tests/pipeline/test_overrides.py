"""--set: what it changes, and what it says when it cannot."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from dovetail.documents.parser import parse_document
from dovetail.errors import ConfigError
from dovetail.pipeline import pipeline_file
from dovetail.pipeline.overrides import apply_overrides, parse_override, parse_overrides

TEXT = """\
source: a.jsonl
sink: {stages: {caption: c.jsonl, v1.2: {path: d.jsonl}}}
stages:
  - {name: read, run: "m:read"}
  - {name: caption, run: "m:Caption", workers: 2}
  - {name: v1.2, run: "m:f", after: [read], env: {A: "1"}}
"""


def apply_texts(*texts: str) -> Any:
    document = parse_document(TEXT, "p.yaml")
    return apply_overrides(document, [parse_override(text, document.data) for text in texts]).data


def problems_of(*texts: str) -> list[tuple[str, str, str]]:
    """The problems of a file with these changes."""
    document = parse_document(TEXT, "p.yaml")
    made = apply_overrides(document, [parse_override(text, document.data) for text in texts])
    return [(one.code, one.place, one.message) for one in pipeline_file.parse_pipeline_document(made).problems]


@pytest.mark.parametrize(
    ("text", "way", "value"),
    [
        ("stages.caption.workers=4", ("stages", 1, "workers"), 4),
        ("stages.caption.workers=[1, 4]", ("stages", 1, "workers"), [1, 4]),
        ("stages.0.batch_size=8", ("stages", 0, "batch_size"), 8),
        ("stages.caption.resources.gpus=0.5", ("stages", 1, "resources", "gpus"), 0.5),
        ("stages.caption.resources={cpus: 2, memory: 4GB}", ("stages", 1, "resources"), {"cpus": 2, "memory": "4GB"}),
        ("stages.v1.2.rate=1e3", ("stages", 2, "rate"), 1000.0),
        ("stages.v1.2.env.B='2'", ("stages", 2, "env"), {"A": "1", "B": "2"}),
        ("source=b.jsonl", ("source",), "b.jsonl"),
        ("source=*.jsonl", ("source",), "*.jsonl"),
        ("source.path=**/x[0-9].jsonl", ("source", "path"), "**/x[0-9].jsonl"),
        ("source.format=csv", ("source",), {"path": "a.jsonl", "format": "csv"}),
        ("sink=null", ("sink",), None),
        ("sink.stages.caption.ordered=true", ("sink", "stages", "caption"), {"path": "c.jsonl", "ordered": True}),
        ("sink.stages.v1.2=e.jsonl", ("sink", "stages", "v1.2"), "e.jsonl"),
        ("max_errors = 5", ("max_errors",), 5),
        ("name=a=b", ("name",), "a=b"),
        ('name="5"', ("name",), "5"),
    ],
)
def test_a_value_is_put_in_its_place(text: str, way: tuple[Any, ...], value: Any) -> None:
    found = apply_texts(text)
    for step in way:
        found = found[step]
    assert found == value
    assert type(found) is type(value)


def test_the_last_one_counts_and_the_file_stays_as_it_is() -> None:
    document = parse_document(TEXT, "p.yaml")
    before = repr(document.data)
    changes = [parse_override(f"stages.read.workers={n}", document.data) for n in (1, 2)]
    assert apply_overrides(document, changes).data["stages"][0]["workers"] == 2
    assert repr(document.data) == before


def test_a_pattern_is_for_every_stage_that_matches() -> None:
    document = parse_document(TEXT, "p.yaml")

    def workers(*texts: str) -> list[Any]:
        changes = [change for text in texts for change in parse_overrides(text, document.data)]
        return [stage.get("workers") for stage in apply_overrides(document, changes).data["stages"]]

    assert workers("stages.*.workers=4") == [4, 4, 4]
    assert workers("stages.*.workers=4", "stages.read.workers=1") == [1, 4, 4]
    assert workers("stages.[rc]*.workers=4") == [4, 4, None]
    assert workers("stages.caption.workers=4") == [None, 4, None]


@pytest.mark.parametrize(
    ("text", "words", "fix"),
    [
        ("stages.x*.workers=4", "no stage matches 'x*'", "--set 'stages.*.workers=4'"),
        ("stages.*=4", "names no setting", "--set 'stages.*.on_error=skip'"),
        ("stages.captoin.workers=4", "no stage 'captoin'", "--set stages.caption.workers=4"),
        ("stages.captoin.on_error={then: skip}", "did you mean", "--set 'stages.caption.on_error={then: skip}'"),
        ("stages.7.workers=4", "the last 2", "--set stages.v1.2.workers=4"),
    ],
)
def test_the_fix_of_a_wrong_stage_is_the_option_for_the_right_one(text: str, words: str, fix: str) -> None:
    with pytest.raises(ConfigError) as found:
        parse_overrides(text, parse_document(TEXT, "p.yaml").data)
    (problem,) = found.value.problems
    assert words in problem.message
    assert problem.fix_texts == (fix,)
    assert parse_overrides(shlex.split(fix)[1], parse_document(TEXT, "p.yaml").data)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("stages.caption.wrokers=4", "--set stages.caption.workers=4"),
        ("stages.caption.resources.gpu=1", "--set stages.caption.resources.gpus=1"),
        ("stages.caption.workers=0", "--set stages.caption.workers=1"),
        ("stages.caption.resources.gpus=-1", "--set stages.caption.resources.gpus=1"),
        ("sorce=x.jsonl", "--set source=x.jsonl"),
        ("batch_size=4", "--set defaults.batch_size=4"),
        ("stages.caption.gpus=1", "--set stages.caption.resources.gpus=1"),
    ],
)
def test_the_fix_of_a_wrong_override_is_an_override(text: str, fix: str) -> None:
    document = parse_document(TEXT, "p.yaml")
    (problem, *_) = pipeline_file.parse_pipeline_document(
        apply_overrides(document, parse_overrides(text, document.data))
    ).problems
    assert problem.fix_texts[0] == fix


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stages.captoin.workers=4", "there is no stage 'captoin' (did you mean 'caption'?)"),
        ("stages.3.workers=4", "there is no stage 3: the first is 0, the last 2"),
        ("stages.caption.workers", "is not path=value"),
        ("=4", "is not path=value"),
        ("", "is not path=value"),
        ("mode=", "there is no value after the ="),
        ("stages..workers=4", "has an empty part"),
        ("stages.caption.workers.x=4", "stages[1].workers is 2, which has no 'x'"),
        ("name.x.y=1", None),
        ("mode=[1, 2", "not valid YAML"),
        ("mode='waves", "not valid YAML"),
    ],
)
def test_an_invalid_override_is_reported_with_its_option(text: str, words: str | None) -> None:
    if words is None:
        assert problems_of(text)
        return
    with pytest.raises(ConfigError) as found:
        apply_texts(text)
    (problem,) = found.value.problems
    assert problem.code == "DT360"
    assert problem.place == f"--set {text}"
    assert words in problem.message
    assert problem.fix_texts


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("stages.caption.wrokers=4", "DT011", "unknown key 'wrokers' (did you mean 'workers'?)"),
        ("stages.caption.workers=many", "DT034", "workers"),
        ("stages.caption.gpus=1", "DT011", "it belongs under 'resources'"),
        ("stages.caption.resources.gpu=1", "DT011", "did you mean 'gpus'?"),
        ("sorce=x", "DT011", "did you mean 'source'?"),
        ("source.fromat=csv", "DT011", "did you mean 'format'?"),
        ("source.limit=x", "DT013", "source.limit should be a whole number"),
        ("mode=fast", "DT013", "mode should be one of"),
        ("stages.caption=5", "DT013", "stages[1] should be a mapping"),
    ],
)
def test_an_invalid_value_of_an_override_is_reported_with_its_option(text: str, code: str, words: str) -> None:
    found = problems_of(text)[0]
    assert found[:2] == (code, f"--set {text}")
    assert words in found[2]
