"""Declared functions, their references, the application of a worker, and the current job."""

from __future__ import annotations

import contextvars
import copy
import functools
import pickle
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.jobs.application import Application
from dovetail.jobs.job_function import SCRIPT_MODULE_PREFIX, reference_of
from dovetail.jobs.workers.current_job import running_job
from jobs import queue_functions
from jobs.queue_functions import add, square, train

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCRIPT = """
import dovetail as dt

@dt.job(timeout="1h")
def train(config):
    return config

def plain():
    pass

if __name__ == "__main__":
    print(train.reference)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder from which modules are imported, and forgotten afterwards."""
    before, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.startswith((SCRIPT_MODULE_PREFIX, "own_")):
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def problems_of(modules: list[str]) -> list[str]:
    with pytest.raises(dt.ConfigError) as caught:
        Application.load(modules)
    assert set(caught.value.codes) == {"DT609"}
    return [problem.render() for problem in caught.value.problems]


def test_the_place_of_a_syntax_error_is_shown(folder: Path) -> None:
    write(folder / "own_broken.py", "x = 1\ndef f(:\n")
    [text] = problems_of(["own_broken"])
    assert "own_broken cannot be imported: SyntaxError: invalid syntax\n" in text
    assert f"{folder / 'own_broken.py'}:2: def f(:\n" in text


# --- declaration


def test_a_declared_function_is_called_as_before() -> None:
    assert add(1, b=2) == 3
    assert (add.__name__, add.__module__) == ("add", "jobs.queue_functions")  # type: ignore[attr-defined]
    assert (add.reference, repr(add)) == ("jobs.queue_functions:add", "<job function jobs.queue_functions:add>")
    assert pickle.loads(pickle.dumps(add)) is add
    assert train.defaults.timeout_ms == 3_600_000


def test_methods_of_other_queues_are_explained() -> None:
    for name in ("delay", "apply_async", "send"):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': submit a job by add.submit\(...\)"):
            getattr(add, name)
    unknown = "other"
    with pytest.raises(AttributeError, match=r"no attribute 'other'$"):
        getattr(add, unknown)
    assert copy.copy(train).defaults == train.defaults


def test_all_wrong_options_of_a_declaration_are_reported() -> None:
    with pytest.raises(dt.ConfigError) as caught:

        @dt.job(timeout="soon", priority="hihg", retries=-1, queue="a b", isolation="proces", resources={"cpu": 1})
        def wrong() -> None: ...

    text = str(caught.value)
    assert set(caught.value.codes) == {"DT602"}
    for name in (
        "timeout='soon'",
        "priority='hihg'",
        "retries=-1",
        "queue='a b'",
        "isolation='proces'",
        "unknown key 'cpu' (did you mean 'cpus'?)",
    ):
        assert name in text
    assert 'priority="high"' in text


def test_only_functions_can_be_declared_and_only_once() -> None:
    values: list[Any] = [5, None, len, queue_functions.Model]
    for value in values:
        with pytest.raises(dt.ConfigError, match="is not a function"):
            dt.job(value)
    with pytest.raises(dt.ConfigError, match="declared twice"):
        dt.job(add)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: 1, "a lambda has no name"),
        (queue_functions.make_function(), "inner is defined inside of make_function"),
        (queue_functions.Model.fit, "Model.fit is a method"),
        (queue_functions.Model().fit, "Model.fit is a method"),
        (len, "is written in C"),
        ([].append, "is written in C"),
        (functools.partial(add, 1), "a functools.partial has no name"),
        (queue_functions.Model, "Model is a class"),
        (None, "None is not a function"),
    ],
)
def test_what_a_worker_cannot_find_by_its_name_is_refused(function: object, reason: str) -> None:
    with pytest.raises(dt.ConfigError) as caught:
        reference_of(function)
    [problem] = caught.value.problems
    assert (problem.code, reason in problem.message, bool(problem.fixes)) == ("DT603", True, True)


def test_a_function_with_another_name_in_its_module_has_that_reference() -> None:
    assert reference_of(square) == "jobs.queue_functions:square"
    assert Application.load(["jobs.queue_functions"]).find("jobs.queue_functions:square")(7) == 49


# --- the application


def test_an_application_has_the_functions_of_modules_and_scripts(folder: Path) -> None:
    script = write(folder / "own_script.py", SCRIPT)
    write(folder / "own_package" / "tasks.py", "from jobs.queue_functions import add\n" + SCRIPT)
    application = Application.load(["own_script.py", "own_package.tasks"])
    assert sorted(application.functions) == sorted([f"{script}:train", "own_package.tasks:train"])
    assert application.find(f"{script}:train")(5) == 5
    by_path = application.find(f"{folder}/own_package/tasks.py:train")
    assert by_path is application.find("own_package.tasks:train")
    assert Application.load([str(script)]).functions.keys() == {f"{script}:train"}


def test_a_function_of_a_script_has_the_same_reference_where_it_is_submitted(folder: Path) -> None:
    script = write(folder / "own_script.py", SCRIPT)
    write(folder / "own_package" / "tasks.py", SCRIPT)
    found = [
        subprocess.run(
            [sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()
        for command in (["own_script.py"], ["-m", "own_package.tasks"], ["-c", SCRIPT])
    ]
    assert found == [f"{script}:train", "own_package.tasks:train", ""]
    application = Application.load(["own_script.py", "own_package.tasks"])
    assert [application.find(reference).reference for reference in found[:2]] == found[:2]


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("os:system", "its module is not in the application"),
        ("subprocess:run", "its module is not in the application"),
        ("jobs.queue_functions:undeclared", "declares no job function 'undeclared'"),
        ("jobs.queue_functions:Model.fit", "declares no job function"),
        ("jobs.queue_functions:ad", "did you mean 'add'?"),
        ("jobs.queue_functions:dt", "declares no job function"),
        ("", "its module is not in the application"),
        ("antigravity:fly", "its module is not in the application"),
    ],
)
def test_anything_else_is_refused_and_never_imported(reference: str, reason: str) -> None:
    application = Application.load(["jobs.queue_functions"])
    with pytest.raises(dt.JobRefusedError) as caught:
        application.find(reference)
    assert reason in str(caught.value)
    assert caught.value.codes == ("DT608",)
    assert "antigravity" not in sys.modules


def test_everything_that_is_wrong_with_an_application_is_reported(folder: Path) -> None:
    write(folder / "own_broken.py", "import dovetail\n1 / 0\n")
    write(folder / "own_missing.py", "import not_installed_anywhere\n")
    write(folder / "own_plain.py", "def plain(): pass\n")
    write(folder / "own_imports.py", "from jobs.queue_functions import add\n")
    write(folder / "own_exits.py", "raise SystemExit(3)\n")
    found = problems_of(
        ["own_broken", "own_missing", "own_plain.py", "own_imports", "own_exits", "own_plan.py", "nope.x", "a:b", ".."]
    )
    expected = (
        ("ZeroDivisionError", "own_broken.py:2: 1 / 0"),
        ("No module named 'not_installed_anywhere'",),
        ("declares no job function", "write @dt.job above def plain"),
        ("it imports job functions from jobs.queue_functions", "--app jobs.queue_functions"),
        ("SystemExit: 3",),
        ("no such file (did you mean 'own_plain.py'?)", "--app own_plain.py"),
        ("no module named 'nope'",),
        ("is not the name of a module", "--app a"),
        ("is not the name of a module",),
    )
    assert len(found) == len(expected)
    for text, parts in zip(found, expected, strict=True):
        for part in parts:
            assert part in text
    assert "no module with job functions is given" in problems_of([])[0]


# --- the current job


def test_a_job_reports_progress_and_sees_its_cancellation() -> None:
    reports: list[tuple[float | None, str | None]] = []
    job = dt.CurrentJob("0123ab", 2, 5, "gpu", "w1", lambda *report: reports.append(report), lambda: len(reports) > 1)
    seen = []
    with running_job(job):
        assert dt.current_job() is job
        seen.append(job.cancelled)
        job.progress(0.5, "epoch 3")
        job.progress(message="almost")
        seen.append(job.cancelled)
    assert seen == [False, True]
    assert reports == [(0.5, "epoch 3"), (None, "almost")]
    assert (job.id, job.attempt, job.token, job.queue, job.worker) == ("0123ab", 2, 5, "gpu", "w1")
    fractions: list[Any] = [-0.1, 1.1, float("nan"), "half", True]
    for fraction in fractions:
        with pytest.raises(dt.ConfigError, match="is not a number from 0 to 1"):
            job.progress(fraction)


def test_there_is_no_current_job_outside_of_a_job_and_in_its_threads() -> None:
    with pytest.raises(dt.ConfigError, match="outside of a job") as caught:
        dt.current_job()
    assert caught.value.codes == ("DT615",)
    found: list[object] = []

    def look() -> None:
        try:
            found.append(dt.current_job().id)
        except dt.ConfigError:
            found.append(None)

    with running_job(dt.CurrentJob("0123ab", 1, 1, "default", "w1")):
        context = contextvars.copy_context()
        for target in (look, lambda: context.run(look)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert found == [None, "0123ab"]
