"""The documentation is true: links resolve, tables are complete, examples run, and commands print what is shown."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from command import like_a_process, run_command, text_of
from dovetail.data import file_formats, sinks, sources
from dovetail.data.sink_spec import KINDS
from dovetail.recipes import file_keys
from dovetail.recipes.catalogue import known_operators, native_class
from in_process import InProcessEngine
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


RECIPES = ROOT / "docs" / "recipes.md"
FROM_DATA_JUICER = ROOT / "docs" / "coming-from-data-juicer.md"


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for of, text in found if of == language]


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as on GitHub."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def typed(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a `dovetail` command in a folder, with a terminal in which the tables of all pages fit."""
    return run_command(*shlex.split(command)[1:], cwd=folder, DOVETAIL_HOME=str(folder / "home"), COLUMNS="120")


def executed(name: str, folder: Path) -> str:
    """Run a Python file of a folder; what it prints."""
    with like_a_process(folder, DOVETAIL_HOME=str(folder / "home")) as (out, _):
        runpy.run_path(str(folder / name), run_name="__main__")
        return text_of(out)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_resolves(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            wrong.append(target)
    assert wrong == []


def test_every_decision_has_a_number_of_its_own() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [path.name[:3] for path in decisions]
    assert numbers == sorted(set(numbers))
    assert [path.read_text(encoding="utf-8")[:7] for path in decisions] == [f"# {number}: " for number in numbers]


def test_the_api_page_has_every_public_name_once() -> None:
    import dovetail as dt

    names = re.findall(r"^\| `dt\.(\w+)` \|", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(names) == sorted(dt.__all__)
    assert dir(dt) == sorted([*dt.__all__, "__version__"]), "imports do not show up beside the public names"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_uses_only_public_names(page: Path) -> None:
    import dovetail as dt

    code = "\n".join(blocks(page, "python"))
    names = set(re.findall(r"\bdt\.(\w+)", page.read_text(encoding="utf-8"))) - {"NAME"}
    assert sorted(name for name in names if not hasattr(dt, name)) == []
    assert re.findall(r"^\s*(?:from|import) dovetail\.(?!recipes\.operators\.base).*", code, re.MULTILINE) == []


# --- output that differs between machines and runs

VARYING = (
    (r"\d{8}-\d{6}-[0-9a-f]{4,6}-", "RUN-"),
    (r"\b1[0-9a-hjkmnp-tv-z]{19}\b", "JOB"),
    (r"\bin (\d+ d \d+ h|\d+ h \d\d min|\d+ min \d\d s|[\d.]+ s)\b", "in TIME"),
    (r"\b(\d+ min )?\d+(\.\d+)? s\b", "T s"),
    (r"\b\d[\d.]*[kMG]?/s\b", "R/s"),
    (r"\b[\d.]+[kMG]?\^( +)[\d.]+[kMG]?\b", "R^ R"),
    (r"\b\d+ %", "P %"),
    (r"\b[\d.]+[KMG]B\b", "SIZE"),
    (r"1x\(\d+cpu, SIZE\)", "1x(CLUSTER)"),
    (r"\S+ x1$", "HOST x1"),
    (r"'text': '\w+'", "'text': 'WORD'"),
    (r"[\d:.]+ \[(\w+) \d+\] worker \d+", r"TIME [\1 N] worker N"),
    (r"\b\d+ of 3001(?= +(R/s|-))", "N of 3001"),
    (r"standard error (\S+ %|unknown)", "standard error E"),
    (r" +", " "),
)
"""What differs: pattern -> what is compared instead."""
LEFT_OUT = re.compile(r"[ |]*[~^]+|limit .*")
"""Lines that are not compared: Python's marks below a source line, and which stage was slower in a short run."""


def normalised(lines: list[str]) -> list[str]:
    """Lines without what differs between machines and runs."""
    found = []
    for line in lines:
        text = line
        for pattern, instead in VARYING:
            text = re.sub(pattern, instead, text)
        if not LEFT_OUT.fullmatch(line):
            found.append(text.rstrip())
    return found


def test_the_example_of_the_readme_prints_what_it_shows(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    (example,) = blocks(page, "python")
    assert len([line for line in example.splitlines() if line]) <= 12
    shown = next(text for text in blocks(page, "") if text.startswith("pipeline: finished")).splitlines()
    words = ["soil", "seed", "rain", "leaf", "moon", "dust"]
    rows = [{"id": row, "text": " ".join(words[(row + word) % 6] for word in range(row % 41))} for row in range(20_000)]
    (tmp_path / "pages.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    assert printed_by("example.py", tmp_path, shown) == []


def test_the_first_example_of_the_page_on_one_machine_prints_what_it_shows(tmp_path: Path) -> None:
    page = ROOT / "docs" / "local.md"
    (tmp_path / "example.py").write_text(blocks(page, "python")[0], encoding="utf-8")
    assert printed_by("example.py", tmp_path, blocks(page, "")[0].splitlines()) == []


def test_the_examples_for_users_of_other_actor_systems_run(tmp_path: Path) -> None:
    page = ROOT / "docs" / "coming-from-nexrl.md"
    for name, text in zip(("system.py", "main.py", "scaled.py"), blocks(page, "python"), strict=True):
        (tmp_path / name).write_text(text, encoding="utf-8")
    (shown,) = blocks(page, "")
    assert printed_by("main.py", tmp_path, shown.splitlines()[1:]) == []
    executed("scaled.py", tmp_path)


def printed_by(name: str, folder: Path, shown: list[str]) -> list[str]:
    """Run a program in a process of its own; where its output differs from what is shown."""
    home = {**os.environ, "DOVETAIL_HOME": str(folder / "home")}
    done = subprocess.run([sys.executable, name], cwd=folder, env=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return differing(normalised(shown), normalised(done.stdout.splitlines()))


def test_the_page_on_files_names_every_kind_and_setting() -> None:
    text = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    reading, writing = text.split("\n## Sinks\n")
    assert [name for name in (*sources.SETTING_NAMES, *file_formats.FORMATS) if f"`{name}`" not in reading] == []
    settings = [field.name for field in fields(sinks.SinkSpec)]
    assert [name for name in (*settings, *KINDS) if f"`{name}`" not in writing] == []
    assert [end for end in file_formats.SUFFIXES if end not in reading] == []


def test_the_files_for_clusters_are_valid() -> None:
    page = ROOT / "docs" / "ray.md"
    (job,) = (yaml.safe_load(text) for text in blocks(page, "yaml"))
    assert job["kind"] == "RayJob"
    groups = [job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    assert [pod["containers"][0]["volumeMounts"][0]["name"] for pod in pods] == ["shared"] * len(pods)
    assert [pod["volumes"][0]["name"] for pod in pods] == ["shared"] * len(pods)
    (script,) = blocks(page, "bash")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")


def test_every_error_code_of_ray_has_a_remedy() -> None:
    listed = re.findall(r"^\| (DT\d{3}) \| \d", (ROOT / "docs" / "ray.md").read_text(encoding="utf-8"), re.MULTILINE)
    codes = re.findall(r"^\| (DT\d{3}) \|", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(listed) == {code for code in codes if "DT390" <= code <= "DT409"} | {"DT120"}


GETTING_STARTED = ROOT / "docs" / "getting-started.md"
SLOW, FAST = "time.sleep(0.04)", "time.sleep(0.004)"
"""The model of the page, and a faster one where its speed does not matter."""
TWO_CPUS = "1x(2cpu, 4GB)"
"""The machine on which the page was written; another one has other numbers of workers."""
CORRECTION = ('/ row["words"]', '/ max(1, row["words"])')
"""The correction that the page describes before it retries failed rows."""


def test_getting_started_can_be_followed_literally(tmp_path: Path) -> None:
    make, steps, program = blocks(GETTING_STARTED, "python")
    (pipeline,) = blocks(GETTING_STARTED, "yaml")
    texts = {"make.py": make, "steps.py": steps.replace(SLOW, FAST), "program.py": program, "pipeline.yaml": pipeline}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    commands = shown_sessions(GETTING_STARTED)
    assert [command.split()[0] for command, _ in commands].count("dovetail") >= 9
    for command, shown in commands:
        printed = followed(command, tmp_path)
        assert differing(normalised(shown), normalised(printed)) == [], command
    assert [row["id"] for row in rows_of(tmp_path / "scored.jsonl")] == list(range(3000))
    assert printed_by("program.py", tmp_path, ["...", "  3001 of 3001 items in, 3000 out, 1 failed", "..."]) == []
    assert len((tmp_path / "scored.csv").read_text(encoding="utf-8").splitlines()) == 3001


def shown_sessions(page: Path) -> list[tuple[str, list[str]]]:
    """Commands of the page in their order, each with the lines shown below it."""
    found: list[tuple[str, list[str]]] = []
    for text in blocks(page, ""):
        for line in text.splitlines() if text.startswith("$ ") else ():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return found


def followed(command: str, folder: Path) -> list[str]:
    """Output of a command of the page: stdout, then stderr."""
    steps = folder / "steps.py"
    if "--retry-errors" in command:
        steps.write_text(steps.read_text(encoding="utf-8").replace(*CORRECTION), encoding="utf-8")
    if "kill -9" in command:
        steps.write_text(steps.read_text(encoding="utf-8").replace(FAST, SLOW), encoding="utf-8")
        killed(command.partition(" &")[0], folder)
        steps.write_text(steps.read_text(encoding="utf-8").replace(SLOW, FAST), encoding="utf-8")
        return []
    if not command.startswith("dovetail "):
        done = subprocess.run(shlex.split(command), cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOVETAIL_CLUSTER", TWO_CPUS)
        done = typed(command, folder)
    return (done.stdout + done.stderr).replace(f"{folder}/", ".../").splitlines()


def killed(command: str, folder: Path) -> None:
    """Start a command and kill it when some of its work is finished."""
    home = folder / "home"
    before = set((home / "runs").iterdir())
    process = subprocess.Popen(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=folder,
        env={**os.environ, "DOVETAIL_HOME": str(home)},
        stderr=subprocess.DEVNULL,
    )

    def has_progress() -> bool:
        new = [run / "run.json" for run in (home / "runs").iterdir() if run not in before]
        headers = [json.loads(path.read_text(encoding="utf-8")) for path in new if path.exists()]
        return any(header.get("progress", {}).get("finished") for header in headers)

    try:
        until(has_progress, "some work is finished")
    finally:
        process.kill()
        process.wait()


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- jobs

JOBS = ROOT / "docs" / "jobs.md"
FROM_CELERY = ROOT / "docs" / "coming-from-celery.md"
WORKER = ("--resources", "4cpu, 8GB", "--slots", "4", "--port", "0", "--worker-id", "vm-31304-c34f")
"""Options of the worker on whose output the page was written."""


@contextmanager
def a_worker(folder: Path, *words: str) -> Iterator[None]:
    """A worker of the queue of a folder, in a process of its own."""
    command = [sys.executable, "-m", "dovetail", "worker", *words, *WORKER]
    with (folder / "worker.log").open("w") as log:
        worker = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        until(lambda: "status:" in (folder / "worker.log").read_text(), "the worker runs")
        yield
    finally:
        worker.kill()
        worker.wait()


@pytest.fixture
def jobs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOVETAIL_QUEUE", "sqlite:///jobs.db")
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.time_limit
def test_the_guide_for_jobs_can_be_followed_literally(jobs_folder: Path) -> None:
    for name, text in python_files(JOBS).items():
        (jobs_folder / name).write_text(text, encoding="utf-8")
    executed("routed.py", jobs_folder)
    commands = shown_sessions(JOBS)
    assert len(commands) >= 16

    def is_settled(states: str) -> bool:
        words = " ".join(f"--state {state}" for state in states.split())
        return bool(json.loads(typed(f"dovetail jobs ls --json {words}", jobs_folder).stdout) == [])

    with a_worker(jobs_folder, "--app", "tasks", "--app", "broken.py"):
        for command, shown in commands:
            if command in ("dovetail jobs dead", "dovetail jobs stats"):
                states = "ready leased scheduled" if command.endswith("dead") else "ready leased"
                until(partial(is_settled, states), "no job is left")
            if command.startswith("python "):
                printed = executed(command.split()[1], jobs_folder)
            else:
                done = typed(command, jobs_folder)
                printed = done.stdout + done.stderr
            assert differing(normalised(shown), normalised(printed.splitlines())) == [], (command, printed)


@pytest.mark.time_limit
def test_the_example_for_users_of_other_queues_prints_what_it_shows(jobs_folder: Path) -> None:
    for name, text in python_files(FROM_CELERY).items():
        (jobs_folder / name).write_text(text, encoding="utf-8")
    (_, none), (client, shown) = shown_sessions(FROM_CELERY)
    assert none == []
    with a_worker(jobs_folder, "--app", "tasks", "--queues", "reports"):
        assert executed(client.split()[1], jobs_folder).splitlines() == shown


def test_the_commands_for_shells_of_the_guide_for_jobs_are_valid() -> None:
    from dovetail.cli import command_line

    lines = [line for text in blocks(JOBS, "bash") for line in text.splitlines()]
    assert len(lines) >= 6
    for line in lines:
        words = [word for word in shlex.split(line, comments=True) if "=" not in word or word.startswith("-")]
        assert words[0] == "dovetail"
        command: Any = command_line
        while hasattr(command, "get_command"):
            command = command.get_command(None, words.pop(1))
        command.make_context(command.name, words[1:])


DEPLOYING = ROOT / "docs" / "deploying.md"


def test_the_guide_for_deployments_writes_the_files_that_it_shows(tmp_path: Path) -> None:
    file, scraping = blocks(DEPLOYING, "yaml")
    (tmp_path / "deploy.yaml").write_text(file, encoding="utf-8")
    commands = shown_sessions(DEPLOYING)
    assert len(commands) == 4
    for command, shown in commands:
        done = typed(command, tmp_path)
        assert differing(shown, done.stdout.splitlines()) == [], (command, done.stderr)
    yaml.safe_load(scraping)
    first_lines = (tmp_path / "deploy" / "compose.yaml").read_text(encoding="utf-8").splitlines()[:8]
    script = blocks(DEPLOYING, "bash")[0]
    for step in ("printf 'DOVETAIL_TOKEN=%s", "docker compose up -d --build", "/workers/status"):
        assert step in script
        assert any(step in line for line in first_lines), "the file has the steps of the guide"


def test_the_simulated_queue_of_the_page_has_the_tables_that_it_shows() -> None:
    """Not the figures: they change with every decision of the queue."""
    (shown,) = [
        text.splitlines()[2:]
        for text in blocks(ROOT / "docs" / "simulating.md", "")
        if text.startswith("$ dovetail simulate examples/jobs.yaml")
    ]
    short = ("--set", "duration=1h", "--set", "deaths=[]")
    printed = run_command("simulate", str(ROOT / "examples" / "jobs.yaml"), *short).stdout.splitlines()[1:]

    def first_cells(lines: list[str]) -> list[str]:
        return [re.split(r"  +", line.strip())[0] for line in lines if not line.startswith("  3")]

    assert [cell for cell in first_cells(printed) if "attempts" not in cell and "jobs:" not in cell] == first_cells(
        shown
    )


def test_every_path_and_metric_of_the_guide_for_jobs_exists() -> None:
    from dovetail.jobs import metrics
    from dovetail.jobs.workers import status_server

    text = JOBS.read_text(encoding="utf-8")
    code = Path(metrics.__file__).read_text() + Path(status_server.__file__).read_text()
    names = re.findall(r"\bdovetail_(\w+)[{`]", text)
    assert len(names) >= 10
    assert [name for name in names if f'"{name}"' not in code] == []
    paths = re.findall(r"^\| (`/.*?) \|", text, re.MULTILINE)
    assert [path for row in paths for path in re.findall(r"`(/\w+)", row) if path not in code] == []


# --- backfill

BACKFILL = ROOT / "docs" / "backfill.md"
FROM_GENEVA = ROOT / "docs" / "coming-from-geneva.md"


def python_files(page: Path) -> dict[str, str]:
    """Python blocks that begin with a file name, by that name."""
    named = [(re.match(r"# (\w+\.py)\n", text), text) for text in blocks(page, "python")]
    return {name[1]: text for name, text in named if name}


def with_a_table(folder: Path, page: Path = BACKFILL) -> Path:
    """Write the files of a page to a folder, and create the table."""
    for name, text in python_files(page).items():
        (folder / name).write_text(text, encoding="utf-8")
    executed("make.py", folder)
    return folder


def without_numbers(lines: list[str], shown: list[str]) -> list[str]:
    """Replace lines that vary: a line of the page that ends in "..." stands for any line with that start. Python's
    marks below a source line are removed, because they differ between versions."""
    open_ = [line for line in shown if line.endswith("...") and line != "..."]
    found = [next((one for one in open_ if line.startswith(one.removesuffix("..."))), line) for line in lines]
    return [line for line in found if not re.fullmatch(r" +[~^]+", line)]


@pytest.mark.parametrize(("page", "least"), [(BACKFILL, 6), (FROM_GENEVA, 7)], ids=lambda it: str(it)[-12:])
def test_the_commands_of_a_page_on_backfills_print_what_it_shows(page: Path, least: int, tmp_path: Path) -> None:
    with_a_table(tmp_path, page if "make.py" in python_files(page) else BACKFILL)
    shown = [text.splitlines() for text in blocks(page, "") if text.startswith("$ dovetail backfill")]
    assert len(shown) >= least
    for command, *lines in shown:
        if "backfill retry" in command:  # the correction that the page describes
            functions = tmp_path / "functions.py"
            functions.write_text(functions.read_text().replace("len(text.split())", 'len((text or "").split())'))
        with pytest.MonkeyPatch.context() as patch:
            if "functions:crashes" not in command:  # which aborts the process of a worker
                patch.setattr("dovetail.engines.local.engine.LocalEngine", InProcessEngine)
            done = typed(command.removeprefix("$ "), tmp_path)
        printed = (done.stdout if done.returncode == 0 else done.stderr).replace(f"{tmp_path}/", "").rstrip()
        assert differing(without_numbers(lines, lines), without_numbers(printed.splitlines(), lines)) == [], command


@pytest.mark.usefixtures("in_process")
def test_the_first_example_of_backfills_runs(tmp_path: Path) -> None:
    with_a_table(tmp_path)
    printed = executed("start.py", tmp_path)
    for words in (
        "10,000 rows in 10 fragments to compute",
        "words: finished after ",
        "row=17179869895, fragment=4, offset=711",
    ):
        assert words in printed


@pytest.mark.usefixtures("in_process")
def test_every_kind_of_function_on_the_page_fills_a_column(tmp_path: Path) -> None:
    with_a_table(tmp_path)
    fill = """
import lance, kinds
import dovetail as dt
table = dt.table("clips.lance")
for column, udf in {"a": kinds.upper, "b": kinds.length, "c": kinds.ratio, "e": kinds.Embed, "f": kinds.ask}.items():
    table.backfill(column, udf, fragments=1, cluster="1x(2cpu, 4GB)")
table.backfill(["letters", "spaces"], kinds.size, fragments=1)
print(lance.dataset("clips.lance").to_table(limit=3).to_pylist()[2])
"""
    (tmp_path / "fill.py").write_text(fill, encoding="utf-8")
    printed = executed("fill.py", tmp_path)
    text = "clip 2 shows a street at night"
    made = {"a": text.upper(), "b": 30, "c": 0.0002, "e": [1.0, 1.0], "f": text, "letters": 30, "spaces": 6}
    assert ast.literal_eval(printed) == {"id": 2, "text": text} | made


def test_the_clusters_of_the_geneva_guide_have_the_planned_workers_of_the_page(tmp_path: Path) -> None:
    rows = re.findall(
        r"^\| `(.+?)` \| (\d+) \| ([\d.]+) CPUs, ([\d.]+) GB \| (\d+) \|$", FROM_GENEVA.read_text(), re.MULTILINE
    )
    assert len(rows) == 3
    with_a_table(tmp_path, FROM_GENEVA)
    for cluster, concurrency, cpus, memory, workers in rows:
        assert float(cpus) == round(0.2 + 1.1 * int(concurrency), 1)  # driver and tracker, appliers and writers
        assert float(memory) == round(0.128 + int(concurrency), 1)
        command = (
            f'dovetail backfill plan clips.lance upper --udf functions:upper --no-sample --json --cluster "{cluster}"'
        )
        assert json.loads(typed(command, tmp_path).stdout)["workers"] == int(workers)


def test_every_argument_of_a_backfill_and_of_a_function_is_on_the_page() -> None:
    import inspect

    import dovetail as dt

    text = BACKFILL.read_text(encoding="utf-8") + FROM_GENEVA.read_text(encoding="utf-8")
    names = {*inspect.signature(dt.Table.backfill).parameters} - {"self", "unknown"}
    names |= {*inspect.signature(dt.udf).parameters} - {"fn", "unknown"}
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []


# --- recipes


def shown_commands(page: Path) -> list[tuple[str, list[str]]]:
    """Commands that print the same on every machine, with the lines shown below them."""
    found = []
    for text in blocks(page, ""):
        command, *lines = text.splitlines()
        if command.startswith(("$ dovetail plan", "$ dovetail recipe")) and (
            "--cluster" in command or "wrong" in command
        ):
            found.append((command.removeprefix("$ "), lines))
    return found


def differing(shown: list[str], printed: list[str]) -> list[str]:
    """The first line of the page that is not printed in its place; a line "..." stands for any lines."""
    place, anywhere = 0, False
    for line in shown:
        if line == "...":
            anywhere = True
            continue
        while anywhere and place < len(printed) and printed[place] != line:
            place += 1
        if place >= len(printed) or printed[place] != line:
            return [line, f"but it prints: {printed[place] if place < len(printed) else 'nothing more'}"]
        place, anywhere = place + 1, False
    return [] if anywhere or place == len(printed) else ["the end", f"but it prints: {printed[place]}"]


@pytest.fixture(scope="module")
def recipe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example recipes and the files of the page on recipes."""
    folder = tmp_path_factory.mktemp("recipe_folder")
    shutil.copytree(ROOT / "examples" / "recipes", folder / "examples" / "recipes")
    for text in blocks(RECIPES, "yaml"):
        name = re.match(r"# (\w+\.yaml)\n", text)
        if name:
            (folder / name[1]).write_text(text, encoding="utf-8")
    return folder


COMMANDS = [(page, command, lines) for page in (RECIPES, ROOT / "README.md") for command, lines in shown_commands(page)]


def test_the_commands_of_the_page_on_recipes_are_found() -> None:
    assert len([page for page, _, _ in COMMANDS if page == RECIPES]) >= 9
    assert any("recipes" in command for page, command, _ in COMMANDS if page != RECIPES)


@pytest.mark.parametrize(
    ("command", "lines"),
    [(command, lines) for _, command, lines in COMMANDS if "recipe" in command or ".yaml" in command],
    ids=lambda value: value.removeprefix("dovetail ")[:60] if isinstance(value, str) else "",
)
def test_a_command_on_recipes_prints_what_the_page_shows(command: str, lines: list[str], recipe_folder: Path) -> None:
    if "examples/video" in command:
        shutil.copy(ROOT / "examples" / "video.yaml", recipe_folder / "examples")
    done = typed(command, recipe_folder)
    printed = done.stdout if done.returncode == 0 else done.stderr
    assert differing(lines, printed.splitlines()) == []


def test_every_fix_on_the_page_of_recipes_works(recipe_folder: Path) -> None:
    tried = 0
    for command, lines in shown_commands(RECIPES):
        for fix in (line.removeprefix("  fix  ") for line in lines if line.startswith("  fix  --")):
            # an option that is given twice replaces the first
            before = command.replace(" --mode streaming", "") if fix.startswith("--mode") else command
            done = typed(f"{before} {fix}", recipe_folder)
            assert done.returncode == 0, f"{before} {fix}\n{done.stderr}"
            tried += 1
    assert tried >= 8


@pytest.mark.parametrize(
    ("changes", "workers", "cards"),
    [
        (cells[0], int(cells[1]), cells[2])
        for cells in (
            [cell.strip().strip("`") for cell in row.split("|")[1:4]]
            for row in RECIPES.read_text(encoding="utf-8").partition("| `hint.yaml` with |")[2].splitlines()[2:6]
        )
    ],
)
def test_the_table_of_memory_hints_matches_the_plans(
    changes: str, workers: int, cards: str, recipe_folder: Path
) -> None:
    more = "" if changes == "nothing else" else changes
    done = typed(f'dovetail plan hint.yaml --cluster "1x(32cpu, 128GB, 2xgpu:20GB)" {more}', recipe_folder)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("image_maniqa_filter"))
    assert re.search(rf" {workers}  .*  {re.escape(cards)}  ", line), line


def operator_rows() -> list[str]:
    """Rows of the table of operators, from the docstrings of the modules."""
    rows = []
    for name, entry in known_operators().items():
        made = native_class(name)
        if made is not None:
            text = importlib.import_module(made.__module__).__doc__ or ""
            what = " ".join(text.strip().partition("\n\n")[0].split())
            rows.append(f"| `{name}` | {entry.kind} | {what} | {f'[{made.extra}] ' if made.needs else ''}|")
    return rows


def test_the_table_of_operators_is_complete() -> None:
    table = RECIPES.read_text(encoding="utf-8").partition("\n## Operators\n")[2]
    assert [line for line in table.splitlines() if line.startswith("| `")] == operator_rows()
    assert f"{len(operator_rows())} operators run here" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_key_of_a_recipe_is_on_the_page_with_its_meaning() -> None:
    text = RECIPES.read_text(encoding="utf-8")
    table = text.partition("\n## Keys\n")[2].partition("\n## Operators\n")[0]
    assert [line for line in table.splitlines() if line.startswith("| `")] == [
        f"| `{field.name}` | {field.description} |" for field in file_keys.RECIPE_FILE.fields
    ]
    assert [key for key in sorted(file_keys.OPERATOR_KEYS) if f"`{key}`" not in table] == []


def test_every_ignored_key_of_data_juicer_is_listed() -> None:
    text = FROM_DATA_JUICER.read_text(encoding="utf-8")
    named = text.partition("\n## Keys without effect\n")[2].partition("\n`op_fusion`")[0]
    assert re.findall(r"`(\w+)`", named) == sorted(file_keys.IGNORED_KEYS)


def test_the_recipes_on_the_data_juicer_page_are_valid(tmp_path: Path) -> None:
    import dovetail as dt

    for text in blocks(FROM_DATA_JUICER, "yaml"):
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        assert dt.Recipe.load(tmp_path / "recipe.yaml").steps


def test_the_sizes_on_the_data_juicer_page_are_parsed_as_shown(tmp_path: Path) -> None:
    import dovetail as dt

    def read(memory: str) -> float | None:
        (tmp_path / "recipe.yaml").write_text(f"process: [{{image_maniqa_filter: {{memory: {memory}}}}}]")
        try:
            shape = next(iter(dt.Recipe.load(tmp_path / "recipe.yaml").pipeline())).shape
        except dt.PipelineError:
            return None
        return shape.gpu_memory_bytes / (1 << 20)

    expected: dict[str, float | None] = {
        "'1500MB'": 1500.0,
        "'2GB'": 2048.0,
        "'2GiB'": 2048.0,
        "'1.5GB'": 1536.0,
        "'2g'": 2048.0,
    }
    expected |= {"'-2GB'": None, "'1500'": None, "1500": None}
    text = FROM_DATA_JUICER.read_text(encoding="utf-8").partition("\n## Sizes\n")[2].partition("\n## ")[0]
    assert {size: read(size) for size in expected} == expected
    assert [size for size in expected if f"`{size}`" not in text] == []


def test_the_custom_operators_of_the_page_are_those_of_the_example(tmp_path: Path) -> None:
    (shown,) = blocks(RECIPES, "python")
    (tmp_path / "own_operators.py").write_text(shown, encoding="utf-8")
    row = {"text": "One. Two. Three."}
    results = []
    for folder in (tmp_path, ROOT / "examples" / "recipes"):
        names = runpy.run_path(str(folder / "own_operators.py"))
        results.append((names["enough_sentences"](row, 3), names["CountWords"]()(row)))
    assert results[0] == results[1] == (True, {**row, "words": 3})
