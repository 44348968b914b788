"""`dovetail schema`."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

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


def test_the_reference_page_is_generated_from_the_declarations() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference.md"
    assert page.read_text(encoding="utf-8") == reference_page(), "python -m dovetail.cli.schema > docs/reference.md"


def test_an_unknown_kind_of_file_is_a_usage_error() -> None:
    assert CliRunner().invoke(schema, ["recipie"]).exit_code == 2


def test_the_help_explains_the_use_in_an_editor() -> None:
    shown = CliRunner().invoke(schema, ["--help"]).stdout
    setting = next(line for line in shown.splitlines() if "yaml.schemas" in line)
    assert json.loads(setting) == {
        "yaml.schemas": {"./pipeline.schema.json": ["pipeline.yaml", "*.pipeline.yaml"]},
    }
