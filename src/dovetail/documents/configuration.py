"""Configuration of a user or project: environment variables, and the project file.

The project file is `dovetail.toml`, or the table `[tool.dovetail]` of `pyproject.toml`, in the current folder or the
nearest one above it. An option or argument wins over the environment, the environment over the project file.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dovetail.documents.fields import (
    Field,
    MissingKey,
    Mistake,
    Noted,
    ParserProblem,
    Record,
    UnknownKey,
    WrongValue,
    choice,
    file_problem,
    predicate,
)
from dovetail.errors import ConfigError, Problem, nearest_word

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dovetail.errors import Fix

PROJECT_FILE, PYPROJECT_FILE = "dovetail.toml", "pyproject.toml"
PYPROJECT_TABLE = ("tool", "dovetail")
ENGINE_NAMES = ("local", "ray", "ray:auto")
QUIET, NORMAL, VERBOSE = "quiet", "normal", "verbose"
CLUSTER_SUFFIXES = (".yaml", ".yml", ".json")
SQLITE_PREFIX = "sqlite:///"
"""Start of the URL of a queue in a file; a relative path follows."""
ENGINE_TEXT = "local, ray, ray:auto or ray:HOST:PORT"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_engine(value: object) -> bool:
    return isinstance(value, str) and (value in ENGINE_NAMES or value.startswith("ray:"))


CONFIGURATION = Record(
    "Project file",
    "Defaults of commands and of `dt.run`.",
    (
        Field("home", predicate("a folder", ".dovetail", {}, _is_text), "Folder of runs and measured speeds."),
        Field("engine", predicate(ENGINE_TEXT, "ray:auto", {}, _is_engine), "Where to run.", "local"),
        Field(
            "cluster",
            predicate("a cluster spec or file", "1x(8cpu, 32GB)", {}, _is_text),
            "Cluster to plan for, and to limit local runs to ([clusters.md](clusters.md)). It does not apply on Ray.",
            "auto",
        ),
        Field(
            "verbosity",
            choice((QUIET, NORMAL, VERBOSE)),
            "quiet: neither plan nor progress; verbose: the output of workers as well.",
            NORMAL,
        ),
        Field(
            "queue",
            predicate("the URL of a queue", "sqlite:///jobs.db", {}, _is_text),
            "Queue of `train.submit(...)`, of `dovetail jobs` and of `dovetail worker`.",
        ),
    ),
)


class ConfiguredText(str):
    """A value of the environment or the project file; `origin` is its place, for messages. A copy is plain text."""

    __slots__ = ("origin",)
    origin: str

    def __new__(cls, value: str, origin: str) -> Self:
        text = super().__new__(cls, value)
        text.origin = origin
        return text

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"DOVETAIL_{name.upper()}"


def configured(name: str) -> ConfiguredText | None:
    """The configured value of a setting; None if there is none. Raises ConfigError for anything invalid."""
    field = CONFIGURATION.by_name[name]
    variable = variable_of(name)
    value = os.environ.get(variable)
    if value:
        problems = [_problem(variable, mistake, "{}={}") for mistake in field.mistakes(value)]
        if problems:
            raise ConfigError(replace(problem, place=variable) for problem in problems)
        return ConfiguredText(value, variable)
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        return None  # the current folder was removed
    return project_settings(folder).get(name)


def at_origin(error: ConfigError, value: object) -> ConfigError:
    """The same error with the origin of a configured value as its place."""
    if not isinstance(value, ConfiguredText):
        return error
    return type(error)(
        replace(problem, place=f"{value.origin}: {problem.place}" if problem.place else value.origin)
        for problem in error.problems
    )


def configuration_table() -> str:
    """The settings as a table in Markdown, as in docs/configuration.md."""
    lines = ["| key | variable | value | default | meaning |", "|---|---|---|---|---|"]
    for one in CONFIGURATION.fields:
        default = f"`{one.default}`" if isinstance(one.default, str) else ""
        lines.append(f"| `{one.name}` | `{variable_of(one.name)}` | {one.type.text} | {default} | {one.description} |")
    return "\n".join(lines)


# --- the project file


def project_settings(folder: Path) -> Mapping[str, ConfiguredText]:
    """The settings of the project file of a folder; none if there is no such file."""
    for path in _candidates(folder):
        try:
            found = path.stat()
        except OSError:
            continue
        settings = _read(path, found.st_mtime_ns, found.st_size)
        if settings is not None:
            return settings
    return {}


def _candidates(folder: Path) -> Iterator[Path]:
    """Paths of project files, nearest first, up to the root of the repository or the home of the user. Above the
    folder itself, those that everyone may write to, such as /tmp, are left out."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises if there is none
    for place in (folder, *folder.parents):
        if place != folder and _is_world_writable(place):
            return
        yield place / PROJECT_FILE
        yield place / PYPROJECT_FILE
        if place == home or (place / ".git").exists():
            return


def _is_world_writable(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return True


@lru_cache(maxsize=16)
def _read(path: Path, _changed_ns: int, _size: int) -> Mapping[str, ConfiguredText] | None:
    """The settings in a file; None if it is a pyproject.toml without the table."""
    is_pyproject = path.name == PYPROJECT_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if is_pyproject:
            return None  # other tools report it
        raise ConfigError(
            Problem("DT010", f"cannot be read: {error}", fixes=("make it a readable text file",), place=str(path))
        ) from None
    if is_pyproject and ".".join(PYPROJECT_TABLE) not in text:
        return None
    data = _parse(text, path)
    for step in PYPROJECT_TABLE if is_pyproject else ():
        data = data.get(step) if isinstance(data, dict) else None
        if data is None:
            return None
    return _settings(data, text, path)


def _parse(text: str, path: Path) -> Any:
    import tomllib  # late: most folders have no such file

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r" *\(at line (\d+), column (\d+)\)", str(error))
        where = f"{path}:{place[1]}:{place[2]}" if place else str(path)
        message = f"not valid TOML: {str(error).replace(place[0], '') if place else error}"
        raise ConfigError(
            Problem("DT010", message, fixes=('write lines such as engine = "ray:auto"',), place=where)
        ) from None


def _settings(data: Any, text: str, path: Path) -> Mapping[str, ConfiguredText]:
    if not isinstance(data, dict):
        message = f"{'.'.join(PYPROJECT_TABLE)} is not a table"
        raise ConfigError(Problem("DT013", message, fixes=(f"[{'.'.join(PYPROJECT_TABLE)}]",), place=str(path)))
    lines = _key_lines(text, PYPROJECT_TABLE if path.name == PYPROJECT_FILE else ())

    def place(key: str) -> str:
        return f"{path}:{lines[key]}" if key in lines else str(path)

    problems = [
        replace(_problem(str(mistake.path[0]), mistake, "{} = {}"), place=place(str(mistake.path[0])))
        for mistake in CONFIGURATION.mistakes(data)
    ]
    if problems:
        raise ConfigError(problems)
    return {key: ConfiguredText(_resolved(key, value, path.parent), place(key)) for key, value in data.items()}


def _problem(name: str, mistake: Mistake, line: str) -> Problem:
    """The problem of a setting, with fixes as lines of TOML or as variables."""
    fixes: tuple[Fix, ...] = ()
    match mistake:
        case UnknownKey(known=known, value=value):
            near = nearest_word(name, known)
            fixes = (line.format(near, json.dumps(value)),) if near else (f"remove {name!r}",)
        case WrongValue(value=value, instead=instead):
            meant = nearest_word(value, ENGINE_NAMES) if isinstance(value, str) and "engine" in name.lower() else None
            values = [meant] if meant else [one.value if isinstance(one, Noted) else one for one in instead]
            fixes = tuple(line.format(name, json.dumps(one) if " " in line else one) for one in values)
            mistake = replace(mistake, path=(name,))
        case MissingKey() | ParserProblem():
            raise AssertionError(f"{mistake} cannot be in a project file")
    return replace(file_problem(mistake), fixes=fixes)


def _key_lines(text: str, table: tuple[str, ...]) -> dict[str, int]:
    """The line of each key of a table."""
    found: dict[str, int] = {}
    current: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?$", line):
            current = tuple(part.strip().strip("\"'") for part in header[1].split("."))
        elif key := re.match(r"""\s*([\w."' -]+?)\s*=""", line):
            names = (*current, *(part.strip().strip("\"'") for part in key[1].split(".")))
            if names[: len(table)] == table and len(names) > len(table):
                found.setdefault(names[len(table)], number)
        if header and current[: len(table)] == table and len(current) > len(table):
            found.setdefault(current[len(table)], number)
    return found


def _resolved(key: str, value: str, folder: Path) -> str:
    """The value, with paths relative to the folder of the project file."""
    relative = value.removeprefix(SQLITE_PREFIX)
    if key == "queue" and relative != value and not relative.startswith(("/", "~")):
        return f"{SQLITE_PREFIX}{folder / relative}"
    is_path = key == "home" or (key == "cluster" and value.endswith(CLUSTER_SUFFIXES))
    return str(folder / os.path.expanduser(value)) if is_path else value  # noqa: PTH111


if __name__ == "__main__":
    print(configuration_table())  # noqa: T201
