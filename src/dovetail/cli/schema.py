"""`dovetail schema`: JSON Schema of pipeline and recipe files, for editors."""

from __future__ import annotations

import json

import click

from dovetail.pipeline import schema as pipeline_schema
from dovetail.recipes import schema as recipe_schema

SCHEMAS = {"pipeline": pipeline_schema.schema, "recipe": recipe_schema.schema}


@click.command(
    epilog="""\b
Examples:
  dovetail schema pipeline > pipeline.schema.json
  dovetail schema recipe > recipe.schema.json

\b
To check and complete pipeline files in VS Code (with the YAML extension), add
this to .vscode/settings.json:
  {"yaml.schemas": {"./pipeline.schema.json": ["pipeline.yaml", "*.pipeline.yaml"]}}

\b
For one file in any editor with yaml-language-server, use this first line:
  # yaml-language-server: $schema=./pipeline.schema.json
"""
)
@click.argument("kind", type=click.Choice(list(SCHEMAS)))
def schema(kind: str) -> None:
    """Print the JSON Schema of pipeline or recipe files."""
    click.echo(json.dumps(SCHEMAS[kind](), indent=2))
