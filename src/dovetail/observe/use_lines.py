"""How is what workers use written into the log of a run?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.observe.journal import Journal
    from dovetail.observe.telemetry import Telemetry

UNITS_EVERY_S = 5.0
GPUS_SHOWN = 16
DIGITS = 3


class UseLines:
    """What a recorder writes of a run's telemetry; nothing, if it has none."""

    def __init__(self, telemetry: Telemetry | None) -> None:
        self._telemetry = telemetry
        self._due = float("-inf")

    def of_worker(self, worker: int) -> dict[str, Any]:
        """What is added to its line."""
        use = self._telemetry.latest().get(worker) if self._telemetry is not None else None
        return {} if use is None else {key: it for key, it in _line(use).items() if key not in ("worker", "unit")}

    def write(self, now: float, journal: Journal, *, last: bool = False) -> int:
        """With a view: units, cards and the machine if they are due, and what there is to advise. The bytes it took."""
        if self._telemetry is None:
            return 0
        size = 0
        if now >= self._due or last:
            self._due = now + UNITS_EVERY_S
            size = self._write_all(now, journal, self._telemetry)
        for advice in self._telemetry.advice():
            data = {"unit": advice.unit, "about": advice.about, "used": round(advice.used, DIGITS)}
            journal.tell(now, "note", {"what": "advice", "text": advice.text, "data": data})
        return size

    def _write_all(self, now: float, journal: Journal, telemetry: Telemetry) -> int:
        seen = telemetry.snapshot()
        size = sum(journal.keep(now, "unit_use", _line(use)) for use in seen.units.values())
        size += sum(journal.keep(now, "gpu_use", _line(card)) for card in seen.gpus[:GPUS_SHOWN])
        if seen.machine is not None:
            size += journal.keep(now, "machine_use", _line(seen.machine))
        return size


def _line(use: Any) -> dict[str, Any]:
    """What is known of it."""
    return {
        name: round(value, DIGITS) if isinstance(value, float) else value
        for name, value in asdict(use).items()
        if value is not None
    }
