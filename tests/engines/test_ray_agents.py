"""Agents of the driver: those that die again and again, nodes that are all gone, and those that have nothing to do."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayError, RuntimeEnvSetupError

from dovetail.control.events import FailRun, NodeLeft
from dovetail.engines.local.spec import Home
from dovetail.engines.ray import fleet, gone, idle, links
from dovetail.engines.ray.discovery import NoNodes, seen_of
from dovetail.engines.ray.engine import RayEngine
from dovetail.engines.ray.fleet import Agents, Surroundings, pause_s
from dovetail.engines.ray.gone import LEFT, SILENT_HEAD, STAY, Gone, Head
from dovetail.engines.ray.hearing import MOST_IN_VAIN, NO_WORKER
from dovetail.engines.ray.idle import THREAD, Idle
from dovetail.engines.ray.links import Again, Link, Listener, Lookout
from dovetail.engines.ray.wire import Hello, our_version
from dovetail.errors import Problem
from dovetail.resources.cluster import Cluster
from engines.test_ray_discovery import row
from running.aids import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GONE = NoNodes(Problem("DT393", "no node with CPUs"))


def around(*names: str) -> Surroundings:
    nodes = Cluster.parse("1x(2cpu, 4GB)").nodes
    return Surroundings("r", dict.fromkeys(names, nodes[0]), {name: f"id-{name}" for name in names}, Home((), "", {}))


class NoHandle:
    """An agent that hears nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *_: Any) -> None:
        return None


class NoListener:
    def __init__(self) -> None:
        self.added: list[Any] = []
        self.due: list[tuple[float, Again]] = []

    def add(self, link: Any) -> None:
        self.added.append(link)

    def later(self, delay_s: float, what: Again) -> None:
        self.due.append((delay_s, what))


# --- agents that die


def test_an_agent_that_dies_again_and_again_is_started_ever_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "start_agent", lambda *_: NoHandle())
    listener: Any = NoListener()
    agents = Agents(tmp_path, around("a"), listener)
    for _ in range(7):
        assert agents.lost("a")
        assert agents.lost("a")  # told twice
        assert agents.pauses("a")
        assert agents.link("a", "") is None
        agents.again("a")
        assert not agents.pauses("a")
        agents.again("a")  # told twice
    assert [delay_s for delay_s, _ in listener.due] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert len(listener.added) == 7
    listener.added[-1].began_at -= fleet.STEADY_S + 1
    agents.lost("a")
    assert listener.due[-1] == (0.5, Again("a"))
    assert pause_s(10**6) == 10.0


def test_no_agent_is_started_on_a_node_that_has_left_meanwhile(tmp_path: Path) -> None:
    listener: Any = NoListener()
    agents = Agents(tmp_path, around("a", "b"), listener)
    assert agents.lost("a")
    del agents.around.ids["a"]
    assert not agents.lost("a")
    agents.again("a")
    assert listener.added == []


def test_what_is_due_later_is_heard_then() -> None:
    heard: SimpleQueue[Any] = SimpleQueue()
    listener = Listener(heard)
    listener.later(60.0, Again("late"))
    listener.later(0.0, Again("soon"))
    listener._thread.start()
    try:
        assert heard.get(timeout=PATIENCE_S) == (None, Again("soon"))
        with pytest.raises(Empty):
            heard.get_nowait()
    finally:
        listener.close()


def test_all_agents_of_a_node_are_started_again_whichever_runtime_env_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "start_agent", lambda *_: NoHandle())
    monkeypatch.setattr(idle.IDLE, "take", lambda *_: None)
    listener: Any = NoListener()
    agents = Agents(tmp_path, around("a"), listener)
    for kind in ("", ENV):
        agents.link("a", kind)
    agents.lost("a")
    agents.again("a")
    assert [link.kind for link in listener.added] == ["", ENV, "", ENV]


ENV = '{"env_vars": {"QQ": "1"}}'
DIED = "The actor died unexpectedly.\nThe actor is dead because its worker process has died: connection error code 2."


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayEngine]:
    """With agents that hear nothing, on two nodes."""
    monkeypatch.setattr(fleet, "start_agent", lambda *_: NoHandle())
    monkeypatch.setattr(idle.IDLE, "take", lambda *_: None)
    found = RayEngine(tmp_path, around("a", "b"))
    nobody: Any = NoListener()
    found.agents._listener = nobody
    yield found
    found.close()


def failed(engine: RayEngine) -> list[str]:
    return [event.error for event in engine.events if isinstance(event, FailRun)]


def started(engine: RayEngine, kind: str) -> Link:
    link = engine.agents.link("a", kind)
    assert link is not None
    return link


def test_an_agent_with_a_runtime_env_that_dies_before_it_says_a_word_is_started_again(engine: RayEngine) -> None:
    for _ in range(MOST_IN_VAIN - 1):
        engine._hearing.hear(started(engine, ENV), RayError(DIED))
        assert failed(engine) == []
        engine._hearing.hear(None, Again("a"))
    engine._hearing.hear(
        started(engine, ""), [("hello", *Hello(1, "", True, (), (), our_version()))]
    )  # that another starts says nothing of this one
    engine._hearing.hear(started(engine, ENV), RayError(DIED))
    [error] = failed(engine)
    assert error.startswith("DT403 node a cannot start an agent with the runtime_env")
    assert "connection error code 2" in error


@pytest.mark.parametrize(
    "error",
    [RuntimeEnvSetupError("no such package"), RayError(f"it died\n{NO_WORKER}, because of it")],
    ids=["made", "started"],
)
def test_a_runtime_env_that_cannot_be_made_fails_the_run_at_once(engine: RayEngine, error: Exception) -> None:
    engine._hearing.hear(started(engine, ENV), error)
    assert [text.startswith("DT403 node a cannot make the runtime_env") for text in failed(engine)] == [True]


def test_a_node_that_dies_below_an_agent_with_a_runtime_env_is_no_fault_of_that(engine: RayEngine) -> None:
    for _ in range(2 * MOST_IN_VAIN):
        engine._hearing.hear(started(engine, ENV), RayError("The actor died because its node has died."))
        engine._hearing.hear(None, Again("a"))
    assert failed(engine) == []


# --- Ray that is gone


class Leaves(NoHandle):
    """An agent whose calls fail as those of Ray do after ray.shutdown()."""

    def remote(self, *_: Any) -> None:
        raise SystemExit


def test_a_listener_to_which_ray_is_gone_says_so_once() -> None:
    heard: SimpleQueue[Any] = SimpleQueue()
    listener = Listener(heard)
    handle: Any = NoHandle()
    setup: Any = NoHandle()
    link = Link("a", "", handle, setup)
    link.handle = Leaves()
    listener.add(link)
    assert heard.get(timeout=PATIENCE_S) == (None, Gone(LEFT, STAY))
    listener.add(link)
    listener.close()
    assert heard.empty()


def test_when_ray_is_gone_the_run_fails_once_and_nobody_is_started_again(engine: RayEngine) -> None:
    started(engine, "")
    engine._hearing.hear(None, Gone(LEFT, STAY))
    engine._hearing.hear(None, Gone(SILENT_HEAD, deaf=False))
    engine._hearing.hear(None, Again("a"))
    assert failed(engine) == [f"DT397 {LEFT}"]
    assert {event.node: event.returns for event in engine.events if isinstance(event, NodeLeft)} == {
        "a": False,
        "b": False,
    }
    assert engine.agents.links() == []
    assert engine.agents.link("a", "") is None


def test_a_call_that_finds_no_ray_fails_the_run_instead_of_the_loop(engine: RayEngine) -> None:
    link = started(engine, "")
    link.handle = Leaves()
    link.tell(("stop", 1, False, ""))
    events = engine.poll(0.0)
    assert [event.error for event in events if isinstance(event, FailRun)] == [f"DT397 {LEFT}"]


def test_a_head_that_is_silent_for_long_is_told_once_and_one_that_stumbles_is_not() -> None:
    head = Head()
    for _ in range(3):
        with head.asked():
            assert not any(head.is_gone(1.0) for _ in range(20))
    assert not any(head.is_gone(1.0) for _ in range(100)), "nobody asks it"
    with head.asked():
        assert sum(head.is_gone(1.0) for _ in range(100)) == 1


def test_who_looks_after_the_head_tells_when_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gone, "HEAD_S", 0.2)
    monkeypatch.setattr(links, "BEAT_S", 0.02)
    heard: SimpleQueue[Any] = SimpleQueue()
    head = Head()
    listener = Listener(heard, head)
    listener._thread.start()
    try:
        with head.asked():
            assert heard.get(timeout=PATIENCE_S) == (None, Gone(SILENT_HEAD, deaf=False))
    finally:
        listener.close()


# --- nodes that are all gone


def test_when_all_nodes_are_gone_the_run_is_told(tmp_path: Path) -> None:
    engine = RayEngine(tmp_path, around("a", "b"))
    try:
        engine._hearing.hear(None, GONE)
        assert engine.events[:2] == [NodeLeft(name, "Ray says that it is dead", False) for name in ("a", "b")]
        assert engine.events[2:] == [FailRun("the last node, 'b', is gone", "Ray says that it is dead")]
        assert engine.agents.around.ids == {}
        engine._hearing.hear(None, GONE)
        assert len(engine.events) == 3
    finally:
        engine.close()


def test_when_all_nodes_are_gone_whose_agents_had_died_before_the_run_fails(tmp_path: Path) -> None:
    engine = RayEngine(tmp_path, around("a", "b"))
    try:
        for name in ("a", "b"):
            engine.lose_node(name, "its agent is silent")
        assert engine.events == [NodeLeft(name, "its agent is silent", True) for name in ("a", "b")]
        engine._hearing.hear(None, GONE)
        assert [event for event in engine.events if isinstance(event, FailRun)] == engine.events[-1:]
    finally:
        engine.close()


def test_a_cluster_is_looked_at_closely_only_when_nodes_come_or_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LOOK_S", 0.01)
    heard: SimpleQueue[Any] = SimpleQueue()
    rows = [row("aa")]
    looks: list[int] = []

    def look() -> Any:
        looks.append(len(rows))
        return seen_of(rows, {}, {})

    def heard_of(ids: set[str]) -> bool:
        what = heard.get(timeout=PATIENCE_S)[1]
        return (set() if isinstance(what, NoNodes) else set(what.ids)) == ids

    lookout = Lookout(heard, look, nodes=lambda: rows)
    try:
        assert all(heard_of({"host-aa"}) for _ in range(5))
        assert looks == [1]
        rows = [row("aa"), row("bb")]
        until(lambda: heard_of({"host-aa", "host-bb"}), "the other one is seen")
        assert looks == [1, 2]
        rows = [row("aa", CPU=0)]
        until(lambda: heard_of(set()), "that there is none is told")
        rows = [row("aa")]
        until(lambda: heard_of({"host-aa"}), "it is there again")
    finally:
        lookout.close()


# --- idle ones


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(idle, "_job", lambda: "job")
    return []


def test_one_timer_waits_for_all_idle_agents(ended: list[Any]) -> None:
    kept = Idle(60.0, ended.append)
    others = set(threading.enumerate())  # one that a test on Ray has left may end meanwhile
    for number in range(50):
        kept.put(f"node-{number}", "", object())
    assert kept._timer is not None
    assert [one for one in threading.enumerate() if one.name == THREAD and one not in others] == [kept._timer]
    kept._timer.cancel()


def test_an_idle_agent_ends_when_its_own_time_is_over(ended: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("dovetail.engines.ray.idle.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Idle, "_look_at", lambda self, when: waits.append(when))
    waits: list[float] = []
    kept = Idle(60.0, ended.append)
    kept.put("a", "", "first")
    now[0] = 130.0
    kept.put("b", "", "second")
    assert kept.take("a", "") == "first"
    kept.put("a", "", "first")  # used meanwhile
    now[0] = 160.0
    kept._look()
    assert ended == []
    now[0] = 190.0
    kept._look()
    assert sorted(ended) == ["first", "second"]
    assert kept.take("a", "") is None
    assert waits[-1] == 190.0
