"""`dovetail backfill` as people type it: real tables and a module beside them."""

from __future__ import annotations

import json
import re
import shlex
import signal
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from cli.jobs import CLUSTER, CommandFolder
from dovetail.cli.backfill import backfill
from waiting import until

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.time_limit

FUNCTIONS = """
import os
import time
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

import dovetail as dt


@dt.udf
def twice(n: int) -> int:
    return 2 * n


def plain(text: str) -> str:
    return text.upper()


def plain_of_n(n: int) -> str:
    return str(n)


class Size(NamedTuple):
    letters: int
    words: int


@dt.udf
def size(text: str) -> Size:
    return Size(len(text), len(text.split()))


@dt.udf
def length(text: pa.StringArray) -> pa.Int32Array:
    return pc.utf8_length(text)


@dt.udf
def no_seven(n: int) -> int:
    if n == 7 and not Path("fixed").exists():
        raise ValueError(f"a seven: {n}")
    return n


@dt.udf
def ends(n: int) -> int:
    raise EOFError("no more")


@dt.udf
def sometimes(n: int) -> int:
    if n == 7 and not Path("tried").exists():
        Path("tried").touch()
        raise ConnectionError("try again")
    return n


@dt.udf
def hangs(n: int) -> int:
    while n == 7:
        time.sleep(0.01)
    return n


@dt.udf
def slowly(n: int) -> int:
    if not Path("fast").exists():
        time.sleep(0.01)
    return n


@dt.udf
def held(n: int) -> int:
    while n >= 100 and not Path("fast").exists():
        time.sleep(0.01)
    return n


@dt.udf(cpus=64)
def huge(n: int) -> int:
    return n


@dt.udf
def wrong_type(text: int) -> int:
    return text


NOT_A_FUNCTION = 5
"""
ROWS, PER_FRAGMENT = 40, 10


class TableFolder(CommandFolder):
    """A folder with a table in it, and a module of functions."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "functions.py").write_text(FUNCTIONS)
        self.make(ROWS)

    def make(self, rows: int, per_fragment: int = PER_FRAGMENT) -> None:
        import lance
        import pyarrow as pa

        numbers = list(range(rows))
        table = pa.table({"n": numbers, "text": [f"row {n}" for n in numbers]})
        lance.write_dataset(table, str(self.folder / "t.lance"), mode="overwrite", max_rows_per_file=per_fragment)

    def values(self, column: str) -> list[Any]:
        import lance

        found: list[Any] = lance.dataset(str(self.folder / "t.lance")).to_table([column])[column].to_pylist()
        return found

    def columns(self) -> list[str]:
        import lance

        return [str(name) for name in lance.dataset(str(self.folder / "t.lance")).schema.names]

    def fill(self, *arguments: str, action: str = "run") -> subprocess.CompletedProcess[str]:
        return self.run("backfill", action, "t.lance", *arguments)

    def filled(self, *arguments: str, action: str = "run") -> dict[str, Any]:
        done = self.fill(*arguments, "--json", action=action)
        assert done.returncode == 0, done.stderr
        data: dict[str, Any] = json.loads(done.stdout)
        return data

    def errors(self, column: str, *options: str) -> subprocess.CompletedProcess[str]:
        return self.fill(column, *options, action="errors")

    def history(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.fill(*arguments, action="history")

    def typed(self, command: str) -> subprocess.CompletedProcess[str]:
        """A whole command, as a fix shows it."""
        program, *words = shlex.split(command, comments=True)
        assert program == "dovetail", command
        return self.run(*words)

    def refused(self, *arguments: str, code: int = 2, action: str = "run") -> str:
        done = self.fill(*arguments, action=action)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert "dovetail/cli" not in done.stderr  # a traceback of ours
        return done.stderr


@pytest.fixture
def place(tmp_path: Path) -> TableFolder:
    return TableFolder(tmp_path / "my tables")


# --- filling


def test_a_column_is_filled_and_the_same_again_does_nothing(place: TableFolder) -> None:
    done = place.fill("twice", "--udf", "functions:twice")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("twice: finished after ")
    assert f"\n  {ROWS} rows in 4 fragments and " in done.stdout
    assert place.values("twice") == [2 * n for n in range(ROWS)]
    again = place.fill("twice", "--trust-table")
    assert (again.returncode, again.stdout) == (0, f"twice: nothing to do, {ROWS} rows are already filled\n")


def test_several_columns_of_one_function_are_written_with_commas(place: TableFolder) -> None:
    assert place.filled("letters,words", "--udf", "functions:size")["rows"] == ROWS
    assert place.values("letters")[:2] == [5, 5]
    assert place.values("words") == [2] * ROWS
    assert place.refused("letters,words,more", "--udf", "functions:size").count("DT446") == 1


def test_plain_functions_and_functions_of_arrays_are_accepted(place: TableFolder) -> None:
    assert place.filled("big", "--udf", "functions:plain", "--slots", "1")["rows"] == ROWS
    assert place.values("big")[0] == "ROW 0"
    assert place.filled("long", "--udf", "functions:length", "--batch-size", "4")["rows"] == ROWS
    assert place.values("long") == [len(f"row {n}") for n in range(ROWS)]


def test_fragments_by_number_and_by_id_and_the_rest_later(place: TableFolder) -> None:
    result = place.filled("twice", "--udf", "functions:twice", "--fragments", "1", "--workers", "1")
    assert (result["rows"], result["fragments"], result["workers"]) == (PER_FRAGMENT, 1, 1)
    assert place.filled("twice", "--trust-table", "--fragments", "3,")["rows"] == PER_FRAGMENT
    assert [value is None for value in place.values("twice")] == [False] * 10 + [True] * 20 + [False] * 10
    assert place.filled("twice", "--trust-table", "--fragments", "1,3", "--workers", "1-2")["rows"] == PER_FRAGMENT
    result = place.filled("twice", "--trust-table", "--workers", "auto", "--commit-every", "0")
    assert (result["rows"], result["done_before"]) == (PER_FRAGMENT, 3 * PER_FRAGMENT)


def test_a_condition_leaves_other_rows_alone_and_recompute_computes_all_again(place: TableFolder) -> None:
    place.filled("twice", "--udf", "functions:twice", "--where", "n < 5")
    assert place.values("twice") == [0, 2, 4, 6, 8] + [None] * (ROWS - 5)
    assert place.filled("twice", "--trust-table")["rows"] == ROWS
    assert place.filled("twice", "--trust-table", "--recompute")["rows"] == ROWS
    assert place.filled("twice", "--trust-table")["rows"] == 0


def test_option_names_of_geneva_are_accepted(place: TableFolder) -> None:
    others = ("--concurrency", "1", "--intra-applier-concurrency", "1", "--num-frags", "2")
    result = place.filled("twice", "--udf", "functions:twice", "--engine", "local", "--env-from", "HOME", *others)
    assert (result["workers"], result["fragments"]) == (1, 2)
    assert "--concurrency" not in place.run("backfill", "run", "--help").stdout


def test_more_workers_than_fit_are_reduced_with_a_note(place: TableFolder) -> None:
    done = place.fill("twice", "--udf", "functions:twice", "--workers", "8", *CLUSTER)
    assert done.returncode == 0, done.stderr
    words = "running 2 of 8 workers: 8 need 8.0 CPUs, 2.0 available"
    assert words in done.stdout
    assert words in done.stderr


def test_a_table_may_be_named_by_an_address(place: TableFolder) -> None:
    done = place.run("backfill", "run", f"file://{place.folder}/t.lance", "twice", "--udf", "functions:twice")
    assert done.returncode == 0, done.stderr
    assert place.values("twice")[-1] == 2 * (ROWS - 1)


@pytest.mark.processes
def test_storage_options_reach_the_table_and_the_workers(place: TableFolder, s3_server: str) -> None:
    import lance

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "aws_region": "us-east-1"}
    storage = {"aws_endpoint": s3_server, "allow_http": "true", **keys}
    urllib.request.urlopen(urllib.request.Request(f"{s3_server}/clips", method="PUT")).close()
    uri = "s3://clips/t.lance"
    lance.write_dataset(lance.dataset(str(place.folder / "t.lance")).to_table(), uri, storage_options=storage)
    options = [word for key, value in storage.items() for word in ("--storage-option", f"{key}={value}")]
    done = place.run("backfill", "run", uri, "twice", "--udf", "functions:twice", "--workers", "1", *options)
    assert done.returncode == 0, done.stderr
    found = lance.dataset(uri, storage_options=storage).to_table(["twice"])["twice"].to_pylist()
    assert found == [2 * n for n in range(ROWS)]


# --- rows that fail


def test_a_failed_row_ends_the_command_with_fixes_as_options(place: TableFolder) -> None:
    error = place.refused("checked", "--udf", "functions:no_seven", code=1)
    assert "error[DT435] column 'checked', row 7 (fragment 0, offset 7): ValueError: a seven: 7" in error
    assert "--on-error skip" in error
    assert "dovetail backfill errors t.lance checked" in error
    assert "table." not in error
    (place.folder / "fixed").touch()
    assert place.filled("checked", "--trust-table")["status"] == "finished"
    assert place.values("checked") == list(range(ROWS))


def test_a_function_that_only_the_table_names_is_loaded_when_it_is_named_or_trusted(place: TableFolder) -> None:
    place.filled("twice", "--udf", "functions:twice", "--fragments", "1")
    assert fixes(place.refused("twice", action="plan")) == ["--udf functions:twice"]
    error = place.refused("twice")
    assert "error[DT452]" in error
    assert "the table names functions:twice as the function of column 'twice'" in error
    named, trusted = (shlex.split(fix, comments=True) for fix in fixes(error))
    assert place.filled("twice", *named, "--fragments", "1")["rows"] == PER_FRAGMENT
    assert place.filled("twice", *trusted)["rows"] == ROWS - 2 * PER_FRAGMENT


def test_failed_rows_are_listed_and_retried(place: TableFolder) -> None:
    done = place.fill("checked", "--udf", "functions:no_seven", "--on-error", "skip")
    assert done.returncode == 0, done.stderr
    assert ", 1 failed\n" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("next "))
    listed = place.typed(line.removeprefix("next").strip())
    assert listed.stdout == "row 7 (fragment 0, offset 7): ValueError: a seven: 7\n"
    retry_them = listed.stderr.removeprefix("1 row failed; correct the function, then: ").strip()
    (row,) = map(json.loads, place.errors("checked", "--json").stdout.splitlines())
    assert (row["row"], row["error"], row["message"]) == (7, "ValueError", "a seven: 7")
    assert "no_seven" in row["traceback"]
    (place.folder / "fixed").touch()
    assert json.loads(place.typed(f"{retry_them} --json").stdout)["rows"] == 1
    assert place.values("checked") == list(range(ROWS))
    none = place.errors("checked")
    assert (none.returncode, none.stdout, none.stderr) == (0, "", "no failed rows\n")


def test_a_row_that_fails_again_is_skipped_by_the_option_of_the_fix(place: TableFolder) -> None:
    place.filled("checked", "--udf", "functions:no_seven", "--on-error", "skip")
    error = place.refused("checked", "--trust-table", action="retry", code=1)
    option, explanation = fixes(error)[0].split("  ", 1)
    assert explanation == "leaves such rows NULL; dovetail backfill errors t.lance checked lists them"
    assert place.filled("checked", "--trust-table", *option.split(), action="retry")["errors"] == 1


def test_a_retry_with_changed_code_says_which_rows_the_earlier_code_computed(place: TableFolder) -> None:
    place.filled("checked", "--udf", "functions:no_seven", "--on-error", "skip")
    functions = place.folder / "functions.py"
    functions.write_text(functions.read_text().replace("if n == 7 and not", "if n == 70 and not"))
    notes = place.filled("checked", "--trust-table", action="retry")["notes"]
    (command,) = re.findall(
        rf"^{ROWS - 1} rows were computed by another version of no_seven: the next (.+) computes all rows with this "
        r'one; @dt\.udf\(version=".+"\) keeps them$',
        notes[0],
    )
    assert place.values("checked") == list(range(ROWS))
    done = place.typed(command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("checked: finished after ")
    assert f"\n  {ROWS} rows in " in done.stdout


def test_a_backfill_is_named_by_table_and_column_and_counts_rows(place: TableFolder) -> None:
    place.filled("checked", "--udf", "functions:no_seven", "--on-error", "skip")
    (listed,) = json.loads(place.run("ls", "--json").stdout)
    assert (listed["name"], listed["items"], listed["unit"]) == ("t.checked", ROWS, "rows")
    shown = place.run("status")
    assert shown.stdout.startswith("t.checked: finished after ")
    assert f"{ROWS} of {ROWS} rows in, {ROWS - 1} out, 1 failed" in shown.stdout
    (command,) = re.findall(r"^failed +(dovetail .+)$", shown.stderr, re.MULTILINE)
    assert place.typed(command).stdout == "row 7 (fragment 0, offset 7): ValueError: a seven: 7\n"


def test_status_and_errors_show_the_row_with_which_a_backfill_failed(place: TableFolder) -> None:
    place.refused("checked", "--udf", "functions:no_seven", code=1)
    shown = place.run("status")
    assert "\n  column 'checked', row 7 (fragment 0, offset 7): ValueError: a seven: 7\n" in shown.stdout
    assert "  row 7 (fragment 0, offset 7)  in checked: ValueError: a seven: 7\n" in shown.stdout
    assert "table." not in shown.stdout.replace("the table", "")
    assert place.run("errors").stdout == (
        "1 row in checked, ended the run: ValueError: a seven: 7\n  row 7 (fragment 0, offset 7)\n"
    )


def test_the_next_command_of_a_failed_backfill_resumes_it(place: TableFolder) -> None:
    place.refused("checked", "--udf", "functions:no_seven", code=1)
    (place.folder / "fixed").touch()
    (fix, *_) = fixes(place.run("cancel").stderr)  # which is too late
    assert fix.startswith("dovetail backfill run ")
    assert place.typed(fix).returncode == 0
    assert place.values("checked") == list(range(ROWS))


@pytest.mark.parametrize(("option", "action"), [("--resume", "run"), ("--retry-errors", "retry")])
def test_a_backfill_is_resumed_and_retried_by_its_own_commands(place: TableFolder, option: str, action: str) -> None:
    place.filled("checked", "--udf", "functions:no_seven", "--on-error", "skip")
    (place.folder / "fixed").touch()
    with_file, done = (place.run("run", *file, option, "last") for file in (["p.yaml"], []))
    assert (with_file.returncode, with_file.stderr) == (2, done.stderr)
    assert "error[DT365]" in done.stderr
    assert "is a backfill" in done.stderr
    (fix,) = fixes(done.stderr)
    assert fix.startswith(f"dovetail backfill {action} ")
    done = place.typed(fix)
    assert done.returncode == 0, done.stderr
    assert (place.values("checked")[7] == 7) == (action == "retry")


def test_notes_that_are_printed_while_it_runs_are_commands(place: TableFolder) -> None:
    import lance

    place.filled("twice", "--udf", "functions:twice")
    lance.dataset(str(place.folder / "t.lance")).update({"twice": "0"}, "n < 5")
    done = place.fill("twice", "--trust-table")
    assert "; --where 'twice IS NULL' computes only empty rows" in done.stderr
    assert "where=" not in done.stderr + done.stdout


def test_an_exception_type_that_click_handles_is_an_ordinary_error(place: TableFolder) -> None:
    assert "EOFError: no more" in place.refused("bad", "--udf", "functions:ends", code=1)


def test_an_exception_type_is_retried(place: TableFolder) -> None:
    result = place.filled("n2", "--udf", "functions:sometimes", "--retry", "ConnectionError", "--retry", "TimeoutError")
    assert (result["rows"], result["errors"]) == (ROWS, 0)
    assert (place.folder / "tried").exists()


@pytest.mark.parametrize("most", ["0", "1%"])
def test_more_errors_than_allowed_stop_it(place: TableFolder, most: str) -> None:
    function = ("--udf", "functions:no_seven", "--on-error", "skip")
    error = place.refused("checked", *function, "--max-errors", most, code=1)
    assert "error[DT436]" in error
    assert "a larger --max-errors" in error
    assert place.filled("checked", "--trust-table", "--on-error", "skip", "--max-errors", "5%")["status"] == "finished"


@pytest.mark.processes
def test_a_row_that_exceeds_the_timeout_fails(place: TableFolder) -> None:
    options = ("--timeout", "0.2s", "--on-error", "skip", "--workers", "1")
    result = place.filled("n2", "--udf", "functions:hangs", *options)
    assert result["errors"] == 1
    assert "TimeoutError" in place.errors("n2").stdout


# --- what is looked at, and removed


def test_a_plan_starts_nothing_and_changes_nothing(place: TableFolder) -> None:
    done = place.fill("twice", "--udf", "functions:twice", "--workers", "4", *CLUSTER, action="plan")
    assert done.returncode == 0, done.stderr
    for words in (
        f"twice by functions:twice: {ROWS} rows in 4 fragments to compute",
        "Workers:    2 x 1 CPU = 2 CPUs",
        "rows/s per worker (from a sample of ",
        "note: running 2 of 4 workers: 4 need 4.0 CPUs, 2.0 available",
    ):
        assert words in done.stdout
    plan = place.filled("twice", "--udf", "functions:twice", "--no-sample", action="plan")
    assert (plan["rows"], plan["seconds"], plan["rate"]) == (ROWS, None, None)
    assert place.columns() == ["n", "text"]


def test_the_history_of_one_column_and_of_all(place: TableFolder) -> None:
    empty = place.history()
    assert (empty.returncode, empty.stdout, empty.stderr) == (0, "", "no backfills\n")
    place.filled("a", "--udf", "functions:twice")
    place.refused("b", "--udf", "functions:no_seven", code=1)
    jobs = [json.loads(line) for line in place.history("--json").stdout.splitlines()]
    assert [(job["column"], job["status"]) for job in jobs] == [("a", "finished"), ("b", "failed")]
    (line,) = place.history("b").stdout.splitlines()
    assert "ValueError: a seven: 7" in line


def test_a_column_is_dropped_with_all_that_is_kept_of_it(place: TableFolder) -> None:
    place.filled("twice", "--udf", "functions:twice")
    done = place.fill("twice", action="drop")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert re.fullmatch(
        rf"removed twice: {ROWS} rows of type int64; version \d+ of the table still contains them\n", done.stderr
    )
    assert place.columns() == ["n", "text"]
    assert place.history().stdout == ""
    assert "DT447" in place.refused("twice")


def test_a_column_that_dovetail_did_not_create_is_dropped_only_by_force(place: TableFolder) -> None:
    place.filled("text", "--udf", "functions:plain_of_n", "--where", "n < 3")  # filling it does not make it ours
    error = place.refused("text", action="drop")
    assert "error[DT450]" in error
    assert "column 'text' was not created by Dovetail" in error
    assert f"it has {ROWS} rows of type string" in error
    (fix,) = fixes(error)
    assert "text" in place.typed(fix).stdout  # lists the columns that Dovetail filled
    assert place.columns() == ["n", "text"]
    done = place.fill("text", "--force", action="drop")
    assert done.returncode == 0, done.stderr
    assert f"removed text: {ROWS} rows of type string; version " in done.stderr
    assert place.columns() == ["n"]


def fixes(text: str) -> list[str]:
    return [line.removeprefix("  fix  ") for line in text.splitlines() if line.startswith("  fix  ")]


# --- what is wrong


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "twice"], ["DT447", "the table has no column 'twice'", "fix  --udf package.module:function"]),
        (["run", "text"], ["DT447", "no function is registered for column 'text'"]),
        (["run", "n", "--udf", "functions:plain"], ["DT446", "plain returns string, but column 'n' is int64"]),
        (["run", "a", "--udf", "functions:twise"], ["DT443", "did you mean 'twice'?", "fix  --udf functions:twice"]),
        (["run", "a", "--udf", "nowhere:twice"], ["DT443", "no module named 'nowhere'"]),
        (["run", "a", "--udf", "functions"], ["DT443", "package.module:name"]),
        (["run", "a", "--udf", "functions:NOT_A_FUNCTION"], ["DT443", "of type int"]),
        (["run", "a", "--udf", "functions:wrong_type"], ["DT445", "takes int for text, but the column is string"]),
        (
            ["run", "a", "--udf", "functions:twice", "--where", "nosuch > 3"],
            ["DT432", "--where 'nosuch > 3'", "nosuch"],
        ),
        (["run", "a", "--udf", "functions:twice", "--storage-option", "region"], ["DT437", "region is not KEY=VALUE"]),
        (["run", "a", "--udf", "functions:twice", "--engine", "loca"], ["DT331", "did you mean 'local'?"]),
        (["run", "a", "--udf", "functions:twice", "--share", "0.5"], ["share"]),
        (["errors", "text"], ["DT447", "column 'text' was never filled by a function"]),
        (["drop", "nosuch"], ["DT447", "the table has no column 'nosuch'"]),
        (["run"], ["Missing argument", "COLUMN"]),
        (["plan", "a"], ["DT447"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_error(place: TableFolder, arguments: list[str], words: list[str]) -> None:
    action, *words_after = arguments
    error = place.refused(*words_after, action=action)
    assert [one for one in words if one not in error] == []
    assert "table." not in error.replace("/t.lance", "")
    assert place.columns() == ["n", "text"]


def test_all_problems_of_options_are_reported_at_once(place: TableFolder) -> None:
    wrong = "--workers many --fragments x --max-errors lots --timeout soon --commit-every never --on-error ignore"
    error = place.refused("a", "--udf", "functions:twice", *shlex.split(wrong), "--batch-size", "0", "--slots", "x")
    options = ("workers", "fragments", "max-errors", "timeout", "commit-every", "on-error", "batch-size", "slots")
    assert [name for name in options if f"]  --{name} " not in error.replace("] ", "]  ")] == []
    assert error.count("error[DT") == len(options)
    assert "--workers 4-2 " in place.refused("a", "--udf", "functions:twice", "--workers", "4-2")


WRONG_VALUES = """
--workers many
--fragments x
--max-errors lots
--timeout soon
--commit-every never
--on-error ignore
--batch-size 0
--slots x
--engine loca
--retry ''
--env-from 1X
--where ''
"""


@pytest.mark.parametrize("wrong", WRONG_VALUES.strip().splitlines())
def test_the_fix_of_a_wrong_value_can_be_typed_instead(place: TableFolder, wrong: str) -> None:
    command = ("a", "--udf", "functions:twice", "--no-sample")
    shown = fixes(place.refused(*command, *shlex.split(wrong), action="plan"))
    assert shown
    for fix in shown:
        if fix.startswith("--engine ray"):  # there is no Ray
            continue
        done = place.fill(*command, *shlex.split(fix, comments=True), action="plan")
        assert done.returncode == 0, f"{fix}: {done.stderr}"


def test_the_input_columns_of_the_fix_can_be_given_to_the_function(place: TableFolder) -> None:
    module = place.folder / "misnamed.py"
    module.write_text("import dovetail as dt\n\n@dt.udf\ndef size(txet: str) -> int:\n    return len(txet)\n")
    command = ("a", "--udf", "misnamed:size")
    module.write_text(module.read_text().replace("@dt.udf", fixes(place.refused(*command))[0]))
    assert place.fill(*command).returncode == 0
    assert place.values("a")[:2] == [5, 5]


def test_a_resource_of_the_fix_can_be_given_to_the_function(place: TableFolder) -> None:
    fix = fixes(place.refused("a", "--udf", "functions:huge", *CLUSTER, code=3))[0]
    functions = place.folder / "functions.py"
    functions.write_text(functions.read_text().replace("@dt.udf(cpus=64)", fix))
    assert place.fill("a", "--udf", "functions:huge", *CLUSTER).returncode == 0


def test_the_commands_of_the_error_about_too_many_errors_work(place: TableFolder) -> None:
    error = place.refused("checked", "--udf", "functions:no_seven", "--on-error", "skip", "--max-errors", "0", code=1)
    show, retry = re.findall(r"(dovetail backfill .+?) (?:shows why|computes them again)", fixes(error)[0])
    assert "a seven: 7" in place.typed(show).stdout
    (place.folder / "fixed").touch()
    assert place.typed(retry).returncode == 0
    assert place.values("checked")[7] in (7, None)  # None: its fragment is not finished, and a note says so


def test_the_type_of_the_fix_can_be_given_to_the_function(place: TableFolder) -> None:
    module = place.folder / "numbers_of.py"
    module.write_text("import dovetail as dt\n\n@dt.udf\ndef size(text: str) -> float:\n    return len(text)\n")
    command = ("n", "--udf", "numbers_of:size", "--where", "n < 3")
    fix = fixes(place.refused(*command))[0].partition("  #")[0]
    module.write_text(module.read_text().replace("@dt.udf", fix))
    assert place.fill(*command).returncode == 0
    assert place.values("n")[:4] == [5, 5, 5, 3]


def test_no_mistake_hides_another(place: TableFolder) -> None:
    wrong = "--udf nowhere:x --engine loca --storage-option region --retry '' --workers 0 --share x --env-from 1X"
    error = place.refused("a", *shlex.split(wrong), "--where", "")
    for words in (
        "no module named 'nowhere'",
        "unknown engine 'loca' (did you mean 'local'?)\n  fix  --engine local\n",
        "--storage-option region is not KEY=VALUE",
        "--retry '' is not an exception type or the name of one\n  fix  --retry ConnectionError",
        '--workers 0 is not "auto", a number or a range\n  fix  --workers auto\n  fix  --workers 1-4',
        "--share x is not a fraction of the cluster (greater than 0, at most 1)\n  fix  --share 0.5",
        "--env-from 1X is not a variable name\n  fix  --env-from HF_TOKEN\n",
        "--where '' is not an SQL condition",
    ):
        assert words in error
    assert error.count("error[DT") == 8
    assert "dt." not in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["errors", "nosuch"], ["it has: n, text"]),
        (["drop", "nosuch"], ["it has: n, text"]),
        (["history", "nosuch"], ["it has: n, text"]),
        (["errors", "text"], ["dovetail backfill history t.lance  # lists the columns that were filled"]),
        (["run", "text"], ["--udf package.module:function --where 'text IS NULL'"]),
        (["run", "", "--udf", "functions:twice"], ["dovetail backfill run t.lance length --udf functions:twice"]),
        (["plan", "a,a", "--udf", "functions:twice"], ["dovetail backfill plan t.lance a --udf functions:twice"]),
        (["run", "a,", "--udf", "functions:twice"], ["dovetail backfill run t.lance a --udf functions:twice"]),
        (["run", "a", "--udf", "./functions.py:twice"], ["--udf functions:twice"]),
        (["run", "a", "--udf", "functions.twice"], ["--udf functions:twice"]),
        (["run", "a", "--udf", "functions:twice", "--concurrency", "0"], ["--concurrency auto", "--concurrency 1-4"]),
        (["run", "a", "--udf", "functions:twice", "--slots", "10001"], ["--slots 64"]),
        (["run", "a", "--udf", "functions:twice", "--fragments", "9,"], ["--fragments 0,"]),
        (["run", "a,b", "--udf", "functions:twice"], ["dovetail backfill run t.lance twice --udf functions:twice"]),
        (["run", "a", "--udf", "functions:size"], ["dovetail backfill run t.lance letters,words --udf functions:size"]),
        (
            ["run", "text", "--udf", "functions:plain_of_n"],
            ["--where 'text IS NULL'", "dovetail backfill run t.lance text_2 --udf functions:plain_of_n"],
        ),
        (
            ["run", "n", "--udf", "functions:plain"],
            [
                '@dt.udf(data_type="int64")  # if its values are of that type',
                "dovetail backfill run t.lance n_2 --udf functions:plain",
            ],
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_fixes_can_be_typed(place: TableFolder, arguments: list[str], expected: list[str]) -> None:
    action, *rest = arguments
    shown = fixes(place.refused(*rest, action=action))
    assert shown == expected
    for fix in shown:
        if fix.startswith("dovetail "):
            assert place.typed(fix).returncode == 0
        elif fix.startswith("--") and "package.module" not in fix:
            words = shlex.split(fix)
            before = rest[: rest.index(words[0])] if words[0] in rest else rest
            assert place.fill(*before, *words, action=action).returncode == 0


def test_a_module_that_exits_or_prints_does_no_harm(place: TableFolder) -> None:
    (place.folder / "exits.py").write_text("import sys\nsys.exit(4)\n")
    assert "exits:f: cannot import its module: SystemExit: 4" in place.refused("a", "--udf", "exits:f")
    (place.folder / "prints.py").write_text("print('hello')\ndef f(n: int) -> int:\n    return n\n")
    result = place.filled(
        *("a", "--udf", "prints:f", "--no-sample", "--timeout", "5", "--max-errors", "100%"), action="plan"
    )
    assert result["rows"] == ROWS


def test_a_float_is_not_truncated_for_an_integer_column(place: TableFolder) -> None:
    (place.folder / "halves.py").write_text("def half(n: int) -> int:\n    return n / 2\n")
    error = place.refused("a", "--udf", "halves:half", code=1)
    assert re.search(r"offset 1\): ValueError: returned \d+\.5, a float, which does not fit int64", error)
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--workers 2 --concurrency 3", "--workers and --concurrency are the same option with different values"),
        ("--engine ray --cluster 1x(2cpu,4GB)", "--cluster and --engine ray cannot be combined"),
    ],
)
def test_options_that_do_not_go_together_are_one_clear_error(place: TableFolder, arguments: str, words: str) -> None:
    error = place.refused("a", *arguments.split())
    assert words in error
    assert error.count("error[DT367]") == 1


@pytest.mark.parametrize(
    ("action", "option"),
    [("errors", "--workers"), ("retry", "--recompute"), ("retry", "--num-frags"), ("run", "--no-sample")],
)
def test_an_option_of_another_command_is_refused(place: TableFolder, action: str, option: str) -> None:
    error = place.refused("a", option, action=action)
    assert re.search(rf"No such option:? '?{option}", error)  # as click 8.1 and later versions write it


def test_the_help_of_every_command_has_an_example(place: TableFolder) -> None:
    assert list(backfill.commands) == ["run", "plan", "errors", "retry", "history", "drop"]
    for name in backfill.commands:
        shown = place.run("backfill", name, "--help").stdout
        assert f"dovetail backfill {name} clips.lance" in shown


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ("t.lance twice --udf functions:twice", "run t.lance twice --udf functions:twice"),
        ("t.lance twice --udf functions:twice --plan", "plan t.lance twice --udf functions:twice"),
        ("--plan t.lance twice --udf functions:twice", "plan t.lance twice --udf functions:twice"),
        ("run t.lance twice --udf functions:twice --plan", "plan t.lance twice --udf functions:twice"),
        ("t.lance checked --errors --json", "errors t.lance checked --json"),
        (
            "t.lance checked --udf functions:no_seven --retry-errors",
            "retry t.lance checked --udf functions:no_seven",
        ),
        ("t.lance --history", "history t.lance"),
        (
            "t.lance checked --udf functions:no_seven --where 'n < 3'",
            "run t.lance checked --udf functions:no_seven --where 'n < 3'",
        ),
        ("t.lance checked --drop", "drop t.lance checked"),
    ],
)
def test_a_command_of_version_0_1_is_refused_with_the_command_that_replaces_it(
    place: TableFolder, earlier: str, now: str
) -> None:
    place.filled("checked", "--udf", "functions:no_seven", "--on-error", "skip")
    (place.folder / "fixed").touch()
    done = place.typed(f"dovetail backfill {earlier}")
    assert (done.returncode, done.stdout) == (2, "")
    assert fixes(done.stderr) == [f"dovetail backfill {now}"]
    assert place.typed(fixes(done.stderr)[0]).returncode == 0


def test_a_misspelt_command_is_not_taken_for_a_table(place: TableFolder) -> None:
    done = place.run("backfill", "rn", "t.lance", "a")
    assert done.returncode == 2
    assert "did you mean 'run'?" in done.stderr


@pytest.mark.parametrize("name", ["nowhere.lance", "functions.py", "home"])
def test_a_path_that_is_not_a_table_is_reported(place: TableFolder, name: str) -> None:
    place.home.mkdir()
    done = place.run("backfill", "run", name, "a", "--udf", "functions:twice")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error[DT430]" in done.stderr
    assert str(place.folder / name) in done.stderr


def test_a_function_that_fits_on_no_node_is_refused_with_a_parameter_that_fits(place: TableFolder) -> None:
    error = place.refused("a", "--udf", "functions:huge", *CLUSTER, code=3)
    assert "stage 'huge' (64 CPUs) fits on 0 of 1 nodes" in error
    assert "fix  @dt.udf(cpus=2)\n" in error
    assert place.refused("a", "--udf", "functions:huge", *CLUSTER, code=3, action="plan").count("error[DT") == 1
    assert place.columns() == ["n", "text"]


# --- stopping it, and two at once


def going(place: TableFolder, started: Any) -> None:
    versions: list[Path] = []

    def some() -> bool:
        nonlocal versions
        assert started.process.poll() is None, started.err
        before, versions = versions, sorted((place.folder / "t.lance" / "_versions").iterdir())
        if versions == before:  # opening the table costs a hundred times as much
            return False
        return any(value is not None for value in place.values("n2")) if "n2" in place.columns() else False

    until(some, "the first fragment is visible")


TERM = pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), TERM], ids=["int", "term"])
def test_a_signal_drains_and_the_same_command_resumes(place: TableFolder, number: int, code: int) -> None:
    place.make(3000, 100)
    command = ("backfill", "run", "t.lance", "n2", "--udf", "functions:slowly", *CLUSTER)
    with place.started(*command) as started:
        going(place, started)
        started.process.send_signal(number)
        assert started.ended() == code, started.err
        assert "stopping at the next epoch" in started.err
        assert "Run the same command again to resume" in started.err
        assert "Traceback" not in started.err
        assert "n2: drained after " in started.out
    place.hurry()
    result = place.filled(*command[3:])
    assert result["status"] == "finished"
    assert 0 < result["rows"] < 3000
    assert result["rows"] + result["kept"] + result["done_before"] == 3000
    assert place.values("n2") == list(range(3000))


@pytest.mark.long
def test_a_second_signal_stops_at_once_and_finished_work_is_kept(place: TableFolder) -> None:
    place.make(3000, 100)
    command = ("backfill", "run", "t.lance", "n2", "--udf", "functions:held", *CLUSTER)
    with place.started(*command) as started:
        going(place, started)
        started.process.send_signal(signal.SIGINT)
        until(lambda: "stopping at the next epoch" in started.err, "it drains")
        started.process.send_signal(signal.SIGINT)
        assert started.ended() == 130, started.err
        assert "Traceback" not in started.err
    assert sum(value is not None for value in place.values("n2")) >= 100
    assert [job["status"] for job in map(json.loads, place.history("--json").stdout.splitlines())] == ["cancelled"]
    place.hurry()
    assert place.filled(*command[3:], "--fragments", "1")["fragments"] == 1


def test_with_no_wait_a_column_that_another_process_fills_is_refused(place: TableFolder) -> None:
    place.make(3000, 100)
    command = ("backfill", "run", "t.lance", "n2", "--udf", "functions:held", *CLUSTER)
    with place.started(*command) as started:
        going(place, started)
        error = place.refused(*command[3:], "--no-wait", code=1)
        assert "error[DT434]" in error
        assert f"pid {started.process.pid}" in error
        assert "omit --no-wait" in error
        place.hurry()
        started.process.send_signal(signal.SIGINT)
        started.ended()


def test_calls_in_fixes_and_notes_are_commands() -> None:
    from dovetail.backfill.change_notes import change_note, rows_not_retried_error
    from dovetail.cli.backfill_renderer import BackfillRenderer

    def fix(column: str, *, vanished: bool) -> str:
        renderer = BackfillRenderer("t.lance", column, "retry")
        (problem,) = renderer.error(rows_not_retried_error(column, 2, vanished=vanished)).problems
        return problem.fix_texts[0]

    assert fix("n", vanished=True) == "dovetail backfill run t.lance n --where 'n IS NULL'"
    assert fix("My Col", vanished=True) == "dovetail backfill run t.lance 'My Col' --where '`My Col` IS NULL'"
    assert fix("n", vanished=False) == "dovetail backfill retry t.lance n"
    note = BackfillRenderer("t.lance", "n").text(change_note("n", {1}, {1}))
    assert note.endswith("(compaction): dovetail backfill run t.lance n computes the rest")


def test_a_call_that_the_command_makes_itself_becomes_options() -> None:
    from dovetail.cli.backfill_renderer import BackfillRenderer
    from dovetail.errors import UNSET, Call, Change, Expression, Given, Setting, Text

    fill = BackfillRenderer("t.lance", "n")
    errors = BackfillRenderer("t.lance", "n", "errors")
    skip = Call("table.backfill", ("n",), {"where": "id < 10", "fragments": [0, 1], "on_error": "skip"})
    assert fill.fix(skip) == "--where 'id < 10' --fragments 0,1 --on-error skip"
    assert errors.fix(skip).startswith("dovetail backfill run t.lance n --where ")
    with_udf = Call("table.backfill", ("n", Expression("udf")))
    assert fill.fix(with_udf) == "--udf package.module:function"
    assert errors.fix(with_udf) == "dovetail backfill run t.lance n --udf package.module:function"
    assert fill.fix(Call("table.add_column", (["a", "b"], Expression("udf")))) == (
        "dovetail backfill run t.lance a,b --udf package.module:function"
    )
    assert errors.fix(Call("table.add_column", ("n", Expression("udf")))) == ""
    assert fill.fix(Call("table.drop", (["a", "b"],))) == ""  # no fix removes a column
    assert fill.fix(Call("table.history")) == "dovetail backfill history t.lance"
    options = ("aws_region=eu-west-1", "aws_secret_access_key=x", "azure_storage_sas_token=x")
    stored = BackfillRenderer("s3://b/t.lance", "n", "run", storage=options)
    assert stored.fix(Call("table.errors", ("n",))) == (
        "dovetail backfill errors s3://b/t.lance n --storage-option aws_region=eu-west-1"
    )
    several = BackfillRenderer("t.lance", "a,b", "run", "functions:size")
    assert several.fix(Call("table.backfill", ("a",), {"on_error": "skip"})) == "--on-error skip"
    assert several.fix(Call("table.add_column", ("c", Expression("size")))) == (
        "dovetail backfill run t.lance c --udf functions:size"
    )
    assert fill.fix(Call("dt.simulate", (Expression("pipeline"),))) == ""
    assert fill.fix(Change({"wait": True})) == "omit --no-wait"
    assert fill.fix(Change({"cluster": "1x(4cpu, 8GB)", "share": UNSET})) == (
        "--cluster '1x(4cpu, 8GB)', and omit --share"
    )
    assert fill.fix(Change({"env_from": ["A", "B"]})) == "--env-from A --env-from B"
    assert fill.fix(Change({"storage_options": {"aws_region": "us-east-1"}})) == "--storage-option aws_region=us-east-1"
    text = Text(Given("max_errors", "lots"), " is too many, use ", Setting("max_errors"))
    assert (fill.text(text), str(text)) == (
        "--max-errors lots is too many, use --max-errors",
        "max_errors='lots' is too many, use max_errors",
    )
