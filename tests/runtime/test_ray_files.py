"""Files and tables in and out of runs on Ray, also where nodes do not share a disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import dovetail as dt
from dovetail.errors import ConfigError
from ray_aids import MB, add_node, driver
from runtime.kills import WRITE, make_rows, rows_of, run_script
from waiting import LONG, PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dovetail.engines.ray.protocol import AgentSetup
    from ray_aids import FakeCluster

pytestmark = [pytest.mark.ray, pytest.mark.time_limit, pytest.mark.usefixtures("by_value")]
ROWS = 600


def on(node: str, cpus: float = 0.5) -> dt.Resources:
    return dt.Resources(cpus=cpus, labels={"fake": node})


def run_on(address: str, stages: list[dt.Stage], source: Any, **named: Any) -> dt.Run:
    return dt.run(dt.Pipeline(stages), source, engine=f"ray:{address}", profiles=False, **named)


def length(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": int(row["id"]), "n": len(row["text"])}


def tagged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "t": row["id"] * 2} for row in rows]


def doubled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "k": k} for row in rows for k in range(2)]


def apart() -> list[dt.Stage]:
    """Neighbours on different nodes."""
    return [dt.Stage("length", dt.each(length), on("a")), dt.Stage("tag", tagged, on("d"), batch_size=7)]


def expected(rows: int = ROWS) -> list[dict[str, int]]:
    return [{"id": number, "n": number % 50, "t": number * 2} for number in range(rows)]


def written(path: Path) -> list[dict[str, int]]:
    found = rows_of(path)
    if path.suffix == ".csv":
        head, *lines = [line.decode().strip().split(",") for line in found]
        return [dict(zip(head, map(int, line), strict=True)) for line in lines]
    return [json.loads(row) if isinstance(row, bytes) else row for row in found]


def jsonl(folder: Path, rows: int = ROWS) -> str:
    make_rows(folder / "in.jsonl", rows)
    return str(folder / "in.jsonl")


def source_of(kind: str, folder: Path) -> str:
    path = folder / f"in.{kind}"
    if kind == "jsonl":
        make_rows(path, ROWS)
    elif kind == "csv":
        path.write_text("id,text\n" + "".join(f"{number},{'x' * (number % 50)}\n" for number in range(ROWS)))
    else:
        run_script(WRITE, path, ROWS)
    return str(path)


# --- in and out


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "lance"])
def test_every_kind_of_file_goes_in_and_out(ray_address: str, tmp_path: Path, kind: str) -> None:
    sink = tmp_path / f"out.{kind}"
    run = run_on(ray_address, apart(), source_of(kind, tmp_path), sink=dt.sink(str(sink), ordered=True))
    assert run.wait().status == "finished"
    assert written(sink) == expected()
    assert {path.name for path in tmp_path.iterdir()} == {f"in.{kind}", sink.name}, "parts are left"


def test_shards_leaves_and_functions(ray_address: str, tmp_path: Path) -> None:
    received: list[dict[str, int]] = []
    stages = [
        dt.Stage("length", dt.each(length), on("a")),
        dt.Stage("files", tagged, on("d"), batch_size=7, after=["length"]),
        dt.Stage("calls", doubled, on("b"), after=["length"]),
    ]
    shards = dt.sink(str(tmp_path / "out.jsonl"), shard_size="4kB", ordered=True)
    run = run_on(ray_address, stages, jsonl(tmp_path), sink={"files": shards, "calls": received.extend})
    run.wait()
    paths = sorted(tmp_path.glob("out-*.jsonl"))
    assert len(paths) > 2
    assert [row for path in paths for row in written(path)] == expected()
    assert sorted((row["id"], row["k"]) for row in received) == [
        (number, k) for number in range(ROWS) for k in range(2)
    ]


def test_results_come_in_order(ray_address: str, tmp_path: Path) -> None:
    stages = [dt.Stage("length", dt.each(length), on("a")), dt.Stage("double", doubled, on("d"), batch_size=5)]
    rows = [(row["id"], row["k"]) for row in run_on(ray_address, stages, jsonl(tmp_path), ordered=True)]
    assert rows == [(number, k) for number in range(ROWS) for k in range(2)]


def fussy(folder: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def run(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] % 100 == 3 and not Path(folder, "fixed").exists():
            raise ValueError("cannot do that one")
        return row

    return run


def test_failed_items_are_retried(ray_address: str, tmp_path: Path) -> None:
    """They can also be retried on another engine."""
    make_rows(tmp_path / "in.jsonl", ROWS)
    stages = [
        dt.Stage("length", dt.each(length), on("a")),
        dt.Stage("fussy", dt.each(fussy(str(tmp_path))), on("d"), on_error="skip", retries=0, fuse=False),
        dt.Stage("tag", tagged, on("a"), fuse=False),
    ]
    sink = dt.sink(str(tmp_path / "out.jsonl"), ordered=True)
    run = run_on(ray_address, stages, str(tmp_path / "in.jsonl"), sink=sink, run_dir=tmp_path / "first")
    run.wait()
    assert len(run.errors) == 6
    (tmp_path / "fixed").touch()
    run_on(ray_address, stages, (), retry_errors=tmp_path / "first").wait()
    found = written(tmp_path / "out.jsonl")
    assert sorted(found, key=lambda row: row["id"]) == expected()


# --- waves


def whole(rows: Any) -> Iterator[dict[str, int]]:
    most = max(row["id"] for row in rows)
    for row in rows:
        yield {**row, "most": most}


def with_barrier() -> list[dt.Stage]:
    stages = [dt.Stage("length", dt.each(length), on("a")), dt.Stage("whole", whole, on("d"), barrier=True)]
    return [*stages, dt.Stage("tag", tagged, on("b"), batch_size=7)]


@pytest.mark.parametrize("how", ["sequential", "barrier"])
@pytest.mark.parametrize("sees", [True, False], ids=["shared", "unshared"])
def test_waves_pass_through_the_spool(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, sees: bool
) -> None:
    if not sees:
        hide_files(monkeypatch, "token")
    stages, mode = (with_barrier(), "auto") if how == "barrier" else (apart(), "sequential")
    found: list[dict[str, int]] = []
    sink = dt.sink(str(tmp_path / "out.jsonl"), ordered=True) if sees else found.extend
    run = run_on(ray_address, stages, jsonl(tmp_path), sink=sink, mode=mode, run_dir=tmp_path / "run")
    run.wait()
    rows = written(tmp_path / "out.jsonl") if sees else sorted(found, key=lambda row: row["id"])
    more = {"most": ROWS - 1} if how == "barrier" else {}
    assert rows == [{**row, **more} for row in expected()]
    assert not (tmp_path / "run" / "spool").exists()


# --- nodes that do not see


def hide_files(monkeypatch: pytest.MonkeyPatch, what: str, node: str = "") -> None:
    """Simulate agents (all, or that of one node) on machines with other files under these paths."""
    from dovetail.engines.ray.protocol import AgentSetup

    def elsewhere_(*arguments: Any) -> AgentSetup:
        setup = AgentSetup(*arguments)
        if node and setup.node != node:
            return setup
        if what == "asks":
            return setup._replace(source_paths=tuple(f"{path}.other" for path in setup.source_paths))
        writes = tuple((folder, "other") for folder, _ in setup.sink_folders)
        return setup._replace(token="other", sink_folders=writes)

    monkeypatch.setattr("dovetail.engines.ray.agent_pool.AgentSetup", elsewhere_)


def speaks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    print("a worker speaks", flush=True)  # noqa: T201
    return rows


def test_what_workers_print_comes_home(ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_files(monkeypatch, "token")
    run = run_on(ray_address, [dt.Stage("speaks", speaks, on("a"))], jsonl(tmp_path, 50), run_dir=tmp_path / "run")
    assert len(list(run)) == 50
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())
    assert logs.count("a worker speaks") == 50


def leaves_a_trace(folder: str) -> Callable[[list[Any]], list[Any]]:
    def run(rows: list[Any]) -> list[Any]:
        Path(folder, "ran").touch()
        return rows

    return run


@pytest.mark.parametrize("what", ["asks", "token"])
def test_files_that_a_node_does_not_see_are_reported_before_anything_runs(
    ray_cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Although others do see it, and however late its agent is."""
    monkeypatch.setattr("dovetail.engines.ray.agent_pool.FIRST_HELLO_TIMEOUT_S", PATIENCE_S)
    blind = ray_cluster.nodes["d"].dovetail_name
    hide_files(monkeypatch, what, blind)
    trace = leaves_a_trace(str(tmp_path))
    stages = [dt.Stage("first", trace, on("a"), fuse=False), dt.Stage("second", trace, on("d"), fuse=False)]
    source = jsonl(tmp_path)
    (tmp_path / "out").mkdir()
    run = run_on(ray_cluster.address, stages, source, sink=str(tmp_path / "out" / "o.jsonl"))
    with pytest.raises(ConfigError) as raised:
        run.wait()
    message = str(raised.value)
    assert blind in message
    assert ("DT405" if what == "asks" else "DT401") in message
    assert (source if what == "asks" else str(tmp_path / "out")) in message
    assert "fix" in message
    assert "share" in message
    assert "resume" not in message
    assert not (tmp_path / "ran").exists()
    assert not list((tmp_path / "out").iterdir()), "something is half-written"
    until(lambda: not ray_cluster.groups(), "everything is given back")


@pytest.mark.long
def test_a_node_that_comes_later_and_does_not_see_is_left_out(
    ray_cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run continues without it."""
    from dovetail.engines.ray.message_handlers import MessageHandlers

    known = {node.dovetail_name for node in ray_cluster.nodes.values()}
    refused: list[str] = []
    real = MessageHandlers._refuse

    def refuse_and_record(self: MessageHandlers, link: Any, *why: str) -> None:
        refused.append(link.node)
        real(self, link, *why)
        (tmp_path / "go").touch()

    monkeypatch.setattr(MessageHandlers, "_refuse", refuse_and_record)

    def slow(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        import time

        while not Path(folder, "go").exists():
            time.sleep(0.01)
        return rows

    folder = str(tmp_path)
    stages = [dt.Stage("slow", slow, dt.Resources(cpus=4), workers=(1, 64))]
    out = tmp_path / "out.jsonl"
    run = run_on(ray_cluster.address, stages, jsonl(tmp_path), sink=str(out))
    from dovetail.engines.ray.protocol import AgentSetup

    def blind(*arguments: Any) -> AgentSetup:
        setup = AgentSetup(*arguments)
        other = tuple((path, "other") for path, _ in setup.sink_folders)
        return setup if setup.node in known else setup._replace(sink_folders=other)

    monkeypatch.setattr("dovetail.engines.ray.agent_pool.AgentSetup", blind)
    with add_node(ray_cluster):
        assert run.wait().status == "finished"
        assert len(refused) == 1
    assert sorted(row["id"] for row in written(out)) == list(range(ROWS))
    assert "DT401" in (run.folder / "events.jsonl").read_text()


# --- large rows


LARGE = 2 * MB


def large(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"id": row["id"], "data": os.urandom(LARGE)} for row in rows]


def size(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"id": row["id"], "size": len(row["data"])} for row in rows]


def test_payloads_do_not_pass_through_the_driver(ray_address: str, tmp_path: Path) -> None:
    """Neither the memory of the driver nor what it takes out of Ray grows with 150 MB between two nodes."""
    from dovetail.engines.ray.protocol import decode_frame

    rows, received_bytes = 150 if LONG else 75, 0

    def counted(frame: bytes) -> Any:
        nonlocal received_bytes
        received_bytes += len(frame)
        return decode_frame(frame)

    source = jsonl(tmp_path, rows)
    stages = [dt.Stage("large", large, on("a")), dt.Stage("size", size, on("d"))]
    before = psutil.Process().memory_info().rss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dovetail.engines.ray.agent_link.decode_frame", counted)
        run_on(ray_address, stages, source, sink=str(tmp_path / "out.jsonl")).wait()
    grown = psutil.Process().memory_info().rss - before
    assert sorted(row["id"] for row in written(tmp_path / "out.jsonl")) == list(range(rows))
    assert {row["size"] for row in written(tmp_path / "out.jsonl")} == {LARGE}
    assert received_bytes < 5 * MB, f"{received_bytes / MB:.0f} MB came to the driver"
    assert grown < 64 * MB, f"the driver grew by {grown / MB:.0f} MB"


def slow_size(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    import time

    time.sleep(0.2)  # more than one of them waits for its turn
    return size(rows)


def huge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"id": row["id"], "data": os.urandom(10 * MB)} for row in rows]


def has_spilled(cluster: FakeCluster) -> set[Path]:
    """Logs of raylets that wrote objects to the disk."""
    logs = cluster._folder.glob("ray/session_latest/logs/raylet*.out")
    return {path for path in logs if "Spilled" in path.read_text(errors="replace")}


def test_a_tiny_object_store_neither_spills_nor_stops_the_run(
    ray_cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has 80 MB, while 8 workers elsewhere could take 10 MB each, four at a time."""
    from dovetail.engines.ray.transfers import TransferQueue

    most = 0
    begin = TransferQueue._begin

    def counted(self: TransferQueue, flight: Any) -> None:
        nonlocal most
        begin(self, flight)
        most = max(most, *self._bytes.values())

    monkeypatch.setattr(TransferQueue, "_begin", counted)
    rows = 96 if LONG else 24
    before = has_spilled(ray_cluster)
    with add_node(ray_cluster, object_store_memory=80 * MB, labels={"fake": "tiny"}):
        takers = dt.Stage("size", slow_size, on("a", 0.25), workers=8, slots=4)
        stages = [dt.Stage("huge", huge, on("tiny"), workers=4), takers]
        found = list(run_on(ray_cluster.address, stages, jsonl(tmp_path, rows)))
    assert sorted(row["id"] for row in found) == list(range(rows))
    assert {row["size"] for row in found} == {10 * MB}
    assert 10 * MB <= most <= 32 * MB, f"{most / MB:.0f} MB were on their way at once"
    assert has_spilled(ray_cluster) == before


# --- Ray Datasets


DATASET = """
import os, sys
from pathlib import Path
import dovetail as dt
import ray
from dovetail.engines.ray import agent_link

HERE = Path(__file__).parent
WEIGHT = 20_000

def tag(rows):
    return [{"id": row["id"], "n": len(row["text"]), "t": int(row["id"]) * 2} for row in rows]

def weigh(rows):
    return [{"id": row["id"], "n": len(row["data"]), "sum": int(row["image"].sum())} for row in rows]

def fails(rows):
    raise ValueError("no")

def heavy(batch):
    import numpy
    count = len(batch["id"])
    return {"id": batch["id"], "data": [os.urandom(WEIGHT) for _ in range(count)],
            "image": numpy.ones((count, 4, 4), dtype=numpy.int64)}

if __name__ == "__main__":
    address = os.environ["DOVETAIL_TEST_RAY"]
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.from_items([{"id": n, "text": "x" * (n % 50)} for n in range(600)], override_num_blocks=3)
    wanted = [{"id": n, "n": n % 50, "t": 2 * n} for n in range(600)]

    run = dt.run(dt.Pipeline([dt.Stage("tag", tag, workers=2)]), dataset, engine="ray:auto", ordered=True)
    assert list(run) == wanted
    assert run.stats.read == 600
    run = dt.run(dt.Pipeline([dt.Stage("tag", tag, workers=2)]), dataset, limit=250, engine="ray:auto", ordered=True)
    assert list(run) == wanted[:250]
    run = dt.run(dt.Pipeline([dt.Stage("tag", tag, workers=2)]), dataset, cluster="1x(2cpu, 8GB)", ordered=True)
    assert list(run) == wanted, "on this machine the driver reads it"
    print("ROWS", flush=True)

    heard, decode_frame = [], agent_link.decode_frame
    agent_link.decode_frame = lambda frame: heard.append(len(frame)) or decode_frame(frame)
    big = ray.data.range(400, override_num_blocks=2).map_batches(heavy)
    again = {"sink": str(HERE / "out.jsonl"), "engine": "ray:auto"}
    run = dt.run(dt.Pipeline([dt.Stage("weigh", weigh, workers=2)]), big, run_dir=HERE / "run", **again)
    assert run.wait().status == "finished"
    assert sum(heard) < 400 * WEIGHT / 10, sum(heard)

    no = {"sink": str(HERE / "no.jsonl"), "engine": "ray:auto"}
    run = dt.run(dt.Pipeline([dt.Stage("fails", fails, workers=1)]), dataset, **no)
    try:
        run.wait()
    except dt.DovetailError:
        pass
    try:
        dt.run(dt.Pipeline([dt.Stage("fails", fails, workers=1)]), dataset, resume=run.folder, **no)
    except dt.DovetailError as error:
        print(error, flush=True)
"""


def test_a_ray_dataset_is_read_where_its_blocks_are_needed(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    with driver(ray_cluster, tmp_path, DATASET) as script:
        output = script.finish()
    assert "DT386" in output
    assert "a Ray Dataset ends with its driver" in output
    rows = sorted(written(tmp_path / "out.jsonl"), key=lambda row: row["id"])
    assert rows == [{"id": number, "n": 20_000, "sum": 16} for number in range(400)]
