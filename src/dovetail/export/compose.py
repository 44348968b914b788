"""The files of Docker Compose: one machine with Redis, metrics and workers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.documents.yaml_writer import Commented, yaml_document
from dovetail.export.containers import (
    MIB,
    PASSWORD_VARIABLE,
    REDIS_CLI_VARIABLE,
    STATUS_PORT,
    TOKEN_VARIABLE,
    metrics_arguments,
    queue_url,
    readiness_check,
    redis_check,
    redis_command,
    worker_arguments,
    worker_variables,
)
from dovetail.export.dockerfiles import dockerfile, gpu_dockerfile

if TYPE_CHECKING:
    from dovetail.export.deployment import Deployment, WorkerPool

COMPOSE_FILE = "compose.yaml"
METRICS_MEMORY = "512m"
REDIS_STOP_S = 60
SHARED_MEMORY = "2gb"
SHARED_VOLUME, REDIS_VOLUME = "shared", "redis-data"
HEADER = """\
Redis, metrics and workers on one machine. First, next to this file:
  printf 'DOVETAIL_TOKEN=%s\\nREDIS_PASSWORD=%s\\n' $(openssl rand -hex 16) $(openssl rand -hex 16) > .env
Then:
  docker compose up -d --build
  curl -H "Authorization: Bearer TOKEN" http://localhost:8000/workers/status"""


def compose_files(deployment: Deployment, *, context: str = "..", folder: str = "deploy") -> dict[str, str]:
    """Texts by name. `context`: the folder of the code, seen from that of the files; `folder`: the reverse."""
    found = {
        COMPOSE_FILE: yaml_document(compose_data(deployment, context=context, folder=folder), HEADER),
        "Dockerfile": dockerfile(deployment),
    }
    if deployment.uses_gpus:
        found["Dockerfile.gpu"] = gpu_dockerfile(deployment)
    return found


def compose_data(deployment: Deployment, *, context: str, folder: str) -> dict[str, Any]:
    redis = deployment.redis
    volumes: dict[str, Any] = {REDIS_VOLUME: {}}
    if deployment.shared_folder is not None:
        volumes[SHARED_VOLUME] = Commented({}, "one machine only; several need a volume of NFS or the like")
    return {
        "name": deployment.name,
        "services": {
            "redis": {
                "image": redis.image,
                "command": redis_command(redis, _variable(PASSWORD_VARIABLE)),
                "environment": {REDIS_CLI_VARIABLE: _variable(PASSWORD_VARIABLE)},
                "volumes": [f"{REDIS_VOLUME}:/data"],
                "healthcheck": _health(redis_check(), start="60s"),
                "restart": "unless-stopped",
                "stop_grace_period": f"{REDIS_STOP_S}s",
                "deploy": {"resources": {"limits": {"memory": _memory(redis.memory_bytes)}}},
            },
            "metrics": {
                **_image(deployment, 0, context, folder),
                "command": metrics_arguments(),
                "environment": _environment({}),
                "ports": Commented(
                    [f"127.0.0.1:{STATUS_PORT}:{STATUS_PORT}"], "of this machine only; Prometheus scrapes /metrics here"
                ),
                "depends_on": _after_redis(),
                "healthcheck": _health(readiness_check()),
                "restart": "unless-stopped",
                "deploy": {"resources": {"limits": {"memory": METRICS_MEMORY}}},
            },
            **{
                f"worker-{name}": _worker(deployment, name, pool, context, folder)
                for name, pool in deployment.pools.items()
            },
        },
        "volumes": volumes,
    }


def _worker(deployment: Deployment, name: str, pool: WorkerPool, context: str, folder: str) -> dict[str, Any]:
    limits = {"cpus": f"{pool.cpus:g}", "memory": _memory(pool.memory_bytes)}
    resources: dict[str, Any] = {"limits": limits}
    replicas: object = max(1, pool.least)
    if pool.gpus:
        device = {"driver": "nvidia", "count": pool.gpus, "capabilities": ["gpu"]}
        note = "one worker serves all cards of a machine: raise `count` above, not the replicas, which would share them"
        resources["reservations"] = {"devices": [device]}
        replicas = Commented(1, note)
    else:
        replicas = Commented(replicas, f"or: docker compose up -d --scale worker-{name}=4")
    found: dict[str, Any] = {
        **_image(deployment, pool.gpus, context, folder),
        "command": worker_arguments(deployment, pool),
        "environment": _environment(worker_variables(deployment, pool)),
        "depends_on": _after_redis(),
        "healthcheck": _health(readiness_check(), start="5m"),
        "restart": "unless-stopped",
        "stop_grace_period": Commented(
            f"{pool.stop_s}s", f"SIGTERM drains the worker: {pool.grace_s} s of --grace, then 30 s to stop what is left"
        ),
        "deploy": {
            "resources": Commented(resources, "the worker offers its jobs what these limits allow"),
            "replicas": replicas,
        },
    }
    if pool.gpus:
        found["shm_size"] = SHARED_MEMORY
    if deployment.shared_folder is not None:
        found["volumes"] = [f"{SHARED_VOLUME}:{deployment.shared_folder}"]
    return found


def _image(deployment: Deployment, gpus: int, context: str, folder: str) -> dict[str, Any]:
    name = "Dockerfile.gpu" if gpus else "Dockerfile"
    return {
        "image": deployment.image_of(gpus),
        "build": {"context": context, "dockerfile": f"{folder}/{name}"},
    }


def _environment(variables: dict[str, str]) -> dict[str, Any]:
    secret = {TOKEN_VARIABLE: _variable(TOKEN_VARIABLE)}
    return {"DOVETAIL_QUEUE": queue_url("redis", _variable(PASSWORD_VARIABLE)), **secret, **variables}


def _variable(name: str) -> str:
    """A variable of .env; Compose refuses to start without it."""
    return f"${{{name}:?is not set in .env}}"


def _memory(size_bytes: int) -> str:
    return f"{max(1, size_bytes // MIB)}m"


def _after_redis() -> dict[str, Any]:
    return {"redis": {"condition": "service_healthy"}}


def _health(command: list[str], *, start: str = "30s") -> dict[str, Any]:
    return {"test": ["CMD", *command], "interval": "10s", "timeout": "10s", "retries": 3, "start_period": start}
