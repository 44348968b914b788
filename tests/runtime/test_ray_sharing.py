"""Runs that share a Ray cluster with each other and with other programs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.streaming.settings import StreamOptions
from ray_aids import HOLDS, RESTORED_S, driver, foreign_actor, node_id_of, patiently, until_available_is
from runtime.aids import say_when_waiting
from waiting import LONG, PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ray_aids import FakeCluster

pytestmark = [pytest.mark.ray, pytest.mark.time_limit(600 if LONG else 150), pytest.mark.usefixtures("by_value")]

OFTEN = StreamOptions(eager=True, first_replan_s=1.0, replan_every_s=1.0)
"""As usual, but a replan every second."""
REPLANS_S = 12.0
"""Two replans, and the start of agents and workers on an idle machine with a margin."""
WHERE: dict[str, Any] = {} if LONG else {"labels": {"fake": "d"}}
"""Each node of a run costs an agent."""
EIGHTH: dict[str, Any] = {"cpus": 2 if LONG else 0.5, **WHERE}
"""What a worker requests so that eight fit."""
AT_ONCE_S = 0.5
ENDS_OF_LIFE = ("ready", "stopped", "lost")


def slowly(items: list[int]) -> list[int]:
    time.sleep(0.1 * len(items))
    return items


def refuses(items: list[int]) -> list[int]:
    raise ValueError(f"not these: {items}")


def started(cluster: FakeCluster, *stages: dt.Stage, source: Any = range(10), **more: Any) -> dt.Run:
    return dt.run(dt.Pipeline(list(stages)), source, engine=f"ray:{cluster.address}", **more)


def on(node: str, cpus: float = 1, **more: Any) -> dt.Resources:
    return dt.Resources(cpus=cpus, labels={"fake": node}, **more)


def workers_now(folder: Path) -> int:
    """Present workers of a run, read from its folder."""
    try:
        text = (folder / "events.jsonl").read_text()
    except FileNotFoundError:
        return 0
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    did = {do: {line["w"] for line in lines if line["k"] == "worker" and line["do"] == do} for do in ENDS_OF_LIFE}
    return len(did["ready"] - did["stopped"] - did["lost"])


class EndlessRun:
    """A run over an endless source, whose results are taken."""

    def __init__(self, cluster: FakeCluster, *stages: dt.Stage, **more: Any) -> None:
        self.count = 0
        self._enough = Event()
        self.run = started(cluster, *stages, source=self._items(), options=OFTEN, **more)
        self.got: list[int] = []
        self._taker = Thread(target=lambda: self.got.extend(self.run), daemon=True)
        self._taker.start()

    def _items(self) -> Iterator[int]:
        while not self._enough.is_set():
            yield self.count
            self.count += 1

    @property
    def workers(self) -> int:
        return workers_now(self.run.folder)

    def finish(self) -> None:
        self._enough.set()
        self._taker.join()
        assert sorted(self.got) == list(range(self.count))


# Fair shares

BOTH = """
import json, os, time
import dovetail as dt
from dovetail.streaming.settings import StreamOptions

def slowly(items):
    time.sleep(0.1 * len(items))
    return items

def source():
    number = 0
    while not os.path.exists("enough"):
        yield number
        number += 1
    open(os.environ["NAME"] + ".count", "w").write(str(number))

if __name__ == "__main__":
    work = dt.Resources(**json.loads(os.environ["EIGHTH"]))
    stages = [dt.Stage(name, slowly, work, batch_size=1, fuse=False) for name in ("one", "two")]
    name, options = os.environ["NAME"], StreamOptions(eager=True, first_replan_s=1.0, replan_every_s=1.0)
    engine = "ray:" + os.environ["DOVETAIL_TEST_RAY"]
    run = dt.run(dt.Pipeline(stages), source(), engine=engine, run_dir=name, options=options)
    print("BEGUN", flush=True)
    found = sorted(run)
    assert found == list(range(int(open(name + ".count").read())))
    print("ALL", len(found))
"""


def until_fair(folders: list[Path], all_of: int, what: str) -> float:
    """Seconds until each of two has about half, and next to nothing is left."""

    def fair() -> bool:
        have = [workers_now(folder) for folder in folders]
        return min(have) >= all_of * 3 // 8 and sum(have) >= all_of - 1

    try:
        return until(fair, what)
    except AssertionError:
        raise AssertionError(f"{what}: {[workers_now(folder) for folder in folders]} of {all_of}") from None


def test_two_drivers_that_start_together_share_the_cluster_and_both_finish(
    ray_cluster: FakeCluster, tmp_path: Path
) -> None:
    before = ray_cluster.available()
    names = ["one", "two"]
    with ExitStack() as stack:
        scripts = [
            stack.enter_context(driver(ray_cluster, tmp_path, BOTH, NAME=name, EIGHTH=json.dumps(EIGHTH)))
            for name in names
        ]
        for script in scripts:
            script.says("BEGUN")
        took = until_fair([tmp_path / name for name in names], 8, "both have about half of the cluster")
        (tmp_path / "enough").touch()
        for script in scripts:
            assert "ALL" in script.finish()
        until_available_is(ray_cluster, before, patiently(RESTORED_S))
    assert took < patiently(REPLANS_S), took


def test_a_second_run_gets_half_of_a_fully_used_cluster_also_in_the_same_process(
    ray_cluster: FakeCluster,
) -> None:
    before = ray_cluster.available()
    stages = [dt.Stage(name, slowly, dt.Resources(**EIGHTH), batch_size=1, fuse=False) for name in ("one", "two")]
    first = EndlessRun(ray_cluster, *stages)
    until(lambda: first.workers == 8, "it uses the whole cluster")
    asked = time.monotonic()
    second = EndlessRun(ray_cluster, *stages)
    until_fair([first.run.folder, second.run.folder], 8, "both have about half of the cluster")
    took = time.monotonic() - asked
    first.finish()
    second.finish()
    until_available_is(ray_cluster, before, patiently(RESTORED_S))
    assert took < patiently(REPLANS_S), took


def test_a_share_is_the_most_that_a_run_holds(ray_cluster: FakeCluster) -> None:
    before = ray_cluster.available()
    total = sum(node["CPU"] for node in before.values())
    going = EndlessRun(ray_cluster, dt.Stage("slow", slowly, batch_size=1), share=0.25)
    least = total
    began = time.monotonic()
    while going.workers < 4 or time.monotonic() - began < 3:
        least = min(least, sum(node["CPU"] for node in ray_cluster.available().values()))
        assert time.monotonic() - began < 60, f"{going.workers} of 4 workers"
        time.sleep(0.02)
    going.finish()
    assert least == total * 0.75
    until_available_is(ray_cluster, before, patiently(RESTORED_S))


# Everything is given back

ENDS = (
    """
import os, signal, sys, time
import dovetail as dt

def slowly(items):
    time.sleep(0.05 * len(items))
    return items

if __name__ == "__main__":
    how, node = os.environ["HOW"], os.environ["NODE"]
    stage = dt.Stage("slow", slowly, dt.Resources(labels={"fake": node}), batch_size=1)
    run = dt.run(dt.Pipeline([stage]), range(10**6), engine="ray:" + os.environ["DOVETAIL_TEST_RAY"])
    if how == "SIGINT":
"""
    + "".join(f"        {line}\n" for line in say_when_waiting("BEGUN").splitlines())
    + """
    for number, item in enumerate(run):
        if number == 5 and how != "SIGINT":
            print("BEGUN", flush=True)
            while how == "raises" and not os.path.exists("now"):
                time.sleep(0.01)
            if how == "raises":
                raise KeyError("something else")
"""
)


def test_everything_is_back_soon_after_a_driver_has_ended_in_whichever_way(
    ray_cluster: FakeCluster, tmp_path: Path
) -> None:
    before = ray_cluster.available()
    ways = {"a": "SIGKILL", "d": "SIGTERM"} | ({"b": "SIGINT", "c": "raises"} if LONG else {})
    with ExitStack() as stack:
        scripts = {
            node: stack.enter_context(driver(ray_cluster, tmp_path, ENDS, HOW=how, NODE=node))
            for node, how in ways.items()
        }
        for node, script in scripts.items():
            script.says("BEGUN")
            until(lambda: ray_cluster.available()[node].get("CPU", 0) < 4, "it holds something")  # noqa: B023
        for node, how in ways.items():
            (tmp_path / "now").touch() if how == "raises" else scripts[node].kill(signal.Signals[how])
            scripts[node].ended()
            until_available_is(ray_cluster, {node: before[node]}, patiently(RESTORED_S))
            scripts[node].all_gone()
    assert not [row for row in ray_cluster.groups() if row["name"].startswith("dovetail:")]


def test_everything_is_back_soon_after_a_run_has_ended_in_whichever_way(ray_cluster: FakeCluster) -> None:
    before = ray_cluster.available()
    assert sorted(started(ray_cluster, dt.Stage("slow", slowly, on("d")))) == list(range(10))
    until_available_is(ray_cluster, before, patiently(RESTORED_S))

    failed = started(ray_cluster, dt.Stage("bad", refuses, on("d")), max_errors=0)
    with pytest.raises(dt.RunError):
        list(failed)
    until_available_is(ray_cluster, before, patiently(RESTORED_S))

    cancelled = started(ray_cluster, dt.Stage("slow", slowly, on("d"), batch_size=1), source=range(10**6))
    next(iter(cancelled))
    cancelled.cancel()
    cancelled.wait()
    until_available_is(ray_cluster, before, patiently(RESTORED_S))


# What cannot be


def test_what_no_node_can_ever_give_is_refused_at_once_with_the_reason(
    ray_cluster: FakeCluster, tmp_path: Path
) -> None:
    from dovetail.engines.ray.attachment import RayAddress, attach

    attach(RayAddress.parse(f"ray:{ray_cluster.address}"))
    asked = {
        "3 whole GPUs": dt.Resources(gpus=3),
        "5 CPUs": dt.Resources(cpus=5),
        "H100": dt.Resources(gpus=1, accelerator="H100"),
        "nowhere": dt.Resources(labels={"fake": "nowhere"}),
        "ticket": dt.Resources(custom={"ticket": 1}),
    }
    before = ray_cluster.available()
    list(started(ray_cluster, dt.Stage("warm", slowly, on("d"))))
    until_available_is(ray_cluster, before, patiently(RESTORED_S))
    for what, resources in asked.items():
        began = time.monotonic()
        with pytest.raises(dt.InfeasibleError) as raised:
            started(ray_cluster, dt.Stage("huge", slowly, resources))
        took = time.monotonic() - began
        assert took < patiently(AT_ONCE_S), f"{what}: {took}"
        assert raised.value.exit_code == 3
        text = str(raised.value)
        assert "of 4 nodes" in text, text


# Programs that do not know Dovetail


def test_a_run_without_free_resources_names_the_holders_and_waits_unless_wait_is_false(
    ray_cluster: FakeCluster, tmp_path: Path
) -> None:
    a100 = dt.Stage("gpu", slowly, dt.Resources(gpus=1, accelerator="A100"))
    with ExitStack() as stack:
        foreign = stack.enter_context(ExitStack())
        foreign.enter_context(foreign_actor(ray_cluster, tmp_path, node="c", num_gpus=2))
        before = ray_cluster.available()
        with pytest.raises(dt.InfeasibleError) as raised:
            started(ray_cluster, a100, wait=False)
        text = str(raised.value)
        assert raised.value.codes == ("DT120",)
        assert "Holder" in text, text
        until_available_is(ray_cluster, before)
        waiting = stack.enter_context(driver(ray_cluster, tmp_path, WAITS))
        waiting.says("waiting for")
        assert "Holder" in waiting.output
        foreign.close()
        assert "ALL 10" in waiting.finish()


WAITS = """
import os
import dovetail as dt

def same(items):
    return items

if __name__ == "__main__":
    stage = dt.Stage("gpu", same, dt.Resources(gpus=1, accelerator="A100"))
    run = dt.run(dt.Pipeline([stage]), range(10), engine="ray:" + os.environ["DOVETAIL_TEST_RAY"])
    print("ALL", len(list(run)))
"""


def test_a_run_that_another_has_no_room_for_is_named(ray_cluster: FakeCluster) -> None:
    before = ray_cluster.available()
    first = EndlessRun(ray_cluster, dt.Stage("slow", slowly, on("d", cpus=3), workers=1, batch_size=1))
    with pytest.raises(dt.InfeasibleError) as raised:
        started(ray_cluster, dt.Stage("next", slowly, on("d", cpus=3), workers=1), wait=False)
    assert raised.value.codes == ("DT120",)
    assert first.run.folder.name in str(raised.value)
    first.finish()
    until_available_is(ray_cluster, before, patiently(RESTORED_S))


def test_others_that_come_and_go_beside_a_run(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    """Released resources are used within two replans; a newcomer gets what is free, and the rest after the run."""
    before = ray_cluster.available()
    with ExitStack() as stack:
        asked = json.dumps({"num_cpus": 3, "node": node_id_of(ray_cluster, "d")})
        foreign = stack.enter_context(driver(ray_cluster, tmp_path, HOLDS, ASKED=asked))
        foreign.says("HELD")
        until(lambda: ray_cluster.available()["d"]["CPU"] == 1, "Ray knows it")
        going = EndlessRun(ray_cluster, dt.Stage("slow", slowly, on("d"), batch_size=1))
        until(lambda: len(going.got) > 5, "it works beside them")
        assert going.workers == 1
        foreign.kill()
        took = until(lambda: going.workers == 4, "it uses what they gave back")
        assert took < patiently(REPLANS_S), took
        asked = json.dumps({"num_cpus": 2, "node": node_id_of(ray_cluster, "d")})
        newcomer = stack.enter_context(driver(ray_cluster, tmp_path, HOLDS, ASKED=asked))
        so_far = len(going.got)
        until(lambda: len(going.got) > so_far + 50, "it continues")
        going.finish()
        newcomer.says("HELD")
    until_available_is(ray_cluster, before, patiently(10 * RESTORED_S))


# The command line

STEPS = """
def same(rows):
    return rows
"""
FILE = """
name: huge
stages:
  - {name: huge, run: "steps:same", resources: {gpus: 3}}
source: in.jsonl
sink: out.jsonl
"""


@pytest.mark.long  # tests/cli/test_ray_commands.py has a command that ends so
def test_the_command_line_ends_with_3(ray_cluster: FakeCluster, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "huge.yaml").write_text(FILE)
    command = [sys.executable, "-m", "dovetail", "run", "huge.yaml", "--engine", f"ray:{ray_cluster.address}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False, cwd=tmp_path)
    assert ended.returncode == 3, ended.stderr
    assert "of 4 nodes" in ended.stderr
    assert not (tmp_path / "out.jsonl").exists()
