"""Read JSONL and write Parquet: a line that is not JSON, a driver that is killed, and a resume.

python examples/07_files.py

This file starts the run that is killed in another process. To resume a run on the command line: `dovetail run --resume
last`; in Python: the same call with resume=, as below.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import dovetail as dt

ROWS = 2000
RESULT = "lengths.parquet" if importlib.util.find_spec("pyarrow") else "lengths.csv"  # Parquet needs the extra [tables]


def length(row):
    time.sleep(0.003)  # slow enough to be killed
    return {"id": row["id"], "words": len(row["text"].split())}


def start(folder, **how):
    pipe = dt.Pipeline([dt.Stage("length", dt.each(length))], name="lengths")
    sink = dt.sink(folder / RESULT, ordered=True)  # exists only when it is complete
    return dt.run(pipe, folder / "pages-*.jsonl", sink=sink, **how)


def prepare(folder):
    lines = [json.dumps({"id": n, "text": "word " * (n % 7)}) for n in range(ROWS)]
    lines[1000] = "this is not JSON"
    (folder / "pages-1.jsonl").write_text("\n".join(lines[:1500]))
    (folder / "pages-2.jsonl").write_text("\n".join(lines[1500:]))


def kill_midway(folder):
    """Kill the driver of a run when its first epoch is committed."""
    driver = subprocess.Popen([sys.executable, __file__, str(folder)])  # noqa: S603 - this file
    log = folder / "run" / "commit.log"
    while not log.exists() or log.read_bytes().count(b"\n") < 2:  # the first line describes the run
        assert driver.poll() is None, "the run ended before it was killed"
        time.sleep(0.005)
    driver.kill()
    driver.wait()


if len(sys.argv) > 1:  # the process that is killed
    start(Path(sys.argv[1]), run_dir=Path(sys.argv[1]) / "run").wait()
    sys.exit()

with tempfile.TemporaryDirectory() as name:
    here = Path(name)
    prepare(here)

    print("--- a run that is killed")
    kill_midway(here)
    print(f"{RESULT} exists: {(here / RESULT).exists()}")
    print(f"finished work is kept in {', '.join(path.name for path in here.glob('.*.parts'))}")

    print("\n--- and is resumed")
    run = start(here, resume=here / "run")
    print(run.wait())
    for error in run.errors:
        print(f"failed: {error.error.replace(name, '...')}")

    print("\n--- the result as a source")
    check = dt.Pipeline([dt.Stage("number", dt.each(lambda row: int(row["id"])))], name="check")
    ids = list(dt.run(check, here / RESULT, ordered=True))
    print(f"{len(ids)} rows, each once and in order: {ids == [n for n in range(ROWS) if n != 1000]}")
