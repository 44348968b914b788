"""CPUs, memory, GPUs and processes of this machine: what there is and how much of it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.machine.gpus import CardFacts, GpuReader
    from dovetail.machine.inventory import MachineFacts, read_machine

__all__ = ["read_machine", "MachineFacts", "CardFacts", "GpuReader"]

_HOMES = {"read_machine": "inventory", "MachineFacts": "inventory", "CardFacts": "gpus", "GpuReader": "gpus"}


def __getattr__(name: str) -> object:
    """Names are imported at first use: reading the start time of a process does not need NVML."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'dovetail.machine' has no attribute {name!r}")
    return getattr(import_module(f"dovetail.machine.{home}"), name)
