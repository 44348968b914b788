"""Dockerfiles of CPU workers, GPU workers and Ray nodes. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail import __version__

if TYPE_CHECKING:
    from dovetail.export.deployment import Deployment

CPU_BASE = "python:3.12-slim"
GPU_BASE = "nvidia/cuda:12.6.3-runtime-ubuntu24.04"
USER_ID = 1000


def dockerfile(deployment: Deployment) -> str:
    return f"""\
# The image of CPU workers and of the metrics.
FROM {CPU_BASE}
# tini is process 1: it forwards SIGTERM, which drains the worker, and reaps processes that jobs leave
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
{_install(deployment, "redis")}
{_user("useradd")}"""


def gpu_dockerfile(deployment: Deployment) -> str:
    return f"""\
# The image of GPU workers. Change the version of CUDA to one that the driver of your nodes supports.
FROM {GPU_BASE}
# tini is process 1: it forwards SIGTERM, which drains the worker, and reaps processes that jobs leave
RUN apt-get update && apt-get install -y --no-install-recommends tini python3 python3-venv \\
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
# utility: NVML, with which the worker finds its cards and their memory
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
{_install(deployment, "redis,gpu")}
{_user("userdel -r ubuntu && useradd")}"""


def ray_dockerfile(deployment: Deployment) -> str:
    assert deployment.ray is not None
    suffix = "-gpu" if any(group.gpus for group in deployment.ray.groups.values()) else ""
    return f"""\
# The image of all Ray nodes: its version of Ray is that of the cluster.
FROM rayproject/ray:{deployment.ray.version}-py312{suffix}
{_install(deployment, "ray,gpu" if suffix else "ray")}
WORKDIR /app
COPY --chown=ray:users . /app
"""


def _install(deployment: Deployment, extras: str) -> str:
    lines = [
        f'ARG DOVETAIL="dovetail-ml[{extras}]=={__version__}"',
        'RUN pip install --no-cache-dir "$DOVETAIL"',
    ]
    if deployment.requirements is not None:
        target = "/tmp/requirements.txt"  # noqa: S108 - in the image
        lines += [f"COPY {deployment.requirements} {target}", f"RUN pip install --no-cache-dir -r {target}"]
    return "\n".join(lines)


def _user(command: str) -> str:
    return f"""\
RUN {command} --create-home --uid {USER_ID} worker
WORKDIR /app
COPY . /app
USER {USER_ID}
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["tini", "--", "dovetail"]
"""
