"""Text diagram of nodes and their GPUs; identical nodes share a row."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from dovetail.resources.sizes import format_milli, format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.resources.cluster import Cluster, Gpu, Node
    from dovetail.resources.ledger import Ledger
    from dovetail.resources.seat import Seat, Seats

CARD_CELLS = 10
CPU_CELLS = 10
MAX_ROWS = 40
IN_USE = "in use"
"""Name of the resources that are already in use."""


def cluster_summary(cluster: Cluster) -> str:
    """'20 nodes, 640 CPUs, 1.5TB memory, 8 GPUs (8x A100 40GB: 5 NVDEC, 0 NVENC each)'."""
    nodes = cluster.nodes
    cpus = sum(node.usable_cpu_milli for node in nodes)
    kept = sum(node.kept_back_milli for node in nodes)
    cards = Counter(gpu for node in nodes for gpu in node.gpus)
    parts = [
        f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}",
        f"{format_milli(cpus)} CPUs" + (f" ({format_milli(kept)} more reserved)" if kept else ""),
        f"{format_size(sum(node.memory_bytes for node in nodes))} memory" if any(n.memory_bytes for n in nodes) else "",
        f"{sum(cards.values())} GPU{'s' if sum(cards.values()) != 1 else ''}" if cards else "no GPU",
    ]
    text = ", ".join(filter(None, parts))
    return text + "".join(f"\n  {count} x {card_text(gpu)}" for gpu, count in cards.items())


def card_text(gpu: Gpu) -> str:
    size = f" {format_size(gpu.memory_bytes)}" if gpu.memory_bytes else ""
    return f"{gpu.model}{size}, {gpu.nvdecs} NVDEC, {gpu.nvencs} NVENC"


def draw_cluster(ledger: Ledger, workers: Mapping[str, Sequence[Seats]] | None = None) -> list[str]:
    """Rows of nodes with a bar for their CPUs and a box for each GPU; `workers`: name -> seats."""
    workers = workers or {}
    letters = dict(zip(workers, "abcdefghijklmnopqrstuvwxyz", strict=False))
    seated: dict[str, list[tuple[str, Seat]]] = {}
    for name, group in workers.items():
        for seats in group:
            for seat in seats:
                seated.setdefault(seat.node, []).append((letters.get(name, "*"), seat))
    alike: dict[tuple[str, ...], list[Node]] = {}
    for node in ledger.cluster.nodes:
        alike.setdefault(_node_row(ledger, node, seated.get(node.name, [])), []).append(node)
    rows = [(_node_names(nodes), *cells) for cells, nodes in list(alike.items())[:MAX_ROWS]]
    lines = _node_table([("node", "CPUs in use", "memory free", "GPUs"), *rows])
    if len(alike) > MAX_ROWS:
        lines.append(f"... and {len(alike) - MAX_ROWS} more rows")
    return lines + _legend(letters, workers)


def _node_row(ledger: Ledger, node: Node, seated: list[tuple[str, Seat]]) -> tuple[str, str, str]:
    free = ledger.free_on(node.name)
    used = node.usable_cpu_milli - free.cpu_milli
    filled = -(-used * CPU_CELLS // max(1, node.usable_cpu_milli))
    cpus = f"{'#' * filled}{'.' * (CPU_CELLS - filled)} {format_milli(used)}/{format_milli(node.usable_cpu_milli)}"
    memory = f"{format_size(free.memory_bytes)}/{format_size(node.memory_bytes)}" if node.memory_bytes else "unknown"
    boxes = [_card_box(index, seated) for index in range(len(node.gpus))]
    labels = " ".join(f"{name}={value}" for name, value in node.labels)
    return cpus, memory, "".join(boxes) + _codecs(ledger, node) + (f" {{{labels}}}" if labels else "")


def _card_box(card: int, seated: list[tuple[str, Seat]]) -> str:
    """[aaabb.....]: a letter for every tenth of the GPU, at least one for each worker on it."""
    cells, taken = "", 0
    for letter, seat in seated:
        for share in seat.cards:
            if share.card == card and share.milli:
                taken += share.milli
                cells += letter * max(1, -(-taken * CARD_CELLS // 1000) - len(cells))
    return f"[{cells[:CARD_CELLS]:.<{CARD_CELLS}}]"


def _codecs(ledger: Ledger, node: Node) -> str:
    free = ledger.free_on(node.name).cards.free
    parts = []
    for name in ("nvdecs", "nvencs"):
        total = sum(getattr(gpu, name) for gpu in node.gpus)
        if total:
            used = total - sum(getattr(card, name) for card in free)
            parts.append(f"{name[:-1]} {used}/{total}")
    return f" {', '.join(parts)}" if parts else ""


def _node_names(nodes: list[Node]) -> str:
    if len(nodes) == 1:
        return nodes[0].name
    return (
        f"{len(nodes)} x {nodes[0].name} ..{nodes[-1].name.removeprefix(_common_prefix(nodes[0].name, nodes[-1].name))}"
    )


def _common_prefix(first: str, second: str) -> str:
    end = 0
    while end < min(len(first), len(second)) and first[end] == second[end] and not first[end].isdigit():
        end += 1
    return first[:end]


def _node_table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
    return [click.style(lines[0], dim=True), *lines[1:]]


def _legend(letters: dict[str, str], workers: Mapping[str, Sequence[Seats]]) -> list[str]:
    if not workers:
        return []
    return [
        "",
        *(
            f"{letters.get(name, '*')} = {name}: {len(group)} workers"
            if name != IN_USE
            else f"{letters[name]} = in use"
            for name, group in workers.items()
        ),
    ]
