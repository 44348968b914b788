"""`dovetail plan`, `run`, `explain` and `simulate` of a recipe."""

from __future__ import annotations

import json
import os
import shlex
import signal
from typing import TYPE_CHECKING, Any

import pytest

from cli.jobs import CLUSTER, CommandFolder
from recipes.recipe_aids import FAILING, GPU_CLUSTER, MANUAL, OPTIMIZED, some_rows, write_rows

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable
    from pathlib import Path

pytestmark = pytest.mark.time_limit

SEED = ("--cluster", GPU_CLUSTER)
HEAD = "dataset_path: in.jsonl\nexport_path: out.jsonl\n"


class RecipeFolder(CommandFolder):
    """A folder with a recipe in it."""

    def recipe(self, process: str, head: str = HEAD, rows: Iterable[Any] | None = None) -> None:
        (self.folder / "r.yaml").write_text(f"{head}\nprocess: {process}\n")
        if rows is not None:
            write_rows(self.folder / "in.jsonl", rows)


@pytest.fixture
def place(tmp_path: Path) -> RecipeFolder:
    return RecipeFolder(tmp_path / "my kitchen")


def fixes(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """Commands printed after `fix`, split as by a shell."""
    found = [line.strip().removeprefix("fix").strip() for line in done.stderr.splitlines() if "  fix  " in line]
    return [shlex.split(line.removeprefix("or ")) for line in found]


# --- plan


@pytest.mark.parametrize(
    ("text", "cpus"), [(FAILING, "92.0"), (MANUAL, "112.0")], ids=["the one that fails", "the manual one"]
)
def test_the_seeds_recipes_are_refused_with_fixes_that_work_as_they_are_printed(
    place: RecipeFolder, text: str, cpus: str
) -> None:
    (place.folder / "r.yaml").write_text(text)
    done = place.run("plan", "r.yaml", *SEED)
    assert (done.returncode, done.stdout) == (3, "")
    for words in (f"{cpus} CPUs and 14.0 GPUs", "32.0 CPUs and 2.0 GPUs", "r.yaml:2:1", "r.yaml:3:5", "r.yaml:9:5"):
        assert words in done.stderr
    assert len(fixes(done)) >= 3
    for fix in fixes(done):
        again = place.run("plan", "r.yaml", *SEED, *fix)
        assert again.returncode == 0, (fix, again.stderr)


def test_memory_alone_is_planned_within_both_cards(place: RecipeFolder) -> None:
    (place.folder / "r.yaml").write_text(OPTIMIZED)
    done = place.run("plan", "r.yaml", *SEED)
    assert done.returncode == 0, done.stderr
    assert "image_maniqa_filter" in done.stdout
    assert "workers per card" in done.stdout
    assert "note: cannot run on this machine" in done.stdout
    data = json.loads(place.run("plan", "r.yaml", *SEED, "--json").stdout)
    assert len(data["units"]) == 7


def test_all_problems_of_a_recipe_are_reported_with_exit_code_2(place: RecipeFolder) -> None:
    place.recipe("[text_lenght_filter, {words_num_filter: {min_num: ten}}]", "modus: x\nnp: 0\n")
    for command in (["plan", "r.yaml"], ["run", "r.yaml"], ["explain", "r.yaml"], ["simulate", "r.yaml"]):
        done = place.run(*command)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("error[DT") == 4
        for words in ("r.yaml:1:1", "r.yaml:2:1", "r.yaml:4:11", "r.yaml:4:51", "(did you mean 'text_length_filter'?)"):
            assert words in done.stderr


def test_a_recipe_whose_process_is_misspelt_is_still_one(place: RecipeFolder) -> None:
    (place.folder / "r.yaml").write_text(f"{HEAD}proces: [text_length_filter]\n")
    done = place.run("plan", "r.yaml")
    assert done.returncode == 2
    assert "(did you mean 'process'?)" in done.stderr
    assert "stages" not in done.stderr


def test_a_file_that_is_partly_a_pipeline_is_reported_as_such(place: RecipeFolder) -> None:
    (place.folder / "r.yaml").write_text("stages: [{name: a, run: 'steps:double'}]\nprocess: [text_length_filter]\n")
    done = place.run("plan", "r.yaml")
    assert done.returncode == 2
    assert "'process'" in done.stderr
    place.recipe("[text_length_filter]", "source: in.jsonl\n")
    done = place.run("plan", "r.yaml")
    assert done.returncode == 2
    assert "recipes use 'dataset_path'" in done.stderr


def test_a_plan_lists_ignored_keys(place: RecipeFolder) -> None:
    place.recipe("[{text_length_filter: {turbo: true}}]", "use_cache: true\nnp: 4\n")
    done = place.run("plan", "r.yaml", *CLUSTER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("note: ignored (no effect in Dovetail): use_cache, turbo of text_length_filter") == 1
    assert "note: np: 4 has no effect" in done.stdout


def test_a_plan_probes_with_the_available_rows(place: RecipeFolder) -> None:
    place.recipe("[clean_links_mapper, {text_length_filter: {num_proc: 1}}]", rows=some_rows(50))
    done = place.run("plan", "r.yaml", *CLUSTER)
    assert done.returncode == 0, done.stderr
    assert "probed with 50 rows" in done.stderr
    assert not (place.folder / "out.jsonl").exists()
    silent = place.run("plan", "r.yaml", *CLUSTER, "--no-probe", "--no-profiles")
    assert silent.returncode == 0, silent.stderr
    assert "probed" not in silent.stderr
    (place.folder / "in.jsonl").unlink()
    absent = place.run("plan", "r.yaml", *CLUSTER)
    assert absent.returncode == 0, absent.stderr


def test_explain_and_simulate_take_a_recipe(place: RecipeFolder) -> None:
    text = OPTIMIZED + "  - document_deduplicator\n  - text_length_filter: {rate: 100}\n"
    (place.folder / "r.yaml").write_text(text)
    done = place.run("explain", "r.yaml", *SEED)
    assert done.returncode == 0, done.stderr
    assert "image_maniqa_filter" in done.stdout
    one = place.run("explain", "r.yaml", "image_maniqa_filter", *SEED)
    assert one.returncode == 0, one.stderr
    done = place.run("simulate", "r.yaml", *SEED, "--limit", "500")
    assert done.returncode == 0, done.stderr
    assert "500" in done.stdout


def test_a_simulation_runs_as_the_file_says(place: RecipeFolder) -> None:
    (place.folder / "r.yaml").write_text(FAILING)
    assert place.run("simulate", "r.yaml", *SEED, "--limit", "100").returncode == 3
    done = place.run("simulate", "r.yaml", *SEED, "--limit", "100", "--mode", "sequential")
    assert done.returncode == 0, done.stderr


def test_a_dry_run_starts_and_writes_nothing(place: RecipeFolder) -> None:
    place.recipe("[text_length_filter, document_deduplicator]", rows=some_rows(10))
    done = place.run("run", "r.yaml", *CLUSTER, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "10 rows" in done.stdout or "in.jsonl" in done.stdout
    assert not (place.folder / "out.jsonl").exists()
    assert place.runs() == []
    place.recipe("[image_aesthetics_filter, text_length_filter]")
    done = place.run("run", "r.yaml", *CLUSTER, "--dry-run")
    assert done.returncode == 2
    assert "image_aesthetics_filter" in done.stderr


def test_a_dry_run_misses_a_field_as_a_run_does(place: RecipeFolder) -> None:
    place.recipe("[text_length_filter]", HEAD + "text_keys: content\n", some_rows(5))
    for more in ([], ["--dry-run"]):
        done = place.run("run", "r.yaml", *CLUSTER, *more)
        assert done.returncode == 2, done.stderr
        assert "text_length_filter needs the field 'content'" in done.stderr
        assert "fix  text_keys: text" in done.stderr
    assert place.runs() == []


# --- run


def test_a_recipe_is_run_from_anywhere_with_modules_beside_it(place: RecipeFolder, tmp_path: Path) -> None:
    (place.folder / "mine.py").write_text("def even(row, of=2):\n    return row['n'] % of == 0\n")
    place.recipe("[{'mine:even': {of: 5}}, clean_links_mapper]", rows=some_rows(20))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = place.run("run", str(place.folder / "r.yaml"), *CLUSTER, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert [row["n"] for row in place.result()] == [0, 5, 10, 15]
    done = place.run("run", str(place.folder / "r.yaml"), *CLUSTER, "--set", "process.0.of=10", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert [row["n"] for row in place.result()] == [0, 10]


def test_rows_go_from_stdin_to_stdout(place: RecipeFolder) -> None:
    place.recipe("[{text_length_filter: {min_len: 3}}]")
    given = '{"text": "abcdef"}\n\n{"text": "a"}\n{"text": "ghijkl"}\n'
    done = place.run("run", "r.yaml", *CLUSTER, "--source", "-", "--sink", "-", stdin=given)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["abcdef", "ghijkl"]


def test_failed_items_are_retried_after_their_cause_is_fixed(place: RecipeFolder) -> None:
    (place.folder / "mine.py").write_text(
        "from pathlib import Path\n"
        "def check(row):\n"
        "    if row['n'] == 7 and not (Path(__file__).parent / 'fixed').exists():\n"
        "        raise ValueError('seven')\n"
        "    return row\n"
    )
    place.recipe("['mine:check', clean_links_mapper]", rows=some_rows(20))
    done = place.run("run", "r.yaml", *CLUSTER)
    assert done.returncode == 0, done.stderr
    assert [row["n"] for row in place.result()] == [n for n in range(20) if n != 7]
    assert "1 failed" in done.stderr
    (run,) = place.runs()
    (place.folder / "fixed").touch()
    done = place.run("run", "--retry-errors", run.name)
    assert done.returncode == 0, done.stderr
    assert sorted(row["n"] for row in place.result()) == list(range(20))


def test_too_many_bad_rows_fail_the_run_and_leave_no_half_a_file(place: RecipeFolder) -> None:
    rows = [{"text": n if n % 2 else f"some text {n}"} for n in range(60)]
    place.recipe("[text_length_filter]", HEAD + "max_errors: 3\n", rows)
    done = place.run("run", "r.yaml", *CLUSTER)
    assert done.returncode == 1
    assert (
        "items failed, more than max_errors allows (3); the last error: BadField: field 'text' is int, not a string"
        in done.stderr
    )
    assert "fix  --max-errors 100%  # " in done.stderr
    assert not (place.folder / "out.jsonl").exists()


def test_an_operator_that_cannot_run_here_is_refused_before_anything_starts(place: RecipeFolder) -> None:
    place.recipe("[text_length_filter, image_aesthetics_filter]", rows=some_rows(3))
    done = place.run("run", "r.yaml", *CLUSTER)
    assert done.returncode == 2
    assert "r.yaml:4:31" in done.stderr
    assert "fix  adapter: data_juicer" in done.stderr
    assert place.runs() == []
    assert place.run("plan", "r.yaml", *CLUSTER).returncode == 0


def test_a_missing_input_is_reported_with_exit_code_2(place: RecipeFolder) -> None:
    place.recipe("[text_length_filter]", "dataset_path: inn.jsonl\nexport_path: out.jsonl\n")
    for more in ([], ["--dry-run"]):
        done = place.run("run", "r.yaml", *CLUSTER, *more)
        assert done.returncode == 2
        assert "inn.jsonl" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_recipe_that_does_not_fit_is_refused_by_run_too(place: RecipeFolder) -> None:
    place.recipe(
        "[{text_length_filter: {num_proc: 2}}, {clean_links_mapper: {num_proc: 2}}]",
        HEAD + "mode: streaming\n",
        some_rows(10),
    )
    done = place.run("run", "r.yaml", *CLUSTER)
    assert done.returncode == 3
    assert "2 operators at once need 4.0 CPUs; the cluster has 2.0 CPUs" in done.stderr
    assert not (place.folder / "out.jsonl").exists()
    for fix in fixes(done):
        again = place.run("run", "r.yaml", *CLUSTER, *fix)
        assert again.returncode == 0, (fix, again.stderr)
        assert len(place.result()) == sum(len(row["text"]) >= 10 for row in some_rows(10))


@pytest.mark.parametrize("behind", ["", pytest.param(", document_deduplicator", marks=pytest.mark.long)])
def test_a_killed_run_is_resumed_and_ends_with_the_same_rows(place: RecipeFolder, behind: str) -> None:
    (place.folder / "mine.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "FAST = Path(__file__).with_name('fast')\n"
        "def slowly(row):\n"
        "    if not FAST.exists():\n"
        "        time.sleep(0.01)\n"
        "    while row['n'] >= 300 and not FAST.exists():\n"  # more rows than a probe takes
        "        time.sleep(0.01)\n"
        "    return row\n"
    )
    head = HEAD + "use_checkpoint: true\n"
    place.recipe(f"[clean_links_mapper, 'mine:slowly'{behind}]", head, some_rows(400))
    with place.started("run", "r.yaml", *CLUSTER) as started:
        started.goes()
        os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()
    assert not (place.folder / "out.jsonl").exists()
    (place.folder / "fast").touch()
    done = place.run("run", "r.yaml", *CLUSTER)
    assert done.returncode == 0, done.stderr
    assert "use_checkpoint: resuming run" in done.stderr
    assert [row["n"] for row in place.result()] == list(range(400))
    rerun = place.run("run", "r.yaml", *CLUSTER)
    assert rerun.returncode == 0, rerun.stderr
    assert "resuming" not in rerun.stderr
    assert [row["n"] for row in place.result()] == list(range(400))


def test_paths_of_traces_and_monitor_are_printed_at_the_end(place: RecipeFolder) -> None:
    head = HEAD + "open_tracer: true\ntrace_num: 2\nopen_monitor: true\n"
    rows = [{"text": f"see https://example.com/{n} please"} for n in range(30)]
    place.recipe("[clean_links_mapper, {text_length_filter: {min_len: 5}}]", head, rows)
    done = place.run("run", "r.yaml", *CLUSTER)
    assert done.returncode == 0, done.stderr
    assert f"traces: {place.folder}/trace" in done.stderr
    assert f"monitor: {place.folder}/monitor/monitor.html" in done.stderr
    assert (place.folder / "monitor" / "monitor.json").exists()
    assert len((place.folder / "trace" / "sample_trace-clean_links_mapper.jsonl").read_text().splitlines()) == 2


def test_a_module_that_exits_when_imported_is_reported(place: RecipeFolder) -> None:
    (place.folder / "ends.py").write_text("import sys\nsys.exit(0)\n")
    place.recipe("['ends:f']", rows=some_rows(2))
    done = place.run("run", "r.yaml", *CLUSTER)
    assert done.returncode == 2
    assert "ends:f" in done.stderr
