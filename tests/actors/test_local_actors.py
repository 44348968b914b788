"""Contract suite of actor systems on the local engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from actors.contract import ActorContract
from actors.fault_contract import FaultContract
from runtime.aids import CLUSTER, Script, is_there
from waiting import LONG, until

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
