"""Random shapes, and random free resources of nodes with GPUs, for claims."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.errors import ResourceError
from dovetail.jobs.admission import Admission
from dovetail.resources.cluster import Gpu, Node
from dovetail.resources.free_resources import NodeKind
from dovetail.resources.resources import Resources

if TYPE_CHECKING:
    from random import Random

    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.shape import Shape

GB = 10**9
MODELS = ("A100", "H100", "L4")


def random_shape(random: Random) -> Shape:
    """A shape of any kind, mostly small enough for the nodes below."""
    choose = random.choice
    while True:
        gpus = choose([0, 0, 0.25, 0.5, 1, 1, 2, 3])
        asks_codecs = random.random() < 0.4
        try:
            return Resources(
                cpus=choose([0, 0.5, 1, 2]),
                memory=choose([None, "1GB", "3GB"]),
                gpus=gpus,
                gpu_memory=choose([None, None, None, "7GB", "20GB"]),
                nvdecs=random.randint(0, 5) if asks_codecs else 0,
                nvencs=random.randint(0, 3) if asks_codecs else 0,
                entire_gpu=gpus >= 1 and choose([True, False, False]),
                accelerator=choose([None, None, "a100", "a100|l4"]) if gpus else None,
                labels=choose([{}, {}, {}, {"zone": "a"}, {"zone": "a|b", "disk": "ssd"}]),
                custom=choose([{}, {}, {"licence": 0.5}, {"licence": 1, "port": 2}]),
            ).shape(choose([1, 1, 1, 4]))
        except ResourceError:  # such as an accelerator without a GPU
            continue


def random_free(random: Random) -> FreeResources:
    """Free resources of a node on which some workers run."""
    choose = random.choice
    gpus = tuple(
        Gpu(choose(MODELS), choose([0, 24, 40, 80]) * GB, random.randint(0, 4), random.randint(0, 3))
        for _ in range(random.randint(0, 5))
    )
    node = Node(
        "node",
        cpu_milli=random.randint(0, 12) * 1000,
        memory_bytes=random.randint(0, 16) * GB,
        gpus=gpus,
        labels=choose([(), (("zone", "a"),), (("disk", "ssd"), ("zone", "b"))]),
        custom=choose([(), (("licence", 2000),), (("licence", 1500), ("port", 9000))]),
    )
    free, admission = NodeKind(node).untouched(), Admission()
    for _ in range(random.randint(0, 4)):
        free = admission.take(random_shape(random), free) or free
    return free
