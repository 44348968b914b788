"""Inventory of this machine: CPUs, memory and GPUs that this process may use, with notes on limits."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.machine.cgroups import usable_cpu_milli, usable_memory_bytes
from dovetail.machine.gpus import NvmlReader, card_order_notes, visible_cards
from dovetail.machine.job_seat import job_seat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.machine.gpus import CardFacts, GpuReader


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Resources of the machine that this process may use, and the limits that apply."""

    hostname: str
    cpu_milli: int
    memory_bytes: int
    cards: tuple[CardFacts, ...]
    notes: tuple[str, ...]
    """Every applied limit and every read error, one sentence each."""
    custom: tuple[tuple[str, int], ...] = ()
    """Custom resources, in thousandths: those of the job that this process belongs to."""


def read_machine(
    *, gpus: GpuReader | None = None, environ: Mapping[str, str] | None = None, root: Path = Path("/")
) -> MachineFacts:
    """Read the machine, or the part of it that the job of this process has. The arguments replace NVML, the environment
    and the file system."""
    environ = os.environ if environ is None else environ
    asked = environ.get("CUDA_VISIBLE_DEVICES")
    cpu_milli, cpu_notes = usable_cpu_milli(root)
    memory_bytes, memory_notes = usable_memory_bytes(root)
    present, card_notes = (gpus or NvmlReader(root=root)).cards()
    cards, hidden_notes = visible_cards(present, asked)
    doubts = card_order_notes(present, asked, environ.get("CUDA_DEVICE_ORDER"))
    notes = (*cpu_notes, *memory_notes, *card_notes, *hidden_notes, *doubts)
    seat = job_seat(environ)
    custom: tuple[tuple[str, int], ...] = ()
    if seat is not None:
        cpu_milli, memory_bytes, custom = seat.cpu_milli, seat.memory_bytes, seat.custom
        notes += ("this process belongs to a job: CPUs, memory and GPUs are those of the job",)
    return MachineFacts(socket.gethostname(), cpu_milli, memory_bytes, tuple(cards), notes, custom)
