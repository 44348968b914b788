"""What may this process use of the machine it runs on?"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.machine.cpus import usable_cpu_milli, usable_memory_bytes
from dovetail.machine.facts import MachineFacts
from dovetail.machine.gpus import Nvml, numbering_doubts, visible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.machine.gpus import GpuReader


def read_machine(
    *, gpus: GpuReader | None = None, environ: Mapping[str, str] | None = None, root: Path = Path("/")
) -> MachineFacts:
    """Read the machine now; the arguments stand in for NVML, the environment and the file system."""
    environ = os.environ if environ is None else environ
    asked = environ.get("CUDA_VISIBLE_DEVICES")
    cpu_milli, cpu_notes = usable_cpu_milli(root)
    memory_bytes, memory_notes = usable_memory_bytes(root)
    present, card_notes = (gpus or Nvml(root=root)).cards()
    cards, hidden_notes = visible(present, asked)
    doubts = numbering_doubts(present, asked, environ.get("CUDA_DEVICE_ORDER"))
    return MachineFacts(
        hostname=socket.gethostname(),
        cpu_milli=cpu_milli,
        memory_bytes=memory_bytes,
        cards=tuple(cards),
        notes=(*cpu_notes, *memory_notes, *card_notes, *hidden_notes, *doubts),
    )
