"""Cost of `dovetail run recipe.yaml` against a plain loop of the same operators and against Data-Juicer.

    python benchmarks/recipe.py --engine local --rows 50000 --peers --json result.json

Five text operators over generated JSONL (`text/recipe.yaml` beside the data). Every run is a new process, measured from
start to exit with all of its children. The kinds take turns, and medians are reported. The outputs must be identical:
the same rows in the same order. `--peers` adds `dj-process` with the same file, in its own environment of 1.5 GB.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import report
from peers.environment import run_in
from process_cost import Cost, as_installed, run_process, take_turns, with_bytecode

if TYPE_CHECKING:
    from collections.abc import Sequence

RUN = Path(__file__).with_name("recipe_run.py")
KINDS = ("plain", "dovetail")
KEPT = {50_000: 37_457}
"""Rows of the corpus -> rows that every measured implementation keeps."""
PEER = ["py-data-juicer==1.6.1", "aiohttp", "ray", "torch==2.13.0", "psutil"]


def measure(recipe: Path, source: str, folder: str, engine: str, repeat: int) -> dict[str, list[Cost]]:
    """On Ray there is no warm-up round: modules are compiled already."""
    on_ray = engine == "ray"
    compiled = as_installed() if on_ray else with_bytecode(f"{folder}/compiled")
    environment = compiled | {"DOVETAIL_HOME": f"{folder}/home"}

    def run(kind: str) -> Cost:
        sink = Path(folder, f"{kind}.jsonl")
        sink.unlink(missing_ok=True)
        arguments = [str(RUN), kind, engine, str(recipe), source, str(sink)]
        return run_process(arguments, environment, orphans=on_ray and kind == "dovetail")

    return take_turns(KINDS, repeat, run, warm_up=not on_ray)


def figures(costs: dict[str, list[Cost]], folder: str, rows: int) -> dict[str, Any]:
    """Medians. Both kinds must have written the same."""
    kept = {cost.output["kept"] for each in costs.values() for cost in each}
    assert len(kept) == 1, f"different numbers of rows: {kept}"
    digests = {hashlib.sha256(Path(folder, f"{kind}.jsonl").read_bytes()).digest() for kind in KINDS}
    assert len(digests) == 1, "different rows, or another order"
    (count,) = kept
    assert count == KEPT.get(rows, count), f"{count} of {rows} rows were kept, not {KEPT[rows]}"
    ours, plain = ({key: _median(costs[kind], key) for key in ("cpu_s", "wall_s")} for kind in ("dovetail", "plain"))
    return {
        "kept": count,
        **ours,
        **{f"plain_{key}": value for key, value in plain.items()},
        "cpu_ratio": ours["cpu_s"] / plain["cpu_s"],
    }


def _median(costs: Sequence[Cost], key: str) -> float:
    return float(statistics.median(getattr(cost, key) for cost in costs))


def peers(recipe: Path, source: str, kept: int) -> dict[str, float]:
    """Cost of `dj-process`; empty if it cannot be measured."""
    try:
        found: dict[str, float] = run_in("data-juicer", PEER, "recipe_data_juicer.py", [str(recipe), source])
    except (subprocess.CalledProcessError, json.JSONDecodeError, IndexError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        print(f"Data-Juicer cannot be measured: {lines[-1:]}")
        return {}
    assert found.pop("kept") == kept, "Data-Juicer kept another number of rows"
    return {f"peer_data_juicer_{key}": value for key, value in found.items()}


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--engine", default="local", choices=["local", "ray"])
    arguments.add_argument("--rows", type=int, default=50_000, help="rows of the generated corpus")
    arguments.add_argument("--repeat", type=int, default=3, help="runs of each kind")
    arguments.add_argument("--peers", action="store_true", help="also measure Data-Juicer")
    asked = arguments.parse_args()
    recipe = asked.data / "text" / "recipe.yaml"
    with tempfile.TemporaryDirectory() as folder:
        source = report.corpus(asked.data, asked.rows, folder)
        result = figures(measure(recipe, source, folder, asked.engine, asked.repeat), folder, asked.rows)
        if asked.peers:
            result |= peers(recipe, source, result["kept"])
    if "peer_data_juicer_cpu_s" in result:
        result["peer_ratio"] = result["peer_data_juicer_cpu_s"] / result["cpu_s"]
    rows = [["plain loop", result["plain_cpu_s"], result["plain_wall_s"], 1.0]]
    rows.append([f"dovetail run ({asked.engine})", result["cpu_s"], result["wall_s"], result["cpu_ratio"]])
    if "peer_ratio" in result:
        cpu_s, wall_s = (result[f"peer_data_juicer_{key}"] for key in ("cpu_s", "wall_s"))
        rows.append(["dj-process", cpu_s, wall_s, cpu_s / result["plain_cpu_s"]])
    report.table([f"{result['kept']} rows kept", "CPU-s", "wall s", "CPU / plain loop"], rows)
    report.write(asked.json, {"rows": asked.rows, "engine": asked.engine, **result})


if __name__ == "__main__":
    main()
