"""CPU cost of the engine per item, and until the first result.

    python benchmarks/overhead.py --engine local --peers --json result.json

Three trivial stages over integers, one item per call, one worker each. The cost per item is the marginal CPU of the
driver and all workers: the median of large runs minus that of small ones, in turn in one warm process. `--peers` adds
Ray actors, cosmos-xenna and Ray Data, each in a warm process of its own environment. Start-up: CPU until the first
result in a new interpreter, compared with one that only imports dovetail; the minimum of each.

    python benchmarks/overhead.py --engine ray --json result.json

The same on Ray, including Ray's own processes, also with 64 items per call, and compared with Ray actors called once
per item in the same Ray. The start of that Ray is reported separately: `start_cpu_s`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import dovetail as dt
import overhead_ray
import report
from peers.environment import run_in
from process_cost import run_process, with_bytecode, without_bytecode
from resource_usage import cpu_s

HELLO = Path(__file__).with_name("hello.py")
STAGES = ("first", "second", "third")
KINDS = ("unfused", "fused", "each_unfused", "each_fused")
PEER = ["ray[data]==2.60.0", "cosmos-xenna==0.3.0", "tqdm"]
PEERS = {"ray_actors": (300, 3000), "xenna": (640, 3200), "ray_data": (20_000, 200_000)}
"""Items of a small and of a large run; the costs per item differ by a factor of a thousand."""
TRIES = 3


def _same(items: list[int]) -> list[int]:
    return items


def _same_item(item: int) -> int:
    return item


def pipeline(kind: str) -> tuple[dt.Pipeline, str]:
    """The pipeline, and a cluster on which each of its units has one worker."""
    run = dt.each(_same_item) if kind.startswith("each") else _same
    needs = dt.Resources(cpus=1)
    if kind.endswith("unfused"):
        return dt.Pipeline([dt.Stage(name, run, needs, workers=1, fuse=False) for name in STAGES]), "1x(4cpu, 8GB)"
    return dt.Pipeline([dt.Stage(name, run, needs) for name in STAGES]), "1x(1cpu, 4GB)"


def once(kind: str, engine: str, items: int) -> float:
    """CPU seconds of one run, including its workers, which have ended."""
    pipe, cluster = pipeline(kind)
    before = cpu_s()
    with tempfile.TemporaryDirectory() as folder:
        run = dt.run(pipe, range(items), engine, cluster, run_dir=f"{folder}/run", progress=False)
        total = sum(run)
    assert total == items * (items - 1) // 2, total
    return cpu_s() - before


def measure(kind: str, engine: str, small: int, large: int, repeat: int) -> dict[str, Any]:
    """Measure one kind in this process; the first run is not counted."""
    once(kind, engine, small)
    runs = [(once(kind, engine, small), once(kind, engine, large)) for _ in range(repeat)]
    return margin(small, large, [low for low, _ in runs], [high for _, high in runs])


def margin(small: int, large: int, low: list[float], high: list[float]) -> dict[str, Any]:
    per_item = (statistics.median(high) - statistics.median(low)) / (large - small)
    return {"us": 1e6 * per_item, "small_cpu_s": low, "large_cpu_s": high, "items": [small, large]}


def start_up(engine: str, repeat: int, compiled: Path | None = None) -> dict[str, float]:
    """CPU of new interpreters, with compiled modules, like those of an installed package, and without."""
    with tempfile.TemporaryDirectory() as folder:
        environment = with_bytecode(compiled or folder)
        if compiled is None:
            hello(engine, environment)  # compiles the modules
        found = _start_up(engine, repeat, environment)
    uncompiled = _start_up(engine, repeat, without_bytecode())
    return found | {f"uncompiled_{name}": value for name, value in uncompiled.items()}


def _start_up(engine: str, repeat: int, environment: dict[str, str]) -> dict[str, float]:
    first = min(hello(engine, environment) for _ in range(repeat))
    bare = min(run_process(["-c", "import dovetail; print(0)"], environment).cpu_s for _ in range(repeat))
    return {"hello_cpu_s": first, "import_cpu_s": bare, "hello_extra_cpu_s": first - bare}


def hello(engine: str, environment: dict[str, str]) -> float:
    """CPU seconds until the first result: driver, fork server and worker."""
    with tempfile.TemporaryDirectory() as folder:
        seconds: float = run_process([str(HELLO), engine, f"{folder}/run"], environment).output
    return seconds


def peers(repeat: int) -> dict[str, float]:
    """Cost per item of the peers that can be measured."""
    found = {}
    for name, (small, large) in PEERS.items():
        for left in reversed(range(TRIES)):
            try:
                spent = run_in("streams", PEER, "streams_overhead.py", [name, str(small), str(large), str(repeat)])
            except (subprocess.CalledProcessError, json.JSONDecodeError, IndexError) as error:
                reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
                print(f"{name} cannot be measured{', trying again' if left else ''}: {reason}")
                continue
            found[f"peer_{name}_us"] = margin(small, large, spent["small"], spent["large"])["us"]
            found[f"peer_{name}_start_cpu_s"] = spent["start"]
            break
    return found


def compared(result: dict[str, Any]) -> None:
    """Print the measured peers, each beside the comparable kind of Dovetail."""
    pairs = (("ray_actors", "unfused"), ("xenna", "unfused"), ("ray_data", "fused"))
    rows = [
        [name, result[f"peer_{name}_us"], ours, result[f"{ours}_us"], result[f"peer_{name}_us"] / result[f"{ours}_us"]]
        for name, ours in pairs
        if f"peer_{name}_us" in result
    ]
    if rows:
        report.table(["peer", "us per item", "Dovetail", "us per item", "ratio"], rows)


def on_ray(small: int, large: int, repeat: int) -> dict[str, Any]:
    """Figures on Ray; `peer_actors_us` and `times_less` compare with Ray actors."""
    found = overhead_ray.measured(small, large, repeat)
    runs = {
        kind: margin(small=run["items"][0], large=run["items"][1], low=run["small"], high=run["large"])
        for kind, run in found["runs"].items()
    }
    rows = [
        [kind, run["us"], statistics.median(run["small_cpu_s"]), statistics.median(run["large_cpu_s"])]
        for kind, run in runs.items()
    ]
    report.table(["three stages on Ray", "us per item", "CPU-s of a small run", "of a large one"], rows)
    peer = runs.pop(overhead_ray.ACTORS)
    result: dict[str, Any] = {f"{kind}_us": run["us"] for kind, run in runs.items()}
    result |= {"batch_1_us": result["unfused_us"], "batch_64_us": result["unfused_64_us"]}
    result |= {"peer_actors_us": peer["us"], "times_less": peer["us"] / result["batch_64_us"]}
    result |= {"times_less_batch_1": peer["us"] / result["batch_1_us"], "start_cpu_s": found["start_cpu_s"]}
    keys = ["times_less", "times_less_batch_1", "start_cpu_s"]
    header = ["actors / Dovetail, 64 per call", "1 per call", "CPU-s until the first run has ended"]
    report.table(header, [[result[key] for key in keys]])
    return result | {"runs": runs | {overhead_ray.ACTORS: peer}}


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--engine", default="local", choices=["local", "ray"])
    arguments.add_argument("--items", default="20000,200000", help="items of a small and of a large run")
    arguments.add_argument("--repeat", type=int, default=5, help="runs of each size")
    arguments.add_argument("--peers", action="store_true", help="also measure Ray, cosmos-xenna and Ray Data")
    arguments.add_argument("--kinds", default=",".join(KINDS), help="some of these kinds, on this machine")
    report.add_compiled(arguments)
    arguments.add_argument("--one", choices=KINDS, help="one kind, in this process, as JSON (internal)")
    asked = arguments.parse_args()
    small, large = map(int, asked.items.split(","))
    if asked.one is not None:
        print(json.dumps(measure(asked.one, asked.engine, small, large, asked.repeat)))
        return
    if asked.engine == "ray":
        result = on_ray(small, large, asked.repeat)
        if asked.peers:
            result |= peers(min(asked.repeat, 3))
            compared(result)
        report.write(asked.json, result)
        return
    common = ["--engine", asked.engine, "--items", asked.items, "--repeat", str(asked.repeat)]
    runs = {kind: run_process([__file__, "--one", kind, *common]).output for kind in asked.kinds.split(",")}
    keys = ["us", "small_cpu_s", "large_cpu_s"]
    medians = [[kind, *(statistics.median(_listed(run[key])) for key in keys)] for kind, run in runs.items()]
    report.table(["three stages", "us per item", f"CPU-s of {small}", f"of {large}"], medians)
    result = {f"{kind}_us": run["us"] for kind, run in runs.items()}
    result |= start_up(asked.engine, asked.repeat, asked.compiled)
    keys = ["hello_cpu_s", "import_cpu_s", "hello_extra_cpu_s"]
    rows = [
        [name, *(result[prefix + key] for key in keys)]
        for name, prefix in (("compiled", ""), ("not compiled", "uncompiled_"))
    ]
    report.table(["modules", "CPU-s to first result", "import dovetail", "difference"], rows)
    if asked.peers:
        result |= peers(min(asked.repeat, 3))
        compared(result)
    report.write(asked.json, result | {"runs": runs})


def _listed(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


if __name__ == "__main__":
    main()
