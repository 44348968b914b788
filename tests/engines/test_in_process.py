"""Contract suite on the in-process engine, without the tests of processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from dovetail.control.events import LossCause
from dovetail.engines.simulated.world import Hangs, Kills
from engines.contract import EngineContract
from engines.scene import Caller, Does, Held, Neighbour, Notebook, Rig, Server, Units
from engines.test_local_contract import LocalRig
from in_process import InProcessEngine

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.pipeline.stage_code import StageCode


def until_let_go(
    does: type[Notebook | Server | Caller | Neighbour] | Does | tuple[StageCode, ...],
) -> type[Notebook | Server | Caller | Neighbour] | Does | tuple[StageCode, ...]:
    """Wait until the end of the test: threads cannot be killed."""
    if not isinstance(does, Does):
        return does
    if any(isinstance(item, Kills) for item in does.items.values()):
        pytest.skip("the item would kill this process")
    return Does(
        {key: Held() if isinstance(item, Hangs) else item for key, item in does.items.items()}, does.setup_error
    )


class InProcessRig(LocalRig):
    engine_type = InProcessEngine

    def __init__(self, units: Units) -> None:
        super().__init__({name: until_let_go(does) for name, does in units.items()})

    def knows_pids(self, worker: int, ranks: int) -> bool:
        return True

    def kill(self, worker: int) -> None:
        self.engine.end_worker(worker, LossCause.SIGNAL, "ended by signal 9")

    def processes(self) -> int:
        return len(self.engine.processes())


class TestInProcessEngine(EngineContract):
    def rig(self, units: Units) -> Rig:
        return InProcessRig(units)


def double(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def reject_threes(item: int) -> int:
    if item % 3 == 0:
        raise ValueError("a multiple of 3")
    return item


@pytest.mark.usefixtures("in_process")
def test_a_run_on_threads_returns_results_and_records_failed_items(tmp_path: Path) -> None:
    stages = [dt.Stage("double", double, batch_size=4), dt.Stage("reject", dt.each(reject_threes), on_error="skip")]
    run = dt.run(dt.Pipeline(stages), range(10), cluster="2cpu, 4GB", run_dir=tmp_path / "run")
    assert sorted(run) == [2, 4, 8, 10, 14, 16]
    assert run.stats.failed == 4
