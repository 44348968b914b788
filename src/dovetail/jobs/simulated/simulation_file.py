"""Read jobs files for `dovetail simulate`, and the files of arrivals and times that they name.

workers:
  cpu: {count: 4, resources: "8cpu, 32GB"}
  gpu: {count: 2, resources: "16cpu, 128GB, 2xA100", queues: [gpu]}
jobs:
  prepare: {rate: 30/m, time: 20s, resources: {cpus: 1}}
  train: {every: 10m, time: 45m, resources: {cpus: 4, gpus: 1}, queue: gpu, priority: high}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.documents.document import Document
from dovetail.documents.parser import read_document
from dovetail.errors import ConfigError, Problem, short_repr
from dovetail.jobs.simulated.simulation_fields import (
    BAD_JOB_SIMULATION,
    EXAMPLE_FILE,
    JOBS_LIMIT,
    SCENARIO,
    JobCalls,
    JobClass,
    JobScenario,
    WorkerDeath,
    WorkerKind,
    scenario_problems,
    time_s,
)
from dovetail.pipeline.durations import parse_duration
from dovetail.pipeline.file_reader import FileReader
from dovetail.pipeline.overrides import override_values

if TYPE_CHECKING:
    from collections.abc import Sequence

WRONG_LINES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Samples:
    """Listed values of one class of jobs."""

    arrivals: tuple[tuple[float, float | None], ...] = ()
    """(seconds since the start, seconds that the job takes, if known), by time."""
    times_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ParsedScenario:
    """A jobs file without problems."""

    name: str
    scenario: JobScenario
    samples: Mapping[str, Samples]
    """Class of jobs -> its listed values."""

    def with_one_more(self, kind: str) -> ParsedScenario:
        """The same with one more worker of a kind."""
        return replace(self, scenario=self.scenario.with_one_more(kind))


def read_scenario(path: str | Path, sets: Sequence[str] = ()) -> ParsedScenario:
    """`sets`: values of the command line (`--set workers.gpu.count=4`). ConfigError with everything that is wrong."""
    document = read_document(path)
    changed = override_values(document, sets) if sets else document
    return _SimulationFileReader(changed, Path(path).parent).parsed()


def parse_scenario(data: object, name: str = "jobs") -> ParsedScenario:
    """The same from plain data; files are relative to the current folder."""
    return _SimulationFileReader(Document(name, data), Path()).parsed()


class _SimulationFileReader(FileReader):
    def __init__(self, document: Document, folder: Path) -> None:
        super().__init__(document)
        self._folder = folder

    def parsed(self) -> ParsedScenario:
        top = self.mapping((), self.document.data, SCENARIO, EXAMPLE_FILE)
        for name, mistake in SCENARIO.value_mistakes(top):
            self.report((name, *mistake.path), mistake)
        if self.problems:
            raise ConfigError(self.sorted_problems())
        scenario = self._scenario(top)
        if self.problems:
            raise ConfigError(self.sorted_problems())
        for path, problem in scenario_problems(scenario):
            self.add(path, problem)
        samples = {name: self._samples(name, one) for name, one in scenario.jobs.items()}
        if self.problems:
            raise ConfigError(self.sorted_problems())
        return ParsedScenario(self.document.name, scenario, samples)

    def _scenario(self, top: Mapping[str, Any]) -> JobScenario:
        """The scenario of checked data."""
        values = dict(top)
        values["workers"] = {name: WorkerKind(**kind) for name, kind in values["workers"].items()}
        values["jobs"] = {name: JobClass(**self._class_values(name, one)) for name, one in values["jobs"].items()}
        if "deaths" in values:
            values["deaths"] = tuple(WorkerDeath(**death) for death in values["deaths"])
        return JobScenario(**values)

    def _class_values(self, name: str, one: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(one)
        if found.get("batch") is not None:
            found["batch"] = JobCalls(**found["batch"])
        if isinstance(found.get("resources"), Mapping):
            found["resources"] = self.resources(("jobs", name, "resources"), found["resources"], f"jobs {name}")
        return found

    def _samples(self, name: str, one: JobClass) -> Samples:
        arrivals: list[tuple[float, float | None]] = []
        times: list[float] = []
        if isinstance(one.arrivals, str):
            rows = self._rows(("jobs", name, "arrivals"), one.arrivals, columns=2)
            arrivals = [(row[0], row[1] if len(row) > 1 else None) for row in rows]
            if one.time is None and one.times is None and any(time is None for _, time in arrivals):
                message = f"{one.arrivals} does not say how long all jobs {name} take"
                fixes = ("time: 20s", "write lines such as 12.5,20.0")
                self.add(("jobs", name, "arrivals"), Problem(BAD_JOB_SIMULATION, message, fixes=fixes))
        elif one.arrivals is not None:
            arrivals = [(time_s(value), None) for value in one.arrivals]
        if isinstance(one.times, str):
            times = [row[0] for row in self._rows(("jobs", name, "times"), one.times, columns=1)]
        elif one.times is not None:
            times = [parse_duration(value) for value in one.times]
        return Samples(tuple(sorted(arrivals, key=lambda item: item[0])), tuple(times))

    def _rows(self, path: tuple[str, ...], file: str, columns: int) -> list[list[float]]:
        """The numbers of a file, one line per job; empty lines, and a first line without numbers, are skipped."""
        try:
            lines = (self._folder / file).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            message = f"{file} cannot be read: {reason}"
            fixes = ("write the path relative to the folder of this file",)
            self.add(path, Problem(BAD_JOB_SIMULATION, message, fixes=fixes))
            return []
        rows, wrong = [], []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = _numbers(line, columns)
            if row is not None:
                rows.append(row)
            elif number > 1:
                wrong.append(f"line {number}: {short_repr(line)}")
        problem = _rows_problem(file, len(rows), wrong, columns)
        if problem is not None:
            self.add(path, problem)
            return []
        return rows


def _numbers(line: str, columns: int) -> list[float] | None:
    """The numbers of a line; None if there are none, too many, negative ones, or a job that takes no time."""
    try:
        found = [float(part) for part in line.split(",")]
    except ValueError:
        return None
    within = all(0 <= number < float("inf") for number in found) and (found[-1] > 0 or len(found) < columns)
    return found if len(found) <= columns and within else None


def _rows_problem(file: str, rows: int, wrong: list[str], columns: int) -> Problem | None:
    example = "12.5,20.0" if columns == 2 else "20.0"
    if wrong:
        message = f"{file} has {len(wrong)} lines that are not numbers of seconds"
        return Problem(
            BAD_JOB_SIMULATION, message, tuple(wrong[:WRONG_LINES_SHOWN]), (f"write lines such as {example}",)
        )
    if not rows:
        return Problem(BAD_JOB_SIMULATION, f"{file} has no numbers", fixes=(f"write lines such as {example}",))
    if rows > JOBS_LIMIT:
        message = f"{file} has {rows:,} lines; a simulation has at most {JOBS_LIMIT:,} jobs"
        return Problem(BAD_JOB_SIMULATION, message, fixes=(f"head -n {JOBS_LIMIT} {file} > short.csv",))
    return None
