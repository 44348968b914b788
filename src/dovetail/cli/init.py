"""`dovetail init`: write a runnable project."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from dovetail.cli.options import FOLDER_PATH, SuggestingChoice, json_option
from dovetail.cli.output_file import file_error, write_file
from dovetail.cli.project_templates import FIRST_COMMANDS, PROJECT_KINDS, project_files
from dovetail.errors import ConfigError, Problem


@click.command(
    epilog="""\b
Examples:
  dovetail init pipeline              # writes the folder pipeline
  dovetail init recipe my-recipe
  dovetail init backfill clips && cd clips && cat README.md
"""
)
@click.argument("kind", type=SuggestingChoice(PROJECT_KINDS))
@click.argument("folder", required=False, type=FOLDER_PATH)
@json_option("Print the folder, its files and the first command as JSON.")
def init(kind: str, folder: str | None, as_json: bool) -> None:
    """Write a project that can be run to FOLDER (default: a folder named like KIND).

    A project has data, functions, the file that uses them, and a README with the commands. Existing files are never
    overwritten.
    """
    folder = folder or kind
    files = project_files(kind)
    _check_folder(kind, Path(folder), files)
    another = f"dovetail init {kind} ANOTHER_FOLDER"
    for name, text in files.items():
        path = Path(folder) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise file_error(folder, f"cannot be written: {reason}", another) from None
        write_file(str(path), text, fix=another, fix_if_there=another)
    here = Path(folder).resolve() == Path.cwd()
    first = FIRST_COMMANDS[kind] if here else f"cd {shlex.quote(folder)} && {FIRST_COMMANDS[kind]}"
    if as_json:
        click.echo(json.dumps({"folder": folder, "files": list(files), "next": first}, indent=2))
        return
    for name in files:
        click.echo(Path(folder) / name)
    click.echo(f"wrote {len(files)} files; README.md lists the commands", err=True)
    click.echo(f"Next:  {first}", err=True)


def _check_folder(kind: str, folder: Path, files: dict[str, str]) -> None:
    """Raises one error for all files that exist, before anything is written."""
    if folder.suffix in (".yaml", ".yml", ".json"):
        message = "is the name of a file; init writes a folder with several files"
        fix = f"dovetail init {kind} {shlex.quote(str(folder.with_suffix('')))}"
        raise file_error(str(folder), message, fix)
    try:
        there = [name for name in files if (folder / name).exists()]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise file_error(str(folder), f"cannot be written: {reason}", f"dovetail init {kind}") from None
    if there:
        fixes = (f"dovetail init {kind} ANOTHER_FOLDER",)
        raise ConfigError([Problem("DT025", "file exists", fixes=fixes, place=str(folder / name)) for name in there])
