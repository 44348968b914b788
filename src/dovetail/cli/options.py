"""Arguments and options that several commands share, with shell completion."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from dovetail.documents.configuration import configured
from dovetail.errors import DovetailError, did_you_mean
from dovetail.observe.run_folder import LAST_RUN, find_run, list_runs, run_name_in_id
from dovetail.pipeline.durations import parse_duration
from dovetail.pipeline.error_policy import parse_max_errors
from dovetail.pipeline.source_sink import MODES

if TYPE_CHECKING:
    from collections.abc import Sequence

Decorator = Callable[[Any], Any]

MAX_COMPLETIONS = 50


class PathText(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """A path that the shell completes. Unlike `click.Path`, it is not checked here: the command reports its errors."""

    name = "path"

    def __init__(self, kind: str = "file") -> None:
        self.kind = kind

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self.kind)]


FILE_PATH, FOLDER_PATH = PathText("file"), PathText("dir")


class SuggestingChoice(click.Choice):  # type: ignore[type-arg]  # not generic before click 8.2
    """A choice whose error message suggests the nearest value."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return str(super().convert(value, param, ctx))
        except click.BadParameter as error:
            hint = did_you_mean(str(value), list(self.choices))
            self.fail(f"{error.message.rstrip('.')}{hint}", param, ctx)


class DurationText(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """A duration such as "90s" or "1h30m", as the text that was given."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_duration(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}; for example 90s or 5m", param, ctx)
        return str(value)


class ErrorLimit(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.2
    """A number of items, or a percentage of them."""

    name = "limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        limit: int | str = int(value) if str(value).isascii() and str(value).isdigit() else str(value)
        try:
            parse_max_errors(limit)
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)
        return limit


def complete_runs(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:  # noqa: ARG001
    """Names and ids of runs with this start, the latest first; ids also by any part."""
    ids = _run_ids()
    names = [name for name in (LAST_RUN, *dict.fromkeys(map(run_name_in_id, ids))) if name.startswith(begun)]
    parts = [] if not begun or names else [name for name in ids if begun in name]
    found = [*names, *(name for name in ids if name.startswith(begun)), *parts]
    return list(dict.fromkeys(filter(None, found)))[:MAX_COMPLETIONS]


def complete_run_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:  # noqa: ARG001
    """Names of runs with this start, the latest first."""
    names = dict.fromkeys(run_name_in_id(run) for run in _run_ids())
    return [name for name in names if name and name.startswith(begun)][:MAX_COMPLETIONS]


def _run_ids() -> list[str]:
    """Ids of all runs, the latest first; none if they cannot be read."""
    try:
        return [run.id for run in list_runs()]
    except DovetailError:
        return []


def complete_stages_of_run(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:  # noqa: ARG001
    """Stages of the run that was typed before, or of the latest run."""
    try:
        plan = find_run(context.params.get("run") or LAST_RUN).plan
    except DovetailError:
        return []
    return [name for name in stage_names_in(str(plan)) if name.startswith(begun)]


def complete_stages_of_file(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:  # noqa: ARG001
    """Stages of the pipeline file, or operators of the recipe, that was typed before."""
    return [name for name in stage_names_in(context.params.get("file") or "") if name.startswith(begun)]


def stage_names_in(file: str) -> list[str]:
    """Names of the stages in a pipeline, a recipe or a plan, or of the roles of actors; none if it cannot be read."""
    from dovetail.documents.parser import read_document

    try:
        data = read_document(file).data
    except DovetailError:
        return []
    if not isinstance(data, dict):
        return []
    if isinstance(data.get("units"), list):
        return [str(name) for unit in data["units"] for name in unit.get("stages", ())]
    stages, process = data.get("stages", data.get("roles")), data.get("process")
    if isinstance(stages, list):
        return [str(stage["name"]) for stage in stages if isinstance(stage, dict) and "name" in stage]
    return [str(next(iter(one), "")) if isinstance(one, dict) else str(one) for one in process or ()]


def file_argument(*, required: bool = True) -> Decorator:
    """FILE. It is read, and its errors are reported, by the command."""
    return click.argument("file", required=required, type=FILE_PATH)


RUN_HELP = """RUN is an id, the name of a pipeline or recipe (its latest run), a part of id or name that only one run
has, `last`, or a folder."""


def run_argument() -> Decorator:
    """RUN, by default the latest run; the help explains how runs are found."""

    def decorate(function: Any) -> Any:
        function.__doc__ = f"{inspect.cleandoc(function.__doc__)}\n\n{RUN_HELP}  [default: {LAST_RUN}]"
        return click.argument("run", default=LAST_RUN, shell_complete=complete_runs)(function)

    return decorate


def cluster_option(name: str = "cluster_spec", *, default: str | None = "auto") -> Decorator:
    """--cluster; not given, it is the configured one, else `default`. With None, the command itself resolves it."""
    return click.option(
        "--cluster",
        name,
        metavar="SPEC",
        type=FILE_PATH,
        callback=None if default is None else partial(_configured_cluster, default),
        help="Cluster to use: a spec, an instance type (4xp5.48xlarge), a YAML or JSON file, or auto (this machine).  "
        "[default: as configured, or auto]",
    )


def _configured_cluster(
    default: str,
    context: click.Context,  # noqa: ARG001 - click's
    parameter: click.Parameter,  # noqa: ARG001
    value: str | None,
) -> str:
    return configured("cluster") or default if value is None else value


def mode_option() -> Decorator:
    return click.option(
        "--mode", type=SuggestingChoice(MODES), help="Execution mode.  [default: the mode set in FILE, or auto]"
    )


def no_profiles_option() -> Decorator:
    return click.option("--no-profiles", is_flag=True, help="Ignore measurements of earlier runs.")


def set_option(example: str = "'stages.*.on_error=skip' is for all stages.") -> Decorator:
    return click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="PATH=VALUE",
        help=f"Override a value of FILE; may be repeated. {example}",
    )


def source_option(text: str) -> Decorator:
    return click.option("--source", metavar="PATH", type=FILE_PATH, help=text)


def json_option(text: str = "Print JSON.") -> Decorator:
    return click.option("--json", "as_json", is_flag=True, help=text)


def output_option(text: str, *, required: bool = False) -> Decorator:
    return click.option("-o", "--out", required=required, metavar="FILE", type=FILE_PATH, help=f"{text}; - is stdout.")


def run_dir_option() -> Decorator:
    return click.option(
        "--run-dir",
        metavar="DIR",
        type=FOLDER_PATH,
        help="Folder of the run.  [default: a new one in $DOVETAIL_HOME/runs]",
    )


def http_options(port: int, pages: str = "", *, is_fixed: bool = False) -> Decorator:
    """--port, --host and --token of a command that serves HTTP. `pages`: what it serves beside its work. `is_fixed`: a
    port that is taken is an error; otherwise the next free one is used."""
    where, what = (f"of {pages}", f"Token of {pages}") if pages else ("to listen on", "Token")
    options = (
        click.option(
            "--port",
            metavar="PORT",
            type=click.IntRange(0, 65535),
            default=port,
            show_default=True,
            help=f"Port {where}; {'' if is_fixed else 'the next free one if it is taken; '}0: any free port.",
        ),
        click.option(
            "--host",
            metavar="HOST",
            default="127.0.0.1",
            show_default=True,
            help=f"Address {where}; one that other machines reach needs a token.",
        ),
        click.option(
            "--token",
            metavar="TOKEN",
            envvar="DOVETAIL_TOKEN",
            default="",
            help=f"{what}: clients send `Authorization: Bearer TOKEN`.  "
            "[env var: DOVETAIL_TOKEN, which other users cannot see]",
        ),
    )

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def complete_values(values: Sequence[str]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Completion of an option that takes these values, among others."""

    def complete(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:  # noqa: ARG001
        return [value for value in values if value.startswith(begun)]

    return complete
