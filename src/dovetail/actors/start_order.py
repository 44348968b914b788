"""Order in which the processes of a system start. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.actors.colocation import Bundle
    from dovetail.actors.role import Role


def start_levels(roles: Sequence[Role], bundles: Sequence[Bundle]) -> dict[str, int]:
    """Level of each kind of process: processes of one level start together, when all lower levels are ready.

    A process that hosts several roles starts after everything that one of them waits for. If two kinds of processes
    wait for each other (which `after` between single roles cannot express), they are on the same level."""
    home = {
        role: template.unit for bundle in bundles for template, _ in bundle.processes for role, _ in template.instances
    }
    waits: dict[str, set[str]] = {name: set() for name in home.values()}
    for role in roles:
        waits[home[role.name]] |= {home[other] for other in role.after} - {home[role.name]}
    levels = dict.fromkeys(waits, 0)
    for _ in waits:  # the longest path has fewer edges than there are kinds
        for name, others in waits.items():
            levels[name] = max([levels[name], *(levels[other] + 1 for other in others)])
    return levels if max(levels.values(), default=0) < len(waits) else dict.fromkeys(waits, 0)
