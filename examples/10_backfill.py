"""Fill columns of a Lance table from Python: plan, backfill, failed rows, retry; no row is computed twice.

python examples/10_backfill.py

On the command line: dovetail backfill run clips.lance words --udf functions:words. Needs the extra [lance].
"""

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import dovetail as dt

os.environ.setdefault("LANCE_LOG", "error")  # before lance is imported: otherwise every commit logs a warning
try:
    import lance
    import pyarrow as pa
    import pyarrow.compute as pc
except ImportError:
    raise SystemExit("pip install 'dovetail-ml[lance]'") from None


class Size(NamedTuple):
    letters: int
    spaces: int


@dt.udf(version="1")
def words(text: str) -> int:
    return len(text.split())


@dt.udf(version="1")  # the same version: rows that are filled stay filled
def words_or_none(text: str | None) -> int | None:
    return None if text is None else len(text.split())


@dt.udf
def size(text: str | None) -> Size:
    return Size(len(text or ""), (text or "").count(" "))


@dt.udf(batch_size=1000)
def shout(text: pa.StringArray) -> pa.StringArray:
    return pc.utf8_upper(text)


@dt.udf(cpus=64)
def too_large(text: str) -> str:
    return text


with tempfile.TemporaryDirectory() as name:
    uri = Path(name) / "clips.lance"
    texts = [f"clip {n} shows a street at night" if n != 4711 else None for n in range(10_000)]
    lance.write_dataset(pa.table({"id": range(10_000), "text": texts}), uri, max_rows_per_file=1_000)
    table = dt.table(uri)

    print("--- the plan: fragments, rows and resources of the workers")
    print(table.plan_backfill("words", words, workers=4, cluster="1x(8cpu, 16GB)", sample=False))

    print("\n--- a function that fits on no node")
    try:
        table.plan_backfill("large", too_large, cluster="1x(8cpu, 16GB)")
    except dt.InfeasibleError as error:
        print(error.problems[0].message)

    print("\n--- a row that fails, with its position and the type of its error")
    try:
        table.backfill("words", words)
    except AttributeError as error:
        print(f"{type(error).__name__} in row {error.row}, fragment {error.fragment}, offset {error.offset}")

    print("\n--- failed rows are recorded")
    filled = table.backfill("words", words, on_error="skip")
    print(f"{filled.errors} row failed, the others are filled")
    for row in table.errors("words"):
        print(f"row {row.row} (fragment {row.fragment}, offset {row.offset}): {row.error}: {row.message}")

    print("\n--- with a corrected function, only that row is computed; None is a value")
    print(f"computed: {table.retry_errors('words', words_or_none).rows}, errors: {len(table.errors('words'))}")
    print(table.backfill("words", words_or_none))

    print("\n--- two columns from one function, and one from arrays")
    table.backfill(["letters", "spaces"], size)
    table.backfill("loud", shout, where="id < 3")
    rows = lance.dataset(uri).to_table(columns=["words", "letters", "spaces", "loud"], limit=4).to_pylist()
    for row in rows[2:]:
        print(row)

    print("\n--- history")
    for job in table.history("words"):
        print(f"{job.column} {job.status}: {job.errors} failed {job.message[:60]}".rstrip())
