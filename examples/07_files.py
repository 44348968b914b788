"""From files to files: JSONL in, Parquet out, a line that is not JSON, a driver that is killed, and a resume.

python examples/07_files.py

The run that is killed has a process of its own, which this file starts. In real life it is the power, the scheduler or
you that ends it; then say `dovetail run --resume last`, or from Python what is done here: the same again, with resume=.
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
    time.sleep(0.003)  # so that there is time to be killed in
    return {"id": row["id"], "words": len(row["text"].split())}


def start(folder, **how):
    pipe = dt.Pipeline([dt.Stage("length", dt.each(length))], name="lengths")
    sink = dt.sink(folder / RESULT, ordered=True)  # there when it is complete, not before
    return dt.run(pipe, folder / "pages-*.jsonl", sink=sink, **how)


def prepare(folder):
    lines = [json.dumps({"id": n, "text": "word " * (n % 7)}) for n in range(ROWS)]
    lines[1000] = "this is not JSON"
    (folder / "pages-1.jsonl").write_text("\n".join(lines[:1500]))
    (folder / "pages-2.jsonl").write_text("\n".join(lines[1500:]))


def kill_midway(folder):
    """Kills the driver of a run as soon as a first epoch is committed."""
    driver = subprocess.Popen([sys.executable, __file__, str(folder)])  # noqa: S603 - this file
    log = folder / "run" / "commit.log"
    while not log.exists() or log.read_bytes().count(b"\n") < 2:  # the first line says what the run is about
        assert driver.poll() is None, "it ended by itself"
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
    print(f"{RESULT} is there: {(here / RESULT).exists()}")
    print(f"what was done is kept in {', '.join(path.name for path in here.glob('.*.parts'))}")

    print("\n--- and goes on")
    run = start(here, resume=here / "run")
    print(run.wait())
    for error in run.errors:
        print(f"set aside: {error.error.replace(name, '...')}")

    print("\n--- what it left is a source like any other")
    check = dt.Pipeline([dt.Stage("number", dt.each(lambda row: int(row["id"])))], name="check")
    ids = list(dt.run(check, here / RESULT, ordered=True))
    print(f"{len(ids)} rows, each once and in order: {ids == [n for n in range(ROWS) if n != 1000]}")
