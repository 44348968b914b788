"""Cost of `dovetail run recipe.yaml` against a plain loop of the same operators and against Data-Juicer.

    python benchmarks/recipe.py --engine local --rows 50000 --peers --json result.json

Five text operators over generated JSONL (`text/recipe.yaml` beside the data). All are fresh processes, counted from
their start to their exit with everything they start; they take turns, and medians are told. What they write is compared
byte by byte: the same rows in the same order. `--peers` adds `dj-process` with the same file on this machine, which
needs its own environment of 1.5 GB.
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
from fresh import Spent, spend
from measured import as_installed, with_bytecode
from peers.environment import run_in

if TYPE_CHECKING:
    from collections.abc import Sequence

ONE = Path(__file__).with_name("recipe_one.py")
KINDS = ("plain", "ours")
KEPT = {50_000: 37_457}
"""What every implementation that was measured keeps of the corpus."""
PEER = ["py-data-juicer==1.6.1", "aiohttp", "ray", "torch==2.13.0", "psutil"]


def rounds(recipe: Path, source: str, folder: str, engine: str, repeat: int) -> dict[str, list[Spent]]:
    """Taking turns; the first round, which compiles, is not counted."""
    compiled = as_installed() if engine == "ray" else with_bytecode(f"{folder}/compiled")
    environment = compiled | {"DOVETAIL_HOME": f"{folder}/home"}
    found: dict[str, list[Spent]] = {kind: [] for kind in KINDS}
    for number in range(1 if engine == "ray" else 0, repeat + 1):
        for kind in KINDS:
            sink = Path(folder, f"{kind}.jsonl")
            sink.unlink(missing_ok=True)
            arguments = [str(ONE), kind, engine, str(recipe), source, str(sink)]
            spent = spend(arguments, environment, everybody=kind == "ours" and engine == "ray")
            if number:
                found[kind].append(spent)
    return found


def figures(found: dict[str, list[Spent]], folder: str, rows: int) -> dict[str, Any]:
    """Medians, and that both wrote the same."""
    kept = {one.said["kept"] for spent in found.values() for one in spent}
    assert len(kept) == 1, f"not the same number of rows: {kept}"
    wrote = {hashlib.sha256(Path(folder, f"{kind}.jsonl").read_bytes()).digest() for kind in KINDS}
    assert len(wrote) == 1, "not the same rows in the same order"
    (count,) = kept
    assert count == KEPT.get(rows, count), f"{count} rows were kept of {rows}, not {KEPT[rows]}"
    ours, bare = ({key: _median(found[kind], key) for key in ("cpu_s", "wall_s")} for kind in ("ours", "plain"))
    return {
        "kept": count,
        **ours,
        **{f"plain_{key}": value for key, value in bare.items()},
        "cpu_ratio": ours["cpu_s"] / bare["cpu_s"],
    }


def _median(spent: Sequence[Spent], key: str) -> float:
    return float(statistics.median(getattr(one, key) for one in spent))


def peers(recipe: Path, source: str, kept: int) -> dict[str, float]:
    """`dj-process` on this machine, in its own environment."""
    try:
        said: dict[str, float] = run_in("data-juicer", PEER, "recipe_data_juicer.py", [str(recipe), source])
    except (subprocess.CalledProcessError, json.JSONDecodeError, IndexError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        print(f"Data-Juicer could not be measured: {lines[-1:]}")
        return {}
    assert said.pop("kept") == kept, "Data-Juicer kept another number of rows"
    return {f"peer_data_juicer_{key}": value for key, value in said.items()}


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--engine", default="local", choices=["local", "ray"])
    arguments.add_argument("--rows", type=int, default=50_000, help="of the generated corpus")
    arguments.add_argument("--repeat", type=int, default=3, help="runs of each kind")
    arguments.add_argument("--peers", action="store_true", help="also measure Data-Juicer")
    asked = arguments.parse_args()
    recipe = asked.data / "text" / "recipe.yaml"
    with tempfile.TemporaryDirectory() as folder:
        source = report.corpus(asked.data, asked.rows, folder)
        result = figures(rounds(recipe, source, folder, asked.engine, asked.repeat), folder, asked.rows)
        if asked.peers:
            result |= peers(recipe, source, result["kept"])
    if "peer_data_juicer_cpu_s" in result:
        result["peer_ratio"] = result["peer_data_juicer_cpu_s"] / result["cpu_s"]
    rows = [["plain loop", result["plain_cpu_s"], result["plain_wall_s"], 1.0]]
    rows.append([f"dovetail run ({asked.engine})", result["cpu_s"], result["wall_s"], result["cpu_ratio"]])
    if "peer_ratio" in result:
        spent = [result[f"peer_data_juicer_{key}"] for key in ("cpu_s", "wall_s")]
        rows.append(["dj-process", *spent, spent[0] / result["plain_cpu_s"]])
    report.table([f"{result['kept']} rows kept", "CPU-s", "wall s", "x CPU of the loop"], rows)
    report.write(asked.json, {"rows": asked.rows, "engine": asked.engine, **result})


if __name__ == "__main__":
    main()
