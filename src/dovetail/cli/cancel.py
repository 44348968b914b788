"""`dovetail cancel` and `drain`: stop a run."""

from __future__ import annotations

import json
import time

import click

from dovetail.cli.options import json_option, run_argument
from dovetail.observe.control_socket import send_request
from dovetail.observe.run_folder import find_run, read_json_object, resume_instruction, run_reference
from dovetail.observe.run_status import run_status

POLL_S = 0.05


def stop_run(run: str, command: str, *, wait: bool, as_json: bool) -> None:
    folder = find_run(run)
    send_request(folder.path, command, f"dovetail {command}")
    name = run_reference(folder.path)
    status = run_status(read_json_object(folder.header), time.time())
    while wait and status == "running":
        time.sleep(POLL_S)
        status = run_status(read_json_object(folder.header), time.time())
    if as_json:
        about = {"run": folder.id, "command": command, "status": status, "folder": str(folder.path)}
        click.echo(json.dumps(about | {"resumable": status != "finished" and folder.is_resumable}, indent=2))
    elif not wait:
        click.echo(f"sent {command} to run {folder.id}; follow it with: dovetail status {name} --watch", err=True)
    else:
        resume = resume_instruction(folder.path) if status != "finished" else ""
        click.echo(f"run {folder.id} is {status}; next: {resume or f'dovetail status {name}'}", err=True)


@click.command(
    epilog="""\b
Examples:
  dovetail cancel
  dovetail cancel 20261116-0305 --wait
"""
)
@run_argument()
@click.option("--wait", is_flag=True, help="Wait until the run has ended.")
@json_option("Print the run and its status as JSON.")
def cancel(run: str, wait: bool, as_json: bool) -> None:
    """Stop RUN immediately.

    Work in flight is discarded; `dovetail run --resume RUN` repeats it. To finish it first, use `dovetail drain`.
    """
    stop_run(run, "cancel", wait=wait, as_json=as_json)


@click.command(
    epilog="""\b
Examples:
  dovetail drain
  dovetail drain video          # the latest run of the pipeline video
  dovetail drain 20261116-0305 --wait && dovetail run --resume 20261116-0305
"""
)
@run_argument()
@click.option("--wait", is_flag=True, help="Wait until the run has ended.")
@json_option("Print the run and its status as JSON.")
def drain(run: str, wait: bool, as_json: bool) -> None:
    """Drain RUN: stop reading input, finish the work in flight, and exit.

    No work is lost or repeated: `dovetail run --resume RUN` continues from there.
    """
    stop_run(run, "drain", wait=wait, as_json=as_json)
