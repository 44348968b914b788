"""A script that finishes a sink and dies in the midst of it, at the point that SINK_POINT sets.

SINK_POINT is the number of the function call at which it ends, without a word; 0 counts them, and prints the number.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from dovetail.control.payload import PartFileRange
from dovetail.data.sinks import open_sink, sink


def main(folder: Path, kind: str, point: int) -> None:
    task = json.loads((folder / "task.json").read_text())
    target = open_sink(sink(folder / f"x.{kind}", **task["settings"]), task["run"], folder)
    target.set_base(task["base"])
    target.prepare(resumed=True)
    calls = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1
            if calls == point:
                os._exit(9)

    pieces = [PartFileRange(*piece) for piece in task["pieces"]]
    if kind != "jsonl":
        import pyarrow.parquet  # noqa: F401
    if kind == "lance":
        import lance  # noqa: F401
    sys.setprofile(count)
    target.finish(pieces)
    sys.setprofile(None)
    sys.stdout.write(f"{calls}\n")


if __name__ == "__main__":
    main(Path(os.environ["SINK_FOLDER"]), os.environ["SINK_KIND"], int(os.environ["SINK_POINT"]))
