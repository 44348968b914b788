"""Read `deploy.yaml`.

name: jobs
apps: [tasks]
pools:
  cpu: {cpus: 4, memory: 8GB, queues: [default], workers: [1, 10]}
  gpu: {cpus: 8, memory: 32GB, gpus: 1, queues: [gpu], workers: [0, 4], job_timeout: 1h, grace: 10m}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail.documents.document import Document
from dovetail.documents.fields import (
    FLAG,
    TEXT,
    Field,
    Mistake,
    Record,
    Schema,
    Type,
    WrongValue,
    choice,
    is_int,
    list_of,
    mapping_of,
    number,
    predicate,
    record_of,
    record_type,
    whole,
)
from dovetail.documents.parser import read_document
from dovetail.errors import ConfigError, Problem, short_repr
from dovetail.export.deployment import (
    ALWAYS,
    AUTOSCALERS,
    EVERY_SECOND,
    KEDA,
    Deployment,
    Ray,
    RayGroup,
    RayHead,
    RayPipeline,
    Redis,
    WorkerPool,
)
from dovetail.jobs.submit_options import NAME as QUEUE_NAME
from dovetail.jobs.workers.worker_options import SLOTS
from dovetail.pipeline.durations import DURATION
from dovetail.pipeline.file_reader import FileReader
from dovetail.pipeline.overrides import override_values
from dovetail.resources.resources import CPUS_LIMIT, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from dovetail.documents.document import KeyPath

BAD_DEPLOYMENT = "DT646"
NAME_PATTERN = r"^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$"
FOLDER_PATTERN = r"^/[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$"
URL_PATTERN = r"^https?://[^\s/]+(/\S*)?$"
IMAGE_PATTERN = (
    r"^([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?$"
)
"""Registry, path in lower case, tag, digest."""
FILES_PATTERN = rf"({FOLDER_PATTERN}|^[a-z0-9]+://\S+$)"
WORKERS_LIMIT = 10_000
WORKERS_TEXT = "a number, or [minimum, maximum]"
EXAMPLE_POOL = {"cpus": 4, "memory": "8GB"}
EXAMPLE_FILE = {"apps": ["tasks"]}


def _pattern_type(text: str, example: str, pattern: str) -> Type:
    def accepts(value: object) -> bool:
        return isinstance(value, str) and re.search(pattern, value) is not None

    return predicate(text, example, {"type": "string", "pattern": pattern}, accepts)


def _workers_mistakes(value: object) -> Iterator[Mistake]:
    if is_int(value):
        yield from WORKER_COUNT.check(value)
    elif not isinstance(value, list | tuple) or len(value) != 2 or not all(map(is_int, value)):
        yield WrongValue(value, WORKERS_TEXT, instead=([1, 4], 1))
    elif not (0 <= value[0] <= value[1] and 1 <= value[1] <= WORKERS_LIMIT):
        low, high = (min(max(0, count), WORKERS_LIMIT) for count in sorted(value))
        text = f"[minimum, maximum] with 0 <= minimum <= maximum <= {WORKERS_LIMIT}"
        yield WrongValue(value, text, instead=([low, max(1, high)],))


LABEL_TEXT = "at most 20 lower-case letters, digits and -"
LABEL = _pattern_type(LABEL_TEXT, "jobs", NAME_PATTERN)
FOLDER = _pattern_type("an absolute path", "/shared", FOLDER_PATTERN)
FILES = _pattern_type("an absolute path or a URL", "s3://bucket/jobs", FILES_PATTERN)
URL = _pattern_type("a URL", "http://prometheus:9090", URL_PATTERN)
IMAGE = _pattern_type("the name of an image, with a path in lower case", "registry.example.org/jobs:1", IMAGE_PATTERN)
CPUS, GPUS = number(0.1, CPUS_LIMIT, example=4), whole(0, 64)
SIZE = size(may_be_zero=False)
WORKER_COUNT = whole(1, WORKERS_LIMIT)
WORKERS = Type(
    WORKERS_TEXT,
    [1, 4],
    {"anyOf": [WORKER_COUNT.schema, {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 2}]},
    _workers_mistakes,
)
NODE_LABELS = mapping_of(TEXT, "a mapping of labels to values", {"pool": "gpu"})
INGEST = mapping_of(
    _pattern_type("`package.module:function`", "tasks:infer", r"^[^\s:=]+:[^\s:=]+$"),
    "a mapping of lists to functions",
    {"ai:gpu:queue": "tasks:infer"},
    key=lambda name: re.fullmatch(r"[^\s=]+", name) is not None,
    key_text="the name of a list",
)
QUEUES = list_of(QUEUE_NAME, "a list of queues")
_NODE_LABELS_HELP = "Labels that the nodes must have (Kubernetes)."

WORKER_POOL = record_of(
    WorkerPool,
    "Worker pool",
    "Equal workers of the job queue.",
    (
        Field("cpus", CPUS, "CPUs of one worker."),
        Field("memory", SIZE, "Memory of one worker."),
        Field("gpus", GPUS, "GPUs of one worker. A worker serves several; one worker per GPU is not needed."),
        Field("queues", QUEUES, "Queues that it serves."),
        Field("workers", WORKERS, "Number of workers; with a range, the autoscaler changes it by the work that waits."),
        Field("slots", SLOTS, "Jobs at once per worker (MAX_CONCURRENT_JOBS); auto: by what jobs declare."),
        Field("job_timeout", DURATION, "Timeout of jobs that set none (JOB_TIMEOUT)."),
        Field("grace", DURATION, "Time for running jobs when a worker is stopped; the container is given 30 s more."),
        Field(
            "jobs_per_worker",
            whole(1, 100_000),
            "Waiting and running jobs per worker that the autoscaler aims at; if left out, the number of jobs that a "
            "worker runs at once.",
        ),
        Field("ingest", INGEST, "Lists of the Redis to which programs push JSON, and the functions that become jobs."),
        Field("node_labels", NODE_LABELS, _NODE_LABELS_HELP),
    ),
)
REDIS = record_of(
    Redis,
    "Redis",
    "The Redis that keeps the queue, with an append-only file on a volume.",
    (
        Field("image", IMAGE, "Image; Redis 7 or later, or Valkey."),
        Field("memory", SIZE, "Memory of its container; three quarters of it for data."),
        Field("disk", SIZE, "Size of its volume."),
        Field(
            "fsync",
            choice((EVERY_SECOND, ALWAYS)),
            "When the append-only file is synchronised: everysec loses at most the last second if the machine fails, "
            "always loses nothing and is slower.",
        ),
    ),
)
RAY_HEAD = record_of(
    RayHead,
    "Ray head",
    "The head of a Ray cluster: drivers run on it, and no worker.",
    (Field("cpus", CPUS, "CPUs."), Field("memory", SIZE, "Memory.")),
)
RAY_GROUP = record_of(
    RayGroup,
    "Ray group",
    "Equal nodes of a Ray cluster.",
    (
        Field("cpus", CPUS, "CPUs of one node."),
        Field("memory", SIZE, "Memory of one node."),
        Field("gpus", GPUS, "GPUs of one node."),
        Field("nodes", whole(1, WORKERS_LIMIT), "Number of nodes."),
        Field("node_labels", NODE_LABELS, _NODE_LABELS_HELP),
    ),
)
RAY_PIPELINE = record_of(
    RayPipeline,
    "Ray pipeline",
    "A pipeline or recipe that runs on Ray.",
    (
        Field("file", TEXT, "Its file, relative to the folder of your code."),
        Field("run_dir", FOLDER, "Folder of the run, on the shared folder; if left out, runs/NAME in it."),
    ),
)


def _example_of(record: Record, text: str, example: object) -> Type:
    return replace(record_type(record, example), text=text)


RAY = record_of(
    Ray,
    "Ray",
    "A cluster of KubeRay, and the pipelines that run on it (Kubernetes only).",
    (
        Field(
            "pipelines",
            mapping_of(
                _example_of(RAY_PIPELINE, "a mapping with the keys of a pipeline", {"file": "pipeline.yaml"}),
                "pipelines by name",
                {"pages": {"file": "pipeline.yaml"}},
            ),
            "What runs, each as a RayJob: [pipelines](#ray-pipeline).",
        ),
        Field(
            "groups",
            mapping_of(
                _example_of(RAY_GROUP, "a mapping with the keys of a group", {"cpus": 16}),
                "groups by name",
                {"cpu": {"cpus": 16, "memory": "64GB"}},
                may_be_empty=False,
            ),
            "Nodes: [groups](#ray-group).",
        ),
        Field(
            "head", _example_of(RAY_HEAD, "a mapping with the keys of a head", {"cpus": 4}), "The [head](#ray-head)."
        ),
        Field("image", IMAGE, "Image of all nodes; if left out, NAME-ray:latest, built from Dockerfile.ray."),
        Field("version", _pattern_type("a version", "2.60.0", r"^\d+\.\d+\.\d+$"), "Version of Ray in the image."),
        Field("keep_cluster", FLAG, "One permanent RayCluster for all pipelines, instead of one per run."),
    ),
)
DEPLOY_FILE = record_of(
    Deployment,
    "Deploy file",
    "The deployment for which `dovetail export` writes files.",
    (
        Field(
            "apps", replace(list_of(TEXT, "a list of modules"), example=["tasks"]), "Modules with @dt.job functions."
        ),
        Field("name", LABEL, "Prefix of the names of all objects."),
        Field("image", IMAGE, "Image of CPU workers; if left out, NAME:latest, built from Dockerfile."),
        Field("gpu_image", IMAGE, "Image of GPU workers; if left out, NAME-gpu:latest, built from Dockerfile.gpu."),
        Field("requirements", TEXT, "Requirements file of your code, relative to its folder."),
        Field("namespace", LABEL, "Namespace of Kubernetes."),
        Field(
            "pools",
            mapping_of(
                _example_of(WORKER_POOL, "a mapping with the keys of a pool", EXAMPLE_POOL),
                "pools by name",
                {"cpu": EXAMPLE_POOL},
                may_be_empty=False,
            ),
            "Workers: [pools](#worker-pool).",
        ),
        Field(
            "redis",
            _example_of(REDIS, "a mapping with the keys of redis", {"memory": "1GB"}),
            "The [Redis](#redis) that keeps the queue.",
        ),
        Field("shared_folder", FOLDER, "Path of a shared volume in workers and Ray nodes."),
        Field("shared_claim", LABEL, "Its ReadWriteMany volume claim (Kubernetes); if left out, NAME-shared."),
        Field(
            "files",
            FILES,
            "Large arguments and results, and the output of jobs: a folder in the shared folder, or a URL; if left "
            "out, jobs in the shared folder, if there is one.",
        ),
        Field("autoscaler", choice(AUTOSCALERS), "What changes the number of workers on Kubernetes."),
        Field("prometheus", URL, "URL of Prometheus; if left out, KEDA asks the service of the metrics itself."),
        Field(
            "ray",
            _example_of(RAY, "a mapping with the keys of ray", {"pipelines": {"pages": {"file": "pipeline.yaml"}}}),
            "[Ray](#ray).",
        ),
    ),
)
FILE_RECORDS = (DEPLOY_FILE, WORKER_POOL, REDIS, RAY, RAY_PIPELINE, RAY_GROUP, RAY_HEAD)


def schema() -> Schema:
    """The JSON Schema of a deploy file."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Dovetail deploy"}
    return {**head, **DEPLOY_FILE.schema()}


def read_deploy_file(path: str | Path, changes: Mapping[str, object], sets: Sequence[str] = ()) -> Deployment:
    """`changes`: values of options by their keys. `sets`: `--set pools.gpu.workers=[0,8]`."""
    return _deployment(read_document(path), changes, sets)


def make_deployment(values: Mapping[str, object], sets: Sequence[str] = ()) -> Deployment:
    """A deployment without a file."""
    return _deployment(Document("", {}), values, sets)


def _deployment(document: Document, changes: Mapping[str, object], sets: Sequence[str]) -> Deployment:
    if changes and isinstance(document.data, Mapping):
        document = replace(document, data={**document.data, **changes})
    reader = DeployFileReader(override_values(document, sets) if sets else document)
    found = reader.deployment()
    if reader.problems or found is None:
        raise ConfigError(reader.sorted_problems())
    return found


class DeployFileReader(FileReader):
    """Reads a deploy file, and collects all its problems."""

    def deployment(self) -> Deployment | None:
        """None if there are problems."""
        top = self.mapping((), self.document.data, DEPLOY_FILE, EXAMPLE_FILE)
        for name, mistake in DEPLOY_FILE.value_mistakes(top):
            self.report((name, *mistake.path), mistake)
        if not top.get("apps", True):
            self.report(("apps",), WrongValue([], "a list of modules", instead=(["tasks"],)))
        if self.problems:
            return None
        found = Deployment(**_built(top))
        for path, problem in deployment_problems(found):
            self.add(path, problem)
        return found

    def report(self, path: KeyPath, mistake: Mistake) -> None:
        super().report(path, replace(mistake, path=()) if isinstance(mistake, WrongValue) else mistake)


def _built(top: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Deployment` from checked data."""
    values = dict(top)
    if "pools" in values:
        values["pools"] = {name: WorkerPool(**pool) for name, pool in values["pools"].items()}
    if "redis" in values:
        values["redis"] = Redis(**values["redis"])
    if values.get("ray") is not None:
        ray = dict(values["ray"])
        for key, kind in (("pipelines", RayPipeline), ("groups", RayGroup)):
            if key in ray:
                ray[key] = {name: kind(**one) for name, one in ray[key].items()}
        if "head" in ray:
            ray["head"] = RayHead(**ray["head"])
        values["ray"] = Ray(**ray)
    return values


# --- checks across keys


def deployment_problems(deployment: Deployment) -> Iterable[tuple[KeyPath, Problem]]:
    """What does not fit together, with the paths of the values."""
    for name, pool in deployment.pools.items():
        yield from _name_problems("pool", name, ("pools",))
        yield from _pool_problems(deployment, name, pool)
    folder, files = deployment.shared_folder, deployment.files
    if files is not None and files.startswith("/") and not f"{files}/".startswith(f"{folder or files + '-'}/"):
        message = f"files: {files} is not in a shared folder, so other workers could not read it"
        fixes = (f"shared_folder: {files}", "files: s3://bucket/jobs")
        yield ("files",), _problem(message, fixes)
    if deployment.ray is not None:
        yield from _ray_problems(deployment, deployment.ray)


def _problem(message: str, fixes: tuple[str, ...], evidence: tuple[str, ...] = ()) -> Problem:
    return Problem(BAD_DEPLOYMENT, message, evidence, fixes)


def _pool_problems(deployment: Deployment, name: str, pool: WorkerPool) -> Iterator[tuple[KeyPath, Problem]]:
    path = ("pools", name)
    at_queues, at_workers = partial(_at, (*path, "queues")), partial(_at, (*path, "workers"))
    if not pool.queues:
        yield at_queues(_problem(f"pool {name} serves no queue", ("queues: [default]",)))
        return
    if pool.least == 0 and deployment.autoscaler != KEDA:
        message = f"pool {name} may have no worker, and autoscaler: {deployment.autoscaler} cannot start the first one"
        yield at_workers(_problem(message, ("autoscaler: keda", f"workers: [1, {pool.most}]")))
    if pool.least == 0 and pool.ingest:
        message = f"pool {name} may have no worker, and then nothing reads the lists of its `ingest`"
        fixes = (f"workers: [1, {pool.most}]", "ingest: {}")
        evidence = ("any other pool can read them: the jobs go to the queues of their functions",)
        yield at_workers(_problem(message, fixes, evidence))
    if pool.scales and deployment.autoscaler in AUTOSCALERS[:2] and not deployment.own_queues(name):
        message = f"pool {name} has no queue of its own, so the work that waits for it cannot be counted"
        evidence = (f"other pools serve {', '.join(pool.queues)}, too",)
        fixes = (f"queues: [{', '.join([name, *pool.queues])}]", f"workers: {pool.most}")
        yield at_workers(_problem(message, fixes, evidence))


def _name_problems(kind: str, name: str, above: KeyPath) -> Iterator[tuple[KeyPath, Problem]]:
    if not LABEL.accepts(name):
        valid = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:20].strip("-") or kind
        message = f"{short_repr(name)} is not the name of a {kind}: {LABEL_TEXT}, the first a letter"
        yield (*above, name), _problem(message, (f"{valid}: ...",))


def _at(path: KeyPath, problem: Problem) -> tuple[KeyPath, Problem]:
    return path, problem


def _ray_problems(deployment: Deployment, ray: Ray) -> Iterator[tuple[KeyPath, Problem]]:
    folder = deployment.shared_folder
    if folder is None:
        message = "ray needs a folder that all nodes see, for the runs of its pipelines"
        yield ("ray",), _problem(message, ("shared_folder: /shared",))
        return
    if not ray.pipelines and not ray.keep_cluster:
        yield (
            ("ray",),
            _problem("ray has no pipelines", ("keep_cluster: true", "pipelines: {pages: {file: pipeline.yaml}}")),
        )
    for name in ray.groups:
        yield from _name_problems("group", name, ("ray", "groups"))
    for name, pipeline in ray.pipelines.items():
        yield from _name_problems("pipeline", name, ("ray", "pipelines"))
        if pipeline.run_dir is not None and not pipeline.run_dir.startswith(f"{folder}/"):
            message = f"run_dir: {pipeline.run_dir} is not in the shared folder {folder}"
            yield ("ray", "pipelines", name, "run_dir"), _problem(message, (f"run_dir: {folder}/runs/{name}",))
