"""How is what `dt.table` says told to whoever typed `dovetail backfill`?"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import dovetail as dt

if TYPE_CHECKING:
    from collections.abc import Callable

UDF = "--udf package.module:function"
OPTIONS = ("workers", "batch_size", "slots", "where", "fragments", "on_error", "max_errors", "timeout", "commit_every")
CALLS = {
    r'table\.backfill\("([^"]*)", on_error="skip"\)': "--on-error skip",
    r"table\.(backfill|add_column)\((\"[^\"]*\"|\[[^\]]*\]), \w+\)": UDF,
    r'table\.backfill\("([^"]*)", (where|fragments|recompute)=\.\.\.\)': r"leave out --retry-errors",
    r'table\.backfill\("([^"]*)"\)': "the same without this option",
    r'table\.errors\("([^"]*)"\)': "HERE --errors",
    r'table\.history\("([^"]*)"\)': "HERE --history",
    r'table\.retry_errors\("([^"]*)"\)': "HERE --retry-errors",
    r"table\.drop\((\"[^\"]*\"|'[^']*'|\[[^\]]*\])\)": "DROP",
}
SAID = re.compile(rf"({'|'.join(OPTIONS)})=('[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)|\S+)(| .*)")
PHRASES = {
    "wait for it: pass wait=True": "wait for it: leave --no-wait out",
    "storage_options, e.g. {'aws_region': ..., 'aws_access_key_id': ...}": "--storage-option aws_region=...",
    "a larger max_errors=": "a larger --max-errors",
    "call backfill again": "type the same command again",
    "and call it again": "and type the same command again",
    "call it again": "type the same command again",
    '"fail": the run ends': "--on-error fail: it ends",
    '"skip": the row is NULL and in errors(column)': "--on-error skip: the row is NULL, and --errors lists it",
    'Retry(ConnectionError, times=3, backoff="1s", then="skip")': "--retry ConnectionError --on-error skip",
    "(least, most)": "LO-HI",
}


def typed(table: str, column: str | None) -> Callable[[str], str]:
    """Texts with calls of Python in them, as commands."""

    def change(text: str) -> str:
        for pattern, words in CALLS.items():
            text = re.sub(pattern, partial(_command, words, table, column), text)
        for phrase, words in PHRASES.items():
            text = text.replace(phrase, words)
        said = SAID.fullmatch(text)
        return f"--{said[1].replace('_', '-')} {_value(said[2])}{said[3]}" if said else text

    return change


def as_typed(table: str, column: str) -> Callable[[dt.DovetailError], dt.DovetailError]:
    """Errors in those words. What was raised as two types at once is ours alone: others have ideas about theirs (of an
    EOFError click makes an interruption)."""
    change = typed(table, column)

    def changed(error: dt.DovetailError) -> dt.DovetailError:
        kind = dt.RunError if isinstance(error, dt.RowFailed) else type(error)
        return kind(
            replace(one, message=change(one.message), fixes=tuple(map(change, one.fixes))) for one in error.problems
        )

    return changed


def _command(words: str, table: str, column: str | None, found: re.Match[str]) -> str:
    names = ",".join(re.findall(r"[\"']([^\"']*)[\"']", found[0])) or column or ""
    here = shlex.join(["dovetail", "backfill", table, names])
    return words.replace("HERE", here).replace("DROP", f"{here} --drop")


def _value(text: str) -> str:
    """A value of Python as a shell takes it."""
    if re.fullmatch(r"\(\S+, \S+\)", text):
        return text[1:-1].replace(", ", "-")
    if text.startswith("[") and text.endswith("]"):
        return f"{text[1:-1].replace(' ', '')},"
    return shlex.quote(text[1:-1]) if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
