"""dovetail init: an example file to begin with."""

from __future__ import annotations

import shlex

import click

from dovetail.cli.files import write_atomically

PIPELINE = """\
# A pipeline: stages, and what ONE worker of each needs. How many workers run, and where, is worked out.
# Keys and their meaning: dovetail schema pipeline
name: video

source: videos.jsonl                    # also [a.csv, b.csv], folders, globs, s3://..., {path: x, columns: [id, url]}
sink: {path: clips.jsonl, ordered: true}  # left out, results go to stdout; paths start at the folder of this file
max_errors: 100                         # more items set aside than this fail the run

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
    again = f"dovetail init {kind} {shlex.quote(path)} --force"
    write_atomically(path, EXAMPLES[kind], fix=f"dovetail init {kind} -", fix_if_there=None if force else again)
    click.echo(f"wrote {path}", err=True)
    click.echo(f"Next:  dovetail plan {shlex.quote(path)} --cluster '1x(32cpu, 128GB, 2xL40S:48GB)'", err=True)
