"""Deployments for tests, and the schemas that exported objects must follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import kubernetes_validate
import yaml

from dovetail.export.deploy_file import make_deployment

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dovetail.export.deployment import Deployment

SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES_VERSION = "1.31"
FULL: dict[str, Any] = {
    "name": "train",
    "apps": ["tasks", "reports.py"],
    "image": "registry.example.org/train:1",
    "namespace": "ml",
    "requirements": "requirements.txt",
    "shared_folder": "/shared",
    "pools": {
        "cpu": {"cpus": 4, "memory": "8GB", "workers": [2, 10]},
        "gpu": {
            "cpus": 8,
            "memory": "32GB",
            "gpus": 1,
            "queues": ["gpu"],
            "workers": [0, 4],
            "slots": 2,
            "job_timeout": "1h",
            "grace": "1h",
            "node_labels": {"card": "l40s"},
        },
    },
    "redis": {"fsync": "always", "memory": "2GB"},
    "ray": {
        "pipelines": {"pages": {"file": "pipeline.yaml"}},
        "groups": {"cpu": {"nodes": 2}, "gpu": {"gpus": 2, "node_labels": {"card": "h100"}}},
    },
}

# Fields of ray.io/v1 that Dovetail may write, with their types in the API of KubeRay (ray-operator/apis/ray/v1). No
# package has its custom resource definitions, so this is written by hand. Pod templates are checked as pods.
_PARAMETERS = {"type": "object", "additionalProperties": {"type": "string"}}
_POD = {"type": "object", "required": ["spec"]}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}


def _object(required: tuple[str, ...], **properties: object) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


_HEAD = _object(
    ("rayStartParams", "template"), rayStartParams=_PARAMETERS, template=_POD, serviceType={"type": "string"}
)
_GROUP = _object(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    groupName={"type": "string"},
    replicas=_COUNT,
    minReplicas=_COUNT,
    maxReplicas=_COUNT,
    numOfHosts=_COUNT,
    rayStartParams=_PARAMETERS,
    template=_POD,
)
_CLUSTER = _object(
    ("headGroupSpec",),
    rayVersion={"type": "string"},
    headGroupSpec=_HEAD,
    workerGroupSpecs={"type": "array", "items": _GROUP},
    enableInTreeAutoscaling={"type": "boolean"},
    suspend={"type": "boolean"},
)
_JOB = _object(
    ("entrypoint",),
    entrypoint={"type": "string"},
    rayClusterSpec=_CLUSTER,
    clusterSelector=_PARAMETERS,
    shutdownAfterJobFinishes={"type": "boolean"},
    ttlSecondsAfterFinished=_COUNT,
    runtimeEnvYAML={"type": "string"},
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
    suspend={"type": "boolean"},
)
RAY_SPECS = {"RayCluster": _CLUSTER, "RayJob": _JOB}


def deployment(**changes: object) -> Deployment:
    return make_deployment({**FULL, **changes})


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


def schema_of(name: str) -> Any:
    return json.loads((SCHEMAS / name).read_text(encoding="utf-8"))


def check_composition(data: Mapping[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema_of("compose-spec.json")).validate(data)


def check_object(data: dict[str, Any]) -> None:
    """A Kubernetes object, also of KEDA or KubeRay, against its schema."""
    kind = data["kind"]
    match data["apiVersion"]:
        case "keda.sh/v1alpha1":
            jsonschema.Draft202012Validator(schema_of("keda-2.16.1.json")[kind]).validate(data)
        case "ray.io/v1":
            jsonschema.Draft202012Validator(RAY_SPECS[kind]).validate(data["spec"])
            for spec in pod_specs(data):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
                kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)
        case "kustomize.config.k8s.io/v1beta1":
            assert set(data) <= {"apiVersion", "kind", "namespace", "resources"}
        case _:
            kubernetes_validate.validate(data, KUBERNETES_VERSION, strict=True)


def pod_specs(data: object) -> Iterator[dict[str, Any]]:
    """Specifications of pods anywhere in an object."""
    if isinstance(data, dict):
        if "containers" in data:
            yield data
        for part in data.values():
            yield from pod_specs(part)
    elif isinstance(data, list):
        for part in data:
            yield from pod_specs(part)
