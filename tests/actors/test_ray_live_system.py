"""Live systems on Ray: nodes that are lost, and what a system leaves behind."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import dovetail as dt
from actors.actor_classes import Asker, Gate, Unprepared
from engines.ray_runs import use_only_nodes
from ray_aids import RESTORED_S, add_node, patiently, until_available_is
from runtime.aids import command_of, is_there
from waiting import LONG, PATIENCE_S, until

if TYPE_CHECKING:
    from pathlib import Path

    from ray_aids import FakeCluster

pytestmark = [pytest.mark.ray, pytest.mark.time_limit, pytest.mark.usefixtures("by_value")]
SMALL = dt.Resources(cpus=0.5)


class NodeReporter:
    worker: Any

    def node(self) -> str:
        return str(self.worker.node)

    def ask(self, index: int) -> str:
        return str(self.worker.actors.place[index].node().result(PATIENCE_S))


def test_the_instances_of_a_lost_node_are_restarted_on_another(
    ray_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ray_cluster.available()
    quick = dt.Restart(backoff="100ms", limit=100)
    with add_node(ray_cluster, num_cpus=2) as lost:
        use_only_nodes(ray_cluster, monkeypatch, "d", lost.name)
        roles = [
            dt.Role("place", NodeReporter, workers=2, spread=True, resources=SMALL, restart=quick),
            dt.Role("other", NodeReporter, resources=SMALL, restart=quick),
        ]
        with dt.ActorSystem(roles).launch(f"ray:{ray_cluster.address}", deadline=PATIENCE_S) as live:
            nodes = live.place.all.node().result(PATIENCE_S)
            moved = nodes.index(lost.dovetail_name)
            stays = ray_cluster.nodes["d"].dovetail_name
            lost.kill()
            until(lambda: live.status().instances[moved].incarnation == 2, "it is started elsewhere")
            assert live.place[moved].node().result(PATIENCE_S) == stays
            until(lambda: live.status().state == "ready", "the system is whole again")
            assert live.other.one.ask(moved).result(PATIENCE_S) == stays
    until_available_is(ray_cluster, before, patiently(RESTORED_S))


def test_calls_between_nodes_that_wait_for_each_other_fail_and_are_cancelled_where_they_run(
    ray_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = ray_cluster.available()
    use_only_nodes(ray_cluster, monkeypatch, "a", "d")
    apart = dt.Affinity(apart=["here"])
    roles = [
        dt.Role("here", Asker, resources=SMALL),
        dt.Role("there", Asker, resources=SMALL, affinity=apart),
        dt.Role("gate", Gate, slots=2, resources=SMALL, affinity=apart),
    ]
    with dt.ActorSystem(roles).launch(f"ray:{ray_cluster.address}", deadline=PATIENCE_S) as live:
        for first, second in (("ask", "ask"), ("ask_async", "ask_async")):
            asked = getattr(live.here.one, first)("there", second, "here", "index")
            error = asked.exception(PATIENCE_S)
            assert isinstance(error, dt.CallCycleError)
            assert "here[0] -> there[0] -> here[0]" in str(error) or "there[0] -> here[0] -> there[0]" in str(error)
        assert live.here.one.ask("there", "index").result(PATIENCE_S) == 0
        path = tmp_path / "held"
        assert live.here.one.abandon("gate", "hold_async", str(path)).result(PATIENCE_S)
        until(lambda: str(path) in live.gate.one.history().result(PATIENCE_S)[1], "the method has been cancelled")
    until_available_is(ray_cluster, before, patiently(RESTORED_S))


@pytest.mark.long
def test_the_result_of_an_agent_that_was_stopped_until_it_counted_as_lost_is_refused(
    ray_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its worker answers through the agent, as for a driver on another machine."""
    before = ray_cluster.available()
    use_only_nodes(ray_cluster, monkeypatch, "d")
    monkeypatch.setattr("dovetail.engines.ray.agent_pool.machine_id", lambda: "another machine")
    gate = tmp_path / "gate"
    held = dt.Role("gate", Gate, resources=SMALL, restart=dt.Restart(backoff="100ms", limit=100))
    with dt.ActorSystem([held]).launch(f"ray:{ray_cluster.address}", deadline=PATIENCE_S) as live:
        pid = live.gate.one.pid().result(PATIENCE_S)
        agent = next(one for one in psutil.Process(pid).parents() if "ray::" in command_of(one.pid))
        late = live.gate.one.hold(str(gate))
        until((tmp_path / "gate.begun").exists, "the call is inside")
        agent.suspend()
        gate.touch()  # its worker answers at once, to the agent
        until(lambda: live.status().instances[0].incarnation > 1, "it is started again")
        with suppress(psutil.NoSuchProcess):
            agent.resume()
        with pytest.raises(dt.ActorLostError, match=r"gate\[0\]"):
            late.result(PATIENCE_S)
        assert live.gate.one.pid().result(PATIENCE_S) != pid
        until(lambda: not is_there(pid), "the earlier process has ended")
    until_available_is(ray_cluster, before, patiently(RESTORED_S))


def test_a_fragmented_cluster_is_named_as_the_reason(ray_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ray_cluster.available()
    use_only_nodes(ray_cluster, monkeypatch, "a", "d")
    roles = [
        dt.Role("filler", NodeReporter, workers=2, spread=True, resources=dt.Resources(cpus=3)),
        dt.Role("large", NodeReporter, resources=dt.Resources(cpus=2)),
    ]
    began = time.monotonic()
    with pytest.raises(dt.InfeasibleError, match=r"(?s)'large'.*2 CPUs are free, but as 1 \+ 1"):
        dt.ActorSystem(roles).launch(f"ray:{ray_cluster.address}", deadline=PATIENCE_S)
    if LONG:
        assert time.monotonic() - began < 2
    assert ray_cluster.available() == before


def test_a_system_that_fails_to_start_leaves_nothing_reserved(
    ray_cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ray_cluster.available()
    use_only_nodes(ray_cluster, monkeypatch, "d")
    roles = [dt.Role("place", NodeReporter, resources=SMALL), dt.Role("bad", Unprepared, resources=SMALL)]
    with pytest.raises(dt.RunError, match=r"(?s)DT522.*bad\[0\] did not start.*no model in this folder"):
        dt.ActorSystem(roles).launch(f"ray:{ray_cluster.address}", deadline=PATIENCE_S)
    until_available_is(ray_cluster, before, patiently(RESTORED_S))
