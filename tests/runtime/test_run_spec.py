"""Run specifications from files and options: paths, functions, and errors with their places."""

from __future__ import annotations

import ast
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dovetail.data.sinks import SinkSpec
from dovetail.data.sources import SourceSpec
from dovetail.errors import ConfigError, Problem
from dovetail.pipeline.source_sink import SINK, SOURCE
from dovetail.runtime import run_spec as jobs
from dovetail.runtime.missing_code import defined_names

STAGES = "stages: [{name: a, run: 'job_steps_of_tests:f'}]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "a [b] c*"
    made.mkdir()
    (made / "in.jsonl").write_text('{"n": 1}\n')
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return made


def load(folder: Path, text: str, *sets: str, **typed: Any) -> jobs.RunSpec:
    file = folder / "p.yaml"
    file.write_text(f"{text}\n{STAGES}")
    return jobs.load_pipeline_spec(file, sets, **typed)


def test_the_keys_of_a_file_are_those_of_sources_and_sinks() -> None:
    assert list(SOURCE.names) == [item.name for item in fields(SourceSpec)]
    assert list(SINK.names) == [item.name for item in fields(SinkSpec)]


def test_paths_of_the_file_start_at_its_folder(folder: Path) -> None:
    job = load(folder, "source: in.jsonl\nsink: {path: sub/out.jsonl, ordered: true}")
    assert job.source == str(folder / "in.jsonl")
    assert job.sink == {"path": str(folder / "sub/out.jsonl"), "ordered": True}
    assert load(folder, "source: [in.jsonl, /x.jsonl]").source == [str(folder / "in.jsonl"), "/x.jsonl"]
    assert load(folder, "source: s3://b/in.jsonl").source == "s3://b/in.jsonl"
    assert load(folder, "source: ~/in.jsonl").source == str(Path("~/in.jsonl").expanduser())


def test_a_folder_with_the_letters_of_patterns_is_no_pattern(folder: Path) -> None:
    from dovetail.data.sources import open_source

    for text in ("*.jsonl", "in.jsonl", "**/*.jsonl"):
        cursor = open_source(load(folder, f"source: '{text}'").source)
        assert cursor is not None
        split = cursor.take(5)
        assert split is not None
        assert split.read() == [{"n": 1}], text
        cursor.close()


def test_typed_paths_start_where_they_were_typed(folder: Path, tmp_path: Path) -> None:
    text = "source: {path: in.jsonl, limit: 5}\nsink: out.jsonl"
    job = load(folder, text, "source.path=x.jsonl", "sink={path: y.jsonl}")
    assert job.source == {"path": str(tmp_path / "x.jsonl"), "limit": 5}
    assert job.sink == {"path": str(tmp_path / "y.jsonl")}
    job = load(folder, text, source="x.jsonl", sink="y.jsonl", typed_in=Path("/else"))
    assert (job.source, job.sink) == ("/else/x.jsonl", "/else/y.jsonl")
    assert load(folder, text, sink="-").sink is None


def test_an_unknown_format_is_reported_with_its_line(folder: Path) -> None:
    with pytest.raises(ConfigError) as found:
        load(folder, "mode: waves\nsource: {path: in.jsonl, format: xml}\nsink: {path: out.docx}")
    places = [problem.place for problem in found.value.problems]
    assert len(places) == 2
    assert places[0].startswith(f"{folder / 'p.yaml'}:2:")
    assert places[1].startswith(f"{folder / 'p.yaml'}:3:")


def test_functions_are_found_beside_the_file_and_called(folder: Path) -> None:
    (folder / "job_rows_of_tests.py").write_text(
        "def rows(count): return range(count)\ndef keep(rows): pass\nclass Keeper:\n    def __call__(self, rows): 0\n"
    )
    job = load(
        folder, "source: {run: 'job_rows_of_tests:rows', args: {count: 3}}\nsink: {run: 'job_rows_of_tests:keep'}"
    )
    jobs.add_import_path(folder)
    jobs.add_import_path(folder)
    assert sys.path.count(str(folder)) == 1
    source, sink = jobs.open_source_and_sink(job)
    assert list(source) == [0, 1, 2]
    assert sink.__name__ == "keep"
    job = load(folder, "source: [in.jsonl]\nsink: {stages: {a: {run: 'job_rows_of_tests:Keeper'}}}")
    source, sink = jobs.open_source_and_sink(job)
    assert source == {"path": [str(folder / "in.jsonl")]}
    assert type(sink["a"]).__name__ == "Keeper"


def test_an_error_in_user_code_is_reported_with_its_line(folder: Path) -> None:
    (folder / "job_bad_of_tests.py").write_text("def rows():\n    return 1 / 0\n")
    (folder / "job_torn_of_tests.py").write_text("def rows(:\n")
    jobs.add_import_path(folder)
    job = load(folder, "source: {run: 'job_bad_of_tests:rows'}\nsink: {run: 'job_torn_of_tests:keep'}")
    with pytest.raises(ConfigError) as found:
        jobs.open_source_and_sink(job)
    one, other = found.value.problems
    assert (one.code, other.code) == ("DT363", "DT363")
    assert one.place == f"{folder / 'p.yaml'}:1:10"
    assert any("return 1 / 0" in line for line in one.evidence)
    assert any("ZeroDivisionError" in line for line in one.evidence)
    assert any("SyntaxError" in line for line in other.evidence)


def test_a_missing_module_is_reported_before_anything_starts(folder: Path) -> None:
    (problem,) = jobs.missing_code(load(folder, "source: in.jsonl"))
    assert problem.place == f"{folder / 'p.yaml'}:2:20"
    (folder / "job_steps_of_tests.py").write_text("def g(rows): return rows\n")
    jobs.add_import_path(folder)
    job = load(folder, "source: in.jsonl")
    for (problem,) in (jobs.missing_code(job), jobs.import_errors(job)):
        assert "has no 'f'" in problem.message
        assert problem.fix_texts


def test_a_sink_that_is_added_to() -> None:
    assert jobs.with_append("a.jsonl") == {"path": "a.jsonl", "exists": "append"}
    assert jobs.with_append({"path": "a", "exists": "fail"}) == {"path": "a", "exists": "append"}
    assert jobs.with_append({"stages": {"a": "b"}}) == {"stages": {"a": {"path": "b", "exists": "append"}}}
    assert jobs.with_append({"run": "m:f"}) == {"run": "m:f"}
    assert jobs.with_append(None) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(): pass\nclass C:\n    def inner(self): pass\n", {"f", "C"}),
        ("import a.b, c as d\nfrom e import f as g\nh = i, (j, *k) = 1, (2, 3)\nl: int = 1\n", set("adghijkl")),
        (
            "if True:\n    def f(): pass\nelse:\n    f = None\ntry:\n    import g\nexcept ImportError:\n    g = 1\n",
            {"f", "g"},
        ),
        ("for n in range(3): pass\nwith open('x') as file: (walrus := 2)\n", {"n", "file", "walrus"}),
        ("from a import *\n", None),
        ("def __getattr__(name): return 1\n", None),
        ("for n in 'ab': globals()[n] = 1\n", None),
        ("exec('f = 1')\n", None),
    ],
)
def test_names_of_a_module_are_found_without_importing_it(text: str, names: set[str] | None) -> None:
    assert defined_names(ast.parse(text)) == names


def problems_of_code(folder: Path, text: str, run: str, monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    monkeypatch.syspath_prepend(str(folder))
    (folder / "code_with_mistakes.py").write_text(text)
    (folder / "p.yaml").write_text(f"stages: [{{name: a, run: 'code_with_mistakes:{run}'}}]\n")
    return jobs.missing_code(jobs.load_pipeline_spec(folder / "p.yaml"))


def test_a_module_that_is_not_python_is_reported_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = problems_of_code(tmp_path, "import os\ndef f(rows)\n    return rows\n", "f", monkeypatch)
    assert problem.message == "stage 'a': code_with_mistakes.py, line 2: expected ':'"
    assert problem.evidence == ("def f(rows)",)
    assert problem.fix_texts == (f"correct line 2 of {tmp_path}/code_with_mistakes.py",)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("class C:\n    def setup(self, worker): pass\n", True),
        ("class C:\n    def __call__(self, rows): return rows\n", False),
        ("class C(Base):\n    pass\n", False),
        ("@decorated\nclass C:\n    pass\n", False),
        ("class C:\n    __call__ = other\n", False),
        ("class C:\n    def run(self, rows): return rows\nC.__call__ = C.run\n", False),
        ("class C:\n    def run(self, rows): return rows\nC = C().run\n", False),
    ],
)
def test_a_class_whose_objects_cannot_be_called_is_reported(
    tmp_path: Path, text: str, reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = problems_of_code(tmp_path, text, "C", monkeypatch)
    assert [problem.code for problem in found] == ["DT034"] * reported
    for problem in found:
        assert "has no method __call__(self, items)" in problem.message
        assert problem.fix_texts == (f"define C.__call__ in {tmp_path}/code_with_mistakes.py",)


def test_a_function_that_does_not_exist_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "checked_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('not to be imported')\n")
    (package / "steps.py").write_text("def words(rows): return rows\n")
    (tmp_path / "checked_steps.py").write_text(
        "raise RuntimeError('not to be imported')\ndef words(rows): return rows\n"
    )
    (tmp_path / "p.yaml").write_text(
        "stages:\n"
        "  - {name: a, run: 'checked_steps:wrods'}\n"
        "  - {name: b, run: 'checked_package.steps:something'}\n"
        "  - {name: c, run: 'checked_package.steps:words'}\n"
    )
    first, second = jobs.missing_code(jobs.load_pipeline_spec(tmp_path / "p.yaml"))
    assert first.message == "stage 'a': checked_steps has no 'wrods' (did you mean 'words'?)"
    assert first.fix_texts == ("run: checked_steps:words",)
    assert first.place.endswith("p.yaml:2:15")
    assert second.message == "stage 'b': checked_package.steps has no 'something'"
