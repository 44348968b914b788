"""Input formats and the file name suffixes that select them."""

from __future__ import annotations

FORMATS = ("jsonl", "csv", "text", "parquet", "lance", "paths", "bytes")
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".parquet": "parquet",
    ".lance": "lance",
}
COMPRESSED_SUFFIXES = (".gz", ".zst", ".zstd")
LINE_FORMATS = ("jsonl", "csv", "text")


def format_from_suffix(name: str) -> str | None:
    """The format of a file name suffix."""
    lower = name.lower()
    packed = next((end for end in COMPRESSED_SUFFIXES if lower.endswith(end)), "")
    stem = lower.removesuffix(packed)
    found = next((form for end, form in SUFFIXES.items() if stem.rstrip("/").endswith(end)), None)
    return None if packed and found not in LINE_FORMATS else found
