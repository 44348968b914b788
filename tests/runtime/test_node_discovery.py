"""Names of the nodes of a Ray cluster are the same for all runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.engines.ray.discovery import build_cluster
from dovetail.runtime.ray_site import NodeDiscovery

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.engines.ray.discovery import DiscoveredCluster


def row(number: str, host: str) -> dict[str, Any]:
    address = {"NodeManagerHostname": host, "NodeManagerAddress": "10.0.0.1"}
    return {"NodeID": number * 16, "Resources": {"CPU": 4.0}, "Labels": {}, **address}


def test_a_node_keeps_its_name_and_none_gets_that_of_one_that_left() -> None:
    rows = [row("a1", "host")]

    def look(known: Mapping[str, str]) -> DiscoveredCluster:
        return build_cluster(rows, {}, {}, known=known)

    node_discovery = NodeDiscovery(look({}), look)
    by_book, by_engine = node_discovery, node_discovery
    assert node_discovery.latest.ids == {"host": "a1" * 16}
    rows[:] = [row("b2", "host")]
    assert by_book().ids == {"node-b2b2b2b2": "b2" * 16}
    rows[:] = [row("b2", "host"), row("c3", "host")]
    found = {"node-b2b2b2b2": "b2" * 16, "node-c3c3c3c3": "c3" * 16}
    assert by_engine().ids == found, "the next caller knows the nodes that another one saw"
    rows[:] = [row("d4", "host"), row("c3", "host")]
    assert by_book().ids == {"node-c3c3c3c3": "c3" * 16, "node-d4d4d4d4": "d4" * 16}
    assert by_engine().ids == node_discovery.latest.ids
