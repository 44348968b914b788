"""Parts of Kubernetes objects: labels, quantities, variables, volumes. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.resources.sizes import format_milli, parse_milli

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.export.deployment import Deployment

SHARED = "shared"
_UNITS = (("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10))


def labelled(deployment: Deployment, component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": deployment.name, "app.kubernetes.io/component": component}


def quantity(size_bytes: int) -> str:
    """'8Gi', or the number of bytes."""
    for unit, power in _UNITS:
        if size_bytes and not size_bytes % (1 << power):
            return f"{size_bytes >> power}{unit}"
    return str(size_bytes)


def container_resources(cpus: float, memory_bytes: int, gpus: int = 0) -> dict[str, Any]:
    """Equal requests and limits. A GPU is only a limit; its request follows."""
    amounts = {"cpu": format_milli(parse_milli(cpus)), "memory": quantity(memory_bytes)}
    return {"requests": amounts, "limits": {**amounts, "nvidia.com/gpu": str(gpus)} if gpus else amounts}


def env_list(variables: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def secret_variable(deployment: Deployment, variable: str, key: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": f"{deployment.name}-secrets", "key": key}}}


def shared_mounts(deployment: Deployment) -> list[dict[str, Any]]:
    return [] if deployment.shared_folder is None else [{"name": SHARED, "mountPath": deployment.shared_folder}]


def shared_volumes(deployment: Deployment) -> list[dict[str, Any]]:
    if deployment.shared_folder is None:
        return []
    return [{"name": SHARED, "persistentVolumeClaim": {"claimName": deployment.claim}}]
