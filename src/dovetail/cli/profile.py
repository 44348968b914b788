"""`dovetail profile`: measured speeds of stages."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

import dovetail as dt
from dovetail.cli import SuggestingGroup
from dovetail.cli.options import json_option
from dovetail.errors import did_you_mean
from dovetail.observe.profile_store import forget_profiles, profiles_folder, stored_profiles
from dovetail.observe.terminal import terminal_width
from dovetail.resources.sizes import format_size
from dovetail.text_format import (
    fit_table,
    format_count,
    format_duration,
    format_number,
    printable,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.observe.profile_store import ProfileKey, StoredProfile


def complete_measured_stages(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:  # noqa: ARG001
    return sorted({it.measured.stage for it in stored_profiles() if it.measured.stage.startswith(begun)})


@click.group(
    cls=SuggestingGroup,
    epilog="""\b
Examples:
  dovetail profile ls
  dovetail profile show caption
  dovetail profile forget caption
""",
)
def profile() -> None:
    """Speeds of stages that earlier runs measured. Plans and simulations use them."""


@profile.command(
    "ls",
    epilog="""\b
Examples:
  dovetail profile ls
  dovetail profile ls --json | jq -r .stage
""",
)
@json_option("Print one JSON object per profile.")
def list_profiles(as_json: bool) -> None:
    """List measured stages, the latest first."""
    found = _without_copies(stored_profiles())
    if as_json:
        for stored in found:
            click.echo(json.dumps(_entry(stored)))
        return
    if not found:
        click.echo(f"no profiles in {profiles_folder()}", err=True)
        return
    header = ("stage", "items/s", "out per in", "setup", "batch", "source and sink", "items", "age")
    now = time.time()
    rows = [header, *(_row(stored, now) for stored in found)]
    for line in fit_table(rows, terminal_width(), cut=(5, 0)):
        click.echo(line)


@profile.command(
    epilog="""\b
Examples:
  dovetail profile show caption
  dovetail profile show caption --json
"""
)
@click.argument("stage", shell_complete=complete_measured_stages)
@json_option("Print one JSON object per profile.")
def show(stage: str, as_json: bool) -> None:
    """Show all measurements of STAGE."""
    for number, stored in enumerate(_without_copies(_of_stage(stage))):
        if as_json:
            click.echo(json.dumps(_entry(stored)))
            continue
        if number:
            click.echo()
        for line in _description(stored, time.time()):
            click.echo(line)


@profile.command(
    epilog="""\b
Examples:
  dovetail profile forget caption
  dovetail profile forget --all
"""
)
@click.argument("stage", required=False, shell_complete=complete_measured_stages)
@click.option("--all", "everything", is_flag=True, help="Forget all stages.")
@json_option("Print the forgotten stages as JSON.")
def forget(stage: str | None, everything: bool, as_json: bool) -> None:
    """Delete the measurements of STAGE, so that the next run measures it again."""
    if (stage is None) != everything:
        message = "name a stage, or use --all" if stage is None else "a stage and --all cannot be combined"
        raise dt.ConfigError(dt.Problem("DT306", message, fixes=("dovetail profile forget STAGE",)))
    found = stored_profiles() if stage is None else _of_stage(stage)
    count = len(_without_copies(found))
    forget_profiles(found)
    if as_json:
        click.echo(json.dumps({"profiles": count, "stages": sorted({it.measured.stage for it in found})}, indent=2))
        return
    click.echo(f"forgot {format_count(count, 'profile')}", err=True)


def _of_stage(stage: str) -> list[StoredProfile]:
    everything = stored_profiles()
    found = [stored for stored in everything if stored.measured.stage == stage]
    if not found:
        names = sorted({stored.measured.stage for stored in everything})
        message = f"stage {stage!r} has not been measured{did_you_mean(stage, names)}"
        raise dt.ConfigError(dt.Problem("DT306", message, fixes=("dovetail profile ls",)))
    return found


def _without_copies(profiles: Sequence[StoredProfile]) -> list[StoredProfile]:
    """A measurement is also stored for any source and sink; shown only where it is the newest."""
    newest: dict[ProfileKey, float] = {}
    for stored in profiles:
        if _ends(stored):
            key = replace(stored.key, reads="", writes="")
            newest[key] = max(newest.get(key, 0.0), stored.measured.when)
    return [stored for stored in profiles if _ends(stored) or stored.measured.when > newest.get(stored.key, 0.0)]


def _ends(stored: StoredProfile) -> str:
    """Kinds of source and sink: "jsonl to parquet"."""
    key = stored.key
    return " ".join(filter(None, (key.reads, f"to {key.writes}" if key.writes else "")))


def _row(stored: StoredProfile, now: float) -> tuple[str, ...]:
    measured = stored.measured
    return (
        printable(measured.stage) or "?",
        format_number(1 / measured.seconds_per_item),
        format_number(measured.returns),
        "-" if measured.setup_s is None else format_duration(measured.setup_s),
        str(stored.key.batch_size),
        _ends(stored) or "any",
        format_number(measured.items),
        format_duration(now - measured.when),
    )


def _description(stored: StoredProfile, now: float) -> list[str]:
    key, measured = stored.key, stored.measured
    cpus = f"{key.cpu_milli / 1000:g} CPU" + ("" if key.cpu_milli == 1000 else "s")
    worker = cpus + (f", {key.gpu} {key.card}".rstrip() if key.gpu else "")
    lines = [
        ("stage", printable(measured.stage) or "?"),
        ("speed", f"{format_number(1 / measured.seconds_per_item)} items/s of one worker"),
        ("returns", f"{format_number(measured.returns)} items out per item in"),
        ("setup", "not measured" if measured.setup_s is None else format_duration(measured.setup_s)),
        ("memory", "not measured" if measured.peak_bytes is None else f"{format_size(measured.peak_bytes)} at most"),
        ("worker", f"{worker}, batches of {key.batch_size}, {format_count(key.slots, 'slot')}"),
        ("ends", _ends(stored) or "any source and sink"),
        (
            "evidence",
            f"{format_number(measured.items)} items, {format_duration(measured.seconds)} of work in "
            f"{format_count(measured.runs, 'run')}, the last {format_duration(now - measured.when)} ago",
        ),
        ("code", key.code),
    ]
    return [f"{name:<10}{text}" for name, text in lines]


def _entry(stored: StoredProfile) -> dict[str, Any]:
    return {**asdict(stored.measured), "items_per_s": 1 / stored.measured.seconds_per_item, "key": asdict(stored.key)}
