"""Defaults of all stages of a pipeline, in files and in Python."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest

import dovetail as dt
from dovetail.documents.parser import parse_document
from dovetail.pipeline import pipeline_file
from dovetail.pipeline.overrides import apply_overrides, parse_overrides


def pipeline(text: str) -> dt.Pipeline:
    return dt.Pipeline.from_dict(parse_document(text, "p.yaml").data)


FILE = """\
defaults: {on_error: skip, retries: 2, batch_size: 16, timeout: 5m, resources: {cpus: 2}, env: {A: "1"}}
stages:
  - {name: a, run: "m:f"}
  - {name: b, run: "m:f", on_error: fail, retries: 0, batch_size: 1, timeout: null, resources: {}, env: {B: "2"}}
"""


def test_a_stage_without_a_value_gets_the_default_and_its_own_value_wins() -> None:
    a, b = pipeline(FILE).stages
    assert (a.on_error, a.retries, a.batch_size, a.timeout_s, a.resources.cpus) == ("skip", 2, 16, 300, 2)
    assert (b.on_error, b.retries, b.batch_size, b.timeout_s, b.resources.cpus) == ("fail", 0, 1, None, 1)
    assert (a.env, b.env) == ({"A": "1"}, {"B": "2"})


def test_a_file_and_python_make_the_same_pipeline() -> None:
    stages = [
        dt.Stage("a", "m:f"),
        dt.Stage("b", "m:f", dt.Resources(), on_error="fail", retries=0, batch_size=1, timeout=None, env={"B": "2"}),
    ]
    defaults = {"on_error": "skip", "retries": 2, "batch_size": 16, "timeout": "5m", "env": {"A": "1"}}
    made = dt.Pipeline(stages, defaults={**defaults, "resources": dt.Resources(cpus=2)})
    assert made == pipeline(FILE)
    assert made.to_dict() == pipeline(FILE).to_dict()
    assert dt.Pipeline.from_dict(made.to_dict()) == made


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda stage: pickle.loads(pickle.dumps(stage))])
def test_a_copy_of_a_stage_knows_what_it_was_given(copied: Any) -> None:
    stage = copied(dt.Stage("a", "m:f", batch_size=1))
    (made,) = dt.Pipeline([stage], defaults={"batch_size": 8, "retries": 1}).stages
    assert (made.batch_size, made.retries) == (1, 1)
    assert replace(stage, name="b").name == "b"


def test_all_mistakes_in_defaults_are_reported_once_with_their_place() -> None:
    text = "defaults:\n  on_eror: skip\n  retries: -1\n  workers: 2\n  resources: {cpus: 0.0001}\nstages:\n"
    text += '  - {name: a, run: "m:f"}\n  - {name: b, run: "m:f"}\n'
    found = pipeline_file.parse_pipeline_document(parse_document(text, "p.yaml")).problems
    assert [(one.code, one.place) for one in found] == [
        ("DT011", "p.yaml:2:3"),
        ("DT034", "p.yaml:3:3"),
        ("DT011", "p.yaml:4:3"),
        ("DT005", "p.yaml:5:15"),
    ]
    assert found[0].fix_texts == ("on_error: skip",)
    assert found[1].fix_texts == ("retries: 0",)


def test_a_default_that_a_stage_cannot_have_is_reported_at_the_stage() -> None:
    text = 'defaults: {on_error: {retry: [OSError]}}\nstages:\n  - {name: a, run: "m:f", barrier: true}\n'
    (problem,) = pipeline_file.parse_pipeline_document(parse_document(text, "p.yaml")).problems
    assert problem.place.startswith("p.yaml:3")
    assert "barrier" in problem.message


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"on_eror": "skip"}, "did you mean 'on_error'?"),
        ({"workers": 2}, "is not a setting"),
        ({"retries": -1}, "retries=-1"),
        ("skip", "is not a mapping"),
        ({3: 4}, "3 is not a setting"),
    ],
)
def test_invalid_defaults_in_python_are_pipeline_errors(defaults: Any, message: str) -> None:
    with pytest.raises(dt.PipelineError) as caught:
        dt.Pipeline([dt.Stage("a", "m:f")], defaults=defaults)
    assert message in str(caught.value)
    assert caught.value.problems[0].fix_texts


def test_the_command_line_can_set_a_default() -> None:
    document = parse_document(FILE, "p.yaml")
    changed = apply_overrides(document, parse_overrides("defaults.retries=5", document.data))
    found = pipeline_file.parse_pipeline_document(changed)
    assert [stage.retries for stage in found.stages] == [5, 0]
