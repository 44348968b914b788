"""What was on each node of a run, and how busy was it?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.observe.folder import num

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.observe.history import History


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """One node over the whole run. None: nobody measured."""

    name: str
    workers: dict[str, int]
    """Unit -> the most of its workers that were there at once, all or in part, as far as that was seen."""
    cpus: float | None = None
    """CPUs of its machine that were busy on average, with the work of others."""
    cpu_count: int | None = None
    peak_bytes: int | None = None
    """The most memory of its machine that was in use, with the work of others."""
    memory_bytes: int | None = None
    gpu_share: float | None = None
    """Of the time something ran on its cards, on average over them."""
    left: str | None = None
    """Why it is not there any more; None: it is, or was till the end."""


def node_summaries(history: History) -> tuple[NodeSummary, ...]:
    """By name, every node that had a worker, was measured, came or went."""
    lives, left = _most_alive(history), _left(history)
    names = {*lives, *left, *history.node_uses} - {""}
    return tuple(_node(history, name, lives.get(name, {}), left.get(name)) for name in sorted(names))


def _node(history: History, name: str, alive: Mapping[str, int], left: str | None) -> NodeSummary:
    lines = history.node_uses.get(name, [])
    workers = dict(alive)
    for line in lines:
        told = line.get("workers")
        counts: dict[str, Any] = told if isinstance(told, dict) else {}
        for unit in counts:
            workers[unit] = max(workers.get(unit, 0), int(num(counts, unit)))
    last = lines[-1] if lines else {}
    cpus = [num(line, "cpus") for line in lines if "cpus" in line]
    memory = [int(num(line, "memory_used_bytes")) for line in lines if "memory_used_bytes" in line]
    return NodeSummary(
        name=name,
        workers={unit: most for unit, most in sorted(workers.items()) if most},
        cpus=sum(cpus) / len(cpus) if cpus else None,
        cpu_count=int(num(last, "cpu_count")) or None,
        peak_bytes=max(memory, default=None),
        memory_bytes=int(num(last, "memory_bytes")) or None,
        gpu_share=_gpu_share([it for (node, _), it in history.gpu_uses.items() if node == name]),
        left=left,
    )


def _gpu_share(cards: Sequence[Sequence[Mapping[str, Any]]]) -> float | None:
    found = [num(line, "use_percent") for lines in cards for line in lines if "use_percent" in line]
    return sum(found) / len(found) / 100 if found else None


def _left(history: History) -> dict[str, str | None]:
    """Every node that came or went -> why it is not there any more."""
    found: dict[str, str | None] = {}
    for it in history.happenings:
        if it.kind == "node" and isinstance(it.data.get("node"), str):
            gone = it.data.get("do") == "left"
            found[it.data["node"]] = str(it.data.get("why") or "no reason is known") if gone else None
    return found


def _most_alive(history: History) -> dict[str, dict[str, int]]:
    """Node -> unit -> the most workers at once, by the lines of those that have some."""
    moves: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for life in history.lives.values():
        begun = life.started if life.started is not None else life.ready
        for node in dict.fromkeys(life.nodes or (life.node,)):
            steps = moves.setdefault((node, life.unit), [])
            if begun is not None:
                steps.append((begun, 1))
                steps.append((float("inf") if life.ended is None else life.ended, -1))
    found: dict[str, dict[str, int]] = {}
    for (node, unit), steps in moves.items():
        # one that comes when another goes is not beside it
        there = most = 0
        for _, step in sorted(steps):
            there += step
            most = max(most, there)
        if most:
            found.setdefault(node, {})[unit] = most
    return found
