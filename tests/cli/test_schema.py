"""`dovetail schema`."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import dovetail as dt
from dovetail.cli.schema import SCHEMAS, reference_page, schema


def test_the_schema_is_printed_as_json_on_stdout() -> None:
    result = CliRunner().invoke(schema, ["pipeline"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["title"] == "Dovetail pipeline"
    assert result.stderr == ""


def test_every_schema_is_valid_json_with_a_title() -> None:
    for kind in SCHEMAS:
        result = CliRunner().invoke(schema, [kind])
        assert json.loads(result.stdout)["title"] == f"Dovetail {kind}"


@pytest.mark.parametrize(
    ("kind", "data", "valid"),
    [
        ("cluster", {"nodes": [{"cpus": 4}, {"count": 2, "instance": "p5.48xlarge", "labels": {"a": "b"}}]}, True),
        ("cluster", {"nodes": [{"cpus": 4, "instance": "p5.48xlarge"}]}, False),
        ("cluster", {"nodes": [{"instance": "p5.48xlarge", "gpus": ["2xL4"]}]}, False),
        ("cluster", {"nodes": [{"memory": "4GB"}]}, False),
        ("pipeline", {"defaults": {"on_error": "skip"}, "stages": [{"name": "a", "run": "m:f"}]}, True),
        ("pipeline", {"defaults": {"workers": 4}, "stages": [{"name": "a", "run": "m:f"}]}, False),
        ("pipeline", {"defaults": {"retries": -1}, "stages": [{"name": "a", "run": "m:f"}]}, False),
    ],
)
def test_the_schema_accepts_what_a_file_may_say(kind: str, data: dict[str, Any], valid: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert jsonschema.Draft202012Validator(SCHEMAS[kind]()).is_valid(data) == valid
    read = dt.Cluster.from_dict if kind == "cluster" else dt.Pipeline.from_dict
    with nullcontext() if valid else pytest.raises(dt.ConfigError):
        read(data)


def test_the_reference_page_is_generated_from_the_declarations() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference.md"
    assert page.read_text(encoding="utf-8") == reference_page(), "python -m dovetail.cli.schema > docs/reference.md"


def test_an_unknown_kind_of_file_is_a_usage_error() -> None:
    assert CliRunner().invoke(schema, ["recipie"]).exit_code == 2


def test_the_help_explains_the_use_in_an_editor() -> None:
    shown = CliRunner().invoke(schema, ["--help"]).stdout
    assert json.JSONDecoder().raw_decode(shown[shown.index('{"yaml') :])[0] == {
        "yaml.schemas": {"./pipeline.schema.json": ["pipeline.yaml", "*.pipeline.yaml"]},
    }
