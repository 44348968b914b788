"""Cost of five text operators over a JSONL file, against a plain loop and against Ray Data.

    python benchmarks/text.py --engine local --rows 50000 --peers --json result.json

JSONL to JSONL, with the same five functions everywhere (`text_operators.py`). The baseline is one loop in one process
(`plain_loop.py`). Dovetail runs five ordinary stages, fused and unfused, with two CPUs of workers. Every run
is a new process, measured from start to exit with all of its children. The kinds take turns, and medians are reported.
`run_*` is without start-up: from `dt.run` to the end. The outputs must have the same rows, and be identical if ordered.

On Ray, all of Ray's processes are included, and each process runs twice: the first run, with the start and the end of
Ray, is the cost from start to exit; the second is `warm_*`.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import report
from peers.environment import run_in
from process_cost import Cost, as_installed, run_process, take_turns, with_bytecode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RUN = Path(__file__).with_name("text_run.py")
PREFIXES = {"plain": "plain_", "fused": "", "unfused": "unfused_", "ordered": "ordered_"}
"""Kind -> prefix of its keys in the result."""
RATIOS = ("cpu_ratio", "wall_ratio", "run_wall_ratio", "driver_share")
KEPT = {50_000: 37_457}
"""Rows of the corpus -> rows that every measured implementation keeps."""
PEER = ["ray[data]==2.60.0", "cosmos-xenna==0.3.0", "tqdm"]
COST_KEYS = ("cpu_s", "wall_s")


def measure(
    source: str, folder: str, engine: str, repeat: int, kinds: Sequence[str], compiled: Path | None = None
) -> dict[str, list[Cost]]:
    """On Ray there is no warm-up round: its modules, and those of its peer, are compiled already."""
    environment = as_installed() if engine == "ray" else with_bytecode(compiled or f"{folder}/compiled")
    environment |= {"DOVETAIL_HOME": f"{folder}/home"}

    def run(kind: str) -> Cost:
        sink = Path(folder, f"{kind}.jsonl")
        sink.unlink(missing_ok=True)
        on_ray = kind != "plain" and engine == "ray"
        cost = run_process([str(RUN), kind, engine, source, str(sink)], environment, orphans=on_ray)
        return split_second_run(cost) if on_ray else cost

    return take_turns(kinds, repeat, run, warm_up=engine != "ray" and compiled is None)


def split_second_run(cost: Cost) -> Cost:
    """The cost without the second run of the process, which becomes `warm_*` of the output."""
    began, ended = cost.output.pop("second_began"), cost.output.pop("second_ended")
    assert cost.tally is not None
    second_s = cost.tally.between(began, ended)
    output = cost.output | {"warm_cpu_s": second_s, "warm_wall_s": ended - began}
    return replace(cost, cpu_s=cost.cpu_s - second_s, wall_s=cost.wall_s - (ended - began), output=output)


def medians(costs: list[Cost]) -> dict[str, float]:
    """Medians of the costs and of the outputs."""
    outputs = {key: statistics.median(cost.output[key] for cost in costs) for key in costs[0].output}
    return {key: statistics.median(getattr(cost, key) for cost in costs) for key in COST_KEYS} | outputs


def figures(costs: dict[str, list[Cost]]) -> dict[str, Any]:
    """All figures; those of the fused kind have no prefix. Ratios are to the plain loop."""
    every = {kind: medians(each) for kind, each in costs.items()}
    result: dict[str, Any] = dict(every["fused"])
    for kind in every.keys() - {"fused"}:
        result |= {f"{kind}_{key}": value for key, value in every[kind].items()}
    result["kept"] = int(result["kept"])
    for kind in every.keys() - {"plain"}:
        ours, plain, prefix = every[kind], every["plain"], PREFIXES[kind]
        for key, name in (("cpu_s", "cpu_ratio"), ("wall_s", "wall_ratio"), ("run_wall_s", "run_wall_ratio")):
            result[prefix + name] = ours[key] / plain[key]
        result[f"{prefix}driver_share"] = ours["driver_cpu_s"] / ours["cpu_s"]
        if "warm_cpu_s" in ours:
            result[f"{prefix}warm_ratio"] = ours["warm_cpu_s"] / plain["cpu_s"]
    return result


def compare(folder: str, kept: int, rows: int, kinds: Sequence[str]) -> None:
    """Check that every kind wrote the rows of the plain loop; the ordered kind, an identical file."""
    wanted = sorted(_lines(folder, "plain"))
    assert len(wanted) == kept, (len(wanted), kept)
    assert kept == KEPT.get(rows, kept), f"{kept} of {rows} rows were kept, not {KEPT[rows]}"
    for kind in kinds:
        assert sorted(_lines(folder, kind)) == wanted, f"{kind}: rows differ from those of the plain loop"
    if "ordered" not in kinds:
        return
    digests = {hashlib.sha256(Path(folder, f"{kind}.jsonl").read_bytes()).digest() for kind in ("plain", "ordered")}
    assert len(digests) == 1, "ordered: the file differs from that of the plain loop"


def _lines(folder: str, kind: str) -> Iterator[bytes]:
    with Path(folder, f"{kind}.jsonl").open("rb") as lines:
        yield from lines


def peers(source: str, kept: int) -> dict[str, float]:
    """Cost of Ray Data from start to exit, and of a second run of the same process; empty if it cannot be measured."""
    try:
        found: dict[str, float] = run_in("streams", PEER, "text_ray_data.py", [source])
    except (subprocess.CalledProcessError, json.JSONDecodeError, IndexError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        print(f"Ray Data cannot be measured: {lines[-1:]}")
        return {}
    assert found.pop("kept") == kept, "Ray Data kept another number of rows"
    return {f"peer_ray_data_{key}": value for key, value in found.items()}


def show(result: dict[str, Any]) -> None:
    rows = [
        [
            kind,
            *(result[f"{prefix}{key}"] for key in ("cpu_s", "wall_s", "driver_cpu_s")),
            *(result.get(f"{prefix}{key}", 1.0) for key in RATIOS),
        ]
        for kind, prefix in PREFIXES.items()
        if f"{prefix}cpu_s" in result
    ]
    header = ["", "CPU-s", "wall s", "driver CPU-s", "CPU / plain", "wall / plain", "run wall / plain", "driver share"]
    report.table(header, rows)
    warm = [
        [kind, result[f"{prefix}warm_cpu_s"], result[f"{prefix}warm_ratio"]]
        for kind, prefix in PREFIXES.items()
        if f"{prefix}warm_ratio" in result
    ]
    if warm:
        report.table(["second run", "CPU-s", "CPU / plain"], warm)
    if "peer_ray_data_cpu_s" in result:
        keys = ("cpu_s", "wall_s", "second_cpu_s", "second_wall_s")
        header = ["Ray Data", "CPU-s", "wall s", "CPU-s of a second run", "wall s", "CPU / Dovetail"]
        report.table(header, [["", *(result[f"peer_ray_data_{key}"] for key in keys), result["peer_ratio"]]])


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--engine", default="local", choices=["local", "ray"])
    arguments.add_argument("--rows", type=int, default=50_000, help="rows of the generated corpus")
    arguments.add_argument("--repeat", type=int, default=3, help="runs of each kind")
    arguments.add_argument("--peers", action="store_true", help="also measure Ray Data")
    arguments.add_argument("--kinds", default=",".join(PREFIXES), help="comma-separated; at least plain and fused")
    report.add_compiled(arguments)
    arguments.add_argument("--source", type=Path, help="a JSONL file with 'text' instead of the generated corpus")
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = str(asked.source) if asked.source else report.corpus(asked.data, asked.rows, folder)
        kinds = asked.kinds.split(",")
        result = figures(measure(source, folder, asked.engine, asked.repeat, kinds, asked.compiled))
        compare(folder, result["kept"], 0 if asked.source else asked.rows, kinds)
        if asked.peers:
            result |= peers(source, result["kept"])
    if "peer_ray_data_cpu_s" in result:
        result["peer_ratio"] = result["peer_ray_data_cpu_s"] / result["cpu_s"]
    show(result)
    report.write(asked.json, {"rows": asked.rows, **result})


if __name__ == "__main__":
    main()
