"""How is what workers use written into the log of a run?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.observe.journal import Journal
    from dovetail.observe.telemetry import NodeUse, Telemetry

UNITS_EVERY_S = 5.0
GPUS_SHOWN = 16
NODES_SHOWN = 64
NODE_GPUS_SHOWN = 64
"""Of a cluster, on all its nodes together."""
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
        """With a view: units, cards, nodes and the machine if due, and what there is to advise. The bytes it took."""
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
            nodes = {"nodes": len(seen.nodes)} if seen.nodes else {}
            size += journal.keep(now, "machine_use", _line(seen.machine) | nodes)
        return size + (self._write_nodes(now, journal, seen.nodes) if seen.nodes else 0)

    def _write_nodes(self, now: float, journal: Journal, nodes: Mapping[str, NodeUse]) -> int:
        """Of a large cluster always the same nodes, the first by name, so that each has a history."""
        size, left = 0, NODE_GPUS_SHOWN
        for name, use in list(nodes.items())[:NODES_SHOWN]:
            host = {} if use.host is None else _line(use.host)
            size += journal.keep(now, "node_use", {"node": name, "workers": dict(use.workers), **host})
            cards, left = use.gpus[:left], max(0, left - len(use.gpus))
            size += sum(journal.keep(now, "gpu_use", {"node": name, **_line(card)}) for card in cards)
        return size


def _line(use: Any) -> dict[str, Any]:
    """What is known of it."""
    return {
        name: round(value, DIGITS) if isinstance(value, float) else value
        for name, value in asdict(use).items()
        if value is not None
    }
