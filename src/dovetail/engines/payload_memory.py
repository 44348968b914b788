"""Payload memory: how much memory the data between stages may fill, on this machine and on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.machine.cgroups import usable_memory_bytes

if TYPE_CHECKING:
    from dovetail.resources.cluster import Cluster

PAYLOAD_MEMORY_DIVISOR = 4
"""Payloads may use this fraction of memory (1/n)."""
OBJECT_STORE_DIVISOR = 2
"""Payloads in transit may fill 1/N of Ray's object stores."""


def total_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may use: that of the machine, or the limit of its cgroup."""
    return usable_memory_bytes(root)[0]


def limit_payload_memory(byte_budget: int, cluster: Cluster) -> int:
    """The byte budget of a run, lowered to the share of the cluster's memory that payloads may fill."""
    memory_bytes = sum(node.memory_bytes for node in cluster.nodes)
    return min(byte_budget, memory_bytes // PAYLOAD_MEMORY_DIVISOR) if memory_bytes else byte_budget
