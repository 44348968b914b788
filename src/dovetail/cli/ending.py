"""How is a run of another process ended from here? Through its door; then, if asked, until it is over."""

from __future__ import annotations

import time

import click

from dovetail.observe.door import ask
from dovetail.observe.folder import find_run, read_object
from dovetail.observe.history import status_of
from dovetail.observe.naming import name_for

LOOK_S = 0.05


def end_run(run: str, do: str, *, wait: bool) -> None:
    folder = find_run(run)
    ask(folder.path, do, f"dovetail {do}")
    name = name_for(folder.path)
    if not wait:
        click.echo(f"asked {folder.id} to {do}; see: dovetail status {name}", err=True)
        return
    while (status := status_of(read_object(folder.header), time.time())) == "running":
        time.sleep(LOOK_S)
    goes_on = status != "finished" and folder.can_go_on
    further = f"dovetail run --resume {name}" if goes_on else f"dovetail status {name}"
    click.echo(f"{folder.id} is {status}; next: {further}", err=True)
