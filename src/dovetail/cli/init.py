"""`dovetail init`: write a commented example pipeline or recipe."""

from __future__ import annotations

import shlex

import click

from dovetail.cli.options import FILE_PATH
from dovetail.cli.output_file import write_file

PIPELINE = """\
# A pipeline: its stages, and the resources of ONE worker of each. Dovetail computes how many workers run, and where.
# All keys: dovetail schema pipeline
name: video

source: videos.jsonl                    # also [a.csv, b.csv], folders, globs, s3://..., {path: x, columns: [id, url]}
sink: {path: clips.jsonl, ordered: true}  # default: stdout; paths are relative to this file
max_errors: 100                         # fail the run if more items than this fail

stages:
  - name: download
    run: my_package.video:download      # package.module:name of a function or a class; lists in, lists out
    resources: {cpus: 4, memory: 2GB}
    rate: 6                             # items per second of one worker; default: measured
    retries: 5

  - name: decode
    run: my_package.video:decode
    resources: {cpus: 2, nvdecs: 1}     # one hardware decoder of a GPU; its compute stays free
    rate: 12
    returns: 8                          # 8 clips out per video in

  - name: caption
    run: my_package.video:Caption       # a class: setup() loads the model once per worker
    resources: {cpus: 1, gpus: 0.25, gpu_memory: 4GB}
    batch_size: 16
    rate: 40
    setup_timeout: 5m                   # seconds, or 90s, 5m, 1h

  - name: embed
    run: my_package.video:Embed
    resources: {cpus: 4, gpus: 1}       # a whole GPU
    batch_size: 32
    rate: 200
    on_error: skip                      # record failed items; fail (the default) stops the run

  - name: encode
    run: my_package.video:encode
    resources: {cpus: 2, nvencs: 1}
    rate: 15

  - name: write
    run: my_package.video:write
    after: [encode]                     # default: the stage above; several: items of all of them
    workers: [1, 8]                     # auto (the default), a number, or [min, max]
    rate: 300
"""
RECIPE = """\
# A recipe: operators over a dataset, in Data-Juicer's format. Dovetail computes how many workers run, and where.
# All keys: dovetail schema recipe      Check and plan it: dovetail plan recipe.yaml
project_name: clean_text

dataset_path: data.jsonl                # also folders, globs, .json .csv .parquet .lance .txt, .gz and .zst
export_path: out/clean.jsonl            # or .parquet, .csv, .lance; paths are relative to this file
text_keys: text                         # the field with the text

# mode: auto                            # streaming (all operators at once), waves, sequential (one at a time)
# open_monitor: true                    # out/monitor/: resource use of each operator, with a chart
# open_tracer: true                     # out/trace/: samples of what each operator changed or dropped
# max_errors: 1000                      # fail the run if more rows than this fail

process:
  - fix_unicode_mapper:
  - whitespace_normalization_mapper:
  - clean_links_mapper:
  - clean_email_mapper: {repl: "<EMAIL>"}
  - text_length_filter: {min_len: 50, max_len: 100000}
  - special_characters_filter: {max_ratio: 0.25}
  - character_repetition_filter: {rep_len: 10, max_ratio: 0.3}
  - word_repetition_filter: {rep_len: 5, max_ratio: 0.5}
  - document_deduplicator: {lowercase: true}
  # - my_module:my_operator: {threshold: 3}      # your own function or class, in my_module.py beside this file
  # - image_text_similarity_filter:              # on a GPU: set only the GPU memory of one worker
  #     hf_clip: openai/clip-vit-base-patch32
  #     memory: '1500MB'
"""
EXAMPLES = {"pipeline": PIPELINE, "recipe": RECIPE}


@click.command(
    epilog="""\b
Examples:
  dovetail init pipeline                     # writes pipeline.yaml
  dovetail init pipeline video.yaml --force
  dovetail init pipeline - | less
  dovetail init recipe                       # writes recipe.yaml
"""
)
@click.argument("kind", type=click.Choice(list(EXAMPLES)))
@click.argument("path", required=False, type=FILE_PATH)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(kind: str, path: str | None, force: bool) -> None:
    """Write a commented example file to PATH (default: pipeline.yaml or recipe.yaml; - is stdout)."""
    path = path or f"{kind}.yaml"
    if path == "-":
        click.echo(EXAMPLES[kind], nl=False)
        return
    again = f"dovetail init {kind} {shlex.quote(path)} --force"
    write_file(path, EXAMPLES[kind], fix=f"dovetail init {kind} -", fix_if_there=None if force else again)
    click.echo(f"wrote {path}", err=True)
    where = " --cluster '1x(32cpu, 128GB, 2xL40S:48GB)'" if kind == "pipeline" else " --source data.jsonl"
    click.echo(f"Next:  dovetail plan {shlex.quote(path)}{where}", err=True)
