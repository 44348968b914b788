"""`dovetail schema` and `dovetail init`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from click.testing import CliRunner, Result

from dovetail.cli.init import PIPELINE, init
from dovetail.cli.schema import SCHEMAS, reference_page, schema
from dovetail.errors import ConfigError
from dovetail.pipeline.pipeline import Pipeline
from dovetail.pipeline.units import fuse_stages

if TYPE_CHECKING:
    import pytest


def run_init(*arguments: str) -> Result:
    return CliRunner().invoke(init, arguments)


def refusal(*arguments: str) -> ConfigError:
    error = run_init(*arguments).exception
    assert isinstance(error, ConfigError)
    assert error.exit_code == 2
    return error


# ---- dovetail schema


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
    assert run_init("recipie").exit_code == 2


def test_the_help_explains_the_use_in_an_editor() -> None:
    shown = CliRunner().invoke(schema, ["--help"]).stdout
    setting = next(line for line in shown.splitlines() if "yaml.schemas" in line)
    assert json.loads(setting) == {
        "yaml.schemas": {"./pipeline.schema.json": ["pipeline.yaml", "*.pipeline.yaml"]},
    }


# ---- dovetail init


def test_the_example_is_a_pipeline_without_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "video.yaml"
    result = run_init("pipeline", str(path))
    assert (result.exit_code, result.stdout) == (0, "")
    wrote, following = result.stderr.splitlines()
    assert wrote == f"wrote {path}"
    assert following.startswith(f"Next:  dovetail plan {path} --cluster '1x(")
    pipe = Pipeline.load(path)
    assert [stage.name for stage in pipe] == ["download", "decode", "caption", "embed", "encode", "write"]
    assert all(stage.rate for stage in pipe)
    assert pipe.stage("download").resources.cpus == 4
    assert pipe.stage("decode").resources.nvdecs == 1
    caption = pipe.stage("caption")
    assert (caption.resources.gpus, caption.resources.gpu_memory, caption.batch_size) == (0.25, "4GB", 16)
    assert pipe.stage("embed").resources.gpus == 1
    assert pipe.stage("encode").resources.nvencs == 1
    assert len(fuse_stages(pipe)) == 6


def test_an_existing_file_is_not_overwritten_without_force(tmp_path: Path) -> None:
    path = tmp_path / "my pipeline.yaml"
    path.write_text("mine")
    (problem,) = refusal("pipeline", str(path)).problems
    assert "file exists" in problem.message
    assert problem.fix_texts == (f"dovetail init pipeline '{path}' --force",)
    assert path.read_text() == "mine"
    assert run_init("pipeline", str(path), "--force").exit_code == 0
    assert path.read_text() == PIPELINE
    assert list(tmp_path.iterdir()) == [path]


def test_the_default_is_pipeline_yaml_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_init("pipeline").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline.yaml"]


def test_a_dash_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_init("pipeline", "-")
    assert (result.stdout, result.stderr) == (PIPELINE, "")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in ("nowhere/p.yaml", "file/p.yaml", "x" * 300, "a\0b"):
        assert "cannot be written" in str(refusal("pipeline", str(tmp_path / place)))
    (folder,) = refusal("pipeline", str(tmp_path)).problems
    assert folder.message == "is a folder, not a file"
    assert folder.fix_texts == ("dovetail init pipeline -",)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("mine")

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    assert "No space left" in str(refusal("pipeline", str(path), "--force"))
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]
