"""What would a pipeline do on a cluster that is not there? The same controller over the simulated engine."""

from __future__ import annotations

import gc
import math
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import dovetail
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.engines.simulated.source import SimulatedData
from dovetail.engines.simulated.world import Behaviour, Constant, Lognormal, World
from dovetail.errors import ConfigError, Problem, shown
from dovetail.observe.folder import create_run
from dovetail.observe.history import History
from dovetail.observe.progress import Progress
from dovetail.observe.recorder import About, Recorder
from dovetail.observe.replay import ReplayRecorder
from dovetail.observe.summary import summary
from dovetail.observe.summary_lines import summary_lines
from dovetail.running.observed import run_observed
from dovetail.scheduling.planner import plan as make_plan
from dovetail.streaming.controller import Stream
from dovetail.streaming.options import Options
from dovetail.streaming.remake import header_of
from dovetail.streaming.work import works_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dovetail.control.engine import Observer
    from dovetail.observe.summary import Summary
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.cluster import Cluster
    from dovetail.scheduling.plan import Plan

SETTING_UP_S = 1.0
SPREAD = 0.3
DEFAULT_SECONDS = 60.0
DEFAULT_ITEMS = 100_000
"""At most, when nobody says how many."""
ITEMS_LIMIT = 10**12
MOST_SPREAD = 5.0
RARELY = 200_000
"""Objects that come and stay between two looks of the garbage collector, instead of 700."""


@dataclass(frozen=True, slots=True)
class Chances:
    """What is left to chance in a simulated run, and how much."""

    seed: int
    spread: float
    setup_s: float
    deaths_per_hour: float
    node_losses_per_hour: float


@dataclass(frozen=True)
class Simulation:
    """How a simulated run went. `str()` of it is what a real run prints at its end."""

    plan: Plan
    summary: Summary
    folder: Path

    def __str__(self) -> str:
        return "\n".join(summary_lines(self.summary))

    @property
    def status(self) -> str:
        """finished, failed or cancelled."""
        return self.summary.status

    @property
    def error(self) -> str:
        return self.summary.error

    @property
    def seconds(self) -> float:
        """Virtual ones."""
        return self.summary.seconds

    @property
    def delivered(self) -> int:
        return self.summary.delivered

    @property
    def rate(self) -> float:
        """Source items per second in the steady state; over the whole run, if it was too short for one."""
        steady = self.summary.steady_rate
        return self.summary.mean_rate if steady is None else steady


def simulate(
    pipeline: Pipeline,
    cluster: Cluster | str = "auto",
    items: int | None = None,
    *,
    mode: str = "auto",
    seed: int = 0,
    spread: float = SPREAD,
    setup_s: float = SETTING_UP_S,
    deaths_per_hour: float = 0.0,
    node_losses_per_hour: float = 0.0,
    plan: Plan | None = None,
    world: World | None = None,
    options: Options | None = None,
    run_dir: str | Path | None = None,
    record: bool = False,
    progress: bool = False,
    what: str = "dt.simulate",
) -> Simulation:
    """Runs the pipeline on a simulated cluster, in virtual time: the same controller as a real run, made-up workers.

    Workers are as fast as `rate=` says (as the plan assumed, where it does not), each call by chance: lognormal with
    sigma `spread`. `items`: how many the source has; by default what the plan does in a minute. `world` describes
    everything instead. A run folder is written; `record=True` adds the controller's exact input.
    """
    chances = Chances(seed, spread, setup_s, deaths_per_hour, node_losses_per_hour)
    _check(chances, items)
    made = plan or make_plan(pipeline, cluster, mode)
    count = items if items is not None else min(DEFAULT_ITEMS, max(1, round(DEFAULT_SECONDS * made.rate)))
    world = world or _world(pipeline, made, chances)
    engine = SimulatedEngine(world, made.cluster)
    works = works_of(pipeline, made)
    stream = Stream(works, made, options or Options(hop_s=world.hop_s))
    folder = create_run(made.name, run_dir)
    recorder = Recorder(folder, _about(made, what, count, world), stream.view, stream.workers, plan=made.to_json())
    observers: list[Observer] = [recorder]
    if record:
        observers.append(ReplayRecorder(folder.replay_log, header_of(works, made, stream.board.options)))
    if progress:
        observers.append(Progress(stream.view, name=made.name, virtual=True))
    with _collecting_rarely():
        run_observed(stream, engine, SimulatedData(engine, count), recorder, observers)
    return Simulation(made, summary(History.load(folder.path)), folder.path)


def _about(plan: Plan, what: str, items: int, world: World) -> About:
    return About(
        plan.name,
        what,
        "sim",
        plan.cluster.spec(),
        version=dovetail.__version__,
        virtual=True,
        more={"items": items, "seed": world.seed},
    )


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """The controller makes no cycles, but thousands of workers that the collector would look through again and again: a
    quarter of the time of a large simulation."""
    before = gc.get_threshold()
    gc.set_threshold(RARELY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _check(chances: Chances, items: int | None) -> None:
    numbers = {item.name: getattr(chances, item.name) for item in fields(chances)}
    if items is not None:
        numbers["items"] = items
    problems = [problem for name, value in numbers.items() for problem in _wrong(name, value)]
    if problems:
        raise ConfigError(problems)


def _wrong(name: str, value: object) -> list[Problem]:
    whole = name in ("items", "seed")
    kind = int if whole else (int, float)
    limit = ITEMS_LIMIT if whole else MOST_SPREAD if name == "spread" else 1e9
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value) or not 0 <= value <= limit:
        sort = "a whole number" if whole else "a number"
        message = f"{name}={shown(value)} is not {sort} from 0 to {limit:g}"
        return [Problem("DT310", message, fixes=(f"{name}={'1000' if whole else '0'}",))]
    return []


def _world(pipeline: Pipeline, plan: Plan, chances: Chances) -> World:
    """Workers that are exactly as fast as the plan expects, on average."""
    behaviours = {}
    for unit in plan.units:
        returns = math.prod(stage.returns for stage in map(pipeline.stage, unit.stages) if stage.returns is not None)
        behaviours[unit.name] = Behaviour(
            seconds_per_item=(pipeline.stage(unit.stages[0]).slots or 1) / unit.rate,
            returns=returns,
            spread=Lognormal(chances.spread) if chances.spread else Constant(),
            setup_s=chances.setup_s,
            deaths_per_hour=chances.deaths_per_hour,
        )
    return World(behaviours, seed=chances.seed, node_losses_per_hour=chances.node_losses_per_hour)
