"""With what was a run started? `dovetail run --resume RUN` needs neither the file nor the options again."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.engines.ray.where import is_ray
from dovetail.errors import ConfigError, Problem
from dovetail.observe.folder import find_run, list_runs, read_object
from dovetail.observe.history import status_of
from dovetail.observe.naming import name_for
from dovetail.running.job import STANDARD, absolute

if TYPE_CHECKING:
    from dovetail.observe.folder import RunFolder

KEY = "asked"
RECIPE = "recipe"
"""Under which run.json has the digest of a recipe."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The part of a command line that says what is run, and on what: a resumed run keeps it."""

    file: str
    sets: tuple[str, ...] = ()
    source: str | None = None
    sink: str | None = None
    cluster: str | None = None
    mode: str | None = None
    ordered: bool | None = None
    max_errors: int | None = None
    limit: int | None = None
    folder: str | None = None
    """The current folder when it was typed: what was typed is relative to it."""
    has_sink: bool = False
    """Whether results go to a file: only then it can be resumed."""
    engine: str | None = None
    share: float | None = None
    env_from: tuple[str, ...] | None = None
    """Where it runs; None: not said."""


def remembered(asked: Asked, *, has_sink: bool) -> dict[str, Any]:
    """For run.json."""
    here = {"file": str(Path(asked.file).absolute()), "folder": asked.folder or str(Path.cwd()), "has_sink": has_sink}
    if asked.cluster is not None and os.path.isfile(asked.cluster):  # noqa: PTH113 - a spec may be too long for a Path
        here["cluster"] = str(Path(asked.cluster).absolute())
    return {KEY: asdict(asked) | here}


def asked_before(folder: RunFolder) -> Asked | None:
    """What run.json says; None, if a program started the run."""
    header = read_object(folder.header)
    more = header.get("more")
    told = (more if isinstance(more, Mapping) else header).get(KEY)
    if not isinstance(told, Mapping) or not isinstance(told.get("file"), str):
        return None
    known = {item.name: told[item.name] for item in fields(Asked) if item.name in told}
    texts = {key: tuple(map(str, told.get(key) or ())) for key in ("sets", "env_from")}
    return Asked(**known | texts | {"engine": told.get("engine") or engine_before(folder)})


def engine_before(folder: RunFolder) -> str | None:
    """The Ray that a run was on, whoever started it; None: it was on none."""
    engine = read_object(folder.header).get("engine")
    return engine if isinstance(engine, str) and is_ray(engine) else None


def with_what_was_asked(run: str, now: Asked | None, sets: tuple[str, ...], given: Mapping[str, Any]) -> Asked:
    """What the run was started with, and on top of it what is typed now. A file that is typed says everything but where
    it runs: that it goes on elsewhere must be said."""
    folder = find_run(run)
    before = asked_before(folder)
    if now is not None:
        return _there(now, before or Asked("", engine=engine_before(folder)))
    if before is None:
        name = name_for(folder.path)
        message = f"run {folder.id} was not started by `dovetail run`, so nobody knows its file"
        fixes = (f"dovetail run FILE --resume {name}", f'or where it was started: dt.run(..., resume="{folder.id}")')
        raise ConfigError(Problem("DT365", message, fixes=fixes))
    if not Path(before.file).is_file():
        message = f"run {folder.id} was started from a file that is gone: {before.file}"
        fix = f"dovetail run FILE --resume {name_for(folder.path)}"
        raise ConfigError(Problem("DT365", message, fixes=(fix,)))
    changed = {key: value for key, value in given.items() if value is not None}
    for key in changed.keys() & {"source", "sink"}:  # typed now and here, not where the run was started
        if changed[key] not in ("", STANDARD):
            changed[key] = absolute(changed[key], Path.cwd(), pattern=key == "source")
    nowhere = replace(before, engine=None, share=None, env_from=None)
    return _there(replace(nowhere, sets=(*before.sets, *sets), **changed), before)


def _there(now: Asked, before: Asked) -> Asked:
    """Where it runs, as it is typed now, else as before; a share is one of a cluster."""
    engine = now.engine or before.engine
    share = before.share if now.share is None and is_ray(engine) else now.share
    return replace(now, engine=engine, share=share, env_from=now.env_from or before.env_from)


def unfinished(asked: Asked, digest: str) -> tuple[str | None, str]:
    """The youngest run of the same recipe that did not come to its end and is not going on; or why it is not taken."""
    wall = time.time()
    now = str(Path(asked.file).absolute())
    for folder in list_runs():
        before = asked_before(folder)
        if before is None or before.file != now or _typed(before) != _typed(asked):
            continue
        header = read_object(folder.header)
        if not before.has_sink or status_of(header, wall) in ("finished", "running", "waiting"):
            return None, ""
        more = header.get("more")
        same = (more if isinstance(more, Mapping) else header).get(RECIPE) == digest
        return (folder.id, "") if same else (None, f"the recipe is not what it was in run {folder.id}")
    return None, ""


def _typed(asked: Asked) -> tuple[object, ...]:
    """What was typed; paths as they are found from where it was typed."""
    here = Path(asked.folder) if asked.folder else Path.cwd()
    ends = (asked.source, asked.sink)
    paths = [end and absolute(end, here, pattern=number == 0) for number, end in enumerate(ends)]
    return (tuple(asked.sets), *paths)
