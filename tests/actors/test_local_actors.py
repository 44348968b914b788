"""Contract suite of actor systems on the local engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from actors.actor_classes import Gate
from actors.contract import ActorContract
from actors.fault_contract import FaultContract
from runtime.aids import CLUSTER, Script, is_there
from waiting import LONG, PATIENCE_S, until

if TYPE_CHECKING:
    from pathlib import Path

FAULT_LIMIT_S = 900 if LONG else 150


class TestLocalActors(ActorContract):
    @staticmethod
    def place(request: pytest.FixtureRequest) -> dict[str, Any]:
        return {"cluster": CLUSTER}


@pytest.mark.time_limit(FAULT_LIMIT_S)
class TestLocalActorFaults(FaultContract):
    @staticmethod
    def place(request: pytest.FixtureRequest) -> dict[str, Any]:
        return {"cluster": CLUSTER}


DRIVER = """
import json, os, time
import dovetail as dt

class Echo:
    def pid(self):
        return os.getpid()

system = dt.ActorSystem([dt.Role("echo", Echo, workers=2, resources=dt.Resources(cpus=0.05))])
live = system.launch(**json.loads(os.environ["PLACE"]))
print("PIDS", json.dumps(live.echo.all.pid().result(60)), "", flush=True)
time.sleep(600)
"""


@pytest.mark.time_limit
@pytest.mark.usefixtures("by_value")
def test_a_role_reaches_its_target_within_three_decisions(tmp_path: Path) -> None:
    """The first decision waits for a second signal, the second adds all workers, the third keeps them."""
    gate = tmp_path / "gate"
    scale = dt.Scale(2.0, interval="100ms", cooldown="1h")
    role = dt.Role("gate", Gate, workers=(1, 4), slots=10, scale=scale, resources=dt.Resources(cpus=0.05))
    with dt.ActorSystem([role]).launch(cluster=CLUSTER, run_dir=tmp_path / "run") as live:
        held = [live.gate[0].hold_async(str(gate)) for _ in range(6)]
        until(lambda: [row.state for row in live.status().instances] == ["ready"] * 3, "there are three instances")
        gate.touch()
        assert [one.result(PATIENCE_S) for one in held] == [str(gate)] * 6
    changes = [
        line for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines() if '"what":"scale"' in line
    ]
    assert len(changes) == 1
    assert "1 -> 3 instances" in changes[0]


@pytest.mark.time_limit
def test_a_killed_driver_leaves_no_process(tmp_path: Path) -> None:
    with Script(tmp_path, DRIVER, warm=True, PLACE=json.dumps({"cluster": CLUSTER})) as script:
        script.says("] \n")
        pids = json.loads(script.output.partition("PIDS ")[2].partition("]")[0] + "]")
        assert all(map(is_there, pids))
        script.kill()
        took = until(lambda: not any(map(is_there, pids)), "all actors have ended")
        script.all_gone()
        if LONG:
            assert took < 2
