"""What can be said about one machine and its cards?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CardFacts:
    """One GPU, or one MIG instance of a GPU, that a process can be given through CUDA_VISIBLE_DEVICES."""

    model: str
    """As NVML names it: "NVIDIA A100-SXM4-80GB"; of a MIG instance, the name of the card it is cut from."""
    memory_bytes: int
    uuid: str
    """What goes into CUDA_VISIBLE_DEVICES: "GPU-..." or "MIG-..."."""
    nvdecs: int | None = None
    """None: the driver does not tell; a MIG instance knows its own."""
    nvencs: int | None = None
    mig: str = ""
    """The MIG profile, such as "1g.10gb"; empty for a whole card."""
    index: int | None = None
    """NVML's number of the physical card, which stays the same when an earlier card is lost."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What this process may use of its machine, and why that is less than all of it."""

    hostname: str
    cpu_milli: int
    memory_bytes: int
    cards: tuple[CardFacts, ...]
    notes: tuple[str, ...]
    """Every limit that was applied and everything that went wrong, one sentence each, for people."""
