"""Cost of five text operators over a JSONL file, against a plain loop and against Ray Data.

    python benchmarks/text.py --engine local --rows 50000 --peers --json result.json

JSONL in, JSONL out, the same five functions everywhere (`text_operators.py`). The yardstick is a loop in one process
that reads, calls them and writes. Ours: five ordinary stages, fused and unfused, two workers' worth of CPUs. All are
fresh processes, counted from start to exit with everything they start; they take turns, and medians are told. `run_*`
is without start-up: from `dt.run` to the end. What they write is compared row by row, and byte by byte when ordered.

On Ray all of Ray's processes count. There each process runs twice: the first run, with the start and the end of Ray, is
what it takes from start to exit, and the second is `warm_*`.
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
from fresh import Spent, spend
from measured import as_installed, with_bytecode
from peers.environment import run_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ONE = Path(__file__).with_name("text_one.py")
PREFIXES = {"plain": "plain_", "fused": "", "unfused": "unfused_", "ordered": "ordered_"}
"""Of the keys of the result."""
RATIOS = ("cpu_ratio", "wall_ratio", "run_wall_ratio", "driver_share")
KEPT = {50_000: 37_457}
"""What every implementation that was measured keeps of the corpus."""
PEER = ["ray[data]==2.60.0", "cosmos-xenna==0.3.0", "tqdm"]
KINDS_OF_FIGURES = ("cpu_s", "wall_s")


def rounds(source: str, folder: str, engine: str, repeat: int, kinds: Sequence[str]) -> dict[str, list[Spent]]:
    """Taking turns, so that whatever else the machine does falls on all of them; the first round, which compiles, is
    not counted, except on Ray, where it does not."""
    # Ray's own modules, and its peer's, are compiled already
    compiled = as_installed() if engine == "ray" else with_bytecode(f"{folder}/compiled")
    environment = compiled | {"DOVETAIL_HOME": f"{folder}/home"}
    found: dict[str, list[Spent]] = {kind: [] for kind in kinds}
    for number in range(1 if engine == "ray" else 0, repeat + 1):
        for kind in kinds:
            sink = Path(folder, f"{kind}.jsonl")
            sink.unlink(missing_ok=True)
            on_ray = kind != "plain" and engine == "ray"
            spent = spend([str(ONE), kind, engine, source, str(sink)], environment, everybody=on_ray)
            if number:
                found[kind].append(apart(spent) if on_ray else spent)
    return found


def apart(spent: Spent) -> Spent:
    """What the second run of a process took, apart from the rest of it."""
    began, ended = spent.said.pop("again_began"), spent.said.pop("again_ended")
    assert spent.tally is not None
    again_s = spent.tally.between(began, ended)
    said = spent.said | {"warm_cpu_s": again_s, "warm_wall_s": ended - began}
    return replace(spent, cpu_s=spent.cpu_s - again_s, wall_s=spent.wall_s - (ended - began), said=said)


def middle(spent: list[Spent]) -> dict[str, float]:
    """Medians of what was measured outside and inside."""
    inside = {key: statistics.median(one.said[key] for one in spent) for key in spent[0].said}
    return {key: statistics.median(getattr(one, key) for one in spent) for key in KINDS_OF_FIGURES} | inside


def figures(found: dict[str, list[Spent]]) -> dict[str, Any]:
    """Ours without a prefix, and what is asked of them: ratios to the plain loop."""
    every = {kind: middle(spent) for kind, spent in found.items()}
    result: dict[str, Any] = dict(every["fused"])
    for kind in every.keys() - {"fused"}:
        result |= {f"{kind}_{key}": value for key, value in every[kind].items()}
    result["kept"] = int(result["kept"])
    for kind in every.keys() - {"plain"}:
        ours, bare, prefix = every[kind], every["plain"], PREFIXES[kind]
        for key, name in (("cpu_s", "cpu_ratio"), ("wall_s", "wall_ratio"), ("run_wall_s", "run_wall_ratio")):
            result[prefix + name] = ours[key] / bare[key]
        result[f"{prefix}driver_share"] = ours["driver_cpu_s"] / ours["cpu_s"]
        if "warm_cpu_s" in ours:
            result[f"{prefix}warm_ratio"] = ours["warm_cpu_s"] / bare["cpu_s"]
    return result


def compare(folder: str, kept: int, rows: int, kinds: Sequence[str]) -> None:
    """Everybody wrote what the plain loop wrote, and when ordered, byte by byte."""
    wanted = sorted(_lines(folder, "plain"))
    assert len(wanted) == kept, (len(wanted), kept)
    assert kept == KEPT.get(rows, kept), f"{kept} rows were kept of {rows}, not {KEPT[rows]}"
    for kind in kinds:
        assert sorted(_lines(folder, kind)) == wanted, f"{kind}: not the rows of the plain loop"
    if "ordered" not in kinds:
        return
    digests = {hashlib.sha256(Path(folder, f"{kind}.jsonl").read_bytes()).digest() for kind in ("plain", "ordered")}
    assert len(digests) == 1, "ordered: not byte by byte what the plain loop wrote"


def _lines(folder: str, kind: str) -> Iterator[bytes]:
    with Path(folder, f"{kind}.jsonl").open("rb") as lines:
        yield from lines


def peers(source: str, kept: int) -> dict[str, float]:
    """Ray Data in its own environment: from start to exit, and a second run of the same process."""
    try:
        said: dict[str, float] = run_in("streams", PEER, "text_ray_data.py", [source])
    except (subprocess.CalledProcessError, json.JSONDecodeError, IndexError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        print(f"Ray Data could not be measured: {lines[-1:]}")
        return {}
    assert said.pop("kept") == kept, "Ray Data kept other rows"
    return {f"peer_ray_data_{key}": value for key, value in said.items()}


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
    header = ["", "CPU-s", "wall s", "driver CPU-s", "x CPU", "x wall", "x wall of the run", "driver's share"]
    report.table(header, rows)
    warm = [
        [kind, result[f"{prefix}warm_cpu_s"], result[f"{prefix}warm_ratio"]]
        for kind, prefix in PREFIXES.items()
        if f"{prefix}warm_ratio" in result
    ]
    if warm:
        report.table(["second run", "CPU-s", "x CPU"], warm)
    if "peer_ray_data_cpu_s" in result:
        keys = ("cpu_s", "wall_s", "second_cpu_s", "second_wall_s")
        header = ["Ray Data", "CPU-s", "wall s", "CPU-s of a second run", "wall s", "x our CPU"]
        report.table(header, [["", *(result[f"peer_ray_data_{key}"] for key in keys), result["peer_ratio"]]])


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--engine", default="local", choices=["local", "ray"])
    arguments.add_argument("--rows", type=int, default=50_000, help="of the generated corpus")
    arguments.add_argument("--repeat", type=int, default=3, help="runs of each kind")
    arguments.add_argument("--peers", action="store_true", help="also measure Ray Data")
    arguments.add_argument("--kinds", default=",".join(PREFIXES), help="plain and fused at least")
    arguments.add_argument("--source", type=Path, help="a JSONL file with 'text' instead of the generated corpus")
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = str(asked.source) if asked.source else report.corpus(asked.data, asked.rows, folder)
        kinds = asked.kinds.split(",")
        result = figures(rounds(source, folder, asked.engine, asked.repeat, kinds))
        compare(folder, result["kept"], 0 if asked.source else asked.rows, kinds)
        if asked.peers:
            result |= peers(source, result["kept"])
    if "peer_ray_data_cpu_s" in result:
        result["peer_ratio"] = result["peer_ray_data_cpu_s"] / result["cpu_s"]
    show(result)
    report.write(asked.json, {"rows": asked.rows, **result})


if __name__ == "__main__":
    main()
