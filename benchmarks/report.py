"""Output of benchmarks: a table for people, JSON for tools."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

DATA = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"


def parser(description: str | None) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--data", type=Path, default=DATA, help="folder with openb/, problems/, text/, golden/")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    return arguments


def add_compiled(arguments: argparse.ArgumentParser) -> None:
    text = "keep compiled modules in this folder, and skip the runs that compile them"
    arguments.add_argument("--compiled", type=Path, metavar="DIR", help=text)


def corpus(data: Path, rows: int, folder: str) -> str:
    """Generate a JSONL file with this number of rows, by the generator beside the other data."""
    made = f"{folder}/rows.jsonl"
    generator = data / "text" / "generate.py"
    if not generator.exists():
        sys.exit(f"{generator} does not exist: set --data DIR")
    subprocess.run([sys.executable, str(generator), made, str(rows)], check=True)
    return made


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    for line in (list(header), *texts):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write the result as JSON, atomically."""
    if path is None:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(result, indent=2) + "\n")
    temporary.replace(path)
    print(f"written: {path}")


def _text(cell: object) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)
