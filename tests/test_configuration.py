"""Environment variables and the project file: which one is read, precedence and mistakes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

import dovetail as dt
from cli.jobs import CommandFolder
from dovetail.documents.configuration import CONFIGURATION, configuration_table, configured, variable_of
from dovetail.observe.run_folder import home_folder
from dovetail.runtime.configured_engine import configured_engine

BIG = "2x(4cpu, 8GB)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder inside another, and no variables."""
    for name in CONFIGURATION.names:
        monkeypatch.delenv(variable_of(name), raising=False)
    inner = tmp_path / "project" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    return inner


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def problems() -> list[tuple[str, str]]:
    with pytest.raises(dt.ConfigError) as caught:
        configured("engine")
    assert caught.value.exit_code == 2
    assert all(problem.fix_texts for problem in caught.value.problems)
    return [(problem.code, problem.place) for problem in caught.value.problems]


def test_the_nearest_file_counts_and_dovetail_toml_before_pyproject(folder: Path) -> None:
    assert configured("engine") is None
    written(folder.parent / "dovetail.toml", 'engine = "ray"\n')
    assert configured("engine") == "ray"
    written(folder / "pyproject.toml", '[tool.other]\nengine = "x"\n')
    assert configured("engine") == "ray"
    written(folder / "pyproject.toml", '[tool.other]\nengine = "x"\n[tool.dovetail]\nengine = "ray:auto"\n')
    assert configured("engine") == "ray:auto"
    written(folder / "dovetail.toml", 'engine = "local"\n')
    assert configured("engine") == "local"
    assert configured("cluster") is None


def test_the_search_ends_at_the_root_of_the_repository(folder: Path) -> None:
    written(folder.parent / "dovetail.toml", 'engine = "ray"\n')
    (folder / ".git").mkdir()
    assert configured("engine") is None


def test_the_search_ends_at_the_home_of_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(folder.parent / "dovetail.toml", 'engine = "ray"\n')
    monkeypatch.setenv("HOME", str(folder))
    assert configured("engine") is None
    monkeypatch.setenv("HOME", str(folder.parent))
    assert configured("engine") == "ray"


def test_a_folder_that_everyone_may_write_to_is_not_trusted(folder: Path) -> None:
    written(folder.parent / "dovetail.toml", 'engine = "ray"\n')
    folder.parent.chmod(0o777)
    assert configured("engine") is None


def test_a_file_that_was_changed_is_read_again(folder: Path) -> None:
    written(folder / "dovetail.toml", 'engine = "ray"\n')
    assert configured("engine") == "ray"
    written(folder / "dovetail.toml", 'engine = "ray:auto"\n')
    assert configured("engine") == "ray:auto"


def test_a_variable_wins_over_the_file_and_an_empty_one_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(folder / "dovetail.toml", 'engine = "ray"\nverbosity = "quiet"\n')
    monkeypatch.setenv("DOVETAIL_ENGINE", "ray:auto")
    monkeypatch.setenv("DOVETAIL_VERBOSITY", "")
    assert (configured("engine"), configured("verbosity")) == ("ray:auto", "quiet")


def test_paths_are_relative_to_the_project_file(folder: Path) -> None:
    written(folder.parent / "dovetail.toml", 'home = "store"\ncluster = "nodes.yaml"\n')
    assert home_folder() == folder.parent / "store"
    assert configured("cluster") == str(folder.parent / "nodes.yaml")
    written(folder.parent / "dovetail.toml", f'cluster = "{BIG}"\n')
    assert configured("cluster") == BIG


@pytest.mark.parametrize("name", ["dovetail.toml", "pyproject.toml"])
def test_all_mistakes_in_a_file_are_reported_with_their_lines(folder: Path, name: str) -> None:
    head = "# comment\n" if name == "dovetail.toml" else "[tool.dovetail]\n"
    path = written(folder / name, f'{head}enigne = "ray"\nverbosity = "loud"\n"cluster" = 5\n')
    assert problems() == [("DT011", f"{path}:2"), ("DT013", f"{path}:4"), ("DT013", f"{path}:3")]


def test_a_file_that_is_not_toml_is_reported_with_its_line(folder: Path) -> None:
    path = written(folder / "dovetail.toml", 'home = "x"\nengine = local\n')
    assert problems() == [("DT010", f"{path}:2:10")]


def test_an_invalid_variable_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_ENGINE", "rya")
    assert problems() == [("DT013", "DOVETAIL_ENGINE")]


def test_what_is_given_wins_over_what_is_configured(folder: Path) -> None:
    written(folder / "dovetail.toml", f'engine = "ray:auto"\ncluster = "{BIG}"\n')
    assert configured_engine(None, None) == ("ray:auto", "auto"), "on Ray, the cluster is that of Ray"
    assert configured_engine("local", None) == ("local", BIG)
    assert configured_engine("local", "auto") == ("local", "auto")
    assert configured_engine(None, "(4cpu)") == ("local", "(4cpu)")
    assert copy.deepcopy(configured("engine")) == "ray:auto"


def test_the_documentation_has_the_table_of_settings() -> None:
    page = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert configuration_table() in page, "python -m dovetail.documents.configuration"


# ---- commands and dt.run


@pytest.fixture
def place(folder: Path, in_process: None) -> CommandFolder:
    return CommandFolder(folder)


def test_commands_use_the_configured_cluster_unless_another_is_given(place: CommandFolder) -> None:
    written(place.folder / "dovetail.toml", f'cluster = "{BIG}"\n')
    assert f"on {BIG}" in place.run("plan", "p.yaml").stdout
    assert "on 1x(3cpu)" in place.run("plan", "p.yaml", "--cluster", "1x(3cpu)").stdout
    assert "on 1x(5cpu)" in place.run("plan", "p.yaml", DOVETAIL_CLUSTER="1x(5cpu)").stdout
    assert "of 8\n" in place.run("simulate", "p.yaml", "--limit", "10").stdout


def test_a_cluster_that_is_typed_wins_over_a_configured_ray(place: CommandFolder) -> None:
    """Ray is not contacted."""
    written(place.folder / "dovetail.toml", 'engine = "ray:127.0.0.1:1"\n')
    for command in ("plan", "simulate", "explain"):
        done = place.run(command, "p.yaml", "--cluster", "1x(3cpu)")
        assert done.returncode == 0, done.stderr
    assert place.run("run", "p.yaml", "--cluster", "1x(2cpu, 4GB)").returncode == 0
    assert place.run("run", "p.yaml", "--engine", "local").returncode == 0
    assert place.run("plan", "p.yaml").returncode == 5


def test_an_error_of_a_configured_cluster_names_the_line(place: CommandFolder) -> None:
    path = written(place.folder / "dovetail.toml", 'cluster = "(4cpu, 2xH10O)"\n')
    for command in (["plan", "p.yaml"], ["run", "p.yaml"], ["simulate", "p.yaml"]):
        found = place.run(*command)
        assert found.returncode == 2, found.stderr
        assert f"{path}:1" in found.stderr
        assert "did you mean 'H100'?" in found.stderr


def test_a_run_uses_home_cluster_and_verbosity_of_the_project_file(place: CommandFolder) -> None:
    written(place.folder / "dovetail.toml", 'home = "store"\ncluster = "1x(2cpu, 4GB)"\nverbosity = "quiet"\n')
    done = place.run("run", "p.yaml", DOVETAIL_HOME="")
    assert done.returncode == 0, done.stderr
    assert len(list((place.folder / "store" / "runs").iterdir())) == 1
    assert "double 2 workers" not in done.stderr, "quiet: no plan"
    assert "double 2 workers" in place.run("run", "p.yaml", DOVETAIL_HOME="", DOVETAIL_VERBOSITY="normal").stderr


def test_python_uses_the_project_file(place: CommandFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(place.home))
    monkeypatch.setenv("DOVETAIL_CLUSTER", "1x(2cpu, 4GB)")
    run = dt.run(dt.Pipeline([dt.Stage("same", _same)]), [1, 2, 3])
    assert sorted(run) == [1, 2, 3]
    assert run.plan.cluster == dt.Cluster.parse("1x(2cpu, 4GB)")
    monkeypatch.setenv("DOVETAIL_ENGINE", "ray:no port")
    with pytest.raises(dt.ConfigError) as caught:
        dt.run(dt.Pipeline([dt.Stage("same", _same)]), [1])
    assert caught.value.problems[0].place == "DOVETAIL_ENGINE"


def _same(items: list[int]) -> list[int]:
    return items
