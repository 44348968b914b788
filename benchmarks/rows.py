"""Memory and CPU per row with ten million small rows, against one million.

    python benchmarks/rows.py --rows 10000000 --json result.json

Three trivial stages, fused, two workers: from JSONL to JSONL (`file`), and from a range to the iterator of the run
(`range`). Every run is a new process, measured from start to exit with all of its children. Rows per CPU-second of the
small run are marginal: the difference to a run of a few rows, which excludes start-up. `peak_mb` is driver and workers
together; it is compared with that of a tenth of the rows.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import report
from process_cost import Cost, run_process, with_bytecode

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("file", "range")
CLUSTER = "1x(2cpu, 8GB)"
SMALL_ROWS = 50_000
FEW_ROWS = 1_000
ROWS_PER_WRITE = 10_000
Row = dict[str, Any]


# --- trivial stages


def double(row: Row) -> Row:
    row["x"] *= 2
    return row


def odd(row: Row) -> Row | None:
    return row if row["id"] % 2 else None


def mark(row: Row) -> Row:
    row["seen"] = True
    return row


def double_number(number: int) -> int:
    return 2 * number


def third(number: int) -> int | None:
    return number if number % 3 == 0 else None


def next_number(number: int) -> int:
    return number + 1


STAGES = {"file": (double, odd, mark), "range": (double_number, third, next_number)}


# --- one run, in its own process


def one(kind: str, rows: int, source: str, sink: str) -> int:
    """Number of results."""
    import dovetail as dt

    stages = [dt.Stage(stage.__name__, dt.each(stage), dt.Resources(cpus=1)) for stage in STAGES[kind]]  # type: ignore[arg-type]
    pipe = dt.Pipeline(stages, name="rows")
    with tempfile.TemporaryDirectory() as folder:
        if kind == "file":
            run = dt.run(pipe, source, "local", CLUSTER, sink=sink, run_dir=f"{folder}/run", progress=False)
            return run.wait().delivered
        return sum(1 for _ in dt.run(pipe, range(rows), "local", CLUSTER, run_dir=f"{folder}/run", progress=False))


# --- measurement


def write(path: Path, rows: int) -> None:
    """Write a file of small rows."""
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, rows, ROWS_PER_WRITE):
            numbers = range(first, min(rows, first + ROWS_PER_WRITE))
            file.write("".join(f'{{"id": {number}, "x": {number % 997}}}\n' for number in numbers))


def wanted(rows: int) -> Iterator[str]:
    """Expected lines, in the order of the source."""
    for number in range(1, rows, 2):
        yield json.dumps({"id": number, "x": 2 * (number % 997), "seen": True}, ensure_ascii=False)


def measure(kind: str, rows: int, folder: Path, environment: dict[str, str], *, memory: bool = False) -> Cost:
    source, sink = folder / f"{rows}.jsonl", folder / "out.jsonl"
    if kind == "file" and not source.exists():
        write(source, rows)
    sink.unlink(missing_ok=True)
    arguments = ["--one", kind, "--rows", str(rows), "--source", str(source), "--sink", str(sink)]
    cost = run_process([__file__, *arguments], environment, memory=memory)
    expected = rows // 2 if kind == "file" else -(-rows // 3)
    assert cost.output == expected, f"{kind}: {cost.output} results of {rows} rows, not {expected}"
    if kind == "file" and rows <= SMALL_ROWS:
        assert sorted(sink.read_text().splitlines()) == sorted(wanted(rows)), "different rows"
    return cost


def figures(
    kind: str, rows: int, repeat: int, folder: Path, environment: dict[str, str], *, warm_up: bool
) -> dict[str, float]:
    small = min(SMALL_ROWS, rows)
    if warm_up:
        measure(kind, FEW_ROWS, folder, environment)  # compiles the modules
    pairs = [
        (measure(kind, FEW_ROWS, folder, environment).cpu_s, measure(kind, small, folder, environment).cpu_s)
        for _ in range(repeat)
    ]
    few_s, small_s = (statistics.median(side) for side in zip(*pairs, strict=True))
    tenth = measure(kind, max(FEW_ROWS, rows // 10), folder, environment, memory=True)
    large = measure(kind, rows, folder, environment, memory=True)
    per_small = (small - FEW_ROWS) / max(1e-9, small_s - few_s) if small > FEW_ROWS else 0.0
    per_large = rows / large.cpu_s
    return {
        "peak_mb": large.peak_mb,
        "tenth_peak_mb": tenth.peak_mb,
        "peak_ratio": large.peak_mb / tenth.peak_mb if tenth.peak_mb else 0.0,
        "cpu_s": large.cpu_s,
        "wall_s": large.wall_s,
        "rows_per_cpu_s": per_large,
        "small_rows_per_cpu_s": per_small,
        "ratio": per_large / per_small if per_small else 0.0,
    }


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--rows", type=int, default=10_000_000)
    arguments.add_argument("--repeat", type=int, default=9, help="number of small runs")
    arguments.add_argument("--kinds", default=",".join(KINDS), help="file, range or both")
    report.add_compiled(arguments)
    arguments.add_argument("--one", choices=KINDS, help="one run, in this process (internal)")
    arguments.add_argument("--source", default="", help="source of that run")
    arguments.add_argument("--sink", default="", help="sink of that run")
    asked = arguments.parse_args()
    if asked.one is not None:
        print(json.dumps(one(asked.one, asked.rows, asked.source, asked.sink)))
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = with_bytecode(asked.compiled or f"{folder}/compiled") | {"DOVETAIL_HOME": f"{folder}/home"}
        kinds = asked.kinds.split(",")
        found = {
            kind: figures(kind, asked.rows, asked.repeat, Path(folder), environment, warm_up=asked.compiled is None)
            for kind in kinds
        }
    keys = list(found[kinds[0]])
    report.table([f"{asked.rows} rows", *keys], [[kind, *(found[kind][key] for key in keys)] for kind in kinds])
    result: dict[str, Any] = {"rows": asked.rows, **found[kinds[0]]}
    for kind in kinds[1:]:
        result |= {f"{kind}_{key}": value for key, value in found[kind].items()}
    report.write(asked.json, result)


if __name__ == "__main__":
    main()
