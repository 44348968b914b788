"""Runs in processes of their own that are killed at a given moment, and what remains of them."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dovetail.data.commit_log import read_commit_log
from runtime.aids import Script
from waiting import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.data.commit_log import CommitLogContents

JOB = '''
import json, os, sys, time
import dovetail as dt
from pathlib import Path

HERE = Path(__file__).parent
OPTIONS = json.loads(os.environ["OPTIONS"])
SLEEP = OPTIONS.get("sleep", 0.0)

def record_calls(rows):
    """Append the id of every row and the time to the log of calls."""
    if SLEEP:
        time.sleep(SLEEP * len(rows))
    while rows[-1]["id"] >= OPTIONS.get("hold", 1 << 60) and not (HERE / "go").exists():
        (HERE / "held").touch()
        time.sleep(0.002)
    fd = os.open(HERE / "calls.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"".join(b"%d %f\\n" % (row["id"], time.time()) for row in rows))
    os.close(fd)

def drop(row):
    number = int(row["id"])  # a CSV file has texts
    return None if number % 7 == 0 else {"id": number, "n": len(row["text"])}

def fan(rows):
    record_calls(rows)
    return [{"id": row["id"], "k": k, "n": row["n"]} for row in rows for k in range(row["id"] % 3)]

def fan_one(row):
    yield from fan([row])

def tag(rows):
    return [{**row, "t": row["id"] * 2} for row in rows]

def tag_one(row):
    return tag([row])[0]

def one_of_ten(row):
    return {"id": row["id"]} if row["id"] % 10 == 3 else None

def batch_of_ten(rows):
    """Records the size of every batch."""
    fd = os.open(HERE / "sizes.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"%d\\n" % len(rows))
    os.close(fd)
    return rows

def explode(rows):
    """Many results per row, which are stored in pieces."""
    for row in rows:
        for k in range(40):
            yield {"id": row["id"], "k": k}
    record_calls(rows)

def whole(rows):
    """A barrier: sees all of its input twice."""
    most = max((row["id"] for row in rows), default=0)
    for row in rows:
        yield {**row, "most": most}

def fussy(rows):
    """Fails for some rows, until a file says that the cause is gone."""
    record_calls(rows)
    if not (HERE / "fixed").exists() and any(row["id"] in OPTIONS["bad"] for row in rows):
        raise ValueError("cannot do that one")
    return [{**row, "f": 1} for row in rows]

def fussy_one(row):
    return fussy([row])[0]

HALF = dt.Resources(cpus=0.5, labels=OPTIONS.get("labels", {}))

def stage(name, run, **more):
    return dt.Stage(name, run, HALF, **{"retries": OPTIONS.get("retries", 3), **more})

def pipeline():
    kind = OPTIONS.get("pipeline", "rebatch")
    if kind == "rebatch":
        sizes, workers = OPTIONS.get("sizes", [16, 24]), OPTIONS.get("workers", "auto")
        return [stage("drop", dt.each(drop), workers=workers), stage("fan", fan, batch_size=sizes[0]),
                stage("tag", tag, batch_size=sizes[1])]
    if kind == "one of ten":
        return [stage("keep", dt.each(one_of_ten)), stage("batch", batch_of_ten, batch_size=10)]
    if kind == "explode":
        from dovetail.engines import result_stream
        result_stream.MAX_PIECE_ITEMS = 7
        return [stage("explode", explode), stage("same", dt.each(lambda row: row), fuse=OPTIONS["fuse"])]
    if kind == "fused":
        return [stage("drop", dt.each(drop)), stage("fan", dt.each(fan_one)), stage("tag", dt.each(tag_one))]
    if kind == "barrier":
        return [stage("drop", dt.each(drop)), stage("fan", fan, batch_size=16), stage("whole", whole, barrier=True),
                stage("tag", tag, batch_size=24)]
    if kind == "leaves":
        return [stage("drop", dt.each(drop)), stage("a", fan, batch_size=16, after=["drop"]),
                stage("b", tag, batch_size=24, after=["drop"])]
    if kind == "diamond":
        return [stage("drop", dt.each(drop)), stage("a", dt.each(fan_one), after=["drop"]),
                stage("b", tag, batch_size=24, after=["drop"]), stage("end", tag, batch_size=7, after=["a", "b"])]
    if kind == "renamed":
        return [stage("lose", dt.each(drop)), stage("fan2", fan, batch_size=16), stage("tag2", tag, batch_size=24)]
    assert kind in ("first", "middle", "last"), kind
    fuse = OPTIONS.get("fuse", True)
    others = [stage("drop", dt.each(drop), fuse=fuse), stage("tag", dt.each(tag_one), fuse=fuse)]
    where = {"first": 0, "middle": 1, "last": 2}[kind]
    on_error = OPTIONS.get("on_error", "skip")
    others.insert(where, stage("fussy", dt.each(fussy_one), fuse=fuse, on_error=on_error, retries=0))
    return others

def die_at(moment):
    """Kills this process at an exact moment."""
    import signal
    from dovetail.data import commit_log, sinks
    from dovetail.data.writers import output_files
    name, _, number = moment.partition(":")
    left = [int(number or 1)]

    def now():
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner, method, before):
        real = getattr(owner, method)
        def wrapped(*args, **named):
            if before:
                now()
            found = real(*args, **named)
            if not before:
                now()
            return found
        setattr(owner, method, wrapped)

    def torn(log, *entries):
        left[0] -= 1
        if not left[0]:
            data = json.dumps(entries[0]).encode()
            os.write(log._file, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        real_write(log, *entries)

    def in_wave(log, *entries):
        real_write(log, *entries)
        if any(entry.get("wave", -1) >= int(number) for entry in entries):
            os.kill(os.getpid(), signal.SIGKILL)

    real_write = commit_log.CommitLog.write
    if name in ("torn", "wave"):
        commit_log.CommitLog.write = torn if name == "torn" else in_wave
        return
    owner, method, before = {
        "before-sync": (sinks.FileSink, "sync", True),
        "after-sync": (sinks.FileSink, "sync", False),
        "after-commit": (commit_log.CommitLog, "write", False),
        "before-finish": (sinks.FileSink, "finish", True),
        "after-make": (sinks.FileSink, "_make_files", False),
        "after-finish": (sinks.FileSink, "finish", False),
        "before-discard": (sinks.FileSink, "discard", True),
        "after-place": (output_files, "publish_files", False),
    }[name]
    around(owner, method, before)

def source():
    path = OPTIONS["source"]
    if path == "generator":
        return ({"id": n, "text": "x" * (n % 50)} for n in range(OPTIONS["rows"]))
    if path == "list":
        return [{"id": n, "text": "x" * (n % 50)} for n in range(OPTIONS["rows"])]
    return path

if __name__ == "__main__":
    if OPTIONS.get("threads"):
        from in_process import InProcessEngine
        from dovetail.engines.local import engine
        engine.LocalEngine = InProcessEngine
    if OPTIONS.get("die"):
        die_at(OPTIONS["die"])
    sink = OPTIONS["sink"]
    settings = {"ordered": True, **OPTIONS.get("settings", {})}
    sink = {k: dt.sink(v, **settings) for k, v in sink.items()} if isinstance(sink, dict) else dt.sink(sink, **settings)
    names = ("run_dir", "resume", "mode", "limit", "force_resume", "retry_errors")
    named = {name: OPTIONS[name] for name in names if OPTIONS.get(name) is not None}
    if "retry_errors" in named:
        sink = None
    where = {"engine": OPTIONS["engine"]} if OPTIONS.get("engine") else {"cluster": "1x(2cpu, 8GB)"}
    run = dt.run(dt.Pipeline(pipeline()), source(), sink=sink, **where, profiles=False, **named)
    print("BEGUN", run.folder, flush=True)
    for what in ("drain", "cancel"):
        if OPTIONS.get(what):
            log = run.folder / "commit.log"
            while not run.done and log.read_bytes().count(b'"wave"') < OPTIONS[what]:
                time.sleep(0.002)
            getattr(run, what)()
            (HERE / "go").touch()
    try:
        run.wait()
    finally:
        stats = run.stats
        counts = [run.status, stats.read, stats.finished, stats.delivered, len(run.errors)]
        print("STATS", json.dumps(counts), flush=True)
'''


def make_rows(path: Path, count: int) -> None:
    lines = (json.dumps({"id": number, "text": "x" * (number % 50)}) + "\n" for number in range(count))
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as file:
            file.writelines(lines)
    else:
        with path.open("w") as file:
            file.writelines(lines)


READ = """
import json, os
path = os.environ["TABLE"]
if path.endswith(".parquet"):
    from pyarrow import parquet
    table = parquet.read_table(path)
else:
    import lance
    table = lance.dataset(path).to_table()
print(json.dumps(table.to_pylist()))
"""
WRITE = """
import os
import pyarrow as pa
path, rows = os.environ["TABLE"], int(os.environ["ROWS"])
table = pa.Table.from_pylist([{"id": number, "text": "x" * (number % 50)} for number in range(rows)])
if path.endswith(".parquet"):
    from pyarrow import parquet
    parquet.write_table(table, path, row_group_size=rows // 7)
else:
    import lance
    lance.write_dataset(table, path, max_rows_per_file=rows // 4)
"""


def run_script(text: str, table: Path, rows: int = 0) -> str:
    """Run a script in another process: after an import of lance every fork of this one would be warned of."""
    with TemporaryDirectory() as folder, Script(Path(folder), text, warm=True, TABLE=str(table), ROWS=str(rows)) as run:
        return run.finish()


def rows_of(path: Path) -> Any:
    """Contents of a sink: bytes of a file of lines, rows of a table."""
    if path.suffix in (".parquet", ".lance"):
        return json.loads(run_script(READ, path))
    return path.read_bytes().splitlines(keepends=True)


def expected(count: int) -> list[dict[str, int]]:
    """Results of `rebatch` and `fused` for this number of rows."""
    return [
        {"id": number, "k": k, "n": number % 50, "t": number * 2}
        for number in range(count)
        if number % 7
        for k in range(number % 3)
    ]


@dataclass
class Killed:
    """A job in a folder of its own, whose runs are killed and resumed."""

    folder: Path
    options: dict[str, Any]
    kills: list[float] = field(default_factory=list)
    """Times of the kills."""
    processes: bool = False
    """Workers are processes, which outlive a killed driver for a moment; otherwise they are threads of the driver."""

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> Path:
        return self.run_dir / "commit.log"

    def log_contents(self) -> CommitLogContents:
        return read_commit_log(self.log)

    def script(self, **more: Any) -> Script:
        options = {"run_dir": str(self.run_dir), **self.options, **more}
        if options.get("resume") is not None:
            options.pop("run_dir")
        on_ray = "engine" in options  # the driver of one of the runs, at least
        options["threads"] = not self.processes and not on_ray
        return Script(self.folder, JOB, warm=not on_ray, OPTIONS=json.dumps(options))

    def calls(self) -> list[tuple[int, float]]:
        path = self.folder / "calls.log"
        if not path.exists():
            return []
        lines = (line.split() for line in path.read_text().splitlines())
        return [(int(line[0]), float(line[1])) for line in lines]

    def called(self) -> int:
        path = self.folder / "calls.log"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def kill_when(self, condition: Callable[[], object], what: str, **more: Any) -> bool:
        """Runs it and kills it then; whether it came to that."""
        with self.script(**more) as script:
            until(lambda: script.process.poll() is not None or condition(), what)
            if script.process.poll() is not None:
                assert script.process.returncode == 0, script.output
                return False
            self.kills.append(time.time())
            script.kill()
            script.process.wait()
            return True

    def dies(self, moment: str, **more: Any) -> None:
        """Run it until it kills itself at this moment."""
        with self.script(die=moment, **more) as script:
            assert script.process.wait(PATIENCE_S) == -9, script.output

    def committed(self, least: int = 1, **more: Any) -> None:
        """Killed with something done and something not. An epoch of rows that were all dropped has no results."""
        more = {"hold": 2000, "sleep": 0.001, **more}

        def done() -> bool:
            return (
                sum(bool(entry.result_count or entry.spooled) for entry in self.log_contents().entries.values())
                >= least
            )

        assert self.kill_when(done, f"{least} epochs with results are done", **more)
        assert self.log_contents().finished is None

    def finish(self, **more: Any) -> str:
        with self.script(**more) as script:
            return script.finish()

    def refused(self, **more: Any) -> str:
        """Error message of a run that is refused at the start."""
        with self.script(**more) as script:
            assert script.ended() == 1, script.output
            assert "BEGUN" not in script.output, script.output
            return script.output

    def resume(self, **more: Any) -> str:
        return self.finish(resume=str(self.run_dir), **more)

    def redone_s(self) -> list[float]:
        """Age at the kill, in seconds, of every row that was computed again after it."""
        times: dict[int, list[float]] = {}
        for row, at in self.calls():
            times.setdefault(row, []).append(at)
        found = []
        for seen in times.values():
            for first, again in pairwise(seen):
                found += [kill - first for kill in self.kills if first <= kill <= again][:1]
        return found


def stats_of(output: str) -> tuple[str, int, int, int, int]:
    """Status, read, finished, delivered, errors."""
    line = next(line for line in output.splitlines() if line.startswith("STATS "))
    status, *numbers = json.loads(line.removeprefix("STATS "))
    return (status, *numbers)
