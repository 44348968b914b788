"""Errors with lines of the file and fixes as options of the command line."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import dovetail as dt
from dovetail.documents import read_document
from dovetail.pipeline.option_surface import OptionSurface

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.documents import Document
    from dovetail.errors import DovetailError, Problem
    from dovetail.resources.cluster import Cluster


def error_for_file(error: DovetailError, file: str, cluster: Cluster, *, on_ray: bool = False) -> DovetailError:
    """The same error with the lines of a pipeline file, and with fixes as options of the command line."""
    document = read_document(file)
    surface = OptionSurface(None if on_ray else cluster)
    return type(error)(
        replace(surface.problem(problem), place=problem.place or _stage_place(problem, document))
        for problem in error.problems
    )


def _stage_place(problem: Problem, document: Document) -> str:
    names: Sequence[str] = problem.subject.names if problem.subject and problem.subject.kind == "stage" else ()
    stages = document.data.get("stages", ()) if isinstance(document.data, dict) else ()
    for number, stage in enumerate(stages):
        if isinstance(stage, dict) and stage.get("name") in names:
            return document.place(("stages", number))
    return document.place(("stages",))


UDF_OPTION = "--udf package.module:function"
OTHER_COMMAND_PREFIX = "dt.simulate("
"""What no command of this name does."""
BACKFILL_OPTIONS: tuple[str, ...] = (
    *("workers", "batch_size", "slots", "where", "fragments", "on_error", "max_errors", "timeout", "commit_every"),
    *("engine", "share", "env_from", "concurrency", "intra_applier_concurrency", "num_frags"),
)
CALL_PATTERNS = {
    r'table\.backfill\("([^"]*)", on_error="skip"\)': "--on-error skip",
    r"table\.(backfill|add_column)\((\"[^\"]*\"|\[[^\]]*\]), \w+\)": UDF_OPTION,
    r'table\.backfill\("([^"]*)", (where|fragments|recompute)=\.\.\.\)': r"leave out --retry-errors",
    r'table\.backfill\("([^"]*)", where="([^"]*)"\)': "FILL --where QUOTED",
    r'table\.backfill\("([^"]*)"\)': "FILL",
    r'table\.errors\("([^"]*)"\)': "HERE --errors",
    r'table\.history\("([^"]*)"\)': "HERE --history",
    r'table\.retry_errors\("([^"]*)"\)': "HERE --retry-errors",
    r"Retry\(('[^']*')\): is not": "--retry VALUE is not",
    r"^Retry\(ConnectionError, TimeoutError\)$": "--retry ConnectionError --retry TimeoutError",
    r"^then=": "on_error=",
    r"^([\w.]+:[\w.]+)$": "--udf VALUE",
    r"table\.drop\((\"[^\"]*\"|'[^']*'|\[[^\]]*\])\)": "DROP",
}
OPTION_PATTERN = re.compile(rf"({'|'.join(BACKFILL_OPTIONS)})=('[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)|\S+)(| .*)")
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
    'engine="ray", "ray:auto" or "ray:HOST:PORT"': "--engine ray, --engine ray:auto or --engine ray:HOST:6379",
    'engine="ray:auto" (--engine ray:auto)': "--engine ray:auto",
    "remove share and limit": "remove --share and limit",
    'cluster="1x(4cpu, 8GB)" (--cluster)': '--cluster "1x(4cpu, 8GB)"',
}


def backfill_text(table: str, column: str | None) -> Callable[[str], str]:
    """Texts with calls of Python in them, as commands."""

    def change(text: str) -> str:
        for pattern, words in CALL_PATTERNS.items():
            text = re.sub(pattern, partial(_command_text, words, table, column), text)
        for phrase, words in PHRASES.items():
            text = text.replace(phrase, words)
        said = OPTION_PATTERN.fullmatch(text)
        return f"--{said[1].replace('_', '-')} {_shell_value(said[2])}{said[3]}" if said else text

    return change


def backfill_error(table: str, column: str, *, filling: bool = True) -> Callable[[dt.DovetailError], dt.DovetailError]:
    """Errors in those words. What was raised as two types at once is ours alone: others have ideas about theirs (of an
    EOFError click makes an interruption). `filling`: what was typed can have a --udf."""
    change = backfill_text(table, column)

    def fixes(problem: dt.Problem) -> tuple[str, ...]:
        texts = [str(fix) for fix in problem.fixes]
        found = [change(fix) for fix in texts if not fix.startswith(OTHER_COMMAND_PREFIX)]
        if filling:
            return tuple(found)
        filled = f"{shlex.join(['dovetail', 'backfill', table, column])} {UDF_OPTION}"
        new = any(fix.startswith("table.add_column(") for fix in texts)
        return tuple(fix if fix != UDF_OPTION else filled for fix in found if fix != UDF_OPTION or not new)

    def changed(error: dt.DovetailError) -> dt.DovetailError:
        kind = dt.RunError if isinstance(error, dt.RowFailed) else type(error)
        return kind(replace(one, message=change(one.message), fixes=fixes(one)) for one in error.problems)

    return changed


def _command_text(words: str, table: str, column: str | None, found: re.Match[str]) -> str:
    names = ",".join(re.findall(r"[\"']([^\"']*)[\"']", found[0])) or column or ""
    here = shlex.join(["dovetail", "backfill", table, names])
    value = found[found.lastindex] if found.lastindex else ""
    words = words.replace("VALUE", value).replace("QUOTED", shlex.quote(value))
    words = words.replace("FILL", shlex.join(["dovetail", "backfill", table, column or ""]))
    return words.replace("HERE", here).replace("DROP", f"{here} --drop")


def _shell_value(text: str) -> str:
    """A value of Python as a shell takes it."""
    if re.fullmatch(r"\(\S+, \S+\)", text):
        return text[1:-1].replace(", ", "-")
    if re.fullmatch(r"\[(\"[^\"]*\"|'[^']*')\]", text):
        return text[2:-2]
    if text.startswith("[") and text.endswith("]"):
        return f"{text[1:-1].replace(' ', '')},"
    return shlex.quote(text[1:-1]) if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
