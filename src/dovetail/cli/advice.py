"""How does a fix read to somebody who has a pipeline file and a command line, not a Python program?"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.documents import read_document

if TYPE_CHECKING:
    from dovetail.documents import Document
    from dovetail.errors import DovetailError, Problem
    from dovetail.resources.cluster import Cluster

_STAGE = re.compile(r"stage '([^']+)'")
_MODE = re.compile(r'mode="(\w+)"')
_NODES = re.compile(r"add (?P<count>\d+|a) nodes? like 1x(?P<node>.*)")
_ASSIGNED = re.compile(r"\b(\w+)=(\"[^\"]*\"|[^\s,]+)")


def for_files(error: DovetailError, file: str, cluster: Cluster, *, on_ray: bool = False) -> DovetailError:
    """The same error with the lines of the file, and with fixes as they are written there or on the command line; a
    cluster `on_ray` is no text that could be changed."""
    document = read_document(file)
    return type(error)([_translated(problem, document, None if on_ray else cluster) for problem in error.problems])


def _translated(problem: Problem, document: Document, cluster: Cluster | None) -> Problem:
    fixes = tuple(_fix(fix, cluster) for fix in problem.fixes)
    return replace(problem, fixes=fixes, place=problem.place or _place(problem, document))


def _place(problem: Problem, document: Document) -> str:
    named = _STAGE.match(problem.message)
    stages = document.data.get("stages", ()) if isinstance(document.data, dict) else ()
    for number, stage in enumerate(stages):
        if named and isinstance(stage, dict) and stage.get("name") == named[1]:
            return document.place(("stages", number))
    return document.place(("stages",))


def _fix(fix: str, cluster: Cluster | None) -> str:
    lead = "or " if fix.startswith("or ") else ""
    text = fix.removeprefix("or ")
    if mode := _MODE.fullmatch(text):
        return f"{lead}--mode {mode[1]}"
    if nodes := _NODES.fullmatch(text):
        count = "1" if nodes["count"] == "a" else nodes["count"]
        if cluster is None:
            return f"{lead}add {count} x {nodes['node']} to the Ray cluster"
        return f'{lead}--cluster "{cluster.spec()} + {count}x{nodes["node"]}"'
    return lead + _ASSIGNED.sub(lambda found: f"{found[1]}: {found[2].strip(chr(34))}", text)
