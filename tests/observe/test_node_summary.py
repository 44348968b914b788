"""Summary per node of a run on several nodes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dovetail.control.commands import HostedObject, StartWorker
from dovetail.observe.history import RunHistory
from dovetail.observe.summary import NodeSummary, summarize_nodes, summarize_run
from dovetail.observe.summary_text import node_lines, summary_lines
from dovetail.observe.trace import make_trace
from dovetail.resources.seat import Seat
from observe.made import recorded, recorder, start

if TYPE_CHECKING:
    from pathlib import Path

GB = 1 << 30


def recorded_history(path: Path, *lines: dict[str, Any], **header: Any) -> RunHistory:
    """A run of which only these lines are known."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text(json.dumps({"version": 1, "status": "finished", "engine": "ray", **header}))
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunHistory.load(path)


def worker(t: float, do: str, number: int, node: str, unit: str = "a", **more: Any) -> dict[str, Any]:
    return {"v": 1, "t": t, "k": "worker", "do": do, "w": number, "unit": unit, "node": node, **more}


def use(t: float, node: str, cpus: float | None, used: int, **workers: int) -> dict[str, Any]:
    known = {} if cpus is None else {"cpus": cpus}
    host = {"cpu_count": 4, "memory_used_bytes": used, "memory_bytes": 8 * GB, **known}
    return {"v": 1, "t": t, "k": "node_use", "node": node, "workers": workers, **host}


def test_the_most_workers_at_once_are_counted_by_node_and_unit(tmp_path: Path) -> None:
    history = recorded_history(
        tmp_path,
        worker(0, "start", 1, "x"),
        worker(0, "start", 2, "x"),
        worker(0, "start", 3, "y"),
        worker(5, "stopped", 1, "x"),
        worker(5, "start", 4, "x"),  # in the place of the one before
        worker(6, "start", 5, "x", "b"),
    )
    assert [(it.name, it.workers) for it in summarize_nodes(history)] == [("x", {"a": 2, "b": 1}), ("y", {"a": 1})]


def test_measurements_of_a_node_include_workers_without_a_line_of_their_own(tmp_path: Path) -> None:
    gpu = {"v": 1, "t": 5, "k": "gpu_use", "node": "x", "index": 0, "use_percent": 70}
    history = recorded_history(
        tmp_path,
        use(0, "x", None, GB, a=1, idle=0),
        use(5, "x", 2.0, 5 * GB, a=7),
        use(10, "x", 3.0, 2 * GB, a=3),
        gpu,
        worker(0, "start", 3, "y"),
    )
    x, y = summarize_nodes(history)
    assert x == NodeSummary("x", {"a": 7}, 2.5, 4, 5 * GB, 8 * GB, 0.7)
    assert y == NodeSummary("y", {"a": 1})


def test_a_node_that_left_has_a_reason_and_one_that_returned_is_present(tmp_path: Path) -> None:
    def node(t: float, name: str, do: str, **why: str) -> dict[str, Any]:
        return {"v": 1, "t": t, "k": "node", "node": name, "do": do, **why}

    history = recorded_history(
        tmp_path,
        node(1, "x", "left", why="power"),
        node(1, "y", "left"),
        node(2, "z", "left", why="power"),
        node(3, "z", "joined"),
    )
    assert [(it.name, it.left) for it in summarize_nodes(history)] == [
        ("x", "power"), ("y", "unknown reason"), ("z", None),
    ]  # fmt: skip


def test_the_ranks_of_a_gang_are_on_their_nodes(tmp_path: Path) -> None:
    written = recorder(tmp_path / "r")
    written.on_step(
        0.0, [], [StartWorker(1, (Seat("x", 1000), Seat("y", 1000), Seat("y", 1000)), (HostedObject("train"),))]
    )
    written.on_step(1.0, [], [start(2, "a", "x")])
    written.close(2.0)
    history = RunHistory.load(tmp_path / "r")
    assert [(it.name, it.workers) for it in summarize_nodes(history)] == [
        ("x", {"a": 1, "train": 1}), ("y", {"train": 1}),
    ]  # fmt: skip
    gang, single = history.worker_lifetimes[1], history.worker_lifetimes[2]
    assert [gang.node_of(rank) for rank in range(3)] == ["x", "y", "y"]
    assert (single.nodes, single.node_of(0)) == ((), "x")
    slices = [event for event in make_trace(history)["traceEvents"] if event["ph"] == "X"]
    assert slices[0]["args"]["nodes"] == "x, y, y"


def test_status_has_a_table_of_nodes_and_those_that_left_come_first(tmp_path: Path) -> None:
    summary = summarize_run(RunHistory.load(recorded(tmp_path / "r")))
    assert node_lines(summary) == [
        "",
        "node           workers",
        "node-1 (left)  a 1",
        "node-0         a 1, b 1",
        "node-1 left the cluster: power",
    ]
    assert node_lines(summary)[2] in summary_lines(summary)
    assert json.loads(json.dumps(summary.to_dict()))["nodes"][1]["left"] == "power"


def test_what_was_measured_has_columns(tmp_path: Path) -> None:
    history = recorded_history(tmp_path, use(0, "x", 2.14, GB, a=1), worker(0, "start", 1, "y"))
    assert node_lines(summarize_run(history))[1:] == [
        "node  workers  CPUs busy      memory",
        "x     a 1       2.1 of 4  1GB of 8GB",
        "y     a 1              -           -",
    ]


def test_one_node_and_a_simulated_run_have_no_table_and_a_large_cluster_a_short_one(tmp_path: Path) -> None:
    many = [worker(0, "start", number, f"n{number:03}") for number in range(200)]
    assert node_lines(summarize_run(recorded_history(tmp_path / "one", worker(0, "start", 1, "x")))) == []
    assert node_lines(summarize_run(recorded_history(tmp_path / "sim", *many, virtual=True))) == []
    shown = node_lines(summarize_run(recorded_history(tmp_path / "many", *many)))
    assert len(shown) < 20
    assert shown[-1] == "and 184 more nodes"
    units = [worker(0, "start", number, "xy"[number % 2], f"stage-{number // 2}") for number in range(40)]
    assert node_lines(summarize_run(recorded_history(tmp_path / "units", *units)))[2].endswith("stage-11 1 and 16 more")
