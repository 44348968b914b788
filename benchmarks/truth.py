"""Accuracy of predicted rates: from a probe, from profiles, and simulated, compared with what a run reaches.

    python benchmarks/truth.py --json result.json
    python benchmarks/truth.py --only filter,barrier --seconds 10

For each pipeline, in a home of its own: a probe and the plan from it; a run, which stores profiles; the plan and a
simulation from these profiles; a second run, whose rate is measured in its last stage between 20 and 80 % of the rows,
or over the whole run if it has several waves. A prediction is given as a multiple of the reached rate. At the end, ten
rows are run and the pipeline is planned again: `after_small_run` is the ratio of the predictions.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dovetail as dt
import report
from dovetail.runtime.probe import probe
from dovetail.runtime.stage_profiles import load_profiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

LOG = "DOVETAIL_TRUTH_LOG"
PROBE_ITEMS = 1000
SMALL_RUN_ITEMS = 10
LIMITS = (10, 15, 20)
"""Percent."""
PREDICTIONS = ("probed", "profiled", "simulated")


# --- stages


def compute(seconds: float) -> None:
    """Use the CPU for this long, whatever else runs."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def computes(seconds: float, items: list[Any]) -> list[Any]:
    compute(seconds * len(items))
    return items


def sleeps(seconds: float, items: list[Any]) -> list[Any]:
    time.sleep(seconds * len(items))
    return items


def per_call(seconds: float, items: list[Any]) -> list[Any]:
    time.sleep(seconds)
    return items


async def awaits(seconds: float, items: list[Any]) -> list[Any]:
    await asyncio.sleep(seconds)
    return items


def copies(seconds: float, count: int, items: list[Any]) -> list[Any]:
    time.sleep(seconds * len(items))
    return [item for item in items for _ in range(count)]


def keeps_some(seconds: float, items: list[Any]) -> list[Any]:
    """Drop 70 %, in groups."""
    time.sleep(seconds * len(items))
    return [item for item in items if item % 30 >= 21]


def skewed(seconds: float, items: list[Any]) -> list[Any]:
    """1 % of the rows take 100 times as long."""
    time.sleep(sum(seconds * (100 if item % 100 == 99 else 1) for item in items))
    return items


def drifts(seconds: float, half: int, items: list[Any]) -> list[Any]:
    """The second half of the rows takes twice as long."""
    time.sleep(sum(seconds * (2 if item >= half else 1) for item in items))
    return items


def mixed(seconds: float, items: list[Any]) -> list[Any]:
    compute(seconds * len(items) / 2)
    time.sleep(seconds * len(items) / 2)
    return items


def sorted_rows(rows: Iterable[Any]) -> Iterator[Any]:
    yield from sorted(rows)


class SlowSetup:
    def setup(self) -> None:
        time.sleep(2.0)

    def __call__(self, items: list[Any]) -> list[Any]:
        return sleeps(0.01, items)


class SlowFirstCall:
    def __init__(self) -> None:
        self._called = False

    def __call__(self, items: list[Any]) -> list[Any]:
        if not self._called:
            self._called = True
            time.sleep(1.0)
        return sleeps(0.01, items)


def lengths(rows: list[Any]) -> list[Any]:
    compute(0.0005 * len(rows))
    return [{**row, "length": len(row["text"])} for row in rows]


def logged(items: list[Any]) -> list[Any]:
    """The last stage: log the time and the number of items."""
    data = f"{time.time()} {len(items)}\n".encode()
    file = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, data)
    os.close(file)
    return items


# --- pipelines


@dataclass(frozen=True)
class Case:
    """A pipeline, and about how many rows per second it takes."""

    stages: Callable[[int], list[dt.Stage]]
    rows_per_s: float
    cluster: str = "1x(2cpu, 8GB)"
    files: str = ""
    """Suffix of the sink, if it reads and writes files."""
    source_s: float = 0.0
    """Seconds per row of the source."""


def stage(name: str, run: Any, cpus: float = 1, **more: Any) -> dt.Stage:
    gpus = {"gpus": more.pop("gpus")} if "gpus" in more else {}
    return dt.Stage(name, run, dt.Resources(cpus=cpus, **gpus), **{"fuse": False, **more})


def one(run: Any, cpus: float = 1, **more: Any) -> Callable[[int], list[dt.Stage]]:
    return lambda _: [stage("work", run, cpus, **more)]


CASES: dict[str, Case] = {
    "cpu": Case(one(partial(computes, 0.002)), 900),
    "sleep": Case(one(partial(sleeps, 0.005)), 380),
    "async": Case(one(partial(awaits, 0.05), slots=16), 600),
    "fan out": Case(
        lambda _: [stage("split", partial(copies, 0.002, 5)), stage("work", partial(sleeps, 0.002))],
        95,
        cluster="1x(4cpu, 8GB)",
    ),
    "filter": Case(
        lambda _: [stage("drop", partial(keeps_some, 0.0005)), stage("work", partial(sleeps, 0.01))],
        650,
        "1x(4cpu, 8GB)",
    ),
    "two leaves": Case(
        lambda _: [
            stage("read", partial(sleeps, 0.002)),
            stage("a", partial(sleeps, 0.004), after=["read"]),
            stage("b", partial(sleeps, 0.008), after=["read"]),
        ],
        240,
        "1x(5cpu, 8GB)",
    ),
    "batch": Case(one(partial(per_call, 0.05), batch_size=32), 1200),
    "setup": Case(one(SlowSetup), 190),
    "skew": Case(one(partial(skewed, 0.002)), 480),
    "jsonl to parquet": Case(one(lengths), 2500, files="parquet"),
    "jsonl to jsonl": Case(one(lengths), 2500, files="jsonl"),
    "barrier": Case(
        lambda _: [
            stage("before", partial(sleeps, 0.01)),
            stage("sort", sorted_rows, barrier=True),
            stage("after", partial(sleeps, 0.01)),
        ],
        390,
        "1x(8cpu, 8GB)",
    ),
    "waves on 1 GPU": Case(
        lambda _: [stage(name, partial(sleeps, 0.005), gpus=1) for name in ("a", "b")], 95, "1x(4cpu, 8GB, 1xL40S:48GB)"
    ),
    "2 GPUs": Case(
        lambda _: [stage("cut", partial(sleeps, 0.002)), stage("model", partial(sleeps, 0.01), gpus=1)],
        190,
        "1x(4cpu, 8GB, 2xL40S:48GB)",
    ),
    "drift": Case(lambda rows: [stage("work", partial(drifts, 0.005, rows // 2))], 250),
    "3 stages": Case(
        lambda _: [stage(name, partial(sleeps, s)) for name, s in (("a", 0.004), ("b", 0.012), ("c", 0.008))],
        320,
        "1x(8cpu, 8GB)",
    ),
    "6 and 10 ms": Case(
        lambda _: [stage("a", partial(sleeps, 0.006)), stage("b", partial(sleeps, 0.01))], 240, "1x(4cpu, 8GB)"
    ),
    "first call": Case(one(SlowFirstCall), 190),
    "overuse": Case(one(partial(computes, 0.004), cpus=0.25), 450),
    "slow source": Case(one(partial(sleeps, 0.005)), 95, source_s=0.01),
    "cpu and sleep": Case(one(partial(mixed, 0.006)), 320),
}


def pipeline_of(name: str, case: Case, rows: int) -> dt.Pipeline:
    stages = case.stages(rows)
    leaves = [stages[-1].name]
    last = dt.Stage("log", logged, dt.Resources(cpus=0.1), after=leaves, fuse=False, batch_size=1)
    return dt.Pipeline([*stages, last], name=name.replace(" ", "_"))


# --- measurements


@dataclass
class Bench:
    """One pipeline in a folder of its own."""

    name: str
    case: Case
    rows: int
    folder: Path

    def __post_init__(self) -> None:
        self.pipeline = pipeline_of(self.name, self.case, self.rows)
        self.cluster = dt.Cluster.of(self.case.cluster)
        self.log = self.folder / "log.txt"
        if self.case.files:
            lines = (json.dumps({"id": n, "text": "x" * (n % 500)}) + "\n" for n in range(self.rows))
            (self.folder / "in.jsonl").write_text("".join(lines))

    def source(self) -> Any:
        if self.case.files:
            return str(self.folder / "in.jsonl")
        return self._slow_rows() if self.case.source_s else range(self.rows)

    def _slow_rows(self) -> Iterator[int]:
        for number in range(self.rows):
            time.sleep(self.case.source_s)
            yield number

    def kinds(self) -> tuple[str, dict[str, str]]:
        return ("jsonl", {"log": self.case.files}) if self.case.files else ("iterable", {})

    def run(self, limit: int | None = None) -> float:
        """Run everything, and return the rows of the source per second."""
        self.log.write_text("")
        sink: dict[str, Any] = {"sink": str(self.folder / f"out.{self.case.files}")} if self.case.files else {}
        run = dt.run(
            self.pipeline, self.source(), cluster=self.cluster, run_dir=self._new_folder(), limit=limit, **sink
        )
        if not sink:
            for _ in run:
                pass
        summary = run.wait()
        assert summary.status == "finished", summary.status
        if limit is not None or len(run.plan.waves) > 1:
            return summary.read / summary.seconds
        return rate_of_log(self.log.read_text(), self.rows)

    def predict(self) -> tuple[float, float]:
        """Rates of the plan and of a simulation from profiles."""
        profiles = load_profiles(self.pipeline, self.cluster, *self.kinds())
        plan = dt.plan(self.pipeline, self.cluster, profiles=profiles)
        assert plan.rate is not None, plan.assumptions
        simulated = dt.simulate(
            self.pipeline, plan=plan, profiles=profiles, items=self.rows, run_dir=self._new_folder()
        )
        rate = simulated.rate
        if len(plan.waves) > 1:
            rate = self.rows / simulated.summary.seconds
        return plan.rate, rate

    def probe(self) -> float:
        probe(self.pipeline, self.source(), PROBE_ITEMS, self.cluster)
        return self.predict()[0]

    def _new_folder(self) -> str:
        return tempfile.mkdtemp(dir=self.folder)


def rate_of_log(text: str, rows: int) -> float:
    """Source rows per second between 20 and 80 % of what the last stage got."""
    calls = sorted((float(at), int(count)) for at, count in (line.split() for line in text.splitlines()))
    total = sum(count for _, count in calls)
    seen, began, first = 0, 0.0, 0
    for at, count in calls:
        seen += count
        if not began and seen >= 0.2 * total:
            began, first = at, seen
        if seen >= 0.8 * total:
            return (seen - first) / (at - began) * rows / total
    raise AssertionError("the run had no results")


def measure(name: str, seconds: float) -> dict[str, Any]:
    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="dovetail-truth-") as folder:
        os.environ |= {"DOVETAIL_HOME": f"{folder}/home", LOG: f"{folder}/log.txt"}
        bench = Bench(name, case, max(100, int(case.rows_per_s * seconds)), Path(folder))
        Path(f"{folder}/log.txt").touch()
        probed = bench.probe()
        bench.run()
        profiled, simulated = bench.predict()
        reached = bench.run()
        before = bench.predict()[0]
        bench.run(limit=SMALL_RUN_ITEMS)
        small = bench.predict()[0] / before
    rates = {"probed": probed, "profiled": profiled, "simulated": simulated, "reached": reached}
    return {"pipeline": name, **rates, "after_small_run": small}


def shares_within(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Prediction -> percent -> share of pipelines whose prediction is within that of the reached rate."""
    return {
        kind: {
            str(limit): sum(abs(row[kind] / row["reached"] - 1) <= limit / 100 for row in rows) / len(rows)
            for limit in LIMITS
        }
        for kind in PREDICTIONS
    }


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=20.0, help="approximate length of each run")
    arguments.add_argument("--only", metavar="NAMES", help="names of pipelines, separated by commas")
    given = arguments.parse_args()
    names = given.only.split(",") if given.only else list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        sys.exit(f"no pipeline {', '.join(unknown)}; there are {', '.join(CASES)}")
    rows = []
    for name in names:
        rows.append(measure(name, given.seconds))
        shares = ", ".join(f"{kind} {rows[-1][kind] / rows[-1]['reached']:.3f}" for kind in PREDICTIONS)
        print(f"{name}: {shares} of {rows[-1]['reached']:.4g}/s", file=sys.stderr, flush=True)
    cells = [
        [row["pipeline"], *(row[kind] / row["reached"] for kind in PREDICTIONS), row["reached"], row["after_small_run"]]
        for row in rows
    ]
    report.table(("pipeline", *PREDICTIONS, "reached/s", "after small run"), cells)
    within = shares_within(rows)
    report.table(("within", *(f"{limit} %" for limit in LIMITS)), [[k, *v.values()] for k, v in within.items()])
    report.write(given.json, {"rows": rows, "within": within})


if __name__ == "__main__":
    main()
