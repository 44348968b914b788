"""Run folder: its files, creation, lookup by id or path, and how to refer to a run on the command line."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.documents.configuration import configured
from dovetail.errors import ConfigError, Problem, did_you_mean
from dovetail.machine.private_files import FOLDER_MODE, foreign_access, make_private_folder, open_private

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LAST_RUN = "last"
MAX_RUNS_SHOWN = 5
MAX_RUNS_COMPARED = 500
"""Runs that a misspelt name is compared with."""
RUN_ID = re.compile(r"(?P<time>\d{8}-\d{6}-[0-9a-f]+)-(?P<name>.+)")
TEMPORARY_SUFFIX = ".tmp"
LOCK_FILE = "lock"
MAX_NAME_BYTES = 255
"""Longer than the names that file systems accept."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def header(self) -> Path:
        return self.path / "run.json"

    @property
    def secrets(self) -> Path:
        """Arguments that run.json shows masked."""
        return self.path / "secrets.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def rotated_events(self) -> Path:
        return self.path / "events.1.jsonl"

    @property
    def errors(self) -> Path:
        return self.path / "errors" / "errors.jsonl"

    @property
    def logs(self) -> Path:
        """Output of the workers, one file per process."""
        return self.path / "logs"

    @property
    def commit_log(self) -> Path:
        return self.path / "commit.log"

    @property
    def is_resumable(self) -> bool:
        """Whether its results are durable, so that it can be resumed."""
        unstarted = read_json_object(self.header).get("unstarted")
        if isinstance(unstarted, dict) and unstarted.get("durable"):
            return True
        try:
            with self.commit_log.open("rb") as file:
                return b'"begin"' in file.read(64)
        except OSError:
            return False

    @property
    def replay_log(self) -> Path:
        return self.path / "replay.log"


def home_folder() -> Path:
    """$DOVETAIL_HOME, `home` of the project file, or a folder of this user."""
    given = configured("home")
    if given is not None:
        return _expand_user(given)
    data = os.environ.get("XDG_DATA_HOME", "")
    # XDG specification: ignore relative paths
    base = Path(data) if Path(data).is_absolute() else Path("~/.local/share").expanduser()
    return base / "dovetail"


def _expand_user(path: str | Path) -> Path:
    """Expand ~; unchanged if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def runs_folder() -> Path:
    return home_folder() / "runs"


def new_run_id(name: str, wall: float, salt: str) -> str:
    """Sortable by time, unique by its salt, recognisable by its name: '20261116-030533-9f3a-video'."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(wall))}-{salt}-{_name_in_ids(name) or 'run'}"


def _name_in_ids(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")


def create_run(
    name: str, where: str | Path | None = None, *, again: bool = False, wall: Callable[[], float] = time.time
) -> RunFolder:
    """Create a folder of mode 0700 under the home, or exactly `where`, which must be new or empty; with `again`, that
    of an existing run."""
    if where is not None:
        folder = RunFolder(_expand_user(where).absolute())
        if not _is_unicode(folder.path):
            fixes = ("specify a folder whose path is valid UTF-8",)
            raise _error("DT302", "the path is not valid UTF-8", fixes=fixes, place=repr(str(where)))
        _make_folder(folder.path)
        _make_own(folder.path)
        if not _is_unused(folder.path) and not (again and folder.header.exists()):
            raise _folder_used(folder, str(where))
        return folder
    make_home_folder()
    _make_folder(runs_folder())
    while True:
        now = wall()
        # the fraction of the second first, so that ids sort by time
        path = runs_folder() / new_run_id(name, now, f"{int(now % 1 * 4096):03x}{os.urandom(1).hex()}")
        if not path.exists():
            _make_folder(path)
            return RunFolder(path)


def _is_unicode(path: Path) -> bool:
    """Whether the path can be stored in text files and databases."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_unused(path: Path) -> bool:
    """Whether the folder is empty, but for the lock of a driver that was killed before it wrote run.json."""
    return all(one.name == LOCK_FILE or one.match(f".*{TEMPORARY_SUFFIX}") for one in path.iterdir())


def _folder_used(folder: RunFolder, where: str) -> ConfigError:
    fixes = ["specify a new folder for the run"]
    if not folder.header.exists():
        return _error("DT302", "is not empty and not a run folder", fixes=tuple(fixes), place=where)
    instruction = resume_instruction(folder.path)
    if instruction:
        fixes.append(instruction)
    return _error("DT302", "already contains a run", fixes=tuple(fixes), place=where)


def make_home_folder() -> None:
    _make_folder(home_folder())


def _make_own(path: Path) -> None:
    """Take over an existing folder, so that only this user can write to it."""
    reason = foreign_access(path)
    if reason.startswith("belongs"):
        raise _error("DT303", reason, fixes=("specify a new folder for the run",), place=str(path))
    if reason:
        path.chmod(FOLDER_MODE)


def _make_folder(path: Path) -> None:
    try:
        make_private_folder(path)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except (OSError, ValueError) as error:
        raise cannot_write_error(path, error) from None


def cannot_write_error(path: Path, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error)
    fix = "set DOVETAIL_HOME or the run folder to a folder that you can write to"
    return _error("DT303", f"cannot be written: {reason}", fixes=(fix,), place=str(path))


def list_runs() -> list[RunFolder]:
    """Newest first; other files are skipped."""
    folder = runs_folder()
    try:
        found = [RunFolder(path) for path in folder.iterdir() if _has_header(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        message, fix = f"cannot be read: {error.strerror}", "export DOVETAIL_HOME=/a/folder/of/yours"
        raise _error("DT303", message, fixes=(fix,), place=str(folder)) from None
    return sorted(found, key=lambda run: run.id, reverse=True)


def _has_header(path: Path) -> bool:
    try:
        return (path / "run.json").is_file()
    except OSError:  # a run of another user in a shared home
        return False


def find_run(what: str) -> RunFolder:
    """Find a run by `last`, its id, the path of its folder, its name (the latest run of that name), or a part of id or
    name that only one run has; otherwise raise a ConfigError that lists runs."""
    runs = list_runs()
    if what == LAST_RUN and runs:
        return runs[0]
    exact = [run for run in runs if run.id == what]
    if exact:
        return exact[0]
    is_folder = _is_folder(what)
    if is_folder and (os.sep in what or RunFolder(Path(what)).header.is_file()):
        return _require_run_folder(Path(what))
    named = next((run for run in runs if _has_name(run, what)), None)
    if named is not None:
        return named
    alike = [run for run in runs if what and run.id.startswith(what)]
    if len(alike) != 1:
        alike = [run for run in runs if _contains(run, what)]
    if len(alike) == 1:
        return alike[0]
    if alike:
        raise _ambiguous_run(what, alike)
    if is_folder:
        return _require_run_folder(Path(what))
    raise _no_such_run(what, runs)


def run_name_in_id(run_id: str) -> str:
    """The name of a run as its id spells it, 'video' of '20261116-030533-9f3a-video'; empty for other ids."""
    found = RUN_ID.fullmatch(run_id)
    return found["name"] if found else ""


def short_run_id(run_id: str) -> str:
    """The id without the name, by which the run is found as well."""
    found = RUN_ID.fullmatch(run_id)
    return found["time"] if found else run_id


def _has_name(run: RunFolder, what: str) -> bool:
    if not what or _name_in_ids(what) != run_name_in_id(run.id):
        return False
    return what == run_name_in_id(run.id) or what == read_json_object(run.header).get("name")


def _contains(run: RunFolder, what: str) -> bool:
    name = _name_in_ids(what)
    return bool(what) and (what.lower() in run.id or bool(name and name in run_name_in_id(run.id)))


def _ambiguous_run(what: str, alike: list[RunFolder]) -> ConfigError:
    fixes = ["use more characters of the id"]
    names = {run_name_in_id(run.id) for run in alike}
    if len(names) == 1:
        fixes.append(f"{names.pop()} is the latest run of that name")
    return _error("DT304", f"{len(alike)} runs have {what!r} in their id or name", _run_ids(alike), tuple(fixes))


def _is_folder(what: str) -> bool:
    try:
        return bool(what) and len(what) < 16 * MAX_NAME_BYTES and Path(what).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # the last one: ~ of an unknown user
        return False


def _require_run_folder(path: Path) -> RunFolder:
    folder = RunFolder(path.expanduser().absolute())
    if not folder.header.is_file():
        fixes = ("dovetail ls lists all runs",)
        raise _error("DT302", "is not a run folder: no run.json", fixes=fixes, place=str(path))
    return folder


def _no_such_run(what: str, runs: list[RunFolder]) -> ConfigError:
    if not runs:
        message = f"there is no run {what!r}: no runs in {runs_folder()}"
        return _error("DT301", message, fixes=("dovetail run FILE, or set DOVETAIL_HOME to the folder of the runs",))
    known = [LAST_RUN, *(name for run in runs[:MAX_RUNS_COMPARED] for name in (run_name_in_id(run.id), run.id))]
    message = f"there is no run {what!r}{did_you_mean(what, filter(None, known))}"
    return _error("DT301", message, _run_ids(runs), (f"dovetail status {runs[0].id}", "dovetail ls lists all runs"))


def _run_ids(runs: list[RunFolder]) -> tuple[str, ...]:
    more = (f"and {len(runs) - MAX_RUNS_SHOWN} more",) if len(runs) > MAX_RUNS_SHOWN else ()
    return (*(run.id for run in runs[:MAX_RUNS_SHOWN]), *more)


def _error(
    code: str, message: str, evidence: tuple[str, ...] = (), fixes: tuple[str, ...] = (), place: str = ""
) -> ConfigError:
    return ConfigError(Problem(code, message, evidence, fixes, place))


def write_atomically(path: Path, text: str) -> None:
    """Atomic write of a file of mode 0600: a reader never sees a partial file.

    Without fsync: a crash of the machine may lose the last write, as it may lose the last lines of the journal.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with os.fdopen(open_private(temporary, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_temporary_files(folder: Path) -> None:
    """Remove what a driver that was killed in `write_atomically` left. The caller holds the lock of the run."""
    for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def overwrite_in_place(path: Path, text: str) -> None:
    """Overwrite in place, without a temporary file: for a full disk."""
    data = text.encode()
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if missing or unreadable."""
    try:
        data = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def number_field(data: Mapping[str, Any], key: str) -> float:
    """A number of a line; 0 if missing or malformed."""
    value = data.get(key)
    return value if isinstance(value, int | float) else 0.0


def run_reference(folder: str | Path) -> str:
    path = Path(folder)
    return shlex.quote(path.name if path.parent == runs_folder() else str(path))


def backfill_command(action: str, more: Mapping[str, Any]) -> str:
    """The command for the column of a backfill, whose `more` in run.json is given: dovetail backfill errors clips.lance
    length."""
    words = ["dovetail", "backfill", action, str(more.get("table", "")), str(more.get("column", ""))]
    udf = more.get("udf") if action != "errors" else None
    return shlex.join([*words, "--udf", str(udf)] if udf else words)


def resume_instruction(folder: str | Path) -> str:
    """How to resume a run, as it was started, by the command line or by a program; empty: it cannot be resumed."""
    run = RunFolder(Path(folder))
    more = read_json_object(run.header).get("more")
    if isinstance(more, dict) and more.get("column"):
        return backfill_command("run", more)
    if not run.is_resumable:
        return ""
    if isinstance(more, dict) and "asked" in more:
        return f"dovetail run --resume {run_reference(folder)}"
    where = run.id if run.path.parent == runs_folder() else str(folder)
    return f'dt.run(..., resume="{where}") with the same arguments'
