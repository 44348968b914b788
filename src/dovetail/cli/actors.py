"""`dovetail actors`: start an actor system from a file, and list, show, scale or stop running ones."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.cli import SuggestingGroup
from dovetail.cli.engine_option import LOCAL, engine_conflicts, engine_option
from dovetail.cli.logs import logs as logs_of_run
from dovetail.cli.options import (
    Decorator,
    DurationText,
    cluster_option,
    complete_runs,
    file_argument,
    json_option,
    run_dir_option,
    set_option,
)
from dovetail.cli.run_filter import run_entry
from dovetail.cli.signals import StopSignals
from dovetail.observe.control_socket import send_request
from dovetail.observe.run_folder import (
    LAST_RUN,
    find_run,
    home_folder,
    list_runs,
    make_home_folder,
    read_json_object,
    run_reference,
)
from dovetail.observe.run_header import run_kind
from dovetail.observe.run_status import run_status
from dovetail.pipeline.option_renderer import OptionRenderer
from dovetail.runtime.missing_code import find_missing_code
from dovetail.runtime.run_spec import add_import_path
from dovetail.text_format import align_table, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dovetail.actors.actors_file import ParsedActorsFile
    from dovetail.errors import Call
    from dovetail.observe.run_folder import RunFolder

ACTORS_KIND = "actors"
POLL_S = 0.05
LOG_INTERVAL_S = 0.2
"""Interval at which the messages of a system that starts in the background are shown."""
WATCH_INTERVAL_S = 1.0
DEFAULT_DEADLINE = "5m"
DRIVER_LOG = "driver.log"
UNUSABLE_OPTION, HELD_BY_OTHERS = "DT367", "DT120"
SYSTEM_HELP = "SYSTEM is a name, an id or a part of it, `last`, or a run folder."


class ActorsGroup(SuggestingGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """In the order of their use."""
        return list(self.commands)


@click.group(
    cls=ActorsGroup,
    epilog="""\b
Examples:
  dovetail init actors
  dovetail plan actors.yaml
  dovetail actors up actors.yaml --detach
  dovetail actors status
  dovetail actors scale rl rollout=8
  dovetail actors logs rl rollout -f
  dovetail actors down rl
""",
)
def actors() -> None:
    """Run systems of long-lived actors."""


def system_argument() -> Decorator:
    """SYSTEM, by default the latest running one."""
    return click.argument("system", default=LAST_RUN, shell_complete=complete_runs)


def find_system(what: str) -> RunFolder:
    """The run folder of an actor system; of several with a name, and of `last`, the latest that runs, else the
    latest."""
    headers = [(run, read_json_object(run.header)) for run in list_runs()]
    found = [(run, header) for run, header in headers if run_kind(header) == ACTORS_KIND]
    named = [(run, header) for run, header in found if what in (LAST_RUN, header.get("name"))]
    running = [run for run, header in named if run_status(header, time.time()) == "running"]
    if running:
        return running[0]
    if what == LAST_RUN:
        if not found:
            fixes = ("dovetail init actors", "dovetail actors up actors.yaml")
            raise dt.ConfigError(dt.Problem("DT301", "no actor system was started yet", fixes=fixes))
        return found[0][0]
    folder = find_run(what)
    kind = run_kind(read_json_object(folder.header))
    if kind != ACTORS_KIND:
        message = f"run {folder.id} is a {kind}, not an actor system"
        fixes = (f"dovetail status {run_reference(folder.path)}", "dovetail actors ls")
        raise dt.ConfigError(dt.Problem(UNUSABLE_OPTION, message, fixes=fixes))
    return folder


# --- up


@actors.command(
    epilog="""\b
Examples:
  dovetail actors up actors.yaml
  dovetail actors up actors.yaml --detach && dovetail actors status
  dovetail actors up actors.yaml --engine ray:auto
  dovetail actors up actors.yaml --set roles.rollout.workers=4

\b
Everything starts, or nothing: if an instance is not ready within --deadline,
all are stopped. Ctrl-C or SIGTERM once finishes the outstanding calls and
stops; twice stops at once.

\b
Exit codes: 0 stopped, 1 the system failed, 2 usage or configuration, 3 does
not fit, 5 engine unreachable.
"""
)
@file_argument()
@engine_option(LOCAL)
@cluster_option("cluster")
@click.option(
    "--deadline",
    type=DurationText(),
    default=DEFAULT_DEADLINE,
    show_default=True,
    metavar="TIME",
    help="Time within which every instance must be ready.",
)
@click.option("--no-wait", is_flag=True, help="Exit with code 3 instead of waiting for resources.")
@set_option("'roles.*.slots=4' is for all roles.")
@run_dir_option()
@click.option("--detach", "-d", is_flag=True, help="Return when the system is ready; it continues in the background.")
@click.option("--ready-fd", type=int, hidden=True, help="Of the process that --detach starts.")
def up(
    file: str,
    engine: str,
    cluster: str,
    deadline: str,
    no_wait: bool,
    sets: tuple[str, ...],
    run_dir: str | None,
    detach: bool,
    ready_fd: int | None,
) -> None:
    """Start the actor system in FILE."""
    problems = engine_conflicts(engine, cluster)
    if problems:
        raise dt.ConfigError(problems)
    if detach:
        given = {"--engine": engine, "--cluster": cluster, "--deadline": deadline, "--run-dir": run_dir}
        words = [word for name, value in given.items() if value is not None for word in (name, value)]
        words += [word for text in sets for word in ("--set", text)]
        _start_in_background([file, *words, *(["--no-wait"] if no_wait else [])])
        return
    if ready_fd is not None:
        os.set_inheritable(ready_fd, False)
    live = _launch(file, sets, engine=engine, cluster=cluster, wait=not no_wait, deadline=deadline, run_dir=run_dir)
    with StopSignals() as stops:
        if ready_fd is None:
            click.echo(str(live.status()))
            click.echo(f"{live.name} is running (run {live.folder.name}); Ctrl-C stops it", err=True)
        else:
            os.write(ready_fd, str(live.folder).encode())
            os.close(ready_fd)
        _wait_for_stop(live, stops)


def _launch(file: str, sets: Sequence[str], **arguments: Any) -> dt.LiveSystem:
    """Launch the system of a file; modules in its folder can be imported."""
    from dovetail.cli.actors_plan import load_actors  # late: other commands need no system

    parsed, system = load_actors(file, sets)
    path = Path(file).absolute()
    add_import_path(path.parent)
    problems = list(_missing_classes(parsed, path))
    if problems:
        raise dt.ConfigError(problems)
    try:
        return system.launch(**arguments)
    except dt.InfeasibleError as error:
        raise dt.InfeasibleError(_in_file(parsed, problem) for problem in error.problems) from None
    except dt.ConfigError as error:
        raise dt.ConfigError(
            parsed.located(one) if one.subject is not None and one.subject.kind == "role" else one
            for one in error.problems
        ) from None


def _in_file(parsed: ParsedActorsFile, problem: dt.Problem) -> dt.Problem:
    """A problem with the line of its role. Those of the launch have fixes as options."""
    found = parsed.located(problem)
    return replace(found, fixes=OptionRenderer().fixes(problem)) if problem.code == HELD_BY_OTHERS else found


def _missing_classes(parsed: ParsedActorsFile, file: Path) -> Iterator[dt.Problem]:
    for number, role in enumerate(parsed.roles):
        missing = find_missing_code(f"role {role.name!r}", role.cls, file.parent, called=False)
        if missing is not None:
            fixes = (f"cls: {missing.nearest}" if missing.nearest else missing.remedy(file.name),)
            place = parsed.document.place(("roles", number, "cls"))
            yield dt.Problem("DT034", missing.message, (missing.searched,), fixes, place)


def _start_in_background(words: Sequence[str]) -> None:
    """Start `dovetail actors up` in a process of its own, and return when its system is ready. If it does not start,
    its errors are printed here, and its exit code is that of this command.

    The process prints to a file from the beginning: its workers must not keep the streams of this command open."""
    make_home_folder()
    number, path = tempfile.mkstemp(prefix="actors-", suffix=".log", dir=home_folder())
    ready, ready_fd = os.pipe()
    command = [sys.executable, "-m", "dovetail", "actors", "up", *words, "--ready-fd", str(ready_fd)]
    with open(number, "wb") as log, open(ready, "rb") as answer:  # noqa: PTH123 - descriptors
        child = subprocess.Popen(  # noqa: S603 - this program itself
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(ready_fd,)
        )
        os.close(ready_fd)
        try:
            shown = 0
            while not select.select([answer], [], [], LOG_INTERVAL_S)[0]:
                shown = _show_log(Path(path), shown)  # what it waits for
            folder = answer.read().decode()
        except BaseException:
            child.send_signal(signal.SIGINT)
            raise
    if not folder:
        code = child.wait()
        _show_log(Path(path), shown)
        Path(path).unlink()
        sys.exit(code or 1)
    with suppress(OSError):  # another file system
        Path(path).rename(Path(folder) / DRIVER_LOG)
    click.echo(folder)
    name = run_reference(Path(folder))
    click.echo(f"running in process {child.pid}; stop it with: dovetail actors down {name}", err=True)
    child.returncode = 0  # it runs on: nothing waits for it


def _show_log(log: Path, start: int) -> int:
    """Print what was written behind this position to stderr; returns the position behind it."""
    with log.open("rb") as file:
        file.seek(start)
        data = file.read()
    click.echo(data.decode(errors="replace"), err=True, nl=False)
    return start + len(data)


def _wait_for_stop(live: dt.LiveSystem, stops: StopSignals) -> None:
    """Returns when the system has stopped; raises its error, or KeyboardInterrupt at a second signal."""
    try:
        while not live.done and not stops.count:
            time.sleep(POLL_S)
        if stops.count and not live.done:
            click.echo("stopping after the outstanding calls; Ctrl-C again stops now", err=True)
        live.stop(drain=True)
    except BaseException:
        with suppress(Exception):
            live.stop(drain=False)
        raise
    live.wait()
    click.echo("stopped", err=True)


# --- running systems


@actors.command(
    epilog="""\b
Examples:
  dovetail actors down
  dovetail actors down rl --now
"""
)
@system_argument()
@click.option("--now", is_flag=True, help="Do not finish the outstanding calls.")
@click.option("--no-wait", is_flag=True, help="Return at once.")
@json_option("Print the run and its status as JSON.")
def down(system: str, now: bool, no_wait: bool, as_json: bool) -> None:
    """Stop SYSTEM after its outstanding calls."""
    folder = find_system(system)
    send_request(folder.path, "cancel" if now else "drain", "dovetail actors down")
    status = run_status(read_json_object(folder.header), time.time())
    while not no_wait and status == "running":
        time.sleep(POLL_S)
        status = run_status(read_json_object(folder.header), time.time())
    if as_json:
        click.echo(json.dumps({"run": folder.id, "status": status, "folder": str(folder.path)}, indent=2))
    else:
        click.echo(f"{folder.id} is {'stopping' if status == 'running' else status}", err=True)


@actors.command(
    epilog="""\b
Examples:
  dovetail actors ls
  dovetail actors ls --all
  dovetail actors ls --json | jq -r '.[].id'
"""
)
@click.option("--all", "everything", is_flag=True, help="Also systems that have ended.")
@json_option("Print the systems as JSON.")
def ls(everything: bool, as_json: bool) -> None:
    """List running actor systems, latest first."""
    wall = time.time()
    entries = [run_entry(run, wall) for run in list_runs()]
    found = [one for one in entries if one["kind"] == ACTORS_KIND and (everything or one["status"] == "running")]
    keys = ("id", "name", "engine", "status", "age_s", "folder")
    if as_json:
        click.echo(json.dumps([{key: one[key] for key in keys} for one in found], indent=2))
        return
    if not found:
        click.echo(f"no actor systems{'' if everything else ' are running'}", err=True)
        return
    rows = [["run", "name", "engine", "status", "age"]]
    for one in found:
        age = "-" if one["age_s"] is None else format_duration(one["age_s"])
        rows.append([one["id"], one["name"], one["engine"], one["status"], age])
    for line in align_table(rows, left=4):
        click.echo(line)


@actors.command(
    epilog="""\b
Examples:
  dovetail actors status
  dovetail actors status rl --watch
  dovetail actors status rl --json | jq '.instances[].state'
"""
)
@system_argument()
@click.option(
    "--watch", "-w", is_flag=True, help="Print it every second until the system ends; Ctrl-C ends only the display."
)
@json_option("Print all figures as JSON; with --watch, one line per second.")
def status(system: str, watch: bool, as_json: bool) -> None:
    """Show state, node, calls, latency and restarts of every instance of SYSTEM."""
    from dovetail.actors.system_status import SystemStatus  # late, as above

    folder = find_system(system)
    while True:
        header = read_json_object(folder.header)
        state = run_status(header, time.time())
        if state != "running":
            _show_end(folder, state, str(header.get("error", "")), as_json=as_json)
            return
        found = send_request(folder.path, "status", "dovetail actors status")["status"]
        if as_json:
            click.echo(json.dumps(found, indent=None if watch else 2))
        else:
            if watch:
                click.clear()
            click.echo(str(SystemStatus.from_dict(found)))
        if not watch:
            return
        time.sleep(WATCH_INTERVAL_S)


def _show_end(folder: RunFolder, state: str, error: str, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"run": folder.id, "state": state, "error": error}))
        return
    click.echo(f"{folder.id} is {state}{f': {error}' if error else ''}")
    click.echo(f"dovetail actors logs {run_reference(folder.path)}", err=True)


@actors.command(
    epilog="""\b
Examples:
  dovetail actors logs                # all, each line with time and process
  dovetail actors logs rl rollout -f  # one role, continuously
  dovetail actors logs rl --tail 50
"""
)
@system_argument()
@click.argument("role", required=False)
@click.option("--follow", "-f", is_flag=True, help="Keep printing until the system ends.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Print only the last N lines of each process.")
@click.option("--no-timestamps", is_flag=True, help="Do not print the times.")
@json_option("Print one JSON object per line.")
@click.pass_context
def logs(context: click.Context, /, system: str, role: str | None, **options: Any) -> None:
    """Print what the instances of SYSTEM printed, or those of one ROLE."""
    folder = find_system(system)
    context.invoke(logs_of_run, run=str(folder.path), worker=role, stage=None, **options)


@actors.command(
    epilog="""\b
Examples:
  dovetail actors scale rollout=8
  dovetail actors scale rl rollout=8 validator=2
"""
)
@click.argument("words", nargs=-1, required=True, metavar="[SYSTEM] ROLE=N...")
@json_option("Print the numbers of instances as JSON.")
def scale(words: tuple[str, ...], as_json: bool) -> None:
    """Change the number of instances of roles; instances that are removed finish their calls first."""
    system, *changes = words if "=" not in words[0] else (LAST_RUN, *words)
    workers = _parse_changes(changes)
    folder = find_system(system)
    try:
        send_request(folder.path, "scale", "dovetail actors scale", workers=workers)
    except dt.ConfigError as error:
        raise _ScaleRenderer(run_reference(folder.path)).error(error) from None
    if as_json:
        click.echo(json.dumps(workers))
    else:
        changed = ", ".join(f"{role} to {count}" for role, count in workers.items())
        click.echo(f"scaling {changed}; follow it with: dovetail actors status {run_reference(folder.path)}", err=True)


class _ScaleRenderer(OptionRenderer):
    """Fixes of a refused `dovetail actors scale`."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self._run = run

    def call(self, fix: Call) -> str:
        if fix.function != "live.scale":
            return super().call(fix)
        counts = " ".join(f"{role}={count}" for role, count in fix.keywords.items())
        return f"dovetail actors scale {self._run} {counts}"


def _parse_changes(changes: Sequence[str]) -> dict[str, int]:
    """{"rollout": 8} of ["rollout=8"]; one error names everything that is wrong."""
    wrong = [text for text in changes if not _is_change(text)]
    if wrong or not changes:
        shown = ", ".join(repr(text) for text in wrong)
        message = f"not ROLE=N: {shown}" if wrong else "no role and number of instances given"
        raise dt.ConfigError(dt.Problem(UNUSABLE_OPTION, message, fixes=("dovetail actors scale rollout=8",)))
    return {role: int(count) for role, _, count in (text.partition("=") for text in changes)}


def _is_change(text: str) -> bool:
    role, _, count = text.partition("=")
    return bool(role) and count.isascii() and count.isdigit()
