"""Resource use in the journal, the summary and the trace."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from dovetail.machine.gpus import CardUsage
from dovetail.machine.host_usage import HostUsage
from dovetail.observe.history import RunHistory
from dovetail.observe.journal import read_json_lines
from dovetail.observe.recorder import MAX_NODES_WRITTEN
from dovetail.observe.resource_advice import Advice
from dovetail.observe.run_header import RunDescription
from dovetail.observe.summary import summarize_run
from dovetail.observe.summary_text import advice_lines, summary_lines, unit_table_lines
from dovetail.observe.telemetry import (
    NodeTelemetry,
    Telemetry,
    UsageSnapshot,
    UsageTotals,
    WorkerProcesses,
    WorkerSample,
)
from dovetail.observe.trace import make_trace
from machine.sessions import session
from observe.made import Clock, recorded, recorder, run_at, unit, view, worker
from waiting import LONG

if TYPE_CHECKING:
    from pathlib import Path

MB = 1 << 20
CAP_BYTES = 20_000_000


class ScriptedTelemetry(Telemetry):
    """Telemetry of a run with scripted samples: worker 1 of a, worker 3 of b; the memory of a grows."""

    def __init__(self, workers: int = 2) -> None:
        super().__init__(dict)
        self.news = [Advice("a", "cpus", 3.1, "stage a uses 3.1 CPUs per worker and requests 1: Resources(cpus=3)")]
        self._made, self._second, self._count = UsageTotals(), 0, workers

        self._step()

    def _step(self) -> None:
        self._second += 1
        seen = {
            1 + 2 * number: (
                WorkerProcesses((5,), "b" if number else "a"),
                WorkerSample(3.1 * self._second, 100 * MB + self._second, 10, 20, gpu_bytes=5 * MB),
            )
            for number in range(self._count)
        }
        workers, units = self._made.add_samples(float(self._second), seen)
        cards = (CardUsage(0, "GPU-aaa", use_percent=70, memory_used_bytes=MB), CardUsage(1))
        self._snapshot = UsageSnapshot(workers, units, HostUsage(1.5, 4, 2 * MB, 8 * MB), cards)

    def advice(self) -> list[Advice]:
        """Asked once per view: so much later it is then."""
        self._step()
        found, self.news = self.news, []
        return found


def lines(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_json_lines(path / "events.jsonl") if line["k"] == kind]


def test_units_cards_and_the_machine_are_written_every_five_seconds_and_at_the_end(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", telemetry=ScriptedTelemetry())
    times = [*(5.0 * number for number in range(23)), 110.0]
    assert [line["t"] for line in lines(path, "unit_use") if line["unit"] == "a"] == times
    assert [line["t"] for line in lines(path, "machine_use")] == times
    card, silent = lines(path, "gpu_use")[:2]
    assert (card["index"], card["use_percent"], card["memory_used_bytes"]) == (0, 70, MB)
    assert silent.keys() == {"v", "t", "k", "index"}
    assert lines(path, "machine_use")[0]["cpus"] == 1.5
    assert lines(path, "unit_use")[-1]["gpu_peak_bytes"] == 5 * MB


def test_the_line_of_a_worker_has_its_resource_use(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", telemetry=ScriptedTelemetry())
    line = next(line for line in lines(path, "worker_use") if line["worker"] == 1 and line["t"] == 10.0)
    assert line["unit"] == "a"
    assert line["batches_total"] == 5
    assert line["uss_bytes"] > 100 * MB
    assert line["cpus"] == 3.1


def test_the_summary_has_what_was_measured_and_what_to_change(tmp_path: Path) -> None:
    summary = summarize_run(RunHistory.load(recorded(tmp_path / "r", telemetry=ScriptedTelemetry())))
    a, b = summary.units
    assert a.cpus is not None
    assert round(a.cpus, 1) == 3.1
    assert a.peak_bytes is not None
    assert a.peak_bytes > 100 * MB
    assert b.cpus is not None
    assert unit_table_lines(summary)[0].split()[-2:] == ["CPUs", "memory"]
    assert unit_table_lines(summary)[1].split()[-2:] == ["3.1", "100MB"]
    text = "\n".join(summary_lines(summary))
    assert "to change   stage a uses 3.1 CPUs per worker and requests 1: Resources(cpus=3)" in text
    assert all(len(line) <= 80 for line in text.split("folder  ")[0].splitlines())
    data = json.loads(json.dumps(summary.to_dict()))
    assert data["advice"] == list(summary.advice)
    assert data["units"][0]["peak_bytes"] == a.peak_bytes
    two = replace(summary, advice=("first", "second"))
    assert advice_lines(two) == ["to change   first", "            second"]


def test_figures_that_were_not_measured_are_not_shown(tmp_path: Path) -> None:
    summary = summarize_run(RunHistory.load(recorded(tmp_path / "r")))
    assert (summary.advice, summary.units[0].cpus, summary.units[0].peak_bytes) == ((), None, None)
    assert unit_table_lines(summary)[0].split()[-1] == "workers"
    assert not any("to change" in line for line in summary_lines(summary))
    half = replace(summary, units=(replace(summary.units[0], peak_bytes=MB), summary.units[1]))
    assert [line.split()[-1] for line in unit_table_lines(half)] == ["memory", "1MB", "-"]
    assert "CPUs" not in unit_table_lines(half)[0]


def test_repeated_advice_replaces_the_first(tmp_path: Path) -> None:
    telemetry = ScriptedTelemetry()
    written = recorder(tmp_path / "r", telemetry=telemetry)
    written.on_step(0.0, [], [])
    telemetry.news = [Advice("a", "cpus", 7.0, "seven"), Advice("a", "memory", 7.0, "more memory")]
    written.on_step(1.0, [], [])
    written.close(2.0)
    assert summarize_run(RunHistory.load(tmp_path / "r")).advice == ("seven", "more memory")
    assert len(lines(tmp_path / "r", "note")) == 3


@pytest.mark.parametrize(
    ("more", "change"),
    [
        ({}, 'Resources(memory="256MB")'),
        ({"asked": {"file": "/work/p.yaml"}}, "--set stages.a.resources.memory=256MB"),
        ({"asked": {"file": "/work/r.yaml"}, "recipe": {}}, "memory: 256MB"),
    ],
)
def test_advice_is_written_as_the_run_was_started(tmp_path: Path, more: dict[str, Any], change: str) -> None:
    telemetry = ScriptedTelemetry()
    reason = "stage a: peak memory 209MB per worker, requested 50MB"
    telemetry.news = [Advice("a", "memory", 2e8, f'{reason}: Resources(memory="256MB")', reason, "256MB")]
    history = RunHistory.load(recorded(tmp_path / "r", telemetry=telemetry))
    header: Any = history.header
    header["more"] = more
    assert summarize_run(history).advice == (f"{reason}: {change}",)


def test_the_trace_has_counters_of_what_was_used(tmp_path: Path) -> None:
    events = make_trace(RunHistory.load(recorded(tmp_path / "r", telemetry=ScriptedTelemetry())))["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "C"}
    assert {"a CPUs used", "b memory", "GPU 0 %", "GPU 1 memory", "machine CPUs used", "machine memory"} <= names
    assert "advice" in {event["cat"] for event in events if event["ph"] == "i"}


class Spread(ScriptedTelemetry):
    """The same on nodes, of which the first two have cards."""

    def __init__(self, nodes: int) -> None:
        self._spread = nodes
        super().__init__()

    def _step(self) -> None:
        super()._step()
        cards = (CardUsage(0, use_percent=40), CardUsage(1, use_percent=60))
        nodes = {
            f"node-{number:03}": NodeTelemetry(
                HostUsage(1.5, 4, 2 * MB, 8 * MB), cards if number < 2 else (), {"a": number % 3}
            )
            for number in range(self._spread)
        }
        machine = HostUsage(1.5 * self._spread, 4 * self._spread, 2 * MB * self._spread, 8 * MB * self._spread)
        self._snapshot = UsageSnapshot(self._snapshot.workers, self._snapshot.units, machine, nodes=nodes)


def test_nodes_are_written_each_and_all_machines_together(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", until=10, telemetry=Spread(3))
    whole = lines(path, "machine_use")[0]
    assert (whole["cpus"], whole["cpu_count"], whole["memory_bytes"], whole["nodes"]) == (4.5, 12, 24 * MB, 3)
    assert [line["node"] for line in lines(path, "node_use")[:3]] == ["node-000", "node-001", "node-002"]
    assert lines(path, "node_use")[2]["workers"] == {"a": 2}
    assert [(line["node"], line["index"]) for line in lines(path, "gpu_use")[:4]] == [
        ("node-000", 0), ("node-000", 1), ("node-001", 0), ("node-001", 1),
    ]  # fmt: skip


def test_the_trace_has_the_counters_of_a_node_beside_its_workers(tmp_path: Path) -> None:
    events = make_trace(RunHistory.load(recorded(tmp_path / "r", until=10, telemetry=Spread(2))))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    counters = {(names[event["pid"]], event["name"]) for event in events if event["ph"] == "C"}
    for node in ("node node-000", "node node-001"):
        assert {(node, "node CPUs used"), (node, "node memory"), (node, "GPU 0 %"), (node, "GPU 1 memory")} <= counters
    assert (names[1], "machines CPUs used") in counters
    assert (names[1], "GPU 0 %") not in counters


def test_of_a_large_cluster_the_first_nodes_are_written_and_all_are_counted(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r", until=1, telemetry=Spread(500))
    first = [line["node"] for line in lines(path, "node_use") if line["t"] == 0]
    assert first == [f"node-{number:03}" for number in range(MAX_NODES_WRITTEN)]
    assert lines(path, "machine_use")[0]["nodes"] == 500


def test_lines_of_use_that_are_broken_are_passed_over(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r")
    strange = [
        {"t": 1, "k": "unit_use"},
        {"t": 1, "k": "unit_use", "unit": "a", "cpus": "many", "peak_bytes": None},
        {"t": 1, "k": "gpu_use", "index": "x"},
        {"t": 1, "k": "gpu_use", "index": 0, "use_percent": []},
        {"t": 1, "k": "machine_use", "cpus": None},
        {"t": 1, "k": "node_use", "cpus": 3},
        {"t": 1, "k": "node_use", "node": "x", "workers": ["a"], "cpus": "many", "memory_bytes": None},
        {"t": 1, "k": "gpu_use", "node": 7, "index": 0},
        {"t": 1, "k": "note", "what": "advice", "data": 3},
    ]
    with (path / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in strange)
    history = RunHistory.load(path)
    assert summary_lines(summarize_run(history))
    assert make_trace(history)
    assert (len(history.unit_uses), len(history.gpu_uses), len(history.machine_uses)) == (1, 2, 1)
    assert history.node_uses.keys() == {"x"}


def test_a_huge_run_with_telemetry_stays_under_the_cap_and_within_its_rate(tmp_path: Path) -> None:
    telemetry = ScriptedTelemetry(300)
    units = [unit(f"stage-{number}") for number in range(20)]
    written = recorder(
        tmp_path / "r",
        lambda now: view(now, *(replace(it, taken_total=int(now)) for it in units)),
        lambda: [worker(number) for number in range(300)],
        about=RunDescription("long"),
        telemetry=telemetry,
    )

    def size() -> int:
        return sum(file.stat().st_size for file in (tmp_path / "r").rglob("*"))

    def go_on(seconds: range) -> int:
        for second in seconds:
            written.on_step(float(second), [], [])
        return size()

    first = go_on(range(300))
    assert first < 50_000 * 300
    second = go_on(range(300, 600))
    assert second - first < first, "views become rarer"
    end = 50_000 if LONG else 2000
    go_on(range(600, end, 20))
    written.close(float(end))
    assert size() < CAP_BYTES


def test_real_workers_are_written_down(tmp_path: Path) -> None:
    with session("data = b'x' * (30 << 20); say()\nwhile True: burn(1)") as real:
        real.hear()
        now = [0.0]
        telemetry = Telemetry(lambda: {1: WorkerProcesses((real.pid,), "a")}, clock=lambda: now[0])
        written = recorder(tmp_path / "r", run_at, wall=Clock(), telemetry=telemetry)
        for second in range(12):
            now[0] = float(second)
            telemetry.sample()
            written.on_step(now[0], [], [])
        written.close(12.0)
    summary = summarize_run(RunHistory.load(tmp_path / "r"))
    assert summary.units[0].peak_bytes is not None
    assert summary.units[0].peak_bytes > 30 * MB
    assert summary.units[1].peak_bytes is None
    assert lines(tmp_path / "r", "worker_use")[0]["processes"] == 1
