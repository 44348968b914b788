"""Runs as jobs in the tests: files that name a module which records what it computes, and can be held in the middle."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.jobs.job_handle import Job
    from dovetail.jobs.queue import Queue

ROWS = 2000
"""Far more than a run reads ahead while its first rows are slow."""
HOLD = 250
"""Rows from here on wait for `release`."""
MODULE = "job_work"
WORK = """
import os, time
from pathlib import Path

HERE = Path(__file__).parent

def record(number):
    while number >= HOLD and not (HERE / "go").exists():
        (HERE / "held").touch()
        time.sleep(0.005)
    if number < HOLD:
        time.sleep(0.004)
    fd = os.open(HERE / "calls.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"%d\\n" % number)
    os.close(fd)

def double(rows):
    for row in rows:
        record(row["id"])
    return [{"id": row["id"], "n": 2 * row["id"]} for row in rows]

def keep(row):
    record(row["id"])
    return row

def doubled(id: int) -> int:
    record(id)
    return 2 * id

def refuse(rows):
    raise ValueError("cannot do that")

class Counter:
    def __init__(self):
        self.count = 0

    def add(self):
        self.count += 1
        return self.count
""".replace("HOLD", str(HOLD))
FILES = {
    "pipeline": f"source: in.jsonl\nsink: out.jsonl\nstages:\n  - {{name: double, run: '{MODULE}:double'}}\n",
    "recipe": "dataset_path: in.jsonl\nexport_path: out.jsonl\nnp: 2\nskip_op_error: false\n"
    f"process:\n  - '{MODULE}:keep'\n  - text_length_filter: {{min_len: 10}}\n",
    "failing": f"source: in.jsonl\nsink: out.jsonl\nstages:\n  - {{name: refuse, run: '{MODULE}:refuse'}}\n",
    "actors": f"name: counters\nroles:\n  - {{name: counter, cls: '{MODULE}:Counter'}}\n",
}


class RunScene:
    """A folder with files that a worker may run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / f"{MODULE}.py").write_text(WORK)
        for name, text in FILES.items():
            (folder / f"{name}.yaml").write_text(text)
        rows = ({"id": number, "text": "x" * (number % 50)} for number in range(ROWS))
        (folder / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def file(self, kind: str) -> str:
        return str(self.folder / f"{kind}.yaml")

    def make_table(self) -> str:
        import lance
        import pyarrow as pa

        uri = str(self.folder / "table.lance")
        lance.write_dataset(pa.table({"id": pa.array(range(ROWS), pa.int64())}), uri, max_rows_per_file=100)
        return uri

    def submit(self, queue: Queue, kind: str, **options: Any) -> Job:
        """A run of 2 CPUs. The folder must be the current one for a backfill."""
        given = {"resources": {"cpus": 2}, **options}
        found: Job
        if kind == "backfill":
            more = {"commit_every": 0.2}
            found = queue.submit_backfill(self.make_table(), "n", f"{MODULE}:doubled", **more, **given)
        else:
            found = queue.submit_run(self.file(kind), **given)
        return found

    def is_held(self) -> bool:
        return (self.folder / "held").exists()

    def release(self) -> None:
        (self.folder / "go").touch()

    def calls(self) -> list[int]:
        path = self.folder / "calls.log"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def output(self, name: str = "out.jsonl") -> list[Any]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def check_output(self, kind: str) -> None:
        """Every row once."""
        if kind == "backfill":
            import lance

            rows = lance.dataset(str(self.folder / "table.lance")).to_table().to_pylist()
            assert sorted((row["id"], row["n"]) for row in rows) == [(number, 2 * number) for number in range(ROWS)]
        elif kind == "recipe":
            kept = sorted((row["id"], len(row["text"])) for row in self.output())
            assert kept == [(number, number % 50) for number in range(ROWS) if number % 50 >= 10]
        else:
            done = sorted((row["id"], row["n"]) for row in self.output())
            assert done == [(number, 2 * number) for number in range(ROWS)]
