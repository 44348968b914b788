"""Commands, variables and limits of the containers, which Compose and Kubernetes share. Pure.

Every command is an argument list of `dovetail`, the entry point of the images (`dockerfiles.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.export.deployment import Deployment, Redis, WorkerPool

STATUS_PORT = 8000
REDIS_PORT = 6379
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - in a container; all pages but those of health need the token
TOKEN_VARIABLE, PASSWORD_VARIABLE = "DOVETAIL_TOKEN", "REDIS_PASSWORD"
REDIS_CLI_VARIABLE = "REDISCLI_AUTH"
MIB = 1 << 20
_SERVE = ("--host", ALL_ADDRESSES, "--port", str(STATUS_PORT))


def worker_arguments(deployment: Deployment, pool: WorkerPool) -> list[str]:
    apps = [word for app in deployment.apps for word in ("--app", app)]
    lists = [word for name, function in pool.ingest.items() for word in ("--ingest", f"{name}={function}")]
    return ["worker", *apps, "--queues", ",".join(pool.queues), "--grace", f"{pool.grace_s}s", *lists, *_SERVE]


def worker_variables(deployment: Deployment, pool: WorkerPool) -> dict[str, str]:
    """Variables of a worker that are no secret.

    WORKER_ID and GPU_DEVICE are not among them: replicas would have the same id, while the default contains the name of
    the container; and the container runtime chooses the cards.
    """
    found = {"USE_GPU": "true" if pool.gpus else "false"}
    if isinstance(pool.slots, int):
        found["MAX_CONCURRENT_JOBS"] = str(pool.slots)
    if pool.job_timeout_s is not None:
        found["JOB_TIMEOUT"] = f"{pool.job_timeout_s:g}"
    if deployment.job_files is not None:
        found["DOVETAIL_JOB_FILES"] = deployment.job_files
    return found


def metrics_arguments() -> list[str]:
    return ["jobs", "metrics", *_SERVE]


def queue_url(host: str, password: str) -> str:
    """`password`: as the deployment substitutes it."""
    return f"redis://:{password}@{host}:{REDIS_PORT}/0"


def redis_command(redis: Redis, password: str) -> list[str]:
    """Every change is in the append-only file; no key is evicted."""
    limit = f"{redis.memory_bytes * 3 // 4 // MIB}mb"
    durability = ["--appendonly", "yes", "--appendfsync", redis.fsync, "--save", "", "--dir", "/data"]
    return [
        "redis-server",
        *durability,
        "--maxmemory",
        limit,
        "--maxmemory-policy",
        "noeviction",
        "--requirepass",
        password,
    ]


def redis_check() -> list[str]:
    """Fails while Redis loads its file; the password is in REDISCLI_AUTH."""
    return ["redis-cli", "-e", "ping"]


def readiness_check() -> list[str]:
    url = f"http://127.0.0.1:{STATUS_PORT}/readyz"
    return ["python", "-c", f"import urllib.request; urllib.request.urlopen('{url}', timeout=5)"]
