"""`dt.simulate`: the plan and the controller of a real run on a simulated cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.engines.simulated.world import LoseNode, ScriptedEvent, world_from_pipeline
from dovetail.observe.history import RunHistory
from dovetail.observe.replay import controller_from_record, replay
from dovetail.observe.summary import summarize_run
from dovetail.scheduling.stage_rates import Profile
from stage_functions import same

if TYPE_CHECKING:
    from pathlib import Path

CLUSTER = "2x(16cpu, 64GB, 2xL40S:48GB)"


def pipeline(**caption: Any) -> dt.Pipeline:
    return dt.Pipeline(
        [
            dt.Stage("read", same, rate=20, fuse=False),
            dt.Stage("caption", same, dt.Resources(gpus=0.25), batch_size=8, **({"rate": 4} | caption)),
            dt.Stage("write", same, dt.Resources(cpus=0.5), rate=50, fuse=False),
        ],
        name="clips",
    )


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))


def test_a_simulation_reaches_about_what_the_plan_predicts_and_delivers_everything() -> None:
    result = dt.simulate(pipeline(), CLUSTER, items=10_000)
    assert (result.status, result.error, result.delivered) == ("finished", "", 10_000)
    assert result.rate == pytest.approx(result.plan.rate, rel=0.07)
    assert result.plan.bound is not None
    assert result.rate <= result.plan.bound * 1.05


def test_the_summary_contains_rate_bottleneck_use_workers_setup_and_prediction() -> None:
    text = str(dt.simulate(pipeline(), CLUSTER, items=2000, setup_s=3.0))
    for word in ("2000 of 2000 items", "steady", "predicted", "bottleneck", "GPUs", "workers", "setup", "folder"):
        assert word in text, word


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    def seconds(seed: int) -> float:
        return dt.simulate(pipeline(), CLUSTER, items=2000, seed=seed).seconds

    assert seconds(1) == seconds(1)
    assert seconds(1) != seconds(2)


def test_the_run_folder_is_complete(tmp_path: Path) -> None:
    result = dt.simulate(pipeline(), CLUSTER, items=3000, run_dir=tmp_path / "run")
    assert result.folder == tmp_path / "run"
    history = RunHistory.load(result.folder)
    assert history.virtual
    assert set(history.units) == {"read", "caption", "write"}
    assert dt.Plan.from_json((result.folder / "plan.json").read_text()).rate == result.plan.rate
    assert summarize_run(history).finished == result.summary.finished == 3000


def test_a_replay_of_a_recorded_run_gives_the_same_commands() -> None:
    world = world_from_pipeline(
        pipeline(), every={"setup_s": 2.0, "deaths_per_hour": 60.0}, script=(ScriptedEvent(20.0, LoseNode("node-1")),)
    )
    result = dt.simulate(pipeline(), CLUSTER, items=3000, world=world, record=True)
    assert result.status == "finished"
    compared = replay(result.folder / "replay.log", controller_from_record)
    assert compared.is_same, compared.difference
    assert compared.commands > 1000


def test_a_replay_with_other_options_differs() -> None:
    result = dt.simulate(pipeline(), CLUSTER, items=2000, record=True)

    def other(header: Any) -> Any:
        header["options"]["queued_messages_per_slot"] = 1.0
        header["options"]["min_queued_messages"] = 1
        return controller_from_record(header)

    assert not replay(result.folder / "replay.log", other).is_same


def test_deaths_and_lost_nodes_lose_no_item() -> None:
    result = dt.simulate(
        pipeline(), "8x(16cpu, 64GB, 2xL40S:48GB)", items=20_000, deaths_per_hour=20, node_losses_per_hour=20, seed=3
    )
    assert result.status == "finished", result.error
    assert result.delivered == 20_000
    assert sum(unit.lost for unit in result.summary.units) > 10


def test_a_simulation_uses_measured_speeds_returns_and_setup_times() -> None:
    pipe = dt.Pipeline([dt.Stage("split", same, fuse=False), dt.Stage("write", same, fuse=False)])
    profiles = {"split": Profile(rate=50.0, returns=3.0, setup_s=4.0), "write": Profile(rate=60.0, setup_s=0.5)}
    made = dt.simulate(pipe, "1x(8cpu, 16GB)", 20_000, profiles=profiles, spread=0.0)
    assert made.delivered == 3 * 20_000
    assert made.rate == pytest.approx(made.plan.rate, rel=0.05)
    assert {unit.rate_source for unit in made.plan.units} == {"measured"}
    workers = {unit.name: unit.started for unit in made.summary.units}
    setup = {unit.name: unit.setup_s for unit in made.summary.units}
    assert setup["split"] == pytest.approx(4.0 * workers["split"])
    assert setup["write"] == pytest.approx(0.5 * workers["write"])


def test_an_unknown_rate_is_measured_during_the_run() -> None:
    result = dt.simulate(pipeline(rate=None), CLUSTER, items=20_000)
    assert result.delivered == 20_000
    assert result.summary.replans > 1


def test_a_pipeline_in_waves_is_simulated_wave_by_wave() -> None:
    stages = [dt.Stage(f"s{i}", same, dt.Resources(gpus=1), rate=10, fuse=False) for i in range(3)]
    result = dt.simulate(dt.Pipeline(stages), "1x(8cpu, 32GB, 2xL40S:48GB)", items=500)
    assert (result.status, result.delivered) == ("finished", 500)
    assert len(result.plan.waves) == 2


def staged(**stages: dict[str, Any]) -> dt.Pipeline:
    return dt.Pipeline([dt.Stage(name, same, **({"rate": 10, "fuse": False} | more)) for name, more in stages.items()])


BARRIER = {"barrier": True}
WITH_BARRIERS = {
    "between two stages": staged(a={"workers": 1}, b=BARRIER, c={}),
    "first": staged(b=BARRIER, c={}),
    "last": staged(a={}, b=BARRIER),
    "two in a row": staged(a={}, b=BARRIER, c=BARRIER | {"rate": 40}, d={}),
    "behind a fan-out": staged(a={"returns": 3}, b=BARRIER | {"rate": 60, "returns": 0.5}, c={}),
    "beside another branch": staged(a={}, b=BARRIER, c={"after": ["a"]}, d={"after": ["b", "c"]}),
}


@pytest.mark.parametrize("mode", ["streaming", "sequential", "waves"])
@pytest.mark.parametrize("where", WITH_BARRIERS)
def test_a_simulation_with_barriers_reaches_what_the_plan_predicts(where: str, mode: str) -> None:
    result = dt.simulate(WITH_BARRIERS[where], "1x(2cpu)", items=4000, mode=mode, spread=0.0, setup_s=0.0)
    assert result.status == "finished", result.error
    assert result.rate == pytest.approx(result.plan.rate, rel=0.04)


@pytest.mark.parametrize("items", [0, 1])
def test_zero_and_one_item_are_simulated(items: int) -> None:
    result = dt.simulate(pipeline(), CLUSTER, items=items)
    assert (result.status, result.delivered) == ("finished", items)


def test_all_invalid_numbers_are_reported_at_once() -> None:
    with pytest.raises(dt.ConfigError) as caught:
        dt.simulate(pipeline(), CLUSTER, items=-1, seed=1.5, spread=float("nan"), setup_s="soon")  # type: ignore[arg-type]
    assert caught.value.codes == ("DT310",) * 4
    assert all(problem.fix_texts for problem in caught.value.problems)


def test_a_pipeline_that_does_not_fit_fails_before_any_file_is_written(tmp_path: Path) -> None:
    with pytest.raises(dt.InfeasibleError):
        dt.simulate(pipeline(), "1x(2cpu, 8GB)", items=10)
    assert not (tmp_path / "home").exists()
