"""What is deployed: pools of workers, Redis, metrics, and pipelines on Ray. Pure.

The dataclasses are the keys of `deploy.yaml` (`deploy_file.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.jobs.workers.worker_capacity import GPU_TABLE, auto_slots
from dovetail.pipeline.durations import parse_duration
from dovetail.resources.sizes import parse_milli, parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEDA, HPA, NO_AUTOSCALER = "keda", "hpa", "none"
AUTOSCALERS = (KEDA, HPA, NO_AUTOSCALER)
EVERY_SECOND, ALWAYS = "everysec", "always"
KILL_GRACE_S = 5
"""Time from SIGTERM to SIGKILL of a job process: the default of `dovetail worker --kill-grace`."""
STOP_MARGIN_S = 25
"""Time to record results and to leave the queue, after the drain."""
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """Equal workers of the job queue."""

    cpus: float = 4
    memory: str = "8GB"
    gpus: int = 0
    queues: Sequence[str] = ("default",)
    workers: int | Sequence[int] = 1
    slots: int | str = AUTO
    job_timeout: float | str | None = None
    grace: float | str = "5m"
    jobs_per_worker: int | None = None
    ingest: Mapping[str, str] = field(default_factory=dict)
    node_labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def least(self) -> int:
        return _range(self.workers)[0]

    @property
    def most(self) -> int:
        return _range(self.workers)[1]

    @property
    def scales(self) -> bool:
        return self.least < self.most

    @property
    def memory_bytes(self) -> int:
        return parse_size(self.memory)

    @property
    def grace_s(self) -> int:
        return math.ceil(parse_duration(self.grace))

    @property
    def job_timeout_s(self) -> float | None:
        return None if self.job_timeout is None else parse_duration(self.job_timeout)

    @property
    def stop_s(self) -> int:
        """Time from SIGTERM to SIGKILL of the container: the drain, the kill grace of jobs, and a margin."""
        return self.grace_s + KILL_GRACE_S + STOP_MARGIN_S

    @property
    def target_jobs(self) -> int:
        """Jobs per worker that the autoscaler aims at: as many as a worker runs at once."""
        if self.jobs_per_worker is not None:
            return self.jobs_per_worker
        if isinstance(self.slots, int):
            return self.slots
        # the memory of the cards is unknown here, so the smallest row of the table counts
        return self.gpus * GPU_TABLE[-1][1] if self.gpus else auto_slots(parse_milli(self.cpus), ())


@dataclass(frozen=True, slots=True)
class Redis:
    """The Redis that keeps the queue."""

    image: str = "redis:7.4"
    memory: str = "1GB"
    disk: str = "10GB"
    fsync: str = EVERY_SECOND

    @property
    def memory_bytes(self) -> int:
        return parse_size(self.memory)

    @property
    def disk_bytes(self) -> int:
        return parse_size(self.disk)


@dataclass(frozen=True, slots=True)
class RayHead:
    """The head of a Ray cluster; the driver of a pipeline runs there, and no worker."""

    cpus: float = 4
    memory: str = "16GB"

    @property
    def memory_bytes(self) -> int:
        return parse_size(self.memory)


@dataclass(frozen=True, slots=True)
class RayGroup:
    """Equal nodes of a Ray cluster."""

    cpus: float = 16
    memory: str = "64GB"
    gpus: int = 0
    nodes: int = 1
    node_labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        return parse_size(self.memory)


@dataclass(frozen=True, slots=True)
class RayPipeline:
    """A pipeline, recipe or plan that runs on Ray."""

    file: str
    run_dir: str | None = None


@dataclass(frozen=True, slots=True)
class Ray:
    """A Ray cluster of KubeRay, and the pipelines that run on it."""

    pipelines: Mapping[str, RayPipeline] = field(default_factory=dict)
    groups: Mapping[str, RayGroup] = field(default_factory=lambda: {"cpu": RayGroup()})
    head: RayHead = RayHead()
    image: str | None = None
    version: str = "2.60.0"
    keep_cluster: bool = False


@dataclass(frozen=True, slots=True)
class Deployment:
    """All of it."""

    apps: Sequence[str]
    name: str = "jobs"
    image: str | None = None
    gpu_image: str | None = None
    requirements: str | None = None
    namespace: str | None = None
    pools: Mapping[str, WorkerPool] = field(default_factory=lambda: {"cpu": WorkerPool()})
    redis: Redis = Redis()
    shared_folder: str | None = None
    shared_claim: str | None = None
    files: str | None = None
    autoscaler: str = KEDA
    prometheus: str | None = None
    ray: Ray | None = None

    @property
    def uses_gpus(self) -> bool:
        return any(pool.gpus for pool in self.pools.values())

    def image_of(self, gpus: int) -> str:
        """The image of containers with or without cards."""
        return (self.gpu_image or f"{self.name}-gpu:latest") if gpus else (self.image or f"{self.name}:latest")

    @property
    def claim(self) -> str:
        """The volume claim of the shared folder."""
        return self.shared_claim or f"{self.name}-shared"

    @property
    def job_files(self) -> str | None:
        """Where large arguments and results, and the output of jobs, are kept."""
        if self.files is not None or self.shared_folder is None:
            return self.files
        return f"{self.shared_folder.rstrip('/')}/jobs"

    def own_queues(self, pool: str) -> tuple[str, ...]:
        """The queues that no other pool serves: what waits there can only run in this pool."""
        others = {queue for name, other in self.pools.items() if name != pool for queue in other.queues}
        return tuple(queue for queue in self.pools[pool].queues if queue not in others)


def _range(workers: int | Sequence[int]) -> tuple[int, int]:
    return (workers, workers) if isinstance(workers, int) else (workers[0], workers[1])
