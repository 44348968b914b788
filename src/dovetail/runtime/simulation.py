"""`dt.simulate`: the real controller on a simulated cluster in virtual time."""

from __future__ import annotations

import gc
import math
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import dovetail
from dovetail.engines.simulated.arrivals import SimulatedData
from dovetail.engines.simulated.engine import SimulatedEngine
from dovetail.engines.simulated.world import Behaviour, Constant, Lognormal, World
from dovetail.errors import Change, ConfigError, Given, Problem, Subject, Text
from dovetail.observe.history import RunHistory
from dovetail.observe.progress import ProgressDisplay
from dovetail.observe.recorder import Recorder
from dovetail.observe.replay import ReplayRecorder, controller_record
from dovetail.observe.run_folder import create_run
from dovetail.observe.run_header import RunDescription
from dovetail.observe.summary import summarize_run
from dovetail.observe.summary_text import summary_lines
from dovetail.runtime.run_loop import run_with_observers
from dovetail.scheduling.planner import plan as make_plan
from dovetail.scheduling.stage_rates import stage_rates
from dovetail.streaming.controller import StreamController
from dovetail.streaming.settings import StreamOptions, unit_specs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from dovetail.control.engine import Observer
    from dovetail.observe.summary import RunSummary
    from dovetail.pipeline.pipeline import Pipeline
    from dovetail.resources.cluster import Cluster
    from dovetail.scheduling.plan import Plan, UnitPlan
    from dovetail.scheduling.stage_rates import Profile

DEFAULT_SETUP_S = 1.0
DEFAULT_SPREAD = 0.3
DEFAULT_DURATION_S = 60.0
MAX_DEFAULT_ITEMS = 100_000
"""Maximum of the default number of items."""
MAX_ITEMS = 10**12
MAX_SPREAD = 5.0
GC_THRESHOLD_OBJECTS = 200_000
"""Allocations between two garbage collections, instead of 700."""


@dataclass(frozen=True, slots=True)
class Randomness:
    """Random influences in a simulated run."""

    seed: int
    spread: float
    setup_s: float | None
    """None: as measured, or DEFAULT_SETUP_S."""
    deaths_per_hour: float
    node_losses_per_hour: float


@dataclass(frozen=True)
class Simulation:
    """Result of a simulated run; `str()` of it has all figures, as `dovetail status` shows them for a real run."""

    plan: Plan
    summary: RunSummary
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
        """Virtual seconds."""
        return self.summary.seconds

    @property
    def delivered(self) -> int:
        return self.summary.delivered

    @property
    def rate(self) -> float:
        """Source items per second in the steady state, or over the whole run if it was too short."""
        steady = self.summary.steady_rate
        return self.summary.mean_rate if steady is None else steady


def simulate(
    pipeline: Pipeline,
    cluster: Cluster | str = "auto",
    items: int | None = None,
    *,
    mode: str = "auto",
    seed: int = 0,
    spread: float = DEFAULT_SPREAD,
    setup_s: float | None = None,
    deaths_per_hour: float = 0.0,
    node_losses_per_hour: float = 0.0,
    plan: Plan | None = None,
    profiles: Mapping[str, Profile] | None = None,
    world: World | None = None,
    options: StreamOptions | None = None,
    run_dir: str | Path | None = None,
    record: bool = False,
    progress: bool = False,
    what: str = "dt.simulate",
) -> Simulation:
    """Simulate the pipeline on a cluster in virtual time, with the controller of a real run and simulated workers.

    Workers process items at the `rate` of their stage, else at the speed in `profiles` (as for `dt.plan`), else at the
    speed that the plan assumes; call times vary with a lognormal distribution of sigma `spread`. A worker needs
    `setup_s` to start (default: as in `profiles`, else 1 s). `items` is the number of source items (default: one minute
    of work). `world` replaces all of these settings. A run folder is written; `record=True` adds the input of the
    controller.
    """
    chances = Randomness(seed, spread, setup_s, deaths_per_hour, node_losses_per_hour)
    _check_numbers(chances, items)
    profiles = profiles or {}
    made = plan or make_plan(pipeline, cluster, mode, profiles=profiles)
    if items is None:
        rate = made.rate or min(unit.throughput for unit in made.units)
        items = min(MAX_DEFAULT_ITEMS, max(1, round(DEFAULT_DURATION_S * rate)))
    world = world or _world(pipeline, made, profiles, chances)
    engine = SimulatedEngine(world, made.cluster)
    works = unit_specs(pipeline, made)
    stream = StreamController(works, made, options or StreamOptions())
    folder = create_run(made.name, run_dir)
    recorder = Recorder(folder, _about(made, what, items, world), stream.view, stream.workers, plan=made.to_json())
    observers: list[Observer] = [recorder]
    if record:
        observers.append(ReplayRecorder(folder.replay_log, controller_record(works, made, stream.state.options)))
    if progress:
        observers.append(ProgressDisplay(stream.view, name=made.name, virtual=True))
    with _reduced_gc():
        run_with_observers(stream, engine, SimulatedData(engine, items, rate=made.source_rate), recorder, observers)
    return Simulation(made, summarize_run(RunHistory.load(folder.path)), folder.path)


def _about(plan: Plan, what: str, items: int, world: World) -> RunDescription:
    return RunDescription(
        plan.name,
        what,
        "sim",
        plan.cluster.spec(),
        version=dovetail.__version__,
        virtual=True,
        more={"items": items, "seed": world.seed},
    )


@contextmanager
def _reduced_gc() -> Iterator[None]:
    """The controller creates no cycles, but thousands of workers, which the garbage collector would scan repeatedly: a
    quarter of the time of a large simulation."""
    before = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _check_numbers(chances: Randomness, items: int | None) -> None:
    given = ((item.name, getattr(chances, item.name)) for item in fields(chances))
    numbers = {name: value for name, value in given if (name, value) != ("setup_s", None)}
    if items is not None:
        numbers["items"] = items
    problems = [problem for name, value in numbers.items() for problem in _range_errors(name, value)]
    if problems:
        raise ConfigError(problems)


def _range_errors(name: str, value: object) -> list[Problem]:
    whole = name in ("items", "seed")
    kind = int if whole else (int, float)
    limit = MAX_ITEMS if whole else MAX_SPREAD if name == "spread" else 1e9
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value) or not 0 <= value <= limit:
        sort = "an integer" if whole else "a number"
        message = Text(Given(name, value), f" is not {sort} from 0 to {limit:g}")
        fixes = (Change({name: 1000 if whole else 0}),)
        return [Problem("DT310", message, fixes=fixes, subject=Subject("setting", name))]
    return []


def _world(pipeline: Pipeline, plan: Plan, profiles: Mapping[str, Profile], chances: Randomness) -> World:
    """Workers whose mean rate is that of the plan. Rates contain the cost of messages, so these take no time."""
    behaviours = {}
    all_returns = stage_rates(pipeline, profiles).returns
    for unit in plan.units:
        returns = math.prod(all_returns[stage] for stage in unit.stages)
        behaviours[unit.name] = Behaviour(
            seconds_per_item=(pipeline.stage(unit.stages[0]).slots or 1) / unit.rate,
            returns=returns,
            spread=Lognormal(chances.spread) if chances.spread else Constant(),
            setup_s=_setup_s(unit, profiles) if chances.setup_s is None else chances.setup_s,
            deaths_per_hour=chances.deaths_per_hour,
        )
    return World(behaviours, seed=chances.seed, node_losses_per_hour=chances.node_losses_per_hour, hop_s=0.0)


def _setup_s(unit: UnitPlan, profiles: Mapping[str, Profile]) -> float:
    """The longest measured setup of the stages of a unit: each was measured with all that share its worker."""
    measured = [profiles[stage].setup_s for stage in unit.stages if stage in profiles]
    return max((seconds for seconds in measured if seconds is not None), default=DEFAULT_SETUP_S)
