"""A parsed document, and the file:line:column of each of its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

KeyPath = tuple["str | int", ...]
"""Path from the top of a document to a part of it: ("nodes", 2, "memory")."""


@dataclass(frozen=True, slots=True)
class Document:
    """Plain data with the line and column of each part."""

    name: str
    data: Any
    root: yaml.Node | None = None

    def place(self, path: KeyPath = ()) -> str:
        """'cluster.yaml:3:9' for the part at this path, or for the nearest part around it; for data without a file the
        path itself, 'cluster.nodes[2].memory'."""
        if self.root is None:
            return dotted_path(self.name, path)
        node, at = self.root, self.root.start_mark
        for step in path:
            found = _child(node, step)
            if found is None:
                break
            key, node = found
            at = key.start_mark
        return f"{self.name}:{at.line + 1}:{at.column + 1}"


def dotted_path(name: str, path: KeyPath) -> str:
    text = name
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def _child(node: yaml.Node, step: str | int) -> tuple[yaml.Node, yaml.Node] | None:
    """(start, part) of the child of a node."""
    import yaml

    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and 0 <= step < len(node.value):
        return node.value[step], node.value[step]
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(step):
                return key, value
    return None
