"""Agent pool of the driver: restarts, loss of nodes and of Ray, idle agents. No Ray is started."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayError, RuntimeEnvSetupError

from dovetail.control.commands import HostedObject, StartWorker
from dovetail.control.events import FailRun, NodeLeft
from dovetail.engines.local.code_pickle import PickledWorks
from dovetail.engines.local.worker_spec import DriverContext
from dovetail.engines.ray import agent_link, agent_pool, failure_detection
from dovetail.engines.ray.agent import Outbox
from dovetail.engines.ray.agent_link import AgentLink, AgentListener, RestartAgent
from dovetail.engines.ray.agent_pool import IDLE_THREAD_NAME, AgentPool, IdleAgents, RayRunContext, restart_delay_s
from dovetail.engines.ray.discovery import NoNodesError, build_cluster
from dovetail.engines.ray.engine import RayEngine
from dovetail.engines.ray.failure_detection import (
    SHUTDOWN_FIX,
    SHUTDOWN_MESSAGE,
    SILENT_HEAD_MESSAGE,
    ClusterWatcher,
    HeadWatchdog,
    RayLost,
)
from dovetail.engines.ray.message_handlers import MAX_FAILED_STARTS, NO_WORKER_MESSAGE
from dovetail.engines.ray.node_loss import DEAD_NODE
from dovetail.engines.ray.protocol import AgentHello, SizedOp, dovetail_version
from dovetail.engines.ray.remote_worker import RemoteWorker
from dovetail.errors import Problem
from dovetail.resources.cluster import Cluster
from dovetail.resources.seat import Seat
from engines.test_ray_discovery import row
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GONE = NoNodesError(Problem("DT393", "no node with CPUs"))


def around(*names: str) -> RayRunContext:
    nodes = Cluster.parse("1x(2cpu, 4GB)").nodes
    return RayRunContext(
        "r", dict.fromkeys(names, nodes[0]), {name: f"id-{name}" for name in names}, DriverContext((), "", {})
    )


class NoHandle:
    """Handle of an agent that ignores all calls."""

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *_: Any) -> None:
        return None


class NoListener:
    def __init__(self) -> None:
        self.added: list[Any] = []
        self.due: list[tuple[float, RestartAgent]] = []

    def add(self, link: Any) -> None:
        self.added.append(link)

    def schedule(self, delay_s: float, what: RestartAgent) -> None:
        self.due.append((delay_s, what))


# --- agents that die


def test_an_agent_that_dies_repeatedly_is_restarted_with_growing_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_pool, "start_agent", lambda *_: NoHandle())
    listener: Any = NoListener()
    agents = AgentPool(tmp_path, around("a"), listener)
    for _ in range(7):
        assert agents.on_node_lost("a")
        assert agents.on_node_lost("a")  # reported twice
        assert agents.is_restarting("a")
        assert agents.link("a", "") is None
        agents.restart("a")
        assert not agents.is_restarting("a")
        agents.restart("a")  # reported twice
    assert [delay_s for delay_s, _ in listener.due] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert len(listener.added) == 7
    listener.added[-1].started_at -= agent_pool.STABLE_AGENT_S + 1
    agents.on_node_lost("a")
    assert listener.due[-1] == (0.5, RestartAgent("a"))
    assert restart_delay_s(10**6) == 10.0


def test_no_agent_is_restarted_on_a_node_that_has_left(tmp_path: Path) -> None:
    listener: Any = NoListener()
    agents = AgentPool(tmp_path, around("a", "b"), listener)
    assert agents.on_node_lost("a")
    del agents.context.ids["a"]
    assert not agents.on_node_lost("a")
    agents.restart("a")
    assert listener.added == []


def test_a_scheduled_message_arrives_when_it_is_due() -> None:
    received: SimpleQueue[Any] = SimpleQueue()
    listener = AgentListener(received)
    listener.schedule(60.0, RestartAgent("late"))
    listener.schedule(0.0, RestartAgent("soon"))
    listener._thread.start()
    try:
        assert received.get(timeout=PATIENCE_S) == (None, RestartAgent("soon"))
        with pytest.raises(Empty):
            received.get_nowait()
    finally:
        listener.close()


def test_all_agents_of_a_node_are_restarted_with_their_runtime_envs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_pool, "start_agent", lambda *_: NoHandle())
    monkeypatch.setattr(agent_pool.IDLE_AGENTS, "take", lambda *_: None)
    listener: Any = NoListener()
    agents = AgentPool(tmp_path, around("a"), listener)
    for kind in ("", ENV):
        agents.link("a", kind)
    agents.on_node_lost("a")
    agents.restart("a")
    assert [link.runtime_env for link in listener.added] == ["", ENV, "", ENV]


ENV = '{"env_vars": {"QQ": "1"}}'
DIED = "The actor died unexpectedly.\nThe actor is dead because its worker process has died: connection error code 2."


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayEngine]:
    """An engine on two nodes whose agents ignore all calls."""
    monkeypatch.setattr(agent_pool, "start_agent", lambda *_: NoHandle())
    monkeypatch.setattr(agent_pool.IDLE_AGENTS, "take", lambda *_: None)
    found = RayEngine(tmp_path, around("a", "b"))
    listener: Any = NoListener()
    found.agents._listener = listener
    yield found
    found.close()


def failed(engine: RayEngine) -> list[str]:
    return [f"{event.code} {event.error}" for event in engine.events if isinstance(event, FailRun)]


def started(engine: RayEngine, kind: str) -> AgentLink:
    link = engine.agents.link("a", kind)
    assert link is not None
    return link


def test_an_agent_with_a_runtime_env_that_dies_before_its_hello_is_restarted(engine: RayEngine) -> None:
    for _ in range(MAX_FAILED_STARTS - 1):
        engine._handlers.handle(started(engine, ENV), RayError(DIED))
        assert failed(engine) == []
        engine._handlers.handle(None, RestartAgent("a"))
    engine._handlers.handle(
        started(engine, ""), [("hello", *AgentHello(1, "", True, (), (), dovetail_version()))]
    )  # the start of another agent proves nothing about this one
    engine._handlers.handle(started(engine, ENV), RayError(DIED))
    [error] = failed(engine)
    assert error.startswith("DT403 node a cannot start an agent with the runtime_env")
    assert "connection error code 2" in error


@pytest.mark.parametrize(
    "error",
    [RuntimeEnvSetupError("no such package"), RayError(f"it died\n{NO_WORKER_MESSAGE}, because of it")],
    ids=["made", "started"],
)
def test_a_runtime_env_that_cannot_be_created_fails_the_run_at_once(engine: RayEngine, error: Exception) -> None:
    engine._handlers.handle(started(engine, ENV), error)
    assert [text.startswith("DT403 node a cannot create the runtime_env") for text in failed(engine)] == [True]


def test_a_node_loss_is_not_reported_as_a_failed_runtime_env(engine: RayEngine) -> None:
    for _ in range(2 * MAX_FAILED_STARTS):
        engine._handlers.handle(started(engine, ENV), RayError("The actor died because its node has died."))
        engine._handlers.handle(None, RestartAgent("a"))
    assert failed(engine) == []


# --- loss of Ray


class Leaves(NoHandle):
    """An agent whose calls fail as those of Ray do after ray.shutdown()."""

    def remote(self, *_: Any) -> None:
        raise SystemExit


def test_a_listener_reports_the_loss_of_ray_once() -> None:
    received: SimpleQueue[Any] = SimpleQueue()
    listener = AgentListener(received)
    handle: Any = NoHandle()
    setup: Any = NoHandle()
    link = AgentLink("a", "", handle, setup)
    link.handle = Leaves()
    listener.add(link)
    assert received.get(timeout=PATIENCE_S) == (None, RayLost(SHUTDOWN_MESSAGE, SHUTDOWN_FIX))
    listener.add(link)
    listener.close()
    assert received.empty()


def test_after_the_loss_of_ray_the_run_fails_once_and_no_agent_is_restarted(engine: RayEngine) -> None:
    started(engine, "")
    engine._handlers.handle(None, RayLost(SHUTDOWN_MESSAGE, SHUTDOWN_FIX))
    engine._handlers.handle(None, RayLost(SILENT_HEAD_MESSAGE, agents_lost=False))
    engine._handlers.handle(None, RestartAgent("a"))
    assert failed(engine) == [f"DT397 {SHUTDOWN_MESSAGE}"]
    assert {event.node: event.returns for event in engine.events if isinstance(event, NodeLeft)} == {
        "a": False,
        "b": False,
    }
    assert engine.agents.links() == []
    assert engine.agents.link("a", "") is None


def test_a_call_without_ray_fails_the_run_and_not_the_loop(engine: RayEngine) -> None:
    link = started(engine, "")
    link.handle = Leaves()
    link.send(("stop", 1, False, ""))
    events = engine.poll(0.0)
    failures = [event for event in events if isinstance(event, FailRun)]
    assert [(event.code, event.error) for event in failures] == [("DT397", SHUTDOWN_MESSAGE)]


def test_a_long_silence_of_the_head_is_reported_once_and_a_short_one_is_not() -> None:
    head = HeadWatchdog()
    for _ in range(3):
        with head.probe():
            assert not any(head.has_expired(1.0) for _ in range(20))
    assert not any(head.has_expired(1.0) for _ in range(100)), "no probe is running"
    with head.probe():
        assert sum(head.has_expired(1.0) for _ in range(100)) == 1


def test_the_cluster_watcher_reports_a_silent_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detection, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(agent_link, "HEARTBEAT_S", 0.02)
    received: SimpleQueue[Any] = SimpleQueue()
    head = HeadWatchdog()
    listener = AgentListener(received, head)
    listener._thread.start()
    try:
        with head.probe():
            assert received.get(timeout=PATIENCE_S) == (None, RayLost(SILENT_HEAD_MESSAGE, agents_lost=False))
    finally:
        listener.close()


# --- loss of all nodes


def test_the_run_fails_when_all_nodes_are_lost(tmp_path: Path) -> None:
    engine = RayEngine(tmp_path, around("a", "b"))
    try:
        engine._handlers.handle(None, GONE)
        assert engine.events[:2] == [NodeLeft(name, DEAD_NODE, False) for name in ("a", "b")]
        assert engine.events[2:] == [FailRun("the last node, 'b', is gone", DEAD_NODE)]
        assert engine.agents.context.ids == {}
        engine._handlers.handle(None, GONE)
        assert len(engine.events) == 3
    finally:
        engine.close()


def test_the_run_fails_when_all_nodes_are_lost_after_their_agents_died(tmp_path: Path) -> None:
    engine = RayEngine(tmp_path, around("a", "b"))
    try:
        for name in ("a", "b"):
            engine.losses.lose_node(name, "its agent is silent")
        assert engine.events == [NodeLeft(name, "its agent is silent", True) for name in ("a", "b")]
        engine._handlers.handle(None, GONE)
        assert [event for event in engine.events if isinstance(event, FailRun)] == engine.events[-1:]
    finally:
        engine.close()


def test_the_cluster_is_discovered_again_only_when_nodes_join_or_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detection, "NODE_POLL_S", 0.01)
    received: SimpleQueue[Any] = SimpleQueue()
    rows = [row("aa")]
    discoveries: list[int] = []

    def look() -> Any:
        discoveries.append(len(rows))
        return build_cluster(rows, {}, {})

    def next_nodes_are(ids: set[str]) -> bool:
        what = received.get(timeout=PATIENCE_S)[1]
        return (set() if isinstance(what, NoNodesError) else set(what.ids)) == ids

    lookout = ClusterWatcher(received, look, nodes=lambda: rows)
    try:
        assert all(next_nodes_are({"host-aa"}) for _ in range(5))
        assert discoveries == [1]
        rows = [row("aa"), row("bb")]
        until(lambda: next_nodes_are({"host-aa", "host-bb"}), "the other one is seen")
        assert discoveries == [1, 2]
        rows = [row("aa", CPU=0)]
        until(lambda: next_nodes_are(set()), "the loss of the last node is reported")
        rows = [row("aa")]
        until(lambda: next_nodes_are({"host-aa"}), "it is there again")
    finally:
        lookout.close()


# --- idle agents


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(agent_pool, "_ray_job", lambda: "job")
    return []


def test_one_timer_serves_all_idle_agents(ended: list[Any]) -> None:
    kept = IdleAgents(60.0, ended.append)
    others = set(threading.enumerate())  # a thread of an earlier test on Ray may end meanwhile
    for number in range(50):
        kept.put(f"node-{number}", "", object())
    assert kept._timer is not None
    assert [one for one in threading.enumerate() if one.name == IDLE_THREAD_NAME and one not in others] == [kept._timer]
    kept._timer.cancel()


def test_an_idle_agent_ends_after_its_own_timeout(ended: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("dovetail.engines.ray.agent_pool.time.monotonic", lambda: now[0])
    monkeypatch.setattr(IdleAgents, "_schedule_expiry", lambda self, when: waits.append(when))
    waits: list[float] = []
    kept = IdleAgents(60.0, ended.append)
    kept.put("a", "", "first")
    now[0] = 130.0
    kept.put("b", "", "second")
    assert kept.take("a", "") == "first"
    kept.put("a", "", "first")  # used meanwhile
    now[0] = 160.0
    kept._expire()
    assert ended == []
    now[0] = 190.0
    kept._expire()
    assert sorted(ended) == ["first", "second"]
    assert kept.take("a", "") is None
    assert waits[-1] == 190.0


def test_the_call_that_waits_for_messages_returns_when_its_session_ends() -> None:
    """It has the only thread of the agent for such calls: the next session would begin after a heartbeat."""
    outbox = Outbox()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(outbox.take, 10 * PATIENCE_S)
        outbox.end()
        assert waiting.result(PATIENCE_S) == []
    outbox.put([SizedOp(("log", "last"), 8)])
    assert outbox.take(10 * PATIENCE_S) == [("log", "last")]
    assert outbox.take(10 * PATIENCE_S) == []


# Code of hosted objects


def test_an_agent_keeps_the_code_of_the_objects_that_were_used_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_pool, "MAX_AGENT_UNITS", 2)
    monkeypatch.setattr(agent_pool.IDLE_AGENTS, "take", lambda *_: None)
    monkeypatch.setattr(agent_pool, "start_agent", lambda *_: NoHandle())
    pool = AgentPool(tmp_path, around("a"), AgentListener(SimpleQueue()))
    monkeypatch.setattr(pool._listener, "add", lambda _: None)
    link = pool.link("a", "")
    assert link is not None
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(link, "send", lambda op, *_: sent.append(op))
    for number, name in enumerate(["x", "y", "x", "z", "y"]):
        worker = RemoteWorker(StartWorker(number, (Seat("a"),), (HostedObject(name, len),)), "")
        worker.ranks_by_agent[link] = (0,)
        pool.start(link, worker, {})
    assert [op[:2] for op in sent if op[0] != "start"] == [
        ("unit", "x"),
        ("unit", "y"),
        ("unit", "z"),
        ("forget_unit", "y"),
        ("unit", "y"),
        ("forget_unit", "x"),
    ]


def test_pickled_definitions_that_were_used_last_are_kept() -> None:
    works = PickledWorks(limit=2)
    objects = [HostedObject(str(number), [number]) for number in range(3)]
    first = works.get(objects[0])
    works.get(objects[1])
    assert works.get(objects[0]) is first
    works.get(objects[2])
    assert len(works) == 2
    assert works.get(objects[0]) is first
