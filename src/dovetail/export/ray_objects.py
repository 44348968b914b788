"""Objects of KubeRay: a RayCluster, and a RayJob per pipeline. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from dovetail.documents.yaml_writer import Commented
from dovetail.export.kubernetes_objects import (
    container_resources,
    labelled,
    shared_mounts,
    shared_volumes,
)

if TYPE_CHECKING:
    from dovetail.export.deployment import Deployment, Ray, RayGroup

RAY_HEADER = """\
Pipelines on Ray, for KubeRay 1.1 or later. A RayJob is one run; `kubectl create -f ray.yaml` starts it.
To resume an interrupted run: kubectl delete rayjob NAME, then create it again; it continues in its run folder."""
CODE_FOLDER = "/app"
NO_NICENESS = {"name": "RAY_worker_niceness", "value": "0"}
"""Ray runs workers at nice 15 by default; beside other processes they would get little CPU time."""


def ray_objects(deployment: Deployment, ray: Ray) -> list[dict[str, Any]]:
    cluster = _cluster_spec(deployment, ray)
    jobs = [_job(deployment, ray, name, cluster) for name in ray.pipelines]
    if not ray.keep_cluster:
        return jobs
    kept = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": _cluster_name(deployment), "labels": labelled(deployment, "ray")},
        "spec": cluster,
    }
    return [kept, *jobs]


def run_command(deployment: Deployment, name: str) -> list[str]:
    """The command of a pipeline, run on the head."""
    assert deployment.ray is not None
    pipeline = deployment.ray.pipelines[name]
    assert deployment.shared_folder is not None, "checked when the file was read"
    run_dir = pipeline.run_dir or f"{deployment.shared_folder}/runs/{name}"
    return ["dovetail", "run", f"{CODE_FOLDER}/{pipeline.file}", "--engine", "ray:auto", "--run-dir", run_dir]


def _cluster_name(deployment: Deployment) -> str:
    return f"{deployment.name}-ray"


def _job(deployment: Deployment, ray: Ray, name: str, cluster: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {"entrypoint": shlex.join(run_command(deployment, name))}
    if ray.keep_cluster:
        spec["clusterSelector"] = {"ray.io/cluster": _cluster_name(deployment)}
    else:
        spec |= {"shutdownAfterJobFinishes": True, "ttlSecondsAfterFinished": 300, "rayClusterSpec": cluster}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": f"{deployment.name}-{name}", "labels": labelled(deployment, name)},
        "spec": spec,
    }


def _cluster_spec(deployment: Deployment, ray: Ray) -> dict[str, Any]:
    head = _container(deployment, ray, "ray-head", container_resources(ray.head.cpus, ray.head.memory_bytes))
    return {
        "rayVersion": Commented(ray.version, "that of the image"),
        "headGroupSpec": {
            "rayStartParams": Commented({"num-cpus": "0"}, "the driver is here, and no worker"),
            "template": {"spec": _pod(deployment, head)},
        },
        "workerGroupSpecs": [_group(deployment, ray, name, group) for name, group in ray.groups.items()],
    }


def _group(deployment: Deployment, ray: Ray, name: str, group: RayGroup) -> dict[str, Any]:
    resources = container_resources(group.cpus, group.memory_bytes, group.gpus)
    pod = _pod(deployment, _container(deployment, ray, "ray-worker", resources))
    if group.node_labels:
        pod["nodeSelector"] = dict(group.node_labels)
    if group.gpus:
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    return {
        "groupName": name,
        "replicas": Commented(group.nodes, "all three equal: a run makes no demand that Ray's autoscaler would see"),
        "minReplicas": group.nodes,
        "maxReplicas": group.nodes,
        "rayStartParams": {},
        "template": {"spec": pod},
    }


def _container(deployment: Deployment, ray: Ray, name: str, resources: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "image": ray.image or f"{deployment.name}-ray:latest",
        "env": [NO_NICENESS],
        "resources": Commented(resources, "KubeRay passes the limits to Ray"),
        "volumeMounts": shared_mounts(deployment),
    }


def _pod(deployment: Deployment, container: dict[str, Any]) -> dict[str, Any]:
    return {"containers": [container], "volumes": shared_volumes(deployment)}
