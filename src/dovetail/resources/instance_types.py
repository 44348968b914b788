"""Instance types of clouds: vCPUs, memory and GPUs of one node."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["INSTANCE_TYPES", "InstanceType", "instance_table", "instance_type", "is_instance_name", "similar_instance"]

AWS, GOOGLE, AZURE = "AWS", "Google Cloud", "Azure"
MIN_SIMILARITY = 0.8
"""Similarity of a misspelt name, as `difflib` measures it."""


@dataclass(frozen=True, slots=True)
class InstanceType:
    """One instance type; `card` is one of its cards as cluster specs write it, "" without GPUs."""

    provider: str
    name: str
    cpus: int
    memory_gb: int
    card_count: int = 0
    card: str = ""

    @property
    def cards(self) -> str:
        return f"{self.card_count}x{self.card}" if self.card_count else ""


EC2_CPUS = {
    "large": 2,
    "xlarge": 4,
    "2xlarge": 8,
    "4xlarge": 16,
    "8xlarge": 32,
    "12xlarge": 48,
    "16xlarge": 64,
    "24xlarge": 96,
    "32xlarge": 128,
    "48xlarge": 192,
}
EC2_CARDS = {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 4, "16xlarge": 1, "24xlarge": 4}


def _ec2_gpu_family(name: str, gb_per_cpu: int, card: str, cards: Mapping[str, int]) -> Iterator[InstanceType]:
    for size, count in cards.items():
        cpus = EC2_CPUS[size]
        yield InstanceType(AWS, f"{name}.{size}", cpus, cpus * gb_per_cpu, count, card)


def _ec2_cpu_family(name: str, gb_per_cpu: int) -> Iterator[InstanceType]:
    for size, cpus in EC2_CPUS.items():
        if size != "48xlarge":
            yield InstanceType(AWS, f"{name}.{size}", cpus, cpus * gb_per_cpu)


def _google_family(name: str, cpus: int, memory_gb: int, card: str) -> Iterator[InstanceType]:
    """A family with 1, 2, 4 and 8 cards; CPUs and memory are those of one card."""
    for count in (1, 2, 4, 8):
        yield InstanceType(GOOGLE, f"{name}-{count}g", count * cpus, count * memory_gb, count, card)


# Figures are those of the vendors' pages "Amazon EC2 instance types", "Accelerator-optimized machine family" (Google
# Cloud) and "GPU accelerated virtual machine sizes" (Azure). A vCPU is a hardware thread; sizes are 1024-based.
INSTANCE_TYPES: dict[str, InstanceType] = {
    one.name: one
    for one in (
        InstanceType(AWS, "p3.2xlarge", 8, 61, 1, "V100:16GB"),
        InstanceType(AWS, "p3.8xlarge", 32, 244, 4, "V100:16GB"),
        InstanceType(AWS, "p3.16xlarge", 64, 488, 8, "V100:16GB"),
        InstanceType(AWS, "p3dn.24xlarge", 96, 768, 8, "V100:32GB"),
        InstanceType(AWS, "p4d.24xlarge", 96, 1152, 8, "A100:40GB"),
        InstanceType(AWS, "p4de.24xlarge", 96, 1152, 8, "A100:80GB"),
        InstanceType(AWS, "p5.4xlarge", 16, 256, 1, "H100:80GB"),
        InstanceType(AWS, "p5.48xlarge", 192, 2048, 8, "H100:80GB"),
        InstanceType(AWS, "p5e.48xlarge", 192, 2048, 8, "H200:141GB"),
        InstanceType(AWS, "p5en.48xlarge", 192, 2048, 8, "H200:141GB"),
        *_ec2_gpu_family("g4dn", 4, "T4:16GB", {size: EC2_CARDS[size] for size in EC2_CARDS if size != "24xlarge"}),
        InstanceType(AWS, "g4dn.metal", 96, 384, 8, "T4:16GB"),
        *_ec2_gpu_family("g5", 4, "A10G:24GB", {**EC2_CARDS, "48xlarge": 8}),
        *_ec2_gpu_family("g6", 4, "L4:24GB", {**EC2_CARDS, "48xlarge": 8}),
        *_ec2_gpu_family("g6e", 8, "L40S:48GB", {**EC2_CARDS, "48xlarge": 8}),
        *_ec2_cpu_family("c6i", 2),
        *_ec2_cpu_family("m6i", 4),
        *_ec2_cpu_family("r6i", 8),
        *_google_family("a2-highgpu", 12, 85, "A100:40GB"),
        InstanceType(GOOGLE, "a2-megagpu-16g", 96, 1360, 16, "A100:40GB"),
        *_google_family("a2-ultragpu", 12, 170, "A100:80GB"),
        *_google_family("a3-highgpu", 26, 234, "H100:80GB"),
        InstanceType(GOOGLE, "a3-megagpu-8g", 208, 1872, 8, "H100:80GB"),
        InstanceType(GOOGLE, "a3-ultragpu-8g", 224, 2952, 8, "H200:141GB"),
        *(
            InstanceType(GOOGLE, f"g2-standard-{cpus}", cpus, 4 * cpus, count, "L4:24GB")
            for cpus, count in {4: 1, 8: 1, 12: 1, 16: 1, 24: 2, 32: 1, 48: 4, 96: 8}.items()
        ),
        *(
            InstanceType(GOOGLE, f"n2-standard-{cpus}", cpus, 4 * cpus)
            for cpus in (2, 4, 8, 16, 32, 48, 64, 80, 96, 128)
        ),
        InstanceType(AZURE, "Standard_NC4as_T4_v3", 4, 28, 1, "T4:16GB"),
        InstanceType(AZURE, "Standard_NC8as_T4_v3", 8, 56, 1, "T4:16GB"),
        InstanceType(AZURE, "Standard_NC16as_T4_v3", 16, 110, 1, "T4:16GB"),
        InstanceType(AZURE, "Standard_NC64as_T4_v3", 64, 440, 4, "T4:16GB"),
        InstanceType(AZURE, "Standard_NC24ads_A100_v4", 24, 220, 1, "A100:80GB"),
        InstanceType(AZURE, "Standard_NC48ads_A100_v4", 48, 440, 2, "A100:80GB"),
        InstanceType(AZURE, "Standard_NC96ads_A100_v4", 96, 880, 4, "A100:80GB"),
        InstanceType(AZURE, "Standard_NC40ads_H100_v5", 40, 320, 1, "H100NVL:94GB"),
        InstanceType(AZURE, "Standard_NC80adis_H100_v5", 80, 640, 2, "H100NVL:94GB"),
        InstanceType(AZURE, "Standard_NV36ads_A10_v5", 36, 440, 1, "A10:24GB"),
        InstanceType(AZURE, "Standard_NV72ads_A10_v5", 72, 880, 2, "A10:24GB"),
        InstanceType(AZURE, "Standard_ND96asr_v4", 96, 900, 8, "A100:40GB"),
        InstanceType(AZURE, "Standard_ND96amsr_A100_v4", 96, 1900, 8, "A100:80GB"),
        InstanceType(AZURE, "Standard_ND96isr_H100_v5", 96, 1900, 8, "H100:80GB"),
        InstanceType(AZURE, "Standard_ND96isr_H200_v5", 96, 1850, 8, "H200:141GB"),
        *(InstanceType(AZURE, f"Standard_D{cpus}s_v5", cpus, 4 * cpus) for cpus in (2, 4, 8, 16, 32, 48, 64, 96)),
    )
}

_AZURE_PREFIX = "standard_"
_BY_SPELLING = {name.lower().removeprefix(_AZURE_PREFIX): one for name, one in INSTANCE_TYPES.items()}
_SHAPES = re.compile(
    r"[a-z]+[0-9][a-z0-9-]*\.(?:nano|micro|small|medium|[0-9]*x?large|metal[a-z0-9-]*)"  # AWS: p5.48xlarge
    r"|[a-z][0-9][a-z]?-[a-z]+-[0-9]+g?(?:-[a-z]+)?"  # Google Cloud: a3-highgpu-8g
    r"|standard_[a-z0-9_-]+"  # Azure: Standard_ND96asr_v4
)


def instance_type(name: str) -> InstanceType | None:
    """The instance type of this name; upper and lower case are the same, and "Standard_" may be left out."""
    return _BY_SPELLING.get(_spelling(name))


def is_instance_name(name: str) -> bool:
    """Whether a name has the form of an instance type, known or not."""
    return instance_type(name) is not None or _SHAPES.fullmatch(name.strip().lower()) is not None


def similar_instance(name: str) -> str | None:
    """The known instance type that a misspelt name resembles."""
    near = difflib.get_close_matches(_spelling(name), _BY_SPELLING, n=1, cutoff=MIN_SIMILARITY)
    return _BY_SPELLING[near[0]].name if near else None


def instance_table() -> str:
    """The instance types as a table in Markdown, as in docs/clusters.md."""
    lines = ["| cloud | instance type | CPUs | memory | GPUs |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.provider} | `{one.name}` | {one.cpus} | {one.memory_gb}GB | {one.cards} |"
        for one in INSTANCE_TYPES.values()
    ]
    return "\n".join(lines)


def _spelling(name: str) -> str:
    return name.strip().lower().removeprefix(_AZURE_PREFIX)


if __name__ == "__main__":
    print(instance_table())  # noqa: T201
