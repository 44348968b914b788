"""Arguments of `dovetail run` saved in run.json, so that `--resume` needs neither file nor options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.engines.ray.address import is_ray_engine
from dovetail.errors import ConfigError, Problem
from dovetail.observe.run_folder import backfill_command, find_run, read_json_object, run_reference
from dovetail.observe.run_header import SecretText, read_secrets
from dovetail.pipeline.secret_settings import mask_override
from dovetail.runtime.run_spec import STDIO, absolute_path

if TYPE_CHECKING:
    from dovetail.observe.run_folder import RunFolder

ARGUMENTS_KEY = "asked"


@dataclass(frozen=True, slots=True)
class RunArguments:
    """Arguments that define a run; a resumed run keeps them."""

    file: str
    sets: tuple[str, ...] = ()
    source: str | None = None
    sink: str | None = None
    cluster: str | None = None
    mode: str | None = None
    ordered: bool | None = None
    max_errors: int | float | str | None = None
    limit: int | None = None
    folder: str | None = None
    """The current folder of the command: typed paths are relative to it."""
    has_sink: bool = False
    """Whether results go to a file; otherwise the run cannot be resumed."""
    engine: str | None = None
    share: float | None = None
    env_from: tuple[str, ...] | None = None
    """None: not given."""


def arguments_for_header(asked: RunArguments, *, has_sink: bool) -> dict[str, Any]:
    """The arguments as stored in run.json."""
    here = {"file": str(Path(asked.file).absolute()), "folder": asked.folder or str(Path.cwd()), "has_sink": has_sink}
    if asked.cluster is not None and os.path.isfile(asked.cluster):  # noqa: PTH113 - a spec may be too long for a Path
        here["cluster"] = str(Path(asked.cluster).absolute())
    return {ARGUMENTS_KEY: asdict(asked) | here | {"sets": [_as_secret(text) for text in asked.sets]}}


def _as_secret(override: str) -> str:
    """The override, as a secret if its value may be one."""
    shown = mask_override(override)
    return override if shown == override else SecretText(override, shown)


def read_saved_arguments(folder: RunFolder) -> RunArguments | None:
    """The arguments stored in run.json; None if a program started the run."""
    header = read_json_object(folder.header)
    more = header.get("more")
    stored = (more if isinstance(more, Mapping) else header).get(ARGUMENTS_KEY)
    if not isinstance(stored, Mapping) or not isinstance(stored.get("file"), str):
        return None
    known = {item.name: stored[item.name] for item in fields(RunArguments) if item.name in stored}
    texts = {key: tuple(map(str, stored.get(key) or ())) for key in ("sets", "env_from")}
    secrets = read_secrets(folder)
    texts["sets"] = tuple(secrets.get(text, text) for text in texts["sets"])
    return RunArguments(**known | texts | {"engine": stored.get("engine") or saved_ray_engine(folder)})


def saved_ray_engine(folder: RunFolder) -> str | None:
    """The Ray engine of a run; None if it was not on Ray."""
    engine = read_json_object(folder.header).get("engine")
    return engine if isinstance(engine, str) and is_ray_engine(engine) else None


def check_not_backfill(run: str, action: str) -> None:
    """Raises if the run is a backfill; `action` is the command of `dovetail backfill` that does what was asked."""
    folder = find_run(run)
    more = read_json_object(folder.header).get("more")
    column = more.get("column") if isinstance(more, Mapping) else None
    if isinstance(more, Mapping) and column:
        fix = backfill_command(action, more)
        raise ConfigError(Problem("DT365", f"run {folder.id} is a backfill", fixes=(fix,)))


def merge_saved_arguments(
    run: str, now: RunArguments | None, sets: tuple[str, ...], given: Mapping[str, Any]
) -> RunArguments:
    """The stored arguments of a run, overridden by the given ones. A given file replaces all of them except the engine:
    to resume on another engine, --engine must be given."""
    folder = find_run(run)
    before = read_saved_arguments(folder)
    if now is not None:
        return _with_saved_engine(now, before or RunArguments("", engine=saved_ray_engine(folder)))
    if before is None:
        name = run_reference(folder.path)
        message = f"run {folder.id} was not started by `dovetail run`: its file is unknown"
        fixes = (
            f"dovetail run FILE --resume {name}",
            f'in the program that started it: dt.run(..., resume="{folder.id}")',
        )
        raise ConfigError(Problem("DT365", message, fixes=fixes))
    if not Path(before.file).is_file():
        message = f"the file of run {folder.id} does not exist any more: {before.file}"
        fix = f"dovetail run FILE --resume {run_reference(folder.path)}"
        raise ConfigError(Problem("DT365", message, fixes=(fix,)))
    changed = {key: value for key, value in given.items() if value is not None}
    for key in changed.keys() & {"source", "sink"}:  # relative to the current folder, not to that of the first start
        if changed[key] not in ("", STDIO):
            changed[key] = absolute_path(changed[key], Path.cwd(), pattern=key == "source")
    nowhere = replace(before, engine=None, share=None, env_from=None)
    return _with_saved_engine(replace(nowhere, sets=(*before.sets, *sets), **changed), before)


def _with_saved_engine(now: RunArguments, before: RunArguments) -> RunArguments:
    """The given engine, else the stored one; the stored share applies to Ray only."""
    engine = now.engine or before.engine
    share = before.share if now.share is None and is_ray_engine(engine) else now.share
    return replace(now, engine=engine, share=share, env_from=now.env_from or before.env_from)
