"""Seat of the job that this process belongs to: the part of the machine that the worker of the queue gave to the job.

The worker passes it in the variable `SEAT_VARIABLE`. A run in the process of a job plans for it instead of the machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SEAT_VARIABLE = "DOVETAIL_SEAT"


@dataclass(frozen=True, slots=True)
class JobSeat:
    """CPUs, memory, shares of cards and custom resources of a job."""

    cpu_milli: int
    memory_bytes: int
    """0: it requested none."""
    cards: tuple[tuple[int, int, int, int], ...] = ()
    """(Thousandths, bytes, NVDECs, NVENCs) of each card that it sees, in the order of CUDA_VISIBLE_DEVICES."""
    custom: tuple[tuple[str, int], ...] = ()

    def to_text(self) -> str:
        """The value of the variable."""
        return json.dumps([self.cpu_milli, self.memory_bytes, self.cards, self.custom], separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> JobSeat:
        cpu_milli, memory_bytes, cards, custom = json.loads(text)
        return cls(
            cpu_milli,
            memory_bytes,
            tuple((milli, size, nvdecs, nvencs) for milli, size, nvdecs, nvencs in cards),
            tuple((name, amount) for name, amount in custom),
        )


def job_seat(environ: Mapping[str, str]) -> JobSeat | None:
    """The seat of the job of this process; None outside of a job."""
    text = environ.get(SEAT_VARIABLE)
    return JobSeat.parse(text) if text else None
