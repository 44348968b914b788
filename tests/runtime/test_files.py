"""Files in and out: unusual rows through `dt.run` into every kind of sink."""

from __future__ import annotations

import csv
import gzip
import json
import math
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.streaming.settings import StreamOptions
from runtime.aids import CLUSTER
from stage_functions import same
from waiting import LONG, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.time_limit(1200 if LONG else 200)

KINDS = ("jsonl", "csv", "parquet", "lance")
WRITTEN_BY_PROCESSES = [pytest.param(kind, marks=pytest.mark.processes) for kind in ("jsonl", "parquet")]
AWKWARD: list[dict[str, Any]] = [
    {"i": 0, "text": "", "n": None, "deep": {"a": [{"b": "ü"}, None, {"b": None}], "c": []}, "f": 1.5},
    {"i": 1, "text": "two\nlines\r\nand \u2028 one", "n": 7, "deep": None, "f": None},
    {"i": 2, "text": "x" * (1 << 20), "n": -(1 << 62), "deep": {"a": [], "c": ["\x00", '"', "\\", ","]}, "f": -0.0},
    {"i": 3, "text": ' "quoted", 雪 \U0001f600\t', "n": 0, "deep": {"a": None, "c": None}, "f": 1e300},
]


def run_of(*stages: dt.Stage, source: Any, **settings: Any) -> dt.Run:
    return dt.run(dt.Pipeline(list(stages)), source, **({"cluster": CLUSTER} | settings))


SAME = dt.Stage("same", same)


def write_lines(path: Path, rows: list[Any], end: str = "\n") -> Path:
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode())
    return path


def numbered(path: Path, count: int) -> Path:
    return write_lines(path, [{"i": number} for number in range(count)])


def read_back(path: Path) -> list[dict[str, Any]]:
    """Rows read by an independent reader, sorted by i."""
    name = path.name
    if name.endswith(".parquet"):
        import pyarrow.parquet as pq

        rows = pq.read_table(path).to_pylist()
    elif name.endswith(".lance"):
        import lance

        rows = lance.dataset(str(path)).to_table().to_pylist()
    elif name.endswith(".csv"):
        csv.field_size_limit(1 << 30)
        with path.open(newline="", encoding="utf-8") as file:
            rows = [{key: None if value == "" else value for key, value in row.items()} for row in csv.DictReader(file)]
        rows = [row | {"i": int(row["i"] or 0)} for row in rows]
    else:
        data = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
        rows = [json.loads(line) for line in data.decode().split("\n")[:-1]]
    return sorted(rows, key=lambda row: row["i"])


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def as_csv(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Text is all that it has: None is empty, and what is nested is JSON."""

    def cell(value: Any) -> Any:
        if isinstance(value, dict | list):
            return json.dumps(value, ensure_ascii=False)
        return None if value is None or value == "" else str(value)

    return [{key: value if key == "i" else cell(value) for key, value in row.items()} for row in rows]


def assert_only_files(folder: Path, *names: str) -> None:
    """Assert that the folder has only this file: no part, no temporary file."""
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def problems_of(error: dt.DovetailError) -> dict[str, str]:
    return {problem.code: problem.message for problem in error.problems}


# Rows as they are


@pytest.mark.parametrize("kind", [*WRITTEN_BY_PROCESSES, "csv", "lance"])
def test_awkward_rows_come_out_as_they_went_in(kind: str, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", AWKWARD)
    out = tmp_path / "out" / f"names with spaces\n & ü.{kind}" if kind != "lance" else tmp_path / "out" / "mit ü.lance"
    run = run_of(SAME, source=source, sink=out)
    assert run.wait().status == "finished"
    assert run.files == [str(out)]
    assert read_back(out) == (as_csv(AWKWARD) if kind == "csv" else AWKWARD)
    assert_only_files(out.parent, out.name)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_what_was_written_is_read_again(kind: str, tmp_path: Path) -> None:
    """File to file to file: every kind of source, from what its sink has made."""
    source = write_lines(tmp_path / "in.jsonl", AWKWARD)
    middle, out = tmp_path / f"a b\nü.{kind}", tmp_path / "out.jsonl"
    run_of(SAME, source=source, sink=middle).wait()
    run_of(SAME, source=middle, sink=out).wait()
    found = lines_of(out)
    found = sorted([row | {"i": int(row["i"])} for row in found], key=lambda row: row["i"])
    if kind == "csv":
        assert [{key: None if value == "" else value for key, value in row.items()} for row in found] == as_csv(AWKWARD)
    else:
        assert found == AWKWARD


ODD_FILES: dict[str, tuple[bytes, list[int]]] = {
    "nothing": (b"", []),
    "only blank lines": (b"\n\r\n   \n\t\n", []),
    "one row": (b'{"i": 1}\n', [1]),
    "one row without an end": (b'{"i": 1}', [1]),
    "crlf": (b'{"i": 1}\r\n{"i": 2}\r\n', [1, 2]),
    "bom": (b'\xef\xbb\xbf{"i": 1}\n{"i": 2}\n', [1, 2]),
    "bom and nothing": (b"\xef\xbb\xbf", []),
    "blank lines between": (b'\n{"i": 1}\n\n\n{"i": 2}\n\n', [1, 2]),
}


@pytest.mark.parametrize("what", ODD_FILES)
def test_odd_files_of_lines(what: str, tmp_path: Path) -> None:
    data, expected = ODD_FILES[what]
    (tmp_path / "in.jsonl").write_bytes(data)
    run = run_of(SAME, source=tmp_path / "in.jsonl", sink=tmp_path / "out.jsonl")
    assert run.wait().failed == 0
    assert [row["i"] for row in read_back(tmp_path / "out.jsonl")] == expected


def test_empty_files_among_others_and_row_groups_without_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "a folder"
    folder.mkdir()
    schema = pa.schema([("i", pa.int64())])
    with pq.ParquetWriter(folder / "a.parquet", schema) as writer:
        for numbers in ([], [1, 2], [], [3]):
            writer.write_table(pa.table({"i": pa.array(numbers, pa.int64())}))
    pq.write_table(schema.empty_table(), folder / "b.parquet")
    run_of(SAME, source=folder / "*.parquet", sink=tmp_path / "out.jsonl").wait()
    assert [row["i"] for row in read_back(tmp_path / "out.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("kind", [*KINDS, "jsonl.gz"])
@pytest.mark.parametrize("how", ["nothing came", "all dropped", "all failed"])
def test_a_sink_without_rows_exists_and_is_readable(kind: str, how: str, tmp_path: Path) -> None:
    source = numbered(tmp_path / "in.jsonl", 0 if how == "nothing came" else 20)
    stage = {"nothing came": SAME, "all dropped": dt.Stage("none", lambda _: [])}.get(how)
    run = run_of(stage or dt.Stage("no", _refuse, on_error="skip"), source=source, sink=tmp_path / "o" / f"x.{kind}")
    assert run.wait().failed == (20 if how == "all failed" else 0)
    assert read_back(tmp_path / "o" / f"x.{kind}") == []
    assert_only_files(tmp_path / "o", f"x.{kind}")


def _refuse(_rows: list[Any]) -> list[Any]:
    raise ValueError("not this one")


# Rows that are none


def test_invalid_lines_fail_with_their_place_for_every_on_error(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"i": 1}\n\n{bad\n{"i": 2}\n\xff\xfe\n{"i": 3}')
    run = run_of(SAME, source=source, sink=tmp_path / "out.jsonl")
    assert run.wait().failed == 2
    assert [row["i"] for row in read_back(tmp_path / "out.jsonl")] == [1, 2, 3]
    failures = sorted((error.error.split(": ")[1], error.item) for error in run.errors)
    assert failures == [(f"{source}:3", "{bad"), (f"{source}:5", "\ufffd\ufffd")]
    with pytest.raises(dt.RunError, match=r"2 items failed, more than max_errors allows \(1\)"):
        run_of(SAME, source=source, sink=tmp_path / "other.jsonl", max_errors=1).wait()
    assert not (tmp_path / "other.jsonl").exists()


UNWRITABLE: dict[str, tuple[Any, tuple[str, ...]]] = {
    "an object": (object, ("jsonl", "csv", "parquet", "lance")),
    "a set of mixed things": (lambda: {1, "a"}, ("jsonl", "csv", "parquet", "lance")),
    "bytes": (lambda: b"\xff", ("jsonl", "csv")),
    "half a character": (lambda: "\ud800", ("csv", "parquet", "lance")),
    "a number without end": (lambda: 1 << 200, ("parquet", "lance")),
}


@pytest.mark.parametrize("what", UNWRITABLE)
def test_rows_that_a_sink_has_no_form_for(what: str, tmp_path: Path) -> None:
    make, kinds = UNWRITABLE[what]
    source = numbered(tmp_path / "in.jsonl", 30)

    def odd(rows: list[Any]) -> list[Any]:
        return [{"i": row["i"], "odd": make()} if row["i"] == 17 else {"i": row["i"]} for row in rows]

    for kind in kinds if LONG else (kinds[0], kinds[-1]):
        out = tmp_path / f"out.{kind}"
        with pytest.raises(dt.RunError, match="odd: item failed: the result cannot be written: ") as caught:
            run_of(dt.Stage("odd", odd, batch_size=10), source=source, sink=out).wait()
        assert "skip" in str(caught.value)
        assert not out.exists()
        run = run_of(dt.Stage("odd", odd, batch_size=10, on_error="skip"), source=source, sink=out)
        assert run.wait().failed == 1
        assert [error.item for error in run.errors] == [{"i": 17}]
        assert [row["i"] for row in read_back(out)] == [number for number in range(30) if number != 17]


def test_a_row_that_is_no_dict_has_no_place_in_a_table(tmp_path: Path) -> None:
    stage = dt.Stage("number", lambda rows: [row["i"] for row in rows])
    for kind in ("csv", "parquet"):
        with pytest.raises(dt.RunError, match="cannot be written"):
            run_of(stage, source=numbered(tmp_path / "in.jsonl", 3), sink=tmp_path / f"out.{kind}").wait()
    run_of(stage, source=numbered(tmp_path / "in.jsonl", 3), sink=tmp_path / "out.jsonl").wait()
    assert sorted((tmp_path / "out.jsonl").read_text().split()) == ["0", "1", "2"]


def test_invalid_lance_names_are_reported_at_the_start(tmp_path: Path) -> None:
    source = numbered(tmp_path / "in.jsonl", 30)

    def odd(rows: list[Any]) -> list[Any]:
        return [{"i": row["i"], "_rowid" if row["i"] == 3 else "a.b" if row["i"] == 17 else "x": 1} for row in rows]

    with pytest.raises(dt.RunError, match=r"item failed: .* Lance does not support the column name"):
        run_of(dt.Stage("odd", odd, batch_size=10), source=source, sink=tmp_path / "out.lance").wait()
    run = run_of(dt.Stage("odd", odd, batch_size=10, on_error="skip"), source=source, sink=tmp_path / "out.lance")
    assert run.wait().failed == 2
    assert len(read_back(tmp_path / "out.lance")) == 28


def test_infinity_is_written_to_json_lines_and_read_again(tmp_path: Path) -> None:
    """Infinity is written and read as by the json module of Python."""
    stage = dt.Stage("nan", lambda rows: [{"i": row["i"], "x": math.inf} for row in rows])
    run_of(stage, source=numbered(tmp_path / "in.jsonl", 2), sink=tmp_path / "out.jsonl").wait()
    run_of(SAME, source=tmp_path / "out.jsonl", sink=tmp_path / "out.parquet").wait()
    assert read_back(tmp_path / "out.parquet") == [{"i": 0, "x": math.inf}, {"i": 1, "x": math.inf}]


# Sinks that make no sense


def test_a_sink_that_would_take_the_place_of_its_source_is_refused(tmp_path: Path) -> None:
    source = numbered(tmp_path / "in.jsonl", 5)
    (tmp_path / "link.jsonl").symlink_to(source)
    before = source.read_bytes()
    shard = numbered(tmp_path / "s-00000.jsonl", 5)
    asked: list[tuple[Any, Any]] = [
        (source, source),
        (tmp_path / "link.jsonl", source),
        (source, tmp_path / "link.jsonl"),
        (str(tmp_path / "*.jsonl"), f"{tmp_path}/x/../in.jsonl"),
        (source, f"file://{source}"),
        (source, dt.sink(source, exists="append")),
        (shard, dt.sink(tmp_path / "s.jsonl", shard_size="1MB")),
    ]
    (tmp_path / "x").mkdir()
    for one, sink in asked:
        with pytest.raises(dt.ConfigError, match="the sink is a part of the source") as caught:
            run_of(SAME, source=one, sink=sink)
        assert list(problems_of(caught.value)) == ["DT385"]
    assert source.read_bytes() == before
    assert_only_files(tmp_path, "in.jsonl", "link.jsonl", "s-00000.jsonl", "x")


def test_sinks_that_cannot_be_are_refused_before_anything_runs(tmp_path: Path) -> None:
    source = numbered(tmp_path / "in.jsonl", 5)
    (tmp_path / "folder").mkdir()
    (tmp_path / "a file").touch()
    asked: list[tuple[Any, str]] = [
        (tmp_path / "folder", "DT350"),
        (tmp_path / "a file" / "x.jsonl", "DT351"),
        ("/dev/null", "DT350"),
        (dt.sink("/dev/full", format="jsonl"), "DT351"),
        ("/proc/nowhere/x.jsonl", "DT351"),
        (tmp_path / f"{'x' * 300}.jsonl", "DT351"),
        ({"nobody": tmp_path / "x.jsonl"}, "DT385"),
        (7, "DT385"),
        (dt.sink(tmp_path / "in.jsonl", exists="fail"), "DT385"),
    ]
    for sink, code in asked:
        with pytest.raises(dt.ConfigError) as caught:
            run_of(SAME, source=source, sink=sink)
        assert code in problems_of(caught.value), (sink, str(caught.value))
        assert all(problem.fix_texts for problem in caught.value.problems), str(caught.value)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(dt.ConfigError, match="a folder of that name exists"):
        run_of(SAME, source=source, sink=tmp_path / "folder.jsonl")
    assert_only_files(tmp_path, "in.jsonl", "folder", "folder.jsonl", "a file")


def test_folders_on_the_way_are_made_and_what_was_there_stays_until_the_end(tmp_path: Path) -> None:
    source = numbered(tmp_path / "in.jsonl", 5)
    out = tmp_path / "not" / "there" / "out.jsonl"
    run_of(SAME, source=source, sink=out).wait()
    old = out.read_bytes()
    with pytest.raises(dt.RunError):
        run_of(dt.Stage("no", _refuse), source=source, sink=out).wait()
    assert out.read_bytes() == old


# Leaves


def forked(*names: str, **settings: Any) -> list[dt.Stage]:
    """A stage, and leaves behind it."""
    root = dt.Stage("root", same, fuse=False)
    return [root, *(dt.Stage(name, same, after=["root"], fuse=False, **settings) for name in names)]


def test_every_leaf_has_a_sink_of_its_own_or_shares_one(tmp_path: Path) -> None:
    source = numbered(tmp_path / "in.jsonl", 200)
    numbers = list(range(200))
    sinks = {"a": tmp_path / "a.jsonl", "b": tmp_path / "b.parquet"}
    run_of(*forked("a", "b"), source=source, sink=sinks).wait()
    for path in sinks.values():
        assert [row["i"] for row in read_back(path)] == numbers
    run_of(*forked("a", "b"), source=source, sink=tmp_path / "both.jsonl").wait()
    assert [row["i"] for row in read_back(tmp_path / "both.jsonl")] == sorted(numbers * 2)
    with pytest.raises(dt.ConfigError, match="a and b write to the same sink"):
        run_of(*forked("a", "b"), source=source, sink={"a": tmp_path / "x.jsonl", "b": tmp_path / "x.jsonl"})


def test_one_leaf_goes_to_a_file_one_to_a_function_and_one_is_iterated_over(tmp_path: Path) -> None:
    source = numbered(tmp_path / "in.jsonl", 300)
    given: list[int] = []

    def take(rows: list[Any]) -> None:
        assert type(rows) is list
        given.extend(row["i"] for row in rows)

    sinks = {"a": tmp_path / "a.jsonl", "b": take}
    run = run_of(*forked("a", "b", "c"), source=source, sink=sinks)
    assert sorted(row["i"] for row in run) == list(range(300))
    assert sorted(given) == list(range(300))
    assert [row["i"] for row in read_back(tmp_path / "a.jsonl")] == list(range(300))
    assert run.status == "finished"


def test_a_function_gets_lists_in_order_if_asked_and_none_is_a_result(tmp_path: Path) -> None:
    given: list[Any] = []

    def odd(rows: list[Any]) -> list[Any]:
        return [None if row["i"] % 2 else row["i"] for row in rows]

    source = numbered(tmp_path / "in.jsonl", 500)
    stages = [dt.Stage("odd", odd, batch_size=3), dt.Stage("same", same, workers=2, fuse=False)]
    run_of(*stages, source=source, sink=given.extend, ordered=True, cluster="1x(4cpu, 8GB)").wait()
    assert given == [None if number % 2 else number for number in range(500)]


def test_a_function_sink_that_raises_fails_the_run_with_its_exception() -> None:
    def take(rows: list[int]) -> None:
        raise LookupError(f"no place for {len(rows)} rows")

    run = run_of(SAME, source=range(100), sink=take)
    with pytest.raises(LookupError, match="no place for"):
        run.wait()
    assert run.status == "failed"


def waits_with_the_last_rows(taken: Path, rows: list[Any]) -> list[Any]:
    if rows[-1]["i"] >= 900:
        until(taken.exists)
    return rows


def test_a_function_sink_that_raised_gets_only_the_rest_after_a_resume(tmp_path: Path) -> None:
    given: list[int] = []
    full = True
    taken = tmp_path / "taken"

    def take(rows: list[Any]) -> None:
        if full and given:
            raise OSError("no place")
        given.extend(row["i"] for row in rows)
        taken.touch()

    source = numbered(tmp_path / "in.jsonl", 1000)
    stage = dt.Stage("same", partial(waits_with_the_last_rows, taken), batch_size=4)
    often = StreamOptions(target_epoch_s=0.001, target_epoch_batches=4, hop_s=0.0002)
    run = run_of(stage, source=source, sink=take, options=often)
    with pytest.raises(OSError, match="no place"):
        run.wait()
    assert 0 < len(given) <= 900
    full = False
    run_of(stage, source=source, sink=take, resume=run.folder.name).wait()
    assert sorted(given) == list(range(1000))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_limit_is_of_rows_read(kind: str, tmp_path: Path) -> None:
    source = numbered(tmp_path / "in.jsonl", 500)
    for limit in (0, 1, 499, 1000):
        run_of(SAME, source=source, sink=tmp_path / f"out.{kind}", limit=limit, ordered=True).wait()
        assert len(read_back(tmp_path / f"out.{kind}")) == min(limit, 500)


# The same as a plain loop


def dropped(rows: list[Any]) -> list[Any]:
    return [row for row in rows if row["i"] % 3]


def twice(rows: list[Any]) -> list[Any]:
    return [{**row, "copy": copy} for row in rows for copy in range(row["i"] % 4)]


def marked(rows: list[Any]) -> list[Any]:
    return [{**row, "text": f"{row['i']}:{row.get('copy')}"} for row in rows]


STEPS: list[Callable[[list[Any]], list[Any]]] = [dropped, twice, marked, same]


@pytest.mark.parametrize("seed", range(60 if LONG else 6))
def test_random_pipelines_give_what_a_plain_loop_gives(seed: int, tmp_path: Path) -> None:
    dice = Random(seed)
    count = dice.choice([0, 1, 7, 300, 2000])
    rows = [{"i": number, "pad": "x" * dice.randrange(50)} for number in range(count)]
    files = [tmp_path / f"in {part}.jsonl" for part in range(dice.randint(1, 3))]
    for part, path in enumerate(files):
        write_lines(path, rows[part :: len(files)])
    steps = [dice.choice(STEPS) for _ in range(dice.randint(1, 3))]
    stages = [
        dt.Stage(
            f"s{at}",
            step,
            batch_size=dice.choice([1, 2, 16, 24]),
            workers=dice.choice(["auto", 1, 2]),
            fuse=dice.random() < 0.5,
        )
        for at, step in enumerate(steps)
    ]
    expected = [row for part in range(len(files)) for row in rows[part :: len(files)]]
    for step in steps:
        expected = step(expected)
    ordered, kind = dice.random() < 0.5, dice.choice(["jsonl", "jsonl", "parquet"])
    out = tmp_path / "o" / f"out.{kind}"
    run = run_of(*stages, source=tmp_path / "in *.jsonl", sink=out, ordered=ordered, cluster="1x(8cpu, 8GB)")
    run.wait()
    if kind == "parquet":
        import pyarrow.parquet as pq

        found = pq.read_table(out).to_pylist()
    else:
        found = lines_of(out)
    if not ordered:
        found, expected = sorted(found, key=repr), sorted(expected, key=repr)
    assert found == expected
    assert_only_files(out.parent, out.name)


# Ways of working


class Async:
    async def __call__(self, rows: list[Any]) -> list[Any]:
        import asyncio

        await asyncio.sleep(0)
        return rows


class Gang:
    def setup(self, worker: Any) -> None:
        self.rank = worker.rank

    def __call__(self, rows: list[Any]) -> list[Any]:
        return [{**row, "rank": self.rank} for row in rows]


SHAPES: dict[str, list[dt.Stage]] = {
    "async": [dt.Stage("s", Async, slots=4, workers=2, batch_size=3)],
    "slots": [dt.Stage("s", same, slots=3, workers=2, batch_size=5)],
    "recycle": [dt.Stage("s", same, recycle=20, batch_size=4)],
    "gang": [dt.Stage("s", Gang, ranks=2, batch_size=8)],
    "fused, some failed": [
        dt.Stage("first", same, on_error="skip"),
        dt.Stage("s", lambda rows: [{**row, "x": 1 // (row["i"] % 50)} for row in rows], on_error="skip"),
    ],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ordered", [False, pytest.param(True, marks=pytest.mark.processes)])
def test_every_way_of_working_writes_each_row_once(shape: str, ordered: bool, tmp_path: Path) -> None:
    source = numbered(tmp_path / "in.jsonl", 600)
    run = run_of(*SHAPES[shape], source=source, sink=tmp_path / "out.jsonl", ordered=ordered, cluster="1x(8cpu, 8GB)")
    run.wait()
    found = [row["i"] for row in lines_of(tmp_path / "out.jsonl")]
    expected = [number for number in range(600) if number % 50 or "failed" not in shape]
    assert found == expected if ordered else sorted(found) == expected
    assert run.stats.failed == 600 - len(expected)


# Holders of the run


def test_iterating_over_a_run_with_a_file_gives_nothing_and_ends(tmp_path: Path) -> None:
    run = run_of(SAME, source=numbered(tmp_path / "in.jsonl", 200), sink=tmp_path / "out.jsonl")
    assert list(run) == []
    assert len(read_back(tmp_path / "out.jsonl")) == 200


def test_waiting_has_an_end_and_leaving_early_cancels_and_can_be_resumed(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def gated(rows: list[Any]) -> list[Any]:
        until(gate.exists, "the gate is open")
        return rows

    source, out = numbered(tmp_path / "in.jsonl", 50), tmp_path / "o" / "out.jsonl"
    stage = dt.Stage("gated", gated)
    with run_of(stage, source=source, sink=out) as run, pytest.raises(TimeoutError):
        run.wait(0.05)
    assert run.status == "cancelled"
    assert not out.exists()
    gate.touch()
    run_of(stage, source=source, sink=out, resume=run.folder).wait()
    assert [row["i"] for row in read_back(out)] == list(range(50))
    assert_only_files(out.parent, out.name)
