"""Runs in the peer's environment: a recipe with Data-Juicer's own `dj-process`, on this machine, two processes.

    python recipe_data_juicer.py RECIPE SOURCE

From the start of its process to its exit, with all that it starts and waits for.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml


def main() -> None:
    recipe, source = sys.argv[1:]
    command = Path(sys.executable).with_name("dj-process")
    with tempfile.TemporaryDirectory() as folder:
        said = yaml.safe_load(Path(recipe).read_text())
        sink = Path(folder, "out", "clean.jsonl")
        said |= {"dataset_path": source, "export_path": str(sink), "np": 2}
        file = Path(folder, "recipe.yaml")
        file.write_text(yaml.safe_dump(said))
        # its caches are its own; nothing of an earlier run counts
        environment = {**os.environ, "HF_HOME": f"{folder}/hf", "DATA_JUICER_CACHE_HOME": f"{folder}/dj"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        subprocess.run(
            [str(command), "--config", str(file)], check=True, capture_output=True, env=environment, cwd=folder
        )
        wall_s = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        with sink.open("rb") as lines:
            kept = sum(1 for _ in lines)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"kept": kept, "cpu_s": cpu_s, "wall_s": wall_s}))


if __name__ == "__main__":
    main()
