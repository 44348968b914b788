"""dovetail init: an example file to begin with."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from dovetail.errors import ConfigError, Problem

PIPELINE = """\
# A pipeline: stages, and what ONE worker of each needs. How many workers run, and where, is worked out.
# Keys and their meaning: dovetail schema pipeline
name: video

stages:
  - name: download
    run: my_package.video:download      # package.module:name of a function or a class; lists in, lists out
    resources: {cpus: 4, memory: 2GB}
    rate: 6                             # items per second that one worker takes in; left out, it is measured
    retries: 5

  - name: decode
    run: my_package.video:decode
    resources: {cpus: 2, nvdecs: 1}     # one hardware decoder of a card; the card's compute stays free
    rate: 12
    returns: 8                          # 8 clips out per video in

  - name: caption
    run: my_package.video:Caption       # a class: its model is loaded once per worker, in setup()
    resources: {cpus: 1, gpus: 0.25, gpu_memory: 4GB}
    batch_size: 16
    rate: 40
    setup_deadline: 5m                  # seconds, or 90s, 5m, 1h

  - name: embed
    run: my_package.video:Embed
    resources: {cpus: 4, gpus: 1}       # a card that nobody else computes on
    batch_size: 32
    rate: 200
    on_error: skip                      # an item that keeps failing is set aside; fail (the default) ends the run

  - name: encode
    run: my_package.video:encode
    resources: {cpus: 2, nvencs: 1}
    rate: 15

  - name: write
    run: my_package.video:write
    after: [encode]                     # without it: the stage above; several names: the items of all of them
    workers: [1, 8]                     # auto (the default), a number, or [least, most]
    rate: 300
"""
EXAMPLES = {"pipeline": PIPELINE}


@click.command(
    epilog="""\b
Examples:
  dovetail init pipeline                     # writes pipeline.yaml
  dovetail init pipeline video.yaml --force
  dovetail init pipeline - | less
"""
)
@click.argument("kind", type=click.Choice(list(EXAMPLES)))
@click.argument("path", default="pipeline.yaml")
@click.option("--force", is_flag=True, help="Overwrite a file that is there.")
def init(kind: str, path: str, force: bool) -> None:
    """Write a commented example file of a KIND to PATH (pipeline.yaml; - is stdout)."""
    if path == "-":
        click.echo(EXAMPLES[kind], nl=False)
        return
    target = Path(path)
    try:
        if target.is_dir():
            raise _refused(path, "is a folder", f"dovetail init {kind} {shlex.quote(str(target / 'pipeline.yaml'))}")
        if target.exists() and not force:
            raise _refused(path, "is there already", f"dovetail init {kind} {shlex.quote(path)} --force")
        _write(target, EXAMPLES[kind])
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refused(path, f"cannot be written: {reason}", f"dovetail init {kind} -") from None
    click.echo(f"wrote {path}", err=True)


def _write(target: Path, text: str) -> None:
    """All of it or nothing."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _refused(path: str, message: str, fix: str) -> ConfigError:
    return ConfigError(Problem("DT025", message, fixes=(fix,), place=path))
