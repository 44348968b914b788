"""Run folders written by hand, for what no test machine has: GPUs, ten minutes of work, out-of-memory kills."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STARTED = 1_800_000_000.0
GB = 1 << 30


def shape(cpus: float = 1.0, memory_bytes: int = 0) -> dict[str, Any]:
    return {"cpu_milli": round(1000 * cpus), "memory_bytes": memory_bytes, "ranks": 1}


class RecordedRun:
    """A run whose units each have one worker that works all the time, unless given otherwise."""

    def __init__(self, path: Path, units: Sequence[str], name: str = "recipe") -> None:
        self.path, self.units = path, units
        self.plan: list[dict[str, Any]] = [{"name": unit, "shape": shape()} for unit in units]
        self.name = name
        self.lines: list[dict[str, Any]] = []
        self.now = 0.0

    def line(self, kind: str, t: float | None = None, **data: Any) -> None:
        self.lines.append({"v": 1, "t": self.now if t is None else t, "k": kind, **data})

    def view(self, t: float, *, rows: int, last: bool = False, **changes: dict[str, Any]) -> None:
        """All units have taken this many rows; each stage of a unit an equal share of its time."""
        self.now = t
        for unit in self.units:
            stages = unit.split("+")
            unit_rows = [[stage, rows, rows, t / len(stages)] for stage in stages]
            data: dict[str, Any] = {
                "ready": 0 if last else 1,
                "draining": 0,
                "starting": 0,
                "taken_total": rows,
                "given_total": rows,
            }
            data |= {"busy_s_total": t, "failed_total": 0, "stages": unit_rows, "started_total": 1}
            self.line("unit", name=unit, **data | changes.get(unit, {}))

    def uses(self, cpu_s: float, **more: Any) -> None:
        for unit in self.units:
            data: dict[str, Any] = {
                "workers": 1,
                "cpu_s_total": cpu_s,
                "uss_bytes": GB,
                "peak_bytes": GB,
                "cpus_now": 0.5,
                "cpus": 0.5,
            }
            self.line("unit_use", unit=unit, **data | more)
        self.line("machine_use", cpus=4.0, cpu_count=8, memory_used_bytes=4 * GB, memory_bytes=16 * GB)

    def end(self, **more: Any) -> None:
        """Write the lines that end a view."""
        run: dict[str, Any] = {
            "state": "running",
            "read": 1000,
            "finished": 1000,
            "delivered": 900,
            "failed": 0,
            "bottleneck": "",
        }
        self.line("run", **run | {"use": {"CPUs": [1000, 8000]}} | more)

    def write(self, **header: Any) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        data = {"version": 1, "id": self.path.name, "name": self.name, "engine": "local", "cluster": "1x(8cpu)"}
        data |= {"started": STARTED, "ended": STARTED + self.now, "status": "finished", "error": ""}
        (self.path / "run.json").write_text(json.dumps(data | header))
        (self.path / "plan.json").write_text(json.dumps({"units": self.plan}))
        (self.path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return self.path


def long_run(path: Path, operators: int = 20, seconds: int = 600, cards: int = 2) -> list[tuple[str, tuple[str, ...]]]:
    """Record a run of ten minutes, with operators in units of four and cards; returns its stages."""
    names = [f"operator_{number}_filter" for number in range(operators)]
    units = ["+".join(names[begin : begin + 4]) for begin in range(0, operators, 4)]
    made = RecordedRun(path, units)
    for number, unit in enumerate(units):
        gpus = [number % cards] if cards else []
        made.line("worker", 0.0, do="start", w=number, unit=unit, node="node-0", gpus=gpus)
        made.line("worker", 0.5, do="ready", w=number, unit=unit, node="node-0")
    for t in range(seconds + 1):
        made.view(float(t), rows=100 * t, last=t == seconds)
        if t % 5 == 0:
            made.uses(0.5 * t + t // 60, uss_bytes=GB + t * 1_000_000)
            for card in range(cards):
                use = {"use_percent": 20 + (t * (card + 3)) % 50, "memory_used_bytes": 8 * GB, "memory_bytes": 20 * GB}
                made.line("gpu_use", index=card, power_w=150.0, **use)
        made.end(bottleneck=units[0], state="finished" if t == seconds else "running")
    made.write()
    return [(name, (name,)) for name in names]
