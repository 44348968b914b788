"""What does a run hold of a Ray cluster? Placement groups: Ray gives nobody else what they have.

One atomic group has what the run cannot do without and never changes. What it uses beyond grows and shrinks: per node
groups of CPUs, memory and the rest, and a group per card, because a group owns particular cards. Groups belong to the
driver's job: when that ends, in whichever way, Ray removes them.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from dovetail.engines.ray.bundles import hosts_of, less, more, positions_of, smaller, superfluous
from dovetail.engines.ray.groups import (
    DECIDED,
    Group,
    Taken,
    answer_of,
    ask_group,
    ask_which,
    remove,
    remove_all,
    state_of,
)
from dovetail.errors import EngineError
from dovetail.resources.amounts import HOST, Amounts, amounts_of, minus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.engines.ray.bundles import Host
    from dovetail.resources.seat import Seats

__all__ = ["Holdings", "Taken"]
SPARE_S = 3.0
"""What nobody needs for so long is given back: soon enough for others, late enough for a worker that is restarted."""
LOOK_S = 0.02
"""Between two looks at groups that are not granted yet: each costs Ray a millisecond."""
DECIDE_S = 10.0
"""Ray says within milliseconds whether it grants a group; after this time it does not answer."""
CLOSE_S = 3.0
MILLI = "milli"
WHOLE = 1000


@dataclass(eq=False)
class Card:
    """One card: which position of its node it is for us, and Ray's name for it once that is known."""

    node: str
    position: int
    group: Group
    id: str | None = None
    idle_since: float | None = None


class Holdings:
    """For one thread; `held` can be read by all."""

    def __init__(self, name: str, ids: Mapping[str, str], *, spare_s: float = SPARE_S) -> None:
        """`ids`: node -> Ray's id of it."""
        self.name = name
        self.ids = dict(ids)
        self.held: Amounts = {}
        """What Ray gives to nobody else now, cards at our positions and by their `milli` only. A new dict at every
        change."""
        self._spare_s = spare_s
        self._need: Group | None = None
        self._groups: list[Group] = []
        self._cards: list[Card] = []
        self._wanted: Amounts = {}
        self._spare_since: dict[str, float] = {}
        self._looked = 0.0
        self._abandoned = False

    # --- what it cannot do without

    def take(self, need: Seats, wait_s: float = 0.0) -> Taken:
        """All of it or nothing, decided by what Ray says. `wait_s`: how long it may be held by somebody else, for those
        who know that it is about to be given back. UNDECIDED: Ray asks a node that does not answer."""
        assert self._need is None, "taken once"
        amounts = amounts_of(need)
        if not amounts:
            return Taken.GRANTED
        group = self._ask(hosts_of(amounts), {node: len(cards) for node, cards in positions_of(amounts).items()})
        if group is None:
            return Taken.NEVER
        try:
            state = self._decided(group, wait_s)
            if state is Taken.GRANTED:
                self._begin_with(group, amounts)
        except BaseException:
            self._need, self._cards = None, []
            self._tell()
            remove_all([group])  # what is raised already says what is wrong
            raise
        if state is not Taken.GRANTED:
            remove(group)
        return state

    def _begin_with(self, group: Group, amounts: Amounts) -> None:
        self._need = group
        for node, positions in positions_of(amounts).items():
            self._cards += [Card(node, position, group) for position in positions]
        self._is_granted(group)

    def _decided(self, group: Group, wait_s: float) -> Taken:
        began = time.monotonic()
        while True:
            state, now = state_of(group), time.monotonic()
            known = state in DECIDED
            if known and (state != Taken.NOT_NOW.value or now >= began + wait_s):
                return Taken(state)
            if not known and now >= began + max(DECIDE_S, wait_s):
                return Taken.UNDECIDED
            time.sleep(0.002 if not known else LOOK_S)

    # --- what it uses beyond

    def want(self, amounts: Amounts, now: float) -> None:
        """All that workers who live or start now sit on. Asks Ray for what is missing, and gives back what has been too
        much for some time: call it from time to time, too."""
        self._wanted = {key: amount for key, amount in amounts.items() if key[0] in self.ids}
        self._bind_cards()
        self._ask_hosts()
        self._give_back_spare(now, at_once=False)
        self._tell()

    def give_back(self, amounts: Amounts) -> None:
        """These are not needed any more, and others wait for them: Ray has them at once."""
        self._wanted = minus(self._wanted, amounts)
        self._give_back_spare(time.monotonic(), at_once=True)
        self._tell()

    def _bind_cards(self) -> None:
        """A card for every position that is wanted: one that is there and idle, or a new one."""
        for node, positions in positions_of(self._wanted).items():
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
                group = self._ask({node: {}}, {node: 1})
                if group is not None:
                    self._groups.append(group)
                    self._cards.append(Card(node, position, group))

    def _ask_hosts(self) -> None:
        for node, host in hosts_of(self._wanted).items():
            missing = less(host, self._cover(node))
            if missing:
                group = self._ask({node: missing}, {})
                if group is not None:
                    self._groups.append(group)

    def _cover(self, node: str, *, granted: bool = False) -> Host:
        """What all groups together have of a node, or have been asked for."""
        found: Host = {}
        for group in self._all():
            if node in group.parts and (group.granted or not granted):
                found = more(found, group.parts[node])
        return found

    def _all(self) -> list[Group]:
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
        hosts = hosts_of(self._wanted)
        for node in {node for group in self._groups for node, host in group.parts.items() if host}:
            self._shrink(node, hosts.get(node, {}), now, at_once=at_once)

    def _shrink(self, node: str, wanted: Host, now: float, *, at_once: bool) -> None:
        if not self._surplus(node, wanted):
            self._spare_since.pop(node, None)
            return
        old = at_once or now >= self._spare_since.setdefault(node, now) + self._spare_s
        for granted in (False, True) if old else (False,):  # first what is only asked for
            able = [group for group in self._hosts(node) if group.granted is granted]
            for number in superfluous([group.parts[node] for group in able], self._surplus(node, wanted)):
                self._drop(able[number])
        while old and (found := self._smaller(node, wanted)) is not None:
            self._replace(found[0], node, found[1])
        if old:
            self._spare_since.pop(node, None)

    def _smaller(self, node: str, wanted: Host) -> tuple[Group, Host] | None:
        """A group that has more than it should, and what it should have."""
        groups = self._hosts(node)
        found = smaller([group.parts[node] for group in groups], self._surplus(node, wanted))
        return None if found is None else (groups[found[0]], found[1])

    def _surplus(self, node: str, wanted: Host) -> Host:
        """What is too much, as far as it can be given back."""
        kept = self._need.parts.get(node, {}) if self._need is not None else {}
        return less(less(self._cover(node), kept), less(wanted, kept))

    def _hosts(self, node: str) -> list[Group]:
        return [group for group in self._groups if group.parts.get(node)]

    def _replace(self, group: Group, node: str, left: Host) -> None:
        """A group cannot shrink: it goes, and a smaller one is asked for."""
        was = group.granted or group.replaces
        self._drop(group)
        new = self._ask({node: left}, {}) if left else None
        if new is not None:
            new.replaces = was
            self._groups.append(new)

    # --- what Ray says

    def poll(self) -> bool:
        """Whether something is held now that was not. Does not wait, and costs nothing when all is granted."""
        now = time.monotonic()
        pending = [group for group in self._all() if not group.granted]
        if now < self._looked + LOOK_S or not (pending or any(group.asked for group in self._all())):
            return False
        self._looked = now
        news = False
        for group in pending:
            if state_of(group) == Taken.GRANTED.value:
                self._is_granted(group)
                news = True
        for group in self._all():
            for node in list(group.asked):
                news |= self._heard(group, node)
        if news:
            self._tell()
        return news

    def _is_granted(self, group: Group) -> None:
        group.granted = True
        for node in {card.node for card in self._cards if card.group is group}:
            self._ask_which(group, node)
        self._tell()

    def _ask_which(self, group: Group, node: str) -> None:
        ask_which(group, node, sum(card.group is group and card.node == node for card in self._cards))

    def _heard(self, group: Group, node: str) -> bool:
        try:
            names = answer_of(group, node)
        except EngineError:
            raise
        except Exception:  # whoever was asked has died: another is asked
            self._ask_which(group, node)
            return False
        cards = [card for card in self._cards if card.group is group and card.node == node]
        for card, name in zip(cards, names or (), strict=names is not None):
            card.id = name
        return names is not None

    # --- what can be asked

    def holds(self, amounts: Amounts) -> bool:
        """Whether all of it is held now, and it is known which cards those are."""
        known = {(card.node, card.position) for card in self._cards if card.id is not None}
        wanted = positions_of(amounts)
        return all((node, position) in known for node, mine in wanted.items() for position in mine) and not any(
            less(host, self._cover(node, granted=True)) for node, host in hosts_of(amounts).items()
        )

    def pending(self) -> Amounts:
        """What is wanted and not held yet."""
        known = {(card.node, card.position) for card in self._cards if card.id is not None}
        missing = {node: less(host, self._cover(node, granted=True)) for node, host in hosts_of(self._wanted).items()}
        return {
            key: amount if key[1] != HOST else missing[key[0]][key[2]]
            for key, amount in self._wanted.items()
            if (key[2] in missing[key[0]] if key[1] == HOST else key[:2] not in known)
        }

    def devices(self, node: str) -> dict[int, str]:
        """Position -> Ray's name of the card. Stays as it is while somebody sits there."""
        return {card.position: card.id for card in self._cards if card.node == node and card.id is not None}

    # --- nodes, and the end

    def node_joined(self, name: str, number: str) -> None:
        if self.ids.get(name, number) != number:
            self.node_left(name)
        self.ids[name] = number

    def node_left(self, name: str) -> None:
        """What was held there is forgotten. The rest of the atomic group stays: Ray keeps it for us, and looks for the
        lost part for ever, in vain."""
        self.ids.pop(name, None)
        self._spare_since.pop(name, None)
        self._wanted = {key: amount for key, amount in self._wanted.items() if key[0] != name}
        for group in [group for group in self._groups if name in group.parts]:
            self._drop(group)
        self._cards = [card for card in self._cards if card.node != name]
        need = self._need
        if need is not None and need.parts.pop(name, None) is not None:
            need.asked.pop(name, None)
            if not need.parts:
                self._need = None
                remove(need)
        self._tell()

    @property
    def gone(self) -> bool:
        """Whether there is no Ray any more to give it back to."""
        return self._abandoned or not ray.is_initialized()

    def abandon(self) -> None:
        """Ray does not answer: it takes all of it back itself when this process ends, or has done so."""
        self._abandoned = True
        self._need, self._groups, self._cards, self._wanted = None, [], [], {}
        self._tell()

    def close(self) -> None:
        """All of it goes back. Never raises, and does not wait for a cluster that is gone."""
        groups = self._all()
        self._need, self._groups, self._cards, self._wanted = None, [], [], {}
        self._tell()
        if groups and ray.is_initialized():
            thread = threading.Thread(target=remove_all, args=(groups,), name="dovetail-holdings", daemon=True)
            thread.start()
            thread.join(CLOSE_S)

    def _tell(self) -> None:
        held: Amounts = {}
        for group in self._all():
            if group.granted or group.replaces:
                for node, host in group.parts.items():
                    for what, amount in host.items():
                        held[node, HOST, what] = held.get((node, HOST, what), 0) + amount
        held |= {(card.node, card.position, MILLI): WHOLE for card in self._cards if card.group.granted}
        self.held = held

    # --- groups

    def _ask(self, hosts: Mapping[str, Host], cards: Mapping[str, int]) -> Group | None:
        return ask_group(self.name, self.ids, hosts, cards)

    def _drop(self, group: Group) -> None:
        if group in self._groups:
            self._groups.remove(group)
            self._cards = [card for card in self._cards if card.group is not group]
            remove(group)
