"""Traces: the requested number of samples, each row once, also after failures of workers."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dovetail.engines.worker_context import Worker
from dovetail.observe.history import RunHistory
from dovetail.pipeline.code_hash import code_hash
from dovetail.pipeline.stage_function import is_async
from dovetail.recipes.operators.base import HASH_FIELD, STATS_FIELD, Row, TextMapper
from dovetail.recipes.stage_wrappers import BarrierStage
from dovetail.recipes.tracer import PARTS_FOLDER, SampleWriter, merge_samples, prepare_trace_folder, trace_run
from recipes.traced_operators import (
    Batched,
    ByLength,
    Deadly,
    Fussy,
    Largest,
    Long,
    Lower,
    Same,
    Words,
    dropped_by,
    lines,
    rows,
    run,
    stage,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare_trace_folder(str(tmp_path / "trace"))
    return tmp_path / "trace"


def traced(run: Any, name: str, folder: Path, limit: int = 10) -> Any:
    return trace_run(run, name, str(folder), limit)


def shown(folder: Path, name: str) -> list[dict[str, Any]]:
    return lines(folder / f"sample_trace-{name}.jsonl")


def changed(source: list[Row], limit: int) -> list[dict[str, str]]:
    """Changed rows as `Lower` traces them."""
    found = [row["text"] for row in source if row["text"] != row["text"].lower()]
    return [{"original_text": text, "processed_text": text.lower()} for text in found[:limit]]


# --- whole runs


@pytest.mark.processes
def test_a_run_writes_the_requested_number_of_samples(tmp_path: Path, folder: Path) -> None:
    source = rows(2000)
    pipeline = (
        stage("lower", traced(Lower(), "lower", folder), workers=2, fuse=False),
        stage("long", traced(Long(), "long", folder)),
        stage("batched", traced(Batched(), "batched", folder, 3), fuse=False),
        stage("same_hash", Same()),
        stage("same", traced(BarrierStage(Same()), "same", folder, 4), barrier=True),
        stage("largest", traced(BarrierStage(Largest(20)), "largest", folder, 5), barrier=True),
    )
    out = run(*pipeline, source=source, folder=tmp_path / "run")
    assert merge_samples(str(folder), ["lower", "long", "same", "largest"], 10, run_folder=tmp_path / "run") == []
    assert len(out) == 20
    lower = shown(folder, "lower")
    assert len(lower) == 10
    assert all(one["processed_text"] == one["original_text"].lower() != one["original_text"] for one in lower)
    for short in shown(folder, "long"):
        assert short[STATS_FIELD] == {"text_len": len(short["text"])}
        assert len(short["text"]) < 6
    assert len(shown(folder, "long")) == 10
    pairs = shown(folder, "same")
    assert len(pairs) == 4
    for pair in pairs:
        assert pair["dup1"]["text"] == pair["dup2"]["text"]
        assert pair["dup1"]["id"] < pair["dup2"]["id"]
        assert HASH_FIELD not in pair["dup1"] | pair["dup2"]
    assert len(shown(folder, "largest")) == 5
    assert sorted(path.name for path in folder.iterdir()) == [
        f"sample_trace-{name}.jsonl" for name in ("largest", "long", "lower", "same")
    ]


def test_samples_of_one_worker_are_the_first_rows_in_source_order(tmp_path: Path, folder: Path) -> None:
    source = rows(300)
    pipeline = (
        stage("lower", traced(Lower(), "lower", folder), workers=1),
        stage("long", traced(Long(), "long", folder), workers=1),
    )
    out = run(*pipeline, source=source, folder=tmp_path / "run")
    merge_samples(str(folder), ["lower", "long"], 10)
    assert shown(folder, "lower") == changed(source, 10)
    lowered = [{**row, "text": row["text"].lower()} for row in source]
    assert shown(folder, "long") == dropped_by(6, lowered)[:10]
    assert len(out) == len(source) - len(dropped_by(6, lowered))


@pytest.mark.processes
def test_a_killed_worker_loses_no_sample_and_duplicates_none(tmp_path: Path, folder: Path) -> None:
    source = rows(60)
    deadly = Deadly(tmp_path / "dead", at=41)
    out = run(
        stage("deadly", traced(deadly, "deadly", folder, 1000), workers=1), source=source, folder=tmp_path / "run"
    )
    assert (tmp_path / "dead").exists()
    parts = sorted((folder / PARTS_FOLDER).glob("deadly.*.part"))
    assert len(parts) == 2
    assert merge_samples(str(folder), ["deadly"], 1000, run_folder=tmp_path / "run") == []
    assert shown(folder, "deadly") == changed(source, 1000)
    assert [row["id"] for row in out] == list(range(60))


def test_rows_that_run_twice_after_a_failure_are_one_sample(tmp_path: Path, folder: Path) -> None:
    source = rows(100)
    expected = changed(source, 1000)
    # the limit is the number of samples: a worker that counted a row twice would stop too early
    lower = traced(Lower(), "lower", folder, len(expected))
    pipeline = (
        stage("lower", lower, on_error="skip", retries=0),
        stage("fussy", traced(Fussy(), "fussy", folder, 1000), on_error="skip", retries=0),
    )
    out = run(*pipeline, source=source, folder=tmp_path / "run")
    assert list(RunHistory.load(tmp_path / "run").units) == ["lower+fussy"]
    merge_samples(str(folder), ["lower", "fussy"], 1000)
    assert shown(folder, "lower") == expected
    done = [row for row in source if row["id"] % 10 != 7]
    assert [one["processed_text"] for one in shown(folder, "fussy")] == [row["text"].upper() for row in done]
    assert len(out) == len(done)


# --- samples


def test_if_there_are_fewer_samples_than_requested_all_are_written(folder: Path) -> None:
    operator = traced(Lower(), "lower", folder)
    source = rows(9)
    expected = changed(source, 9)
    for row in source:
        operator(row)
    merge_samples(str(folder), ["lower"], 10)
    assert shown(folder, "lower") == expected
    assert len(expected) == 3


def test_an_operator_without_samples_has_no_file(folder: Path) -> None:
    operator = traced(Lower(), "lower", folder)
    assert operator({"text": "abc"}) == {"text": "abc"}
    assert merge_samples(str(folder), ["lower"], 10) == []
    assert list(folder.iterdir()) == []


def test_each_row_that_a_mapper_returns_is_a_sample(folder: Path) -> None:
    operator = traced(Words(), "words", folder)
    assert [row["text"] for row in operator({"text": "ab"})] == ["a", "b"]
    assert list(operator({"text": ""})) == []
    merge_samples(str(folder), ["words"], 10)
    assert shown(folder, "words") == [{"original_text": "ab", "processed_text": one} for one in "ab"]


def test_dropped_rows_of_a_batch_are_samples(folder: Path) -> None:
    operator = traced(Batched(), "batched", folder)
    assert operator.batch_size == 8
    assert [row["id"] for row in operator([{"id": n} for n in range(7)])] == [1, 2, 3, 4, 6]
    merge_samples(str(folder), ["batched"], 10)
    assert shown(folder, "batched") == [{"id": 0}, {"id": 5}]


def test_a_batch_of_changed_texts_is_shown_text_by_text(folder: Path) -> None:
    def shout(batch: list[Row]) -> list[Row]:
        for row in batch:
            row["text"] = row["text"].upper()
        taken = list(batch)
        batch.clear()
        return taken

    operator = traced(shout, "shout", folder)
    assert operator([{"text": "a"}, {"text": "B"}, {"text": "c"}]) == [{"text": one} for one in "ABC"]
    merge_samples(str(folder), ["shout"], 10)
    assert [one["original_text"] for one in shown(folder, "shout")] == ["a", "c"]


def test_samples_of_deduplicators_are_one_pair_per_cluster_in_source_order(folder: Path) -> None:
    same = Same()
    source = [same({"id": n, "text": text}) for n, text in enumerate("abcbbacca")]
    assert [row["id"] for row in traced(BarrierStage(same), "same", folder, 2)(source)] == [0, 1, 2]
    merge_samples(str(folder), ["same"], 2)
    pairs = [(pair["dup1"]["id"], pair["dup2"]["id"]) for pair in shown(folder, "same")]
    assert pairs == [(1, 3), (0, 5)]


@pytest.mark.parametrize("sort", [True, False])
def test_samples_of_selectors_are_the_dropped_rows(folder: Path, sort: bool) -> None:
    barrier = traced(BarrierStage(Largest(2, sort=sort)), "largest", folder, 3)
    kept = [row["id"] for row in barrier([{"id": n} for n in range(7)])]
    assert sorted(kept) == [5, 6]
    merge_samples(str(folder), ["largest"], 3)
    assert shown(folder, "largest") == [{"id": 0}, {"id": 1}, {"id": 2}]


def test_groupers_have_no_samples(folder: Path) -> None:
    barrier = traced(BarrierStage(ByLength()), "grouper", folder)
    assert list(barrier([{"text": "a"}, {"text": "b"}])) == [{"text": ["a", "b"]}]
    merge_samples(str(folder), ["grouper"], 3)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"\x00\xff", "<2 bytes>"),
        (float("nan"), None),
        ("\ud800 half", "\ud800 half"),
        ("\U0001f600 \u05d0\x00", "\U0001f600 \u05d0\x00"),
        ({1: (2, 3)}, {"1": [2, 3]}),
        (Path("a"), "a"),
    ],
)
def test_any_row_is_a_line_of_json(folder: Path, value: object, expected: object) -> None:
    operator = traced(Long(), "long", folder)
    assert operator({"text": "a", "value": value}) is None
    merge_samples(str(folder), ["long"], 10)
    assert json.loads((folder / "sample_trace-long.jsonl").read_bytes())["value"] == expected


# --- wrapper


def test_a_traced_operator_has_the_attributes_of_the_operator(folder: Path) -> None:
    class Own(TextMapper):
        calls: ClassVar[list[str]] = []

        def setup(self, worker: Worker) -> None:
            self.calls.append(f"setup {worker.id}")

        def teardown(self) -> None:
            self.calls.append("teardown")

    own = Own()
    own.text_key = "body"
    operator = traced(own, "own", folder)
    operator.setup(Worker(7, "unit"))
    operator.teardown()
    assert Own.calls == ["setup 7", "teardown"]
    assert operator.columns() == ("body",)
    assert not hasattr(operator, "nothing_like_it")
    with pytest.raises(NotImplementedError):
        operator({"body": "a"})


def test_a_traced_operator_pickles_without_its_files(folder: Path) -> None:
    operator = traced(Long(3), "long", folder)
    operator({"text": "a"})
    again = pickle.loads(pickle.dumps(operator))
    assert again.least == 3
    assert again({"text": "b"}) is None
    assert len(list((folder / PARTS_FOLDER).glob("long.*.part"))) == 2


def test_profiles_are_the_same_with_and_without_tracing(folder: Path) -> None:
    def key(operator: Any) -> str:
        return code_hash(traced(operator, "a", folder))

    assert key(Long(3)) == code_hash(traced(Long(3), "b", Path("/elsewhere"), 3))
    assert key(Long(3)) != key(Lower())
    assert key(len) != key(rows)
    for operator in (Long(3), len, rows, BarrierStage(Same())):
        assert key(operator) == code_hash(operator)


def test_an_async_operator_remains_async(folder: Path) -> None:
    class Later(TextMapper):
        async def __call__(self, row: Row) -> Row:  # type: ignore[override]
            await asyncio.sleep(0)
            row["text"] = row["text"].lower()
            return row

    operator = traced(Later(), "later", folder)
    assert is_async(operator)
    assert not is_async(traced(Lower(), "lower", folder))
    assert asyncio.run(operator({"text": "A"})) == {"text": "a"}
    merge_samples(str(folder), ["later"], 10)
    assert shown(folder, "later") == [{"original_text": "A", "processed_text": "a"}]


def test_with_all_samples_written_tracing_costs_under_3_us_per_call(folder: Path) -> None:
    def nothing(row: Row) -> None:
        return None

    operator = traced(nothing, "nothing", folder, 1)
    row = {"text": "a"}
    operator(row)
    times = []
    for _ in range(5):
        began = time.process_time()
        for _ in range(20_000):
            operator(row)
        times.append(time.process_time() - began)
    assert min(times) / 20_000 < 3e-6


# --- failures


def test_an_incomplete_line_and_a_foreign_file_are_ignored(folder: Path) -> None:
    operator = traced(Lower(), "lower", folder)
    operator({"text": "A"})
    (part,) = (folder / PARTS_FOLDER).glob("lower.*.part")
    with part.open("ab") as file:
        file.write(b'{"key": [9], "sam')
    (folder / PARTS_FOLDER / "lower.other.0123456789abcdef.part").write_text('{"key": [1], "sample": {"other": 1}}\n')
    merge_samples(str(folder), ["lower"], 10)
    assert shown(folder, "lower") == [{"original_text": "A", "processed_text": "a"}]


def test_a_folder_that_cannot_be_written_fails_no_row(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    operator = traced(Lower(), "lower", tmp_path / "file" / "trace")
    operator.setup(Worker(1, "unit", node="node-0"))
    assert operator({"text": "A"}) == {"text": "a"}
    assert operator({"text": "B"}) == {"text": "b"}


def test_a_worker_on_another_machine_does_not_create_the_folder(tmp_path: Path) -> None:
    samples = SampleWriter("lower", str(tmp_path / "trace"), 10, "another-host")
    samples.mark_node("node-1")
    samples.add((1,), {"text": "a"})
    assert samples.is_full
    assert list(tmp_path.iterdir()) == []


def test_nodes_without_the_folder_are_reported_in_one_line(tmp_path: Path, folder: Path) -> None:
    run_folder = tmp_path / "run"
    run(stage("lower", traced(Lower(), "lower", folder), workers=1), source=rows(9), folder=run_folder)
    for mark in (folder / PARTS_FOLDER).glob("node-*"):
        mark.unlink()
    (note,) = merge_samples(str(folder), ["lower"], 10, run_folder=run_folder)
    assert "node-0" in note
    assert str(folder) in note
    assert "\n" not in note


def test_different_operator_names_have_different_files(folder: Path) -> None:
    for name in ("a/b", "a_b", "<script>", ".."):
        traced(Lower(), name, folder)({"text": name.upper() + "X"})
    merge_samples(str(folder), ["a/b", "a_b", "<script>", ".."], 10)
    assert len(list(folder.iterdir())) == 4
    assert shown(folder, "a%2Fb")[0]["original_text"] == "A/BX"


def test_a_new_run_empties_the_folder_and_a_resumed_one_appends(folder: Path) -> None:
    traced(Lower(), "lower", folder)({"text": "A"})
    merge_samples(str(folder), ["lower"], 2)
    again = traced(Lower(), "lower", folder)
    for text in "BCD":
        again({"text": text})
    merge_samples(str(folder), ["lower"], 2, add=True)
    assert [one["original_text"] for one in shown(folder, "lower")] == ["A", "B"]
    prepare_trace_folder(str(folder))
    assert [path.name for path in folder.iterdir()] == [PARTS_FOLDER]
    assert os.listdir(folder / PARTS_FOLDER) == []  # noqa: PTH208
