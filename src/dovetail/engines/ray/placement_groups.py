"""Placement groups of a run: the reservation of CPUs, memory and GPUs that Ray gives to no other job.

One atomic group holds the minimum of the run and never changes. Further amounts grow and shrink: groups of CPUs, memory
and custom resources per node, and one group per GPU, because a group owns particular GPUs. Groups belong to the
driver's job: when it ends, Ray removes them. `runtime` acquires the minimum; `engine` sets what is wanted while the run
goes.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dovetail.engines.ray.bundles import (
    add,
    amounts_per_node,
    cards_per_node,
    removable_groups,
    shrinkable_group,
    subtract,
    to_bundle,
)
from dovetail.engines.ray.discovery import GROUP_NAME_PREFIX, NODE_ID_LABEL
from dovetail.engines.ray.ray_import import ray_error, ray_errors
from dovetail.engines.ray.raylet_probe import find_silent_nodes
from dovetail.errors import EngineError
from dovetail.resources.amounts import HOST, Amounts, subtract_amounts, sum_seats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Future

    from dovetail.engines.ray.bundles import NodeAmounts
    from dovetail.resources.seat import Seats

_GROUP_NUMBERS = itertools.count(1)


class GroupState(Enum):
    """Ray's scheduling state of a group."""

    GRANTED = "FINISHED"
    NOT_NOW = "NO_RESOURCES"
    NEVER = "INFEASIBLE"
    UNDECIDED = "PENDING"


DECIDED_STATES = frozenset(taken.value for taken in (GroupState.GRANTED, GroupState.NOT_NOW, GroupState.NEVER))


@dataclass(eq=False)
class ReservedGroup:
    """One placement group. `parts`: its amounts per node, without GPUs."""

    handle: Any
    parts: dict[str, NodeAmounts]
    bundles: tuple[str, ...]
    """Node of each bundle."""
    granted: bool = False
    replaces: bool = False
    """It replaces a part of a group that was granted and removed."""
    card_id_futures: dict[str, Future[list[str]]] = field(default_factory=dict)
    """Node -> pending query for the ids of its GPUs."""


def request_group(
    run: str, ids: Mapping[str, str], hosts: Mapping[str, NodeAmounts], cards: Mapping[str, int]
) -> ReservedGroup | None:
    """Request an atomic group with one bundle per node; None if a node is not in the cluster."""
    nodes = tuple(sorted({*hosts, *cards}))
    if not all(node in ids for node in nodes):
        return None
    with ray_errors(NO_ANSWER):
        handle = placement_group(
            [to_bundle(hosts.get(node, {}), cards.get(node, 0)) for node in nodes],
            name=f"{GROUP_NAME_PREFIX}{run}:{os.getpid()}.{next(_GROUP_NUMBERS)}",
            bundle_label_selector=[{NODE_ID_LABEL: ids[node]} for node in nodes],
        )
    return ReservedGroup(handle, {node: dict(hosts.get(node, {})) for node in nodes}, nodes)


def group_state(group: ReservedGroup) -> str:
    with ray_errors(NO_ANSWER):
        return str(placement_group_table(group.handle)["stats"]["scheduling_state"])


def remove_group(group: ReservedGroup) -> None:
    with ray_errors(NO_ANSWER):
        remove_placement_group(group.handle)


def remove_groups(groups: Iterable[ReservedGroup]) -> None:
    """Remove groups, ignoring errors."""
    for group in groups:
        with suppress(Exception):
            remove_placement_group(group.handle)


def request_card_ids(group: ReservedGroup, node: str, count: int) -> None:
    """Query which GPUs the group owns on a node, by a task inside the group: Ray has no other way."""
    inside = PlacementGroupSchedulingStrategy(group.handle, placement_group_bundle_index=group.bundles.index(node))
    with ray_errors(NO_ANSWER):
        answer = _card_ids_task().options(num_gpus=count, scheduling_strategy=inside).remote()
        # a future also collects the error of a query whose group was removed
        group.card_id_futures[node] = answer.future()


def poll_card_ids(group: ReservedGroup, node: str) -> list[str] | None:
    """None: not known yet. Raises if the query failed."""
    return list(group.card_id_futures.pop(node).result()) if group.card_id_futures[node].done() else None


@functools.cache
def _card_ids_task() -> Any:
    return ray.remote(num_cpus=0, max_retries=0)(_card_ids)


def _card_ids() -> list[str]:
    return [str(card) for card in ray.get_gpu_ids()]


def no_answer_error(reason: str) -> EngineError:
    return ray_error(NO_ANSWER, reason)


__all__ = ["GroupReservation", "GroupState"]
NO_ANSWER = "Ray did not answer a request for resources"
SPARE_KEEP_S = 3.0
"""A surplus is released after this time: soon enough for other jobs, late enough to restart a worker."""
POLL_S = 0.02
"""Interval for polling groups that are not granted yet; each poll takes Ray 1 ms."""
DECISION_TIMEOUT_S = 10.0
"""Limit for Ray's decision about a group, which normally takes milliseconds."""
CLOSE_TIMEOUT_S = 3.0
PROBE_TIMEOUT_S, FIRST_PROBE_TIMEOUT_S = 0.5, 3.0
"""Limits for the answer of a node: during a run, whose loop waits for it, and before the run."""
PROBE_KEEP_S = 0.8
"""A node that was probed is not probed again for this time. `engine` calls `set_wanted` every second."""
MILLI = "milli"
WHOLE_CARD_MILLI = 1000


@dataclass(eq=False)
class ReservedCard:
    """One GPU: its position on the node in Dovetail's plan, and Ray's id once it is known."""

    node: str
    position: int
    group: ReservedGroup
    id: str | None = None
    idle_since: float | None = None


class GroupReservation:
    """Thread: one; `held` can be read by any."""

    def __init__(
        self,
        name: str,
        ids: Mapping[str, str],
        *,
        spare_s: float = SPARE_KEEP_S,
        find_silent: Callable[[Iterable[str], float], set[str]] = find_silent_nodes,
    ) -> None:
        """`ids`: node -> Ray's id. `find_silent`: those of Ray's ids whose node does not answer within a limit."""
        self.name = name
        self.ids = dict(ids)
        self.held: Amounts = {}
        """Amounts that are reserved now; GPUs by position and only with `milli`. Replaced, never changed."""
        self._spare_s = spare_s
        self._need: ReservedGroup | None = None
        self._groups: list[ReservedGroup] = []
        self._cards: list[ReservedCard] = []
        self._wanted: Amounts = {}
        self._spare_since: dict[str, float] = {}
        self._polled_at = 0.0
        self._abandoned = False
        self._find_silent = find_silent
        self.silent: frozenset[str] = frozenset()
        """Nodes that did not answer when a group on them was needed last; none is requested there."""
        self._probed_at: dict[str, float] = {}

    # --- the minimum

    def try_acquire(self, need: Seats, wait_s: float = 0.0) -> GroupState:
        """Reserve the minimum, all or nothing. `wait_s`: limit for waiting until other jobs release it, if the caller
        expects that. UNDECIDED: a node does not answer (`silent`), or Ray waits for one."""
        assert self._need is None, "acquired once"
        amounts = sum_seats(need)
        if not amounts:
            return GroupState.GRANTED
        self._probe({node for node, _, _ in amounts}, FIRST_PROBE_TIMEOUT_S)
        if self.silent:
            return GroupState.UNDECIDED
        group = self._request_group(
            amounts_per_node(amounts), {node: len(cards) for node, cards in cards_per_node(amounts).items()}
        )
        if group is None:
            return GroupState.NEVER
        try:
            state = self._wait_for_decision(group, wait_s)
            if state is GroupState.GRANTED:
                self._accept(group, amounts)
        except BaseException:
            self._need, self._cards = None, []
            self._publish_held()
            remove_groups([group])  # the error that is raised has the reason
            raise
        if state is not GroupState.GRANTED:
            remove_group(group)
        return state

    def _accept(self, group: ReservedGroup, amounts: Amounts) -> None:
        self._need = group
        for node, positions in cards_per_node(amounts).items():
            self._cards += [ReservedCard(node, position, group) for position in positions]
        self._on_granted(group)

    def _wait_for_decision(self, group: ReservedGroup, wait_s: float) -> GroupState:
        began = time.monotonic()
        while True:
            state, now = group_state(group), time.monotonic()
            known = state in DECIDED_STATES
            if known and (state != GroupState.NOT_NOW.value or now >= began + wait_s):
                return GroupState(state)
            if not known and now >= began + max(DECISION_TIMEOUT_S, wait_s):
                return GroupState.UNDECIDED
            time.sleep(0.002 if not known else POLL_S)

    # --- beyond the minimum

    def set_wanted(self, amounts: Amounts, now: float) -> None:
        """Set the amounts of all workers that live or start now. Requests what is missing, and releases what has been
        surplus for some time: must also be called periodically."""
        self._wanted = {key: amount for key, amount in amounts.items() if key[0] in self.ids}
        self._probe(self._nodes_with_missing_amounts())
        self._bind_cards()
        self._request_node_groups()
        self._give_back_spare(now, at_once=False)
        self._publish_held()

    def release(self, amounts: Amounts) -> None:
        """Release amounts at once, for other jobs that may wait for them."""
        self._wanted = subtract_amounts(self._wanted, amounts)
        self._give_back_spare(time.monotonic(), at_once=True)
        self._publish_held()

    def _nodes_with_missing_amounts(self) -> set[str]:
        """Nodes on which a group may have to be requested."""
        bound = {(card.node, card.position) for card in self._cards}
        cards = cards_per_node(self._wanted)
        hosts = amounts_per_node(self._wanted)
        return {node for node, mine in cards.items() if any((node, position) not in bound for position in mine)} | {
            node for node, host in hosts.items() if subtract(host, self._covered(node))
        }

    def _probe(self, nodes: set[str], timeout_s: float = PROBE_TIMEOUT_S) -> None:
        """Find out which of these nodes answer, unless that was tried a moment ago."""
        now = time.monotonic()
        due = [node for node in nodes if node in self.ids and now >= self._probed_at.get(node, 0.0) + PROBE_KEEP_S]
        if not due:
            return
        with ray_errors(NO_ANSWER):
            silent = self._find_silent([self.ids[node] for node in due], timeout_s)
        self.silent = self.silent.difference(due) | {node for node in due if self.ids[node] in silent}
        self._probed_at |= dict.fromkeys(due, time.monotonic())

    def _bind_cards(self) -> None:
        """Assign a GPU to every wanted position: an idle one, or a newly requested one."""
        for node, positions in cards_per_node(self._wanted).items():
            mine = [card for card in self._cards if card.node == node]
            bound = {card.position for card in mine}
            idle = [card for card in mine if card.position not in positions]
            idle.sort(key=lambda card: (card.id is None, not card.group.granted))
            for position in positions:
                if position in bound:
                    continue
                if idle:
                    idle.pop(0).position = position
                    continue
                group = self._request_group({node: {}}, {node: 1})
                if group is not None:
                    self._groups.append(group)
                    self._cards.append(ReservedCard(node, position, group))

    def _request_node_groups(self) -> None:
        for node, host in amounts_per_node(self._wanted).items():
            missing = subtract(host, self._covered(node))
            if missing:
                group = self._request_group({node: missing}, {})
                if group is not None:
                    self._groups.append(group)

    def _covered(self, node: str, *, granted: bool = False) -> NodeAmounts:
        """Amounts of all groups on a node, requested or (with `granted`) only granted ones."""
        found: NodeAmounts = {}
        for group in self._all():
            if node in group.parts and (group.granted or not granted):
                found = add(found, group.parts[node])
        return found

    def _all(self) -> list[ReservedGroup]:
        return [*([self._need] if self._need is not None else ()), *self._groups]

    def _give_back_spare(self, now: float, *, at_once: bool) -> None:
        wanted = {(node, card) for node, card, _ in self._wanted if card != HOST}
        for card in list(self._cards):
            if (card.node, card.position) in wanted:
                card.idle_since = None
                continue
            card.idle_since = now if card.idle_since is None else card.idle_since
            old = at_once or now >= card.idle_since + self._spare_s
            if card.group is not self._need and (old or not card.group.granted):
                self._drop(card.group)
        hosts = amounts_per_node(self._wanted)
        for node in {node for group in self._groups for node, host in group.parts.items() if host}:
            self._shrink(node, hosts.get(node, {}), now, at_once=at_once)

    def _shrink(self, node: str, wanted: NodeAmounts, now: float, *, at_once: bool) -> None:
        if not self._surplus(node, wanted):
            self._spare_since.pop(node, None)
            return
        old = at_once or now >= self._spare_since.setdefault(node, now) + self._spare_s
        for granted in (False, True) if old else (False,):  # first those that are only requested
            able = [group for group in self._groups_on(node) if group.granted is granted]
            for number in removable_groups([group.parts[node] for group in able], self._surplus(node, wanted)):
                self._drop(able[number])
        while old and (found := self._find_shrinkable(node, wanted)) is not None:
            self._replace(found[0], node, found[1])
        if old:
            self._spare_since.pop(node, None)

    def _find_shrinkable(self, node: str, wanted: NodeAmounts) -> tuple[ReservedGroup, NodeAmounts] | None:
        """A group with surplus, and the amounts it should have."""
        groups = self._groups_on(node)
        found = shrinkable_group([group.parts[node] for group in groups], self._surplus(node, wanted))
        return None if found is None else (groups[found[0]], found[1])

    def _surplus(self, node: str, wanted: NodeAmounts) -> NodeAmounts:
        """Surplus that can be released; the atomic group stays."""
        kept = self._need.parts.get(node, {}) if self._need is not None else {}
        return subtract(subtract(self._covered(node), kept), subtract(wanted, kept))

    def _groups_on(self, node: str) -> list[ReservedGroup]:
        return [group for group in self._groups if group.parts.get(node)]

    def _replace(self, group: ReservedGroup, node: str, left: NodeAmounts) -> None:
        """Replace a group by a smaller one: groups cannot shrink."""
        was_granted = group.granted or group.replaces
        self._drop(group)
        new = self._request_group({node: left}, {}) if left else None
        if new is not None:
            new.replaces = was_granted
            self._groups.append(new)

    # --- answers of Ray

    def poll(self) -> bool:
        """Whether more is reserved now than before. Does not wait, and costs nothing when everything is granted."""
        now = time.monotonic()
        pending = [group for group in self._all() if not group.granted]
        if now < self._polled_at + POLL_S or not (pending or any(group.card_id_futures for group in self._all())):
            return False
        self._polled_at = now
        news = False
        for group in pending:
            if group_state(group) == GroupState.GRANTED.value:
                self._on_granted(group)
                news = True
        for group in self._all():
            for node in list(group.card_id_futures):
                news |= self._receive_card_ids(group, node)
        if news:
            self._publish_held()
        return news

    def _on_granted(self, group: ReservedGroup) -> None:
        group.granted = True
        for node in {card.node for card in self._cards if card.group is group}:
            self._request_card_ids(group, node)
        self._publish_held()

    def _request_card_ids(self, group: ReservedGroup, node: str) -> None:
        request_card_ids(group, node, sum(card.group is group and card.node == node for card in self._cards))

    def _receive_card_ids(self, group: ReservedGroup, node: str) -> bool:
        try:
            names = poll_card_ids(group, node)
        except EngineError:
            raise
        except Exception:  # the query failed: repeat it
            self._request_card_ids(group, node)
            return False
        cards = [card for card in self._cards if card.group is group and card.node == node]
        for card, name in zip(cards, names or (), strict=names is not None):
            card.id = name
        return names is not None

    # --- state

    def covers(self, amounts: Amounts) -> bool:
        """Whether all amounts are reserved now, and the ids of the GPUs are known."""
        known = {(card.node, card.position) for card in self._cards if card.id is not None}
        wanted = cards_per_node(amounts)
        return all((node, position) in known for node, mine in wanted.items() for position in mine) and not any(
            subtract(host, self._covered(node, granted=True)) for node, host in amounts_per_node(amounts).items()
        )

    def pending(self) -> Amounts:
        """Amounts that are wanted and not reserved yet."""
        known = {(card.node, card.position) for card in self._cards if card.id is not None}
        missing = {
            node: subtract(host, self._covered(node, granted=True))
            for node, host in amounts_per_node(self._wanted).items()
        }
        return {
            key: amount if key[1] != HOST else missing[key[0]][key[2]]
            for key, amount in self._wanted.items()
            if (key[2] in missing[key[0]] if key[1] == HOST else key[:2] not in known)
        }

    def devices(self, node: str) -> dict[int, str]:
        """Position -> Ray's id of the GPU. Does not change while a worker uses it."""
        return {card.position: card.id for card in self._cards if card.node == node and card.id is not None}

    # --- nodes, and close

    def on_node_joined(self, name: str, number: str) -> None:
        if self.ids.get(name, number) != number:
            self.on_node_left(name)
        self.ids[name] = number

    def on_node_left(self, name: str) -> None:
        """Forget what was reserved there. The other bundles of the atomic group stay reserved; Ray does not stop trying
        to place the lost one."""
        self.ids.pop(name, None)
        self.silent -= {name}
        self._probed_at.pop(name, None)
        self._spare_since.pop(name, None)
        self._wanted = {key: amount for key, amount in self._wanted.items() if key[0] != name}
        for group in [group for group in self._groups if name in group.parts]:
            self._drop(group)
        self._cards = [card for card in self._cards if card.node != name]
        need = self._need
        if need is not None and need.parts.pop(name, None) is not None:
            need.card_id_futures.pop(name, None)
            if not need.parts:
                self._need = None
                remove_group(need)
        self._publish_held()

    @property
    def is_ray_lost(self) -> bool:
        """Whether there is no Ray any more to which it could be released."""
        return self._abandoned or not ray.is_initialized()

    def abandon(self) -> None:
        """Ray does not answer: it releases everything itself when this process ends, or has done so."""
        self._abandoned = True
        self._need, self._groups, self._cards, self._wanted = None, [], [], {}
        self._publish_held()

    def close(self) -> None:
        """Release everything. Never raises, and does not wait for a cluster that is gone."""
        groups = self._all()
        self._need, self._groups, self._cards, self._wanted = None, [], [], {}
        self._publish_held()
        if groups and ray.is_initialized():
            thread = threading.Thread(target=remove_groups, args=(groups,), name="dovetail-release", daemon=True)
            thread.start()
            thread.join(CLOSE_TIMEOUT_S)

    def _publish_held(self) -> None:
        held: Amounts = {}
        for group in self._all():
            if group.granted or group.replaces:
                for node, host in group.parts.items():
                    for what, amount in host.items():
                        held[node, HOST, what] = held.get((node, HOST, what), 0) + amount
        held |= {(card.node, card.position, MILLI): WHOLE_CARD_MILLI for card in self._cards if card.group.granted}
        self.held = held

    # --- groups

    def _request_group(self, hosts: Mapping[str, NodeAmounts], cards: Mapping[str, int]) -> ReservedGroup | None:
        """None: a node has left, or does not answer: then it is tried again when `set_wanted` is called next."""
        if not self.silent.isdisjoint({*hosts, *cards}):
            return None
        return request_group(self.name, self.ids, hosts, cards)

    def _drop(self, group: ReservedGroup) -> None:
        if group in self._groups:
            self._groups.remove(group)
            self._cards = [card for card in self._cards if card.group is not group]
            remove_group(group)
