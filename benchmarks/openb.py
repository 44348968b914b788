"""The public traces of "Beware of Fragmentation" (ATC'23): the cluster, the pods, and their arrival."""

from __future__ import annotations

import csv
import random
from collections import Counter
from typing import TYPE_CHECKING

import dovetail as dt

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def cluster(data: Path, seed: int) -> dt.Cluster:
    """The GPU nodes in the fixed random order of this seed, which is the tie-break."""
    with (data / "openb" / "openb_node_list_gpu_node.csv").open() as file:
        rows = list(csv.DictReader(file))
    random.Random(f"nodes {seed}").shuffle(rows)
    return dt.Cluster(
        tuple(
            dt.Node(
                name=row["sn"],
                cpu_milli=int(row["cpu_milli"]),
                memory_bytes=int(row["memory_mib"]) * MIB,
                gpus=(dt.Gpu(model=row["model"]),) * int(row["gpu"]),
            )
            for row in rows
        )
    )


def pods(data: Path, trace: str) -> list[dt.Shape]:
    """Every pod of a trace as a shape."""
    shapes: dict[tuple[str, ...], dt.Shape] = {}
    result = []
    with (data / "openb" / f"openb_pod_list_{trace}.csv").open() as file:
        for row in csv.DictReader(file):
            key = (row["cpu_milli"], row["memory_mib"], row["num_gpu"], row["gpu_milli"], row.get("gpu_spec") or "")
            if key not in shapes:
                shapes[key] = _shape(*(int(value) for value in key[:4]), spec=key[4])
            result.append(shapes[key])
    return result


def _shape(cpu_milli: int, memory_mib: int, num_gpu: int, gpu_milli: int, *, spec: str) -> dt.Shape:
    gpus = gpu_milli / 1000 if num_gpu == 1 else float(num_gpu)
    return dt.Resources(
        cpus=cpu_milli / 1000,
        memory=f"{memory_mib}MiB",
        gpus=gpus,
        accelerator=spec if spec and num_gpu else None,
    ).shape()


def asked_milli(shape: dt.Shape) -> int:
    return shape.cards * shape.gpu_milli


def expected(trace: list[dt.Shape]) -> dt.Workload:
    """The classes that make up 95 % of the trace. Memory is a filter only, as published."""
    counts = Counter(_class(shape) for shape in trace)
    ranked = sorted(counts.items(), key=lambda item: (item[1], _class_key(item[0])), reverse=True)
    chosen, covered = [], 0
    for shape, count in ranked:
        chosen.append((shape, count))
        covered += count
        if covered >= 0.95 * len(trace):
            break
    return dt.Workload(chosen)


def _class(shape: dt.Shape) -> dt.Shape:
    from dataclasses import replace

    return replace(shape, memory_bytes=0)


def _class_key(shape: dt.Shape) -> tuple[int, int, int, str]:
    return (shape.cpu_milli, shape.gpu_milli, shape.cards, "|".join(shape.accelerators))


def arrivals(trace: list[dt.Shape], capacity_milli: int, seed: int) -> list[dt.Shape]:
    """The trace shuffled, then copies of random pods until 1.3 times the capacity is asked for."""
    rng = random.Random(f"arrivals {seed}")
    order = trace.copy()
    rng.shuffle(order)
    asked = sum(map(asked_milli, order))
    while True:
        pod = rng.choice(trace)
        if asked + asked_milli(pod) > 1.3 * capacity_milli:
            return order
        asked += asked_milli(pod)
        order.append(pod)
