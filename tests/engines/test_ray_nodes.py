"""Placement of workers on the nodes of a Ray cluster, and runs whose nodes die or join."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import dovetail as dt
from dovetail.streaming.settings import StreamOptions
from engines.ray_runs import use_only_nodes
from ray_aids import RESTORED_S, add_node, driver, foreign_actor, patiently, until_available_is
from waiting import LONG, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ray_aids import FakeCluster, FakeNode

pytestmark = [pytest.mark.ray, pytest.mark.time_limit(600 if LONG else 150), pytest.mark.usefixtures("by_value")]

OFTEN = StreamOptions(eager=True, first_replan_s=1.0, replan_every_s=1.0)
"""As usual, but a replan every second."""
REPLANS_S = 12.0
"""Two replans, and the start of agents and workers on an idle machine with a margin."""
ELSEWHERE_S = 10.0
BLOB = 150_000
"""More than Ray sends in a message: such a payload is in the object store of a node."""


def started(cluster: FakeCluster, *stages: dt.Stage, source: Any, **more: Any) -> dt.Run:
    return dt.run(dt.Pipeline(list(stages)), source, engine=f"ray:{cluster.address}", **more)


def events_of(run: dt.Run, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run.folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["k"] == kind]


# Placement


class ReportsSeat:
    """Reports its node, cards and parent processes as seen inside the worker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def setup(self, worker: Any) -> None:
        self.report = {
            "worker": worker.id,
            "stage": worker.stage,
            "node": worker.node,
            "positions": worker.seat.gpus,
            "visible": worker.gpus,
            "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "above": [process.pid for process in psutil.Process().parents()],
        }
        (self._folder / f"{worker.stage}.{worker.id}").touch()

    def __call__(self, items: list[list[Any]]) -> list[list[Any]]:
        time.sleep(0.02)
        return [[*item, self.report] for item in items]


def seats(cluster: FakeCluster, folder: Path, a100: int = 4) -> tuple[dt.Run, dict[int, dict[str, Any]]]:
    """A run over nodes with two kinds of cards, and the report of each worker. It ends some time after all workers are
    ready, so that each gets an item."""
    there = folder / "there"
    there.mkdir()
    count = 0

    def numbers() -> Iterator[list[Any]]:
        nonlocal count
        rest = 150
        while rest:
            rest -= len(list(there.iterdir())) >= 7 + a100
            yield [count]
            count += 1

    stages = [
        dt.Stage("hosts", ReportsSeat(there), dt.Resources(cpus=2), workers=5, batch_size=1),
        dt.Stage(
            "l40s", ReportsSeat(there), dt.Resources(cpus=0.5, gpus=1, accelerator="L40S"), workers=2, batch_size=1
        ),
        dt.Stage(
            "a100",
            ReportsSeat(there),
            dt.Resources(cpus=0.25, gpus=0.5, accelerator="A100"),
            workers=a100,
            batch_size=1,
        ),
    ]
    as_planned = StreamOptions(follow_plan=True, replan=False)  # otherwise unknown speeds would decide
    run = started(cluster, *stages, source=numbers(), options=as_planned)
    rows = list(run)
    assert sorted(row[0] for row in rows) == list(range(count))
    return run, {report["worker"]: report for row in rows for report in row[1:]}


def check_nodes(cluster: FakeCluster, run: dt.Run, reports: dict[int, dict[str, Any]]) -> None:
    """Check that every worker is on its planned node and descends from the raylet of that node."""
    raylets = {node.dovetail_name: node.raylet_pid for node in cluster.nodes.values()}
    planned = {unit: Counter(seat.node for seat in found) for unit, found in run.plan.seats.items()}
    assert {unit: sum(nodes.values()) for unit, nodes in planned.items()} == Counter(
        worker["stage"] for worker in reports.values()
    )
    for unit, nodes in planned.items():
        assert nodes == Counter(worker["node"] for worker in reports.values() if worker["stage"] == unit)
    for worker in reports.values():
        assert raylets[worker["node"]] in worker["above"], worker
        assert len([pid for pid in raylets.values() if pid in worker["above"]]) == 1


def cards(reports: dict[int, dict[str, Any]]) -> dict[str, dict[int, str]]:
    """Node -> position -> name of the card, which is the same for all workers on it."""
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for worker in reports.values():
        names = worker["cuda"].split(",") if worker["cuda"] else []
        assert len(names) == len(worker["positions"]) == len(worker["visible"]), worker
        for position, name in zip(worker["positions"], names, strict=True):
            found[worker["node"]][position].add(name)
    assert all(len(names) == 1 for by in found.values() for names in by.values()), found
    return {node: {position: names.pop() for position, names in by.items()} for node, by in found.items()}


def check_seats(reports: dict[int, dict[str, Any]], l40s: str, a100: str) -> None:
    """Check that workers without cards see none, and the others are on the nodes of their cards."""
    assert all(worker["cuda"] == "" for worker in reports.values() if worker["stage"] == "hosts")
    assert {worker["node"] for worker in reports.values() if worker["stage"] == "a100"} == {a100}
    assert {worker["node"] for worker in reports.values() if worker["stage"] == "l40s"} == {l40s}


@pytest.mark.long  # the next test asserts the same of a cluster of which others use a part
def test_every_worker_is_on_its_planned_node(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    before = ray_cluster.available()
    run, reports = seats(ray_cluster, tmp_path)
    until_available_is(ray_cluster, before, patiently(RESTORED_S))
    check_nodes(ray_cluster, run, reports)
    found = cards(reports)
    b, c = (ray_cluster.nodes[name].dovetail_name for name in "bc")
    assert {node: sorted(names.values()) for node, names in found.items()} == {b: ["0", "1"], c: ["0", "1"]}
    check_seats(reports, b, c)


def test_no_worker_is_on_a_card_that_a_foreign_actor_holds(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    with foreign_actor(ray_cluster, tmp_path, node="c", num_gpus=1) as theirs:
        assert theirs == [0]
        before = ray_cluster.available()
        run, reports = seats(ray_cluster, tmp_path, a100=2)
        until_available_is(ray_cluster, before, patiently(RESTORED_S))
    check_nodes(ray_cluster, run, reports)
    b, c = (ray_cluster.nodes[name].dovetail_name for name in "bc")
    found = {node: sorted(names.values()) for node, names in cards(reports).items()}
    assert found == {b: ["0", "1"], c: ["1"]}
    check_seats(reports, b, c)


# Nodes that die


class Traced:
    """Writes a line per call: time, stage, node. Its results are large."""

    def __init__(self, log: Path, seconds: float) -> None:
        self._log, self._seconds = log, seconds

    def setup(self, worker: Any) -> None:
        self._about = f"{worker.stage} {worker.node}"

    def __call__(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        assert all(item["blob"] == bytes([item["id"] % 251]) * len(item["blob"]) for item in items)
        time.sleep(self._seconds * len(items))
        with self._log.open("a") as file:
            file.write(f"{time.time()} {self._about}\n")
        return [{"id": item["id"], "blob": bytes([item["id"] % 251]) * BLOB} for item in items]


class Bare(Traced):
    """Returns only the id."""

    def __call__(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"id": item["id"]} for item in super().__call__(items)]


class EndlessRun:
    """A run over an endless source, and a thread that reads its results."""

    def __init__(self, cluster: FakeCluster, log: Path, *stages: dt.Stage, **more: Any) -> None:
        self.log = log
        self._enough = Event()
        self.count = 0
        self.run = started(cluster, *stages, source=self._items(), **more)
        self.got: list[int] = []
        self._taker = Thread(target=self._take, daemon=True)
        if "sink" not in more:
            self._taker.start()

    def _items(self) -> Iterator[dict[str, Any]]:
        while not self._enough.is_set():
            yield {"id": self.count, "blob": b""}
            self.count += 1

    def _take(self) -> None:
        for row in self.run:
            self.got.append(row["id"])

    def calls(self, stage: str) -> list[tuple[float, str]]:
        """Time and node of each call, in the order of their ends."""
        if not self.log.exists():
            return []
        lines = [line.split() for line in self.log.read_text().splitlines() if line.count(" ") == 2]
        return [(float(at), node) for at, name, node in lines if name == stage]

    def where(self, stage: str) -> str:
        until(lambda: self.calls(stage), f"{stage} has begun")
        return self.calls(stage)[-1][1]

    def until_elsewhere(self, stage: str, than: set[str], since: float) -> float:
        """Seconds until the first call of a stage ended on another node."""

        def found() -> list[float]:
            return [at for at, node in self.calls(stage) if at > since and node not in than]

        until(found, f"{stage} continues on other nodes than {than}")
        return found()[0] - since

    def finish(self) -> list[int]:
        """End the source and return the sorted results."""
        self._enough.set()
        self.run.wait()
        if self._taker.is_alive():
            self._taker.join()
        return sorted(self.got)


def pipeline_over(log: Path, seconds: float = 0.02) -> list[dt.Stage]:
    """Three stages; the middle one has a single worker, and its input and output move between nodes.

    No replan starts a worker: Ray creates one placement group at a time, and one on a node that hangs prevents all
    others until long after Ray has noticed (more than 90 s).
    """
    x, a = {"fake": "x"}, {"fake": "a"}
    return [
        dt.Stage("many", Traced(log, seconds), dt.Resources(cpus=0.5, labels=x), workers=2, batch_size=2),
        dt.Stage("only", Traced(log, seconds / 4), dt.Resources(cpus=0.5, labels=x), workers=1, batch_size=2),
        dt.Stage("last", Bare(log, seconds / 4), dt.Resources(cpus=0.5, labels=a), workers=1, batch_size=2),
    ]


HOWS = [signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP] if LONG else [signal.SIGKILL, signal.SIGSTOP]


class Hangs:
    """Stops a node while a payload is in its object store and was not fetched yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import ray

        from dovetail.engines.ray.agent_link import AgentLink

        self.node: FakeNode | None = None
        self.at = 0.0
        beside = AgentLink.attach_object

        def then_stop(link: AgentLink, what: Any) -> int:
            if self.node is not None and isinstance(what, ray.ObjectRef):
                node, self.node = self.node, None
                ray.wait([what], timeout=10, fetch_local=False)
                self.at = time.time()
                node.kill(signal.SIGSTOP)
            return beside(link, what)

        monkeypatch.setattr(AgentLink, "attach_object", then_stop)

    def stop(self, node: FakeNode) -> float:
        """Stop the node during the next transfer; returns the time."""
        self.node = node
        until(lambda: self.at, "a payload goes from node to node")
        return self.at


@pytest.mark.parametrize("sink", ["iterator", "jsonl"] if LONG else ["iterator"])
def test_nodes_that_die_in_any_way_lose_no_item_and_the_run_continues(
    ray_cluster: FakeCluster, tmp_path: Path, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = Hangs(monkeypatch)
    out, log = tmp_path / "out.jsonl", tmp_path / "calls.log"
    before = ray_cluster.available()
    with ExitStack() as stack:
        x = {"num_cpus": 2, "labels": {"fake": "x"}}
        nodes = [stack.enter_context(add_node(ray_cluster, **x)) for _ in range(1 + len(HOWS))]
        extra = {node.dovetail_name: node for node in nodes}
        going = EndlessRun(ray_cluster, log, *pipeline_over(log), **({} if sink == "iterator" else {"sink": out}))
        dead: set[str] = set()
        took: dict[str, float] = {}
        for how in HOWS:
            enough = len(going.calls("last")) + 20
            until(lambda: len(going.calls("last")) >= enough, "some work is done")  # noqa: B023
            dead.add(where := going.where("only"))
            killed = time.time()
            if how == signal.SIGSTOP:
                killed = hangs.stop(extra[where])
            else:
                extra[where].kill(how)
            took[how.name] = max(going.until_elsewhere(stage, dead, killed) for stage in ("only", "many"))
        assert max(took.values()) < patiently(ELSEWHERE_S), took
        began = time.monotonic()
        got = going.finish()
        assert time.monotonic() - began < patiently(ELSEWHERE_S), "something waited for the node that hangs"
        until_available_is(ray_cluster, before, patiently(RESTORED_S))
        if sink == "jsonl":
            got = sorted(json.loads(line)["id"] for line in out.read_text().splitlines())
        assert Counter(got) == Counter(range(going.count))
        assert {line["node"] for line in events_of(going.run, "node") if line["do"] == "left"} == dead


class NodeName:
    def setup(self, worker: Any) -> None:
        self._node = worker.node

    def __call__(self, items: list[int]) -> list[str]:
        return [self._node for _ in items]


def test_a_run_begins_without_a_node_that_hangs(
    ray_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A placement group there would block those of all jobs until Ray sees that the node is dead."""
    import ray

    before = ray_cluster.available()
    here = ray_cluster.nodes["d"].dovetail_name
    with add_node(ray_cluster, num_cpus=2) as node:
        use_only_nodes(ray_cluster, monkeypatch, "d", node.name)
        node.kill(signal.SIGSTOP)
        run = started(ray_cluster, dt.Stage("s", NodeName, workers_per_node=1), source=range(3))
        assert [seat.node for seat in run.plan.seats["s"]] == [here]
        assert list(run) == [here] * 3
        assert f"{node.dovetail_name} does not answer" in capsys.readouterr().err
        assert node.node_id in {row["NodeID"] for row in ray.nodes() if row["Alive"]}, "Ray does not know it yet"
        until_available_is(ray_cluster, before, patiently(RESTORED_S))


# Nodes that join


def test_a_node_that_joins_is_used_within_two_replans(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    log = tmp_path / "calls.log"
    before = ray_cluster.available()
    slow = dt.Stage("slow", Bare(log, 0.05), dt.Resources(labels={"fake": "d"}), batch_size=2)
    going = EndlessRun(ray_cluster, log, slow, options=OFTEN)
    here = ray_cluster.nodes["d"].dovetail_name
    until(lambda: len(going.calls("slow")) > 20, "it works")
    with add_node(ray_cluster, num_cpus=2, labels={"fake": "d"}) as node:
        took = going.until_elsewhere("slow", {here}, time.time())
        assert {where for _, where in going.calls("slow")} == {here, node.dovetail_name}
        assert took < patiently(REPLANS_S), took
        got = going.finish()
        assert Counter(got) == Counter(range(going.count))
        until_available_is(ray_cluster, before, patiently(RESTORED_S))


# A stopped driver

SLEEPS = """
import os, time
import dovetail as dt

def slowly(items):
    time.sleep(0.05 * len(items))
    return items

def source():
    number = 0
    while not os.path.exists("enough"):
        yield number
        number += 1
    open("count", "w").write(str(number))

if __name__ == "__main__":
    stages = [
        dt.Stage(name, slowly, dt.Resources(labels={"fake": node}), workers=1, batch_size=1, fuse=False)
        for name, node in (("one", "a"), ("two", "d"))
    ]
    run = dt.run(dt.Pipeline(stages), source(), engine="ray:" + os.environ["DOVETAIL_TEST_RAY"], run_dir="run")
    print("BEGUN", flush=True)
    found = []
    for item in run:
        found.append(item)
        if len(found) == 1:
            print("FIRST", flush=True)
        if len(found) % 10 == 0:
            print("GOT", len(found), flush=True)
    assert sorted(found) == list(range(int(open("count").read())))
    print("ALL", len(found))
"""


@pytest.mark.long
def test_a_driver_stopped_for_longer_than_the_silence_timeout_loses_no_node(
    ray_cluster: FakeCluster, tmp_path: Path
) -> None:
    from dovetail.engines.ray.failure_detection import SILENCE_TIMEOUT_S

    with driver(ray_cluster, tmp_path, SLEEPS) as script:
        script.says("FIRST")
        script.kill(signal.SIGSTOP)
        time.sleep(SILENCE_TIMEOUT_S + 3)  # the duration itself is tested
        script.kill(signal.SIGCONT)
        so_far = script.output.count("GOT")
        until(lambda: script.output.count("GOT") >= so_far + 3, "it continues")
        (tmp_path / "enough").touch()
        assert "ALL" in script.finish()
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert not [line for line in lines if line["k"] == "node"]
    assert not [line for line in lines if line["k"] == "worker" and line["do"] == "lost"]
