"""run.json, the first file of a run: what runs, where and since when, and its kind. Secrets of its arguments are kept
beside it."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from dovetail.machine.processes import process_start_time
from dovetail.observe.run_folder import cannot_write_error, read_json_object, write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dovetail.observe.run_folder import RunFolder

UNSTARTED_KEY = "unstarted"
"""Key of run.json until the run has begun to write its results."""
RUN_KINDS = ("pipeline", "recipe", "backfill", "service", "actors")
RECIPE_FILE_KEY = "recipe_file"
"""Key of the file of a recipe in the headers of its runs."""
ROLES_KEY = "roles"
"""Key of the roles of an actor system in its header."""
SERVICE = "dt.serve"
"""What started a service, as its header says."""


@dataclass(frozen=True, slots=True)
class RunDescription:
    """Identity of a run, as written to its folder."""

    name: str
    what: str = ""
    """The file, or the command line."""
    engine: str = ""
    cluster: str = ""
    """The cluster specification."""
    version: str = ""
    """Version of Dovetail."""
    virtual: bool = False
    """Simulated: seconds are virtual."""
    more: Mapping[str, object] = field(default_factory=dict)
    """Values of type `SecretText` are written to secrets.json."""


class SecretText(str):
    """A text that run.json, displays and reports do not contain: they have `shown` instead."""

    shown: str

    def __new__(cls, text: str, shown: str) -> Self:
        made = super().__new__(cls, text)
        made.shown = shown
        return made


def make_header(folder: RunFolder, about: RunDescription, started: float) -> dict[str, Any]:
    """Content of run.json of a run in this process."""
    data: dict[str, Any] = {**_without_secrets(about.more), "version": 1, "id": folder.id}
    data |= {"name": about.name, "what": about.what}
    data |= {"engine": about.engine, "cluster": about.cluster, "virtual": about.virtual}
    data |= {"dovetail": about.version, "python": sys.version.split()[0]}
    data |= {"host": socket.gethostname(), "pid": os.getpid(), "pid_started": process_start_time(os.getpid())}
    return {**data, "started": started, "ended": None, "status": "running", "error": ""}


def header_text(header: Mapping[str, Any]) -> str:
    return json.dumps(header, indent=1, default=str) + "\n"


def write_unstarted_header(
    folder: RunFolder, about: RunDescription, unstarted: Mapping[str, Any], started: float
) -> None:
    """Write run.json before anything else of a run exists, so that the run is listed, and can be resumed after a kill.

    `unstarted` has what a resume needs that otherwise stands in commit.log.
    """
    before = read_json_object(folder.header)
    resumed = {"resumed": before["resumed"]} if "resumed" in before else {}
    header = make_header(folder, about, started) | {"heartbeat": started, UNSTARTED_KEY: dict(unstarted), **resumed}
    try:
        write_secrets(folder, about)
        write_atomically(folder.header, header_text(header))
    except OSError as error:
        raise cannot_write_error(folder.path, error) from None


def read_unstarted(folder: RunFolder) -> dict[str, Any] | None:
    """What `write_unstarted_header` stored; None if the run has begun."""
    found = read_json_object(folder.header).get(UNSTARTED_KEY)
    return found if isinstance(found, dict) else None


def write_secrets(folder: RunFolder, about: RunDescription) -> None:
    secrets = {secret.shown: str(secret) for secret in _find_secrets(about.more)}
    if secrets:
        write_atomically(folder.secrets, json.dumps(secrets, indent=1) + "\n")


def read_secrets(folder: RunFolder) -> dict[str, str]:
    """The text that run.json shows -> the whole text."""
    return {shown: str(text) for shown, text in read_json_object(folder.secrets).items()}


def _without_secrets(value: Any) -> Any:
    match value:
        case SecretText():
            return value.shown
        case Mapping():
            return {key: _without_secrets(part) for key, part in value.items()}
        case list() | tuple():
            return [_without_secrets(part) for part in value]
        case _:
            return value


def _find_secrets(value: object) -> Iterator[SecretText]:
    match value:
        case SecretText():
            yield value
        case Mapping():
            for part in value.values():
                yield from _find_secrets(part)
        case list() | tuple():
            for part in value:
                yield from _find_secrets(part)


# --- kind


def run_kind(header: Mapping[str, Any]) -> str:
    """One of RUN_KINDS."""
    more = header.get("more")
    recorded = more if isinstance(more, Mapping) else {}
    if recorded.get("column"):
        return "backfill"
    if recorded.get(RECIPE_FILE_KEY):
        return "recipe"
    if recorded.get(ROLES_KEY):
        return "actors"
    return "service" if header.get("what") == SERVICE else "pipeline"
