"""`dovetail export`: files that deploy the job queue with Docker Compose or on Kubernetes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dovetail.cli import SuggestingGroup
from dovetail.cli.options import FOLDER_PATH, file_argument, json_option, set_option
from dovetail.errors import ConfigError, Problem
from dovetail.export.deploy_file import BAD_DEPLOYMENT, make_deployment, read_deploy_file
from dovetail.export.exported_files import marked, write_files
from dovetail.text_format import format_count, format_duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.cli.options import Decorator
    from dovetail.export.deployment import Deployment

STDOUT = "-"
DEFAULT_FOLDER = "deploy"
COMPOSE, KUBERNETES = "compose", "kubernetes"


@click.group(
    cls=SuggestingGroup,
    epilog="""\b
Examples:
  dovetail export compose --app tasks
  dovetail export kubernetes --app tasks --gpus 1 -o k8s
  dovetail export kubernetes deploy.yaml -o k8s
  dovetail schema deploy > deploy.schema.json
""",
)
def export() -> None:
    """Write files that deploy the job queue: workers, Redis, metrics, scaling."""


def export_options() -> Decorator:
    options: list[Decorator] = [
        file_argument(required=False),
        click.option(
            "--app", "apps", multiple=True, metavar="MODULE", help="Module with @dt.job functions. May be repeated."
        ),
        click.option("--name", metavar="NAME", help="Prefix of the names of all objects.  [default: jobs]"),
        click.option("--image", metavar="IMAGE", help="Image of CPU workers.  [default: NAME:latest]"),
        click.option("--gpu-image", metavar="IMAGE", help="Image of GPU workers.  [default: NAME-gpu:latest]"),
        click.option(
            "--gpus",
            type=click.IntRange(1, 64),
            metavar="N",
            help="Without FILE: add workers with N GPUs each, for the queue `gpu`.",
        ),
        set_option("--set 'pools.cpu.workers=[1, 8]'."),
        click.option(
            "-o",
            "--out",
            metavar="DIR",
            type=FOLDER_PATH,
            default=DEFAULT_FOLDER,
            show_default=True,
            help="Folder of the files; - prints them.",
        ),
        click.option("--force", is_flag=True, help="Overwrite files that were edited."),
        json_option("Print the folder and the names of its files as JSON; with -o -, their texts by name."),
    ]

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@export.command(
    epilog="""\b
Examples:
  dovetail export compose --app tasks
  dovetail export compose deploy.yaml -o deploy
  dovetail export compose --app tasks --gpus 1 --set redis.fsync=always -o -
"""
)
@export_options()
def compose(**given: Any) -> None:
    """Write compose.yaml and Dockerfiles: Redis, metrics and workers on one machine.

    FILE is a deploy file; without it, the options describe one pool of workers. Options win over FILE. Files that were
    edited are not overwritten.
    """
    from dovetail.export.compose import compose_files

    source, out = _folders(given)
    context, folder = os.path.relpath(source, out), os.path.relpath(out, source)
    deployment = _deployment(given)
    _write(COMPOSE, deployment, compose_files(deployment, context=context, folder=folder), given)
    if deployment.ray is not None:
        click.echo("note: ray is not part of a composition: `dovetail export kubernetes`", err=True)


@export.command(
    epilog="""\b
Examples:
  dovetail export kubernetes --app tasks --image registry.example.org/jobs:1
  dovetail export kubernetes deploy.yaml -o k8s
  kubectl apply -k k8s
"""
)
@export_options()
def kubernetes(**given: Any) -> None:
    """Write Deployments, Redis, autoscalers, probes, budgets and Dockerfiles for Kubernetes.

    With pipelines under `ray` in FILE, also a RayCluster or RayJobs for KubeRay. FILE is a deploy file; without it, the
    options describe the workers. Options win over FILE. Files that were edited are not overwritten.
    """
    from dovetail.export.kubernetes import kubernetes_files

    deployment = _deployment(given)
    _write(KUBERNETES, deployment, kubernetes_files(deployment), given)


def _deployment(given: Mapping[str, Any]) -> Deployment:
    values = {key: given[key] for key in ("name", "image", "gpu_image") if given[key] is not None}
    if given["apps"]:
        values["apps"] = list(given["apps"])
    file, gpus = given["file"], given["gpus"]
    if file is not None:
        if gpus is not None:
            message = "--gpus together with a deploy file: the pools are in the file"
            raise ConfigError(Problem(BAD_DEPLOYMENT, message, fixes=(f"--set pools.gpu.gpus={gpus}",)))
        return read_deploy_file(file, values, given["sets"])
    if not given["apps"]:
        message = "nothing to deploy: there is neither a deploy file nor --app"
        raise ConfigError(Problem(BAD_DEPLOYMENT, message, fixes=("--app tasks", "deploy.yaml")))
    values["pools"] = {"cpu": {"workers": [1, 4]}}
    if gpus is not None:
        values["pools"]["gpu"] = {"gpus": gpus, "queues": ["gpu"], "workers": [0, 4]}
    return make_deployment(values, given["sets"])


def _folders(given: Mapping[str, Any]) -> tuple[Path, Path]:
    """The folder of the code, and that of the files."""
    source = Path(given["file"]).parent if given["file"] is not None else Path()
    return source, source / DEFAULT_FOLDER if given["out"] == STDOUT else Path(given["out"])


def _write(kind: str, deployment: Deployment, files: Mapping[str, str], given: Mapping[str, Any]) -> None:
    texts = {name: marked(kind, text) for name, text in files.items()}
    if given["out"] == STDOUT:
        _print(texts, as_json=given["as_json"])
    else:
        folder = Path(given["out"])
        written = write_files(folder, texts, force=given["force"])
        if given["as_json"]:
            click.echo(
                json.dumps({"folder": str(folder), "files": list(files), "written": list(written.changed)}, indent=2)
            )
        else:
            click.echo("\n".join(str(folder / name) for name in files))
        kept = f", {len(written.unchanged)} unchanged" if written.unchanged else ""
        done = f"wrote {format_count(len(written.changed), 'file')}{kept}"
        click.echo(f"{done}; the first lines of {folder / next(iter(files))} say what to do next", err=True)
        for name in written.outdated:
            click.echo(f"note: {folder / name} is of an earlier export, and not needed any more", err=True)
    for note in (*_missing_modules(deployment, _folders(given)[0]), *_notes(deployment)):
        click.echo(f"note: {note}", err=True)


def _print(texts: Mapping[str, str], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(texts, indent=2))
    else:
        click.echo("\n".join(f"# --- {name}\n{text}" for name, text in texts.items()), nl=False)


def _missing_modules(deployment: Deployment, source: Path) -> list[str]:
    """Modules that are not in the folder from which an image is built."""
    if all((deployment.gpu_image if pool.gpus else deployment.image) for pool in deployment.pools.values()):
        return []
    where = "this folder" if source == Path() else str(source)
    return [
        f"there is no {app} in {where}: the image that is built from it must have it from its requirements"
        for app in deployment.apps
        if not (source / app).is_file()
        and not any((source / app.replace(".", "/")).with_suffix(suffix).exists() for suffix in ("", ".py"))
    ]


def _notes(deployment: Deployment) -> list[str]:
    return [
        f"pool {name}: jobs may take {format_duration(pool.job_timeout_s)}, and a worker that is stopped waits "
        f"{format_duration(pool.grace_s)} for them (`grace`); longer ones are run again by another worker"
        for name, pool in deployment.pools.items()
        if pool.job_timeout_s is not None and pool.job_timeout_s > pool.grace_s
    ]
