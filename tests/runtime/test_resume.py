"""Resume: the sink of a killed and resumed run equals that of an undisturbed one."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from runtime.kills import WRITE, Killed, expected, make_rows, rows_of, run_script, stats_of
from waiting import LONG, until

if TYPE_CHECKING:
    from pathlib import Path

SINKS = ("out.jsonl", "out.csv", "out.parquet", "out.lance")
ROWS = 2500
SEEDS = 10 if LONG else 1


def job(folder: Path, sink: str = "out.jsonl", rows: int = ROWS, **options: Any) -> Killed:
    make_rows(folder / "in.jsonl", rows)
    return Killed(folder, {"source": str(folder / "in.jsonl"), "sink": str(folder / sink), "sleep": 0.0003, **options})


def as_rows(path: Path) -> list[dict[str, int]]:
    found = rows_of(path)
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in found]
    if path.suffix == ".csv":
        head, *lines = [line.decode().strip().split(",") for line in found]
        return [dict(zip(head, map(int, line), strict=True)) for line in lines]
    assert isinstance(found, list)
    return found


def in_some_order(rows: list[dict[str, int]]) -> list[dict[str, int]]:
    return sorted(rows, key=lambda row: (row["id"], row["k"]))


def kill_and_resume(killed: Killed, dice: Random, kills: int, most: int = 600) -> None:
    """Kill the run at random moments of its progress, also during a resume, and resume it."""
    named: dict[str, Any] = {}
    for _ in range(kills):
        goal = killed.called() + dice.randrange(1, most)
        if not killed.kill_when(lambda goal=goal: killed.called() >= goal, f"{goal} calls", **named):  # type: ignore[misc]
            return
        if killed.log_contents().header:
            named = {"resume": str(killed.run_dir)}
        if killed.log_contents().finished is not None:  # killed at its very end
            assert "DT384" in killed.refused(**named)
            return
    killed.finish(**named)


# --- killed


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("sink", SINKS)
def test_a_run_killed_at_any_moment_resumes_exactly(tmp_path: Path, sink: str, seed: int) -> None:
    """Some with workers that are processes: they end after the driver, and write until then."""
    fused = "fused" if (seed + SINKS.index(sink)) % 2 else "rebatch"
    ordered = seed % 3 < 2
    killed = job(tmp_path, sink, pipeline=fused, settings={"ordered": ordered})
    killed.processes = bool(seed % 2) or sink in ("out.jsonl", "out.parquet")
    kill_and_resume(killed, Random(f"{sink} {seed}"), kills=2)
    found = as_rows(tmp_path / sink)
    assert (found if ordered else in_some_order(found)) == expected(ROWS)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} <= {"run", sink}, "parts are left"


@pytest.mark.parametrize("seed", range(20 if LONG else 1))
def test_a_kill_costs_two_seconds_of_a_first_run_with_slow_rows(tmp_path: Path, seed: int) -> None:
    row_s, workers = 0.5, 2
    killed = job(tmp_path, rows=300, sleep=row_s, pipeline="rebatch", workers=workers, sizes=[1, 1])
    goal = Random(seed).randrange(1, 30)
    assert killed.kill_when(lambda: killed.called() >= goal, f"{goal} rows are done")
    killed.resume(sleep=0.0, workers=workers)
    assert as_rows(tmp_path / "out.jsonl") == expected(300)
    assert len(killed.redone_s()) <= workers * 2.0 / row_s


MOMENTS = ("torn:2", "before-sync", "after-commit:2", "before-finish", "after-make", "after-place", "after-finish")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_a_given_moment_resumes(tmp_path: Path, moment: str) -> None:
    sink = tmp_path / "out.jsonl"
    sink.write_text('{"id": -1}\n')
    killed = job(tmp_path, settings={"exists": "append"}, sleep=0.0001)
    killed.dies(moment)
    placed = moment in ("after-place", "after-finish")
    assert placed or sink.read_text() == '{"id": -1}\n', "half-written"
    status = json.loads((killed.run_dir / "run.json").read_text())["status"]
    assert status == "running", "nothing else was written"
    assert stats_of(killed.resume())[0] == "finished"
    assert as_rows(sink) == [{"id": -1}, *expected(ROWS)]


@pytest.mark.parametrize("sink", [pytest.param("out.parquet", marks=pytest.mark.long), "out.lance"])
@pytest.mark.parametrize("exists", ["replace", "append"])
def test_a_table_whose_finish_is_killed_twice_is_exact(tmp_path: Path, sink: str, exists: str) -> None:
    killed = job(tmp_path, sink, sleep=0.0, rows=500)
    killed.finish(run_dir=str(tmp_path / "first"))
    named = {"settings": {"exists": exists}}
    killed.dies("before-finish", **named)
    killed.dies("after-finish", resume=str(killed.run_dir), **named)
    killed.resume(**named)
    assert as_rows(tmp_path / sink) == expected(500) * (2 if exists == "append" else 1)


def test_a_run_whose_driver_died_after_its_end_is_finished(tmp_path: Path) -> None:
    killed = job(tmp_path, rows=300, sleep=0.0)
    killed.dies("before-discard")
    assert "DT384" in killed.refused(resume=str(killed.run_dir))
    assert as_rows(tmp_path / "out.jsonl") == expected(300)
    assert json.loads((killed.run_dir / "run.json").read_text())["status"] == "finished"
    assert not [path for path in tmp_path.iterdir() if "parts" in path.name], "parts are left"


def test_a_run_killed_before_it_began_starts_from_the_beginning(tmp_path: Path) -> None:
    killed = job(tmp_path, rows=300)
    killed.dies("torn:1")
    assert not killed.log_contents().header
    killed.resume()
    assert as_rows(tmp_path / "out.jsonl") == expected(300)


def test_parts_that_are_gone_are_computed_again(tmp_path: Path) -> None:
    killed = job(tmp_path)
    killed.committed()
    parts = {piece.part for entry in killed.log_contents().entries.values() for piece in entry.outputs.get("", ())}
    gone = next(path for path in tmp_path.rglob("*") if path.name in parts)
    gone.unlink()
    assert "computed again" in killed.resume()
    assert as_rows(tmp_path / "out.jsonl") == expected(ROWS)


def test_little_is_computed_again(tmp_path: Path) -> None:
    """The stage records its calls: only rows of the last seconds before a kill are computed again."""
    rows = 60_000 if LONG else 6000
    killed = job(tmp_path, rows=rows)
    kill_and_resume(killed, Random(5), kills=5 if LONG else 2, most=rows // 6)
    assert as_rows(tmp_path / "out.jsonl") == expected(rows)
    redone = killed.redone_s()
    print(f"{len(killed.kills)} kills, {len(redone)} rows again, the oldest {max(redone, default=0):.2f} s")  # noqa: T201
    assert max(redone, default=0) < 4.0  # 2 s on a quiet machine
    assert killed.kills


# --- sources


def write_source(folder: Path, kind: str, rows: int) -> str:
    made = [{"id": number, "text": "x" * (number % 50)} for number in range(rows)]
    if kind in ("generator", "list"):
        return kind
    if kind == "glob":
        for part in range(5):
            lines = [json.dumps(row) + "\n" for row in made[part * rows // 5 : (part + 1) * rows // 5]]
            (folder / f"in {part}.jsonl").write_text("".join(lines))
        return str(folder / "in *.jsonl")
    path = folder / kind
    if kind == "in.csv":
        path.write_text("id,text\n" + "".join(f"{row['id']},{row['text']}\n" for row in made))
    elif kind == "in.jsonl.gz":
        make_rows(path, rows)
    else:
        run_script(WRITE, path, rows)
    return str(path)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("in.jsonl.gz", marks=pytest.mark.long),
        "in.csv",
        "in.parquet",
        "in.lance",
        "glob",
        "generator",
        "list",
    ],
)
def test_every_kind_of_source_resumes_at_its_position(tmp_path: Path, kind: str) -> None:
    source = write_source(tmp_path, kind, ROWS)
    killed = Killed(tmp_path, {"source": source, "sink": str(tmp_path / "out.jsonl"), "sleep": 0.0005, "rows": ROWS})
    killed.committed()
    before = killed.called()
    killed.resume()
    assert as_rows(tmp_path / "out.jsonl") == expected(ROWS)
    assert killed.called() < before + ROWS * 6 // 7, "what was done is not done again"


# --- refused, or not


def test_what_has_changed_is_refused(tmp_path: Path) -> None:
    killed = job(tmp_path)
    killed.committed()
    resume = str(killed.run_dir)
    error = killed.refused(resume=resume, sink=str(tmp_path / "other.jsonl"))
    assert "DT387" in error
    assert "other.jsonl" in error
    assert "DT387" in killed.refused(resume=resume, settings={"ordered": False})
    assert "DT387" in killed.refused(resume=resume, settings={"exists": "append"})
    assert "DT388" in killed.refused(resume=resume, retry_errors=resume)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('{"id": 3, "text": "more"}\n')
    error = killed.refused(resume=resume)
    assert "DT386" in error
    assert "in.jsonl" in error
    killed.resume(force_resume=True)
    assert as_rows(tmp_path / "out.jsonl") == [*expected(ROWS)]


def test_a_run_that_is_still_running_cannot_be_resumed(tmp_path: Path) -> None:
    killed = job(tmp_path)
    with killed.script(hold=2000) as script:
        script.says("BEGUN")
        assert "DT382" in killed.refused(resume=str(killed.run_dir))
        (tmp_path / "go").touch()
        script.finish()
    assert as_rows(tmp_path / "out.jsonl") == expected(ROWS)
    assert "DT384" in killed.refused(resume=str(killed.run_dir))


def test_a_run_is_found_by_its_id_and_as_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    killed = job(tmp_path, sleep=0.001)
    runs = tmp_path / "home" / "runs"

    def logs() -> list[Path]:
        return list(runs.glob("*/commit.log"))

    def begun() -> bool:
        return any('"wave"' in log.read_text() for log in logs())

    assert killed.kill_when(begun, "it is begun", run_dir=None, hold=2000)
    run, goal = logs()[0].parent.name, killed.called() + 100
    assert killed.kill_when(lambda: killed.called() > goal, "more is done", resume=run, hold=2300)
    killed.finish(resume="last")
    assert as_rows(tmp_path / "out.jsonl") == expected(ROWS)


def test_other_batches_and_workers_are_fine(tmp_path: Path) -> None:
    killed = job(tmp_path)
    killed.committed()
    killed.resume(sizes=[7, 50], workers=2, pipeline="rebatch")
    assert as_rows(tmp_path / "out.jsonl") == expected(ROWS)


def test_other_names_of_stages_are_fine_where_nothing_is_spooled(tmp_path: Path) -> None:
    killed = job(tmp_path, mode="streaming")
    killed.committed()
    killed.resume(pipeline="renamed")
    assert as_rows(tmp_path / "out.jsonl") == expected(ROWS)


# --- ended otherwise


@pytest.mark.parametrize("how", ["drain", "cancel"])
def test_a_drained_or_cancelled_run_resumes(tmp_path: Path, how: str) -> None:
    rows = 40_000
    killed = job(tmp_path, rows=rows, sleep=0.001)
    status, read, finished, _, _ = stats_of(killed.finish(hold=2000, **{how: 1}))
    assert status == {"drain": "drained", "cancel": "cancelled"}[how]
    assert not (tmp_path / "out.jsonl").exists()
    if how == "drain":
        assert finished <= read < rows
    status, read, finished, delivered, errors = stats_of(killed.resume(sleep=0.0))
    assert (status, read, finished, errors) == ("finished", rows, rows, 0)
    assert delivered == len(expected(rows))
    assert as_rows(tmp_path / "out.jsonl") == expected(rows)
    if how == "drain":
        assert killed.called() == sum(1 for number in range(rows) if number % 7), "each once"


def test_a_failed_run_resumes_when_the_cause_is_fixed(tmp_path: Path) -> None:
    killed = job(tmp_path, pipeline="last", on_error="fail", bad=[2001])
    with killed.script(hold=2000, sleep=0.001) as script:
        until(lambda: killed.log_contents().entries, "something is done")
        (tmp_path / "go").touch()
        assert script.ended() == 1
        assert "cannot do that one" in script.output
    assert not (tmp_path / "out.jsonl").exists()
    done = sum(entry.last - entry.first for entry in killed.log_contents().entries.values())
    assert done
    before = killed.called()
    (tmp_path / "fixed").touch()
    assert stats_of(killed.resume())[:3] == ("finished", ROWS, ROWS)
    assert killed.called() - before <= ROWS - done, "only the rest"
    assert [row["id"] for row in as_rows(tmp_path / "out.jsonl")] == [n for n in range(ROWS) if n % 7]


# --- failed items


def with_bad_rows(folder: Path, kind: str, fuse: bool) -> Killed:
    bad = [number for number in range(1, ROWS, 100) if number % 7]
    killed = job(folder, pipeline=kind, fuse=fuse, bad=bad, sleep=0.0002)
    lines = (folder / "in.jsonl").read_text().splitlines(keepends=True)
    lines.insert(700, '{"id": 700, torn\n')
    (folder / "in.jsonl").write_text("".join(lines))
    return killed


def ids_of(path: Path) -> list[int]:
    return sorted(row["id"] for row in as_rows(path))


@pytest.mark.parametrize(
    ("kind", "fuse"),
    [
        ("first", True),
        ("middle", False),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("first", False), ("middle", True), ("last", True), ("last", False))
        ),
    ],
)
def test_failed_items_are_retried_once(tmp_path: Path, kind: str, fuse: bool) -> None:
    killed = with_bad_rows(tmp_path, kind, fuse)
    bad = killed.options["bad"]
    killed.committed(hold=1500)
    status, read, finished, _, _ = stats_of(killed.resume())
    assert (status, read, finished) == ("finished", ROWS + 1, ROWS + 1)
    good = [number for number in range(ROWS) if number % 7]
    assert ids_of(tmp_path / "out.jsonl") == [number for number in good if number not in bad]
    errors = [json.loads(line) for line in (killed.run_dir / "errors" / "errors.jsonl").read_text().splitlines()]
    assert any("in.jsonl:701" in json.dumps(error) for error in errors), "the file and the line"
    (tmp_path / "fixed").touch()
    again = {"retry_errors": str(killed.run_dir), "run_dir": str(tmp_path / "again"), "source": "list", "rows": 0}
    output = killed.finish(**again)
    assert stats_of(output)[:4] == ("finished", len(bad), len(bad), len(bad))
    assert "could not be parsed" in output
    assert ids_of(tmp_path / "out.jsonl") == good
    assert "DT388" in killed.refused(**again | {"run_dir": str(tmp_path / "third")})
    assert ids_of(tmp_path / "out.jsonl") == good


@pytest.mark.parametrize(
    "moment",
    [
        "after-commit:2",
        pytest.param("before-finish", marks=pytest.mark.long),
        pytest.param("after-finish", marks=pytest.mark.long),
        "before-discard",
    ],
)
def test_a_retry_that_was_killed_adds_its_rows_once(tmp_path: Path, moment: str) -> None:
    killed = with_bad_rows(tmp_path, "middle", fuse=False)
    killed.finish()
    (tmp_path / "fixed").touch()
    again = {"retry_errors": str(killed.run_dir), "run_dir": str(tmp_path / "again"), "source": "list", "rows": 0}
    killed.dies(moment, **again)
    error = killed.refused(**again | {"run_dir": str(tmp_path / "third")})
    assert "DT388" in error, "two would add the same rows"
    resumed = again | {"resume": str(tmp_path / "again")}
    if moment == "before-discard":
        assert "DT38" in killed.refused(**resumed)
    else:
        knows_by_itself = {"retry_errors": None} if moment == "before-finish" else {}
        killed.finish(**resumed | knows_by_itself)
    assert ids_of(tmp_path / "out.jsonl") == [number for number in range(ROWS) if number % 7]
