"""`dovetail schema`: JSON Schema of pipeline, recipe, cluster, actors, deploy and jobs files, for editors."""

from __future__ import annotations

import json
import sys

import click

from dovetail.actors import actors_file
from dovetail.cli.options import SuggestingChoice
from dovetail.export import deploy_file
from dovetail.jobs.simulated import simulation_fields
from dovetail.jobs.submit_options import BATCH, RETRIES, SUBMIT_OPTIONS
from dovetail.pipeline import pipeline_file
from dovetail.pipeline.error_policy import RETRY
from dovetail.pipeline.pipeline_file import PIPELINE_FILE
from dovetail.pipeline.source_sink import LEAF_SINKS, SINK, SINK_FUNCTION, SOURCE, SOURCE_FUNCTION
from dovetail.pipeline.stage_fields import DEFAULTS, STAGE
from dovetail.recipes import schema as recipe_schema
from dovetail.recipes.file_keys import OPERATOR, OPERATOR_DEFAULTS, RECIPE_FILE
from dovetail.resources import cluster_file
from dovetail.resources.cluster_file import CLUSTER_FILE, NODE_ENTRY
from dovetail.resources.resources import RESOURCES

SCHEMAS = {
    "pipeline": pipeline_file.schema,
    "recipe": recipe_schema.schema,
    "cluster": cluster_file.schema,
    "actors": actors_file.schema,
    "deploy": deploy_file.schema,
    "jobs": simulation_fields.schema,
}
RECORDS = (
    (PIPELINE_FILE, DEFAULTS, STAGE, RESOURCES, RETRY, SOURCE, SOURCE_FUNCTION, SINK, SINK_FUNCTION, LEAF_SINKS),
    (CLUSTER_FILE, NODE_ENTRY),
    (RECIPE_FILE, OPERATOR, OPERATOR_DEFAULTS),
    actors_file.FILE_RECORDS,
    (SUBMIT_OPTIONS, RETRIES, BATCH),
    deploy_file.FILE_RECORDS,
    simulation_fields.FILE_RECORDS,
)
"""Kinds of files and calls, each followed by the records inside it."""


@click.command(
    epilog="""\b
Examples:
  dovetail schema pipeline > pipeline.schema.json
  dovetail schema recipe > recipe.schema.json

\b
To check and complete pipeline files in VS Code (with the YAML extension), add
this to .vscode/settings.json:
  {"yaml.schemas":
    {"./pipeline.schema.json": ["pipeline.yaml", "*.pipeline.yaml"]}}

\b
For one file in any editor with yaml-language-server, use this first line:
  # yaml-language-server: $schema=./pipeline.schema.json
"""
)
@click.argument("kind", type=SuggestingChoice(list(SCHEMAS)))
def schema(kind: str) -> None:
    """Print the JSON Schema of pipeline, recipe, cluster, actors, deploy or jobs files."""
    click.echo(json.dumps(SCHEMAS[kind](), indent=2))


def reference_page() -> str:
    """The page docs/reference.md."""
    lines = [
        "# Keys of pipeline, cluster, recipe, actors, deploy and jobs files, and options of jobs",
        "",
        "The arguments of `dt.Stage`, `dt.Resources`, `dt.Retry`, `dt.source`, `dt.sink`, `dt.Role` and the objects of",
        "roles have the same names and values. `dovetail schema pipeline` (or `cluster`, `recipe`, `actors`, `deploy`,",
        "`jobs`) prints the same as a JSON Schema for editors. The operators of recipes are in",
        "[recipes.md](recipes.md#operators). The first six options of `queue.submit` are also those of `@dt.job`.",
        "",
        "This page is generated: `python -m dovetail.cli.schema > docs/reference.md`.",
    ]
    for file, *inner in RECORDS:
        lines += ["", f"## {file.title}", "", file.description, "", file.table()]
        for record in inner:
            lines += ["", f"### {record.title}", "", record.description, "", record.table()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference_page())
