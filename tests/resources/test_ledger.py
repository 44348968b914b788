from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.errors import LedgerError
from dovetail.resources import free_resources as free_module
from dovetail.resources import ledger as ledger_module
from dovetail.resources.cluster import Cluster, Gpu, Node
from dovetail.resources.ledger import Ledger
from dovetail.resources.seat import CardShare, Seat

if TYPE_CHECKING:
    from dovetail.resources.free_resources import FreeResources

# a tiny world, so that edges are met often: milli-CPUs, bytes and codecs of one digit
BIG = Gpu("A100", memory_bytes=7, nvdecs=2, nvencs=1)
ODD = Gpu("gpu")
ALIKE = {"cpu_milli": 5, "memory_bytes": 4, "gpus": (BIG, BIG), "custom": (("licence", 3), ("seat", 1))}
TINY = Cluster(
    (
        Node("a", **ALIKE),  # type: ignore[arg-type]
        Node("b", **ALIKE),  # type: ignore[arg-type]
        Node("c", cpu_milli=5, kept_back_milli=2, gpus=(BIG, ODD), labels=(("pool", "x"),)),
        Node("d", cpu_milli=5, kept_back_milli=2, memory_bytes=4),
    )
)


# ---- what a ledger should be, written naively


@dataclass
class NodeModel:
    """One node of the model: plain numbers."""

    cpu: int
    memory: int
    cards: list[list[int]]
    custom: dict[str, int]

    @classmethod
    def of(cls, node: Node) -> NodeModel:
        cards = [[1000, gpu.memory_bytes, gpu.nvdecs, gpu.nvencs] for gpu in node.gpus]
        return cls(node.cpu_milli - node.kept_back_milli, node.memory_bytes, cards, dict(node.custom))

    def key(self) -> tuple[object, ...]:
        return (self.cpu, self.memory, tuple(map(tuple, self.cards)), tuple(sorted(self.custom.items())))

    def moved(self, seat: Seat, sign: int) -> NodeModel:
        cards = [list(card) for card in self.cards]
        for share in seat.cards:
            for place, amount in enumerate(share[1:]):
                cards[share.card][place] += sign * amount
        custom = dict(self.custom)
        for name, amount in seat.custom:
            custom[name] = custom.get(name, 0) + sign * amount
        return NodeModel(self.cpu + sign * seat.cpu_milli, self.memory + sign * seat.memory_bytes, cards, custom)

    def has_room_for(self, seat: Seat) -> bool:
        amounts = [seat.cpu_milli, seat.memory_bytes, *(amount for _name, amount in seat.custom)]
        amounts += [amount for share in seat.cards for amount in share]
        if min(amounts) < 0 or any(share.card >= len(self.cards) for share in seat.cards):
            return False
        then = self.moved(seat, -1)
        numbers = [then.cpu, then.memory, *then.custom.values(), *(amount for card in then.cards for amount in card)]
        return min(numbers) >= 0


def room_in(free: FreeResources) -> NodeModel:
    return NodeModel(free.cpu_milli, free.memory_bytes, [list(card) for card in free.cards.free], dict(free.custom))


# ---- seats, sensible and not

small = st.integers(0, 3)
any_small = st.integers(-1, 8)
shares = st.one_of(
    st.builds(
        CardShare,
        st.integers(0, 1),
        st.sampled_from([0, 1, 250, 333, 500, 1000]),
        small,
        st.integers(0, 1),
        st.integers(0, 1),
    ),
    st.builds(CardShare, st.integers(-1, 2), st.sampled_from([-1, 0, 999, 1001]), any_small, any_small, any_small),
)
customs = st.dictionaries(st.sampled_from(["licence", "seat"]), st.integers(-1, 4), max_size=2).map(
    lambda found: tuple(sorted(found.items()))
)
any_seats = st.builds(
    Seat,
    st.sampled_from(["a", "b", "c", "d"]),
    st.one_of(small, any_small),
    st.one_of(small, any_small),
    st.lists(shares, max_size=3).map(tuple),
    st.one_of(st.just(()), customs),
)
good_seats = st.builds(
    Seat,
    st.sampled_from(["a", "b", "c", "d"]),
    st.integers(0, 2),
    st.just(0),
    st.lists(
        st.builds(CardShare, st.integers(0, 1), st.sampled_from([0, 250, 500]), st.integers(0, 2)), max_size=1
    ).map(tuple),
    st.just(()),
)


def snapshot(ledger: Ledger) -> tuple[object, ...]:
    return (list(ledger.free), sorted(ledger.seats()), list(ledger.changes), ledger.era)


class LedgerMachine(RuleBasedStateMachine):
    """Takes and gives back at random, beside a model that does the same with plain numbers."""

    @initialize()
    def start(self) -> None:
        self.ledger = Ledger(TINY)
        self.rooms = {node.name: NodeModel.of(node) for node in TINY.nodes}
        self.taken: list[Seat] = []
        self.known: dict[tuple[str, tuple[object, ...]], FreeResources] = {}
        self.mirror = list(self.ledger.free)
        self.seen = 0
        self.asides: list[tuple[Ledger, tuple[object, ...]]] = []

    def take(self, seat: Seat) -> None:
        room = self.rooms[seat.node]
        if any(not amount and name not in room.custom for name, amount in seat.custom):
            return  # may be refused or not: it has a test of its own
        if room.has_room_for(seat):
            self.ledger.take(seat)
            self.rooms[seat.node] = room.moved(seat, -1)
            self.taken.append(seat)
            return
        before = snapshot(self.ledger)
        with pytest.raises(LedgerError) as caught:
            self.ledger.take(seat)
        assert caught.value.codes == ("DT201",)
        assert snapshot(self.ledger) == before

    @rule(seat=any_seats)
    def take_anything(self, seat: Seat) -> None:
        self.take(seat)

    @rule(seat=good_seats)
    def take_something_small(self, seat: Seat) -> None:
        self.take(seat)

    @rule(node=st.sampled_from(["a", "b", "c", "d"]), which=st.sets(st.integers(0, 1)))
    def take_all_that_is_left(self, node: str, which: set[int]) -> None:
        room = self.rooms[node]
        cards = tuple(CardShare(index, *room.cards[index]) for index in sorted(which) if index < len(room.cards))
        self.take(Seat(node, room.cpu, room.memory, cards, tuple(sorted(room.custom.items()))))

    @rule(node=st.sampled_from(["a", "b", "c", "d"]), of_cpu=st.booleans())
    def take_one_too_many(self, node: str, of_cpu: bool) -> None:
        room = self.rooms[node]
        self.take(Seat(node, cpu_milli=room.cpu + 1) if of_cpu else Seat(node, memory_bytes=room.memory + 1))

    @rule(node=st.sampled_from(["a", "b", "c"]), which=st.integers(0, 4), amount=st.sampled_from([-1, -2, -250]))
    def take_less_than_nothing(self, node: str, which: int, amount: int) -> None:
        share = CardShare(0)._replace(**{["card", "milli", "memory_bytes", "nvdecs", "nvencs"][which]: amount})
        self.take(Seat(node, cards=(share,)))

    @precondition(lambda self: bool(self.taken))
    @rule(data=st.data())
    def give_back_what_was_taken(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from(self.taken))
        self.ledger.give_back(seat)
        self.taken.remove(seat)
        self.rooms[seat.node] = self.rooms[seat.node].moved(seat, +1)

    @rule(seat=any_seats)
    def give_back_what_was_never_taken(self, seat: Seat) -> None:
        if seat in self.taken:
            return
        before = snapshot(self.ledger)
        with pytest.raises(LedgerError) as caught:
            self.ledger.give_back(seat)
        assert caught.value.codes == ("DT202",)
        assert snapshot(self.ledger) == before

    @rule(seat=good_seats)
    def take_and_give_back_on_a_copy(self, seat: Seat) -> None:
        before = snapshot(self.ledger)
        other = self.ledger.copy()
        assert list(other.free) == list(self.ledger.free)
        if self.rooms[seat.node].has_room_for(seat):
            other.take(seat)
            assert Counter(other.seats()) == Counter([*self.taken, seat])
            then = NodeModel.of(TINY.nodes[other.position(seat.node)]).moved(seat, -1)
        else:
            then = NodeModel.of(TINY.nodes[other.position(seat.node)])
        for old in self.taken:
            other.give_back(old)
        assert room_in(other.free_on(seat.node)) == then
        assert snapshot(self.ledger) == before

    @rule()
    def set_a_copy_aside(self) -> None:
        aside = self.ledger.copy()
        self.asides = [*self.asides[-2:], (aside, snapshot(aside))]

    @rule()
    def rebuild_from_the_seats(self) -> None:
        again = Ledger(TINY, self.ledger.seats())
        assert [room_in(free) for free in again.free] == [room_in(free) for free in self.ledger.free]
        assert Counter(again.seats()) == Counter(self.ledger.seats())

    @invariant()
    def the_ledger_is_the_model(self) -> None:
        for node, free in zip(TINY.nodes, self.ledger.free, strict=True):
            assert room_in(free) == self.rooms[node.name]
            assert self.ledger.free_on(node.name) is free
        assert Counter(self.ledger.seats()) == Counter(self.taken)

    @invariant()
    def nothing_is_negative_or_above_what_there_is(self) -> None:
        for node, free in zip(TINY.nodes, self.ledger.free, strict=True):
            assert 0 <= free.cpu_milli <= node.usable_cpu_milli
            assert 0 <= free.memory_bytes <= node.memory_bytes
            for gpu, card in zip(node.gpus, free.cards.free, strict=True):
                most = (1000, gpu.memory_bytes, gpu.nvdecs, gpu.nvencs)
                assert all(0 <= have <= limit for have, limit in zip(card, most, strict=True))
            assert set(dict(free.custom)) == set(dict(node.custom))
            assert all(0 <= have <= dict(node.custom)[name] for name, have in free.custom)

    @invariant()
    def one_state_is_one_value_however_it_was_reached(self) -> None:
        for node, free in zip(TINY.nodes, self.ledger.free, strict=True):
            # a and b are alike
            key = ("a" if node.name == "b" else node.name, self.rooms[node.name].key())
            before = self.known.setdefault(key, free)
            assert before == free
            assert hash(before) == hash(free)
        a, b = self.ledger.free[0], self.ledger.free[1]
        assert (a == b) == (self.rooms["a"].key() == self.rooms["b"].key())
        assert len({self.ledger.free[2], self.ledger.free[3], a, b}) == 3 + (a != b)

    @invariant()
    def who_follows_the_changes_misses_none(self) -> None:
        assert self.ledger.era == 0
        for index in self.ledger.changes[self.seen :]:
            self.mirror[index] = self.ledger.free[index]
        self.seen = len(self.ledger.changes)
        assert self.mirror == list(self.ledger.free)

    @invariant()
    def copies_that_were_set_aside_stay_as_they_were(self) -> None:
        for aside, before in self.asides:
            assert snapshot(aside) == before


LedgerMachine.TestCase.settings = settings(stateful_step_count=40)
TestALedgerIsWhatPlainArithmeticSays: Any = LedgerMachine.TestCase


# ---- one thing at a time


def test_an_unknown_node_is_an_error_that_names_some_that_are_there() -> None:
    ledger = Ledger(Cluster.parse("7x(4cpu)"))
    for call in (ledger.take, ledger.give_back):
        with pytest.raises(LedgerError) as caught:
            call(Seat("nobody"))
        assert caught.value.codes == ("DT203",)
        assert "'nobody'" in str(caught.value)
        assert "node-0" in caught.value.problems[0].fix_texts[0]


def test_a_seat_that_is_taken_is_an_error_with_the_numbers() -> None:
    ledger = Ledger(Cluster.parse("(4cpu, 16GB, 2xA100)"))
    ledger.take(Seat("node-0", 1000, 2**30, (CardShare(0, 500, 2**30),)))
    with pytest.raises(LedgerError) as caught:
        ledger.take(Seat("node-0", 3500, 2**30, (CardShare(0, 750, 0),)))
    problem = caught.value.problems[0]
    assert problem.code == "DT201"
    assert problem.evidence == (
        "requested: 3.5 CPUs, 1GB, #0 0.75 0B",
        "free:  3 CPUs, 15GB, cards 0.5 39GB 5/0 codecs + 1 40GB 5/0 codecs",
    )
    assert problem.fix_texts


def test_a_seat_can_be_given_back_as_often_as_it_was_taken_and_no_more() -> None:
    ledger = Ledger(Cluster.parse("(4cpu)"))
    seat, untouched = Seat("node-0", 1000), ledger.free[0]
    for _ in range(3):
        ledger.take(seat)
    assert list(ledger.seats()) == [seat] * 3
    for _ in range(3):
        ledger.give_back(seat)
    with pytest.raises(LedgerError, match="DT202"):
        ledger.give_back(seat)
    assert ledger.free[0] == untouched


@pytest.mark.parametrize(
    "seat",
    [
        Seat("a", cpu_milli=-1),
        Seat("a", memory_bytes=-1),
        Seat("a", cards=(CardShare(0, milli=-1),)),
        Seat("a", cards=(CardShare(0, memory_bytes=-1),)),
        Seat("a", cards=(CardShare(0, nvdecs=-1),)),
        Seat("a", cards=(CardShare(0, nvencs=-1),)),
        Seat("a", cards=(CardShare(-2, milli=1),)),
        Seat("a", cards=(CardShare(0, milli=-1), CardShare(0, milli=2))),
        Seat("a", custom=(("licence", -1),)),
    ],
    ids=str,
)
def test_a_seat_with_negative_amounts_is_refused(seat: Seat) -> None:
    held = Seat("a", 2, 2, (CardShare(0, 500, 3, 1, 1), CardShare(1, 500)), (("licence", 2),))
    ledger = Ledger(TINY, [held])
    before = snapshot(ledger)
    with pytest.raises(LedgerError, match="DT201"):
        ledger.take(seat)
    assert snapshot(ledger) == before


def test_two_halves_are_not_given_back_as_one_whole() -> None:
    ledger = Ledger(Cluster.parse("(4cpu)"))
    ledger.take(Seat("node-0", 1000))
    ledger.take(Seat("node-0", 1000))
    with pytest.raises(LedgerError, match="DT202"):
        ledger.give_back(Seat("node-0", 2000))
    assert ledger.free[0].cpu_milli == 2000


def test_a_ledger_that_starts_with_seats_has_no_room_for_more_than_there_is() -> None:
    seat = Seat("node-0", 3000)
    assert Ledger(Cluster.parse("(4cpu)"), [seat]).free[0].cpu_milli == 1000
    with pytest.raises(LedgerError, match="DT201"):
        Ledger(Cluster.parse("(4cpu)"), [seat, seat])


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("(4cpu, 2xA100)", "(4cpu, 2xA100)", True),
        ("(4cpu, 2xA100)", "(5cpu, keep 1cpu, 2xA100)", True),
        ("(4cpu, 2xA100)", "(4cpu, 2xA100:80GB)", False),
        ("(4cpu, 2xA100)", "(4cpu, 2xA100){pool=a}", False),
        ("(4cpu, a=1)", "(4cpu, a=2)", False),
        ("(4cpu, L4, T4)", "(4cpu, T4, L4)", False),
        ("(4cpu, gpu:1GB)", "(4cpu, card:1GB)", False),
    ],
)
def test_only_nodes_that_seat_alike_are_alike(one: str, other: str, equal: bool) -> None:
    first, second = Ledger(Cluster.parse(f"{one} + {other}")).free
    assert (first == second) is equal


def test_nodes_whose_cards_differ_only_in_their_uuid_are_alike() -> None:
    nodes = [Node(name, 1000, gpus=(Gpu.of("L4", uuid=f"GPU-{name}"),)) for name in "ab"]
    first, second = Ledger(Cluster(tuple(nodes))).free
    assert first == second


@pytest.mark.parametrize("custom", [(("ghost", 0),), (("licence", 0),), (("ghost", 0), ("licence", 1))])
def test_taking_nothing_of_a_custom_resource_and_giving_it_back_restores_the_state(
    custom: tuple[tuple[str, int], ...],
) -> None:
    ledger = Ledger(TINY)
    before, seat = ledger.free_on("a"), Seat("a", custom=custom)
    try:
        ledger.take(seat)
    except LedgerError:
        assert ledger.free_on("a") == before
        return
    assert set(dict(ledger.free_on("a").custom)) == {"licence", "seat"}
    ledger.give_back(seat)
    assert ledger.free_on("a") == before


def test_a_custom_resource_that_is_asked_for_twice_comes_back_twice() -> None:
    ledger = Ledger(TINY)
    before, seat = ledger.free_on("a"), Seat("a", custom=(("licence", 1), ("licence", 2)))
    try:
        ledger.take(seat)
    except LedgerError:
        assert ledger.free_on("a") == before
        return
    assert dict(ledger.free_on("a").custom)["licence"] == 0
    ledger.give_back(seat)
    assert ledger.free_on("a") == before


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30), st.integers(1, 4))
def test_a_copy_that_follows_changes_and_eras_misses_nothing(steps: list[tuple[bool, int]], limit: int) -> None:
    """Keeps a copy per node as the docstring of `Ledger` describes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module, "CHANGES_LIMIT", limit)
        ledger = Ledger(TINY)
        mirror, era, seen, eras = list(ledger.free), ledger.era, 0, [ledger.era]
        for taking, position in steps:
            seat = Seat(TINY.nodes[position].name, cpu_milli=1)
            try:
                (ledger.take if taking else ledger.give_back)(seat)
            except LedgerError:
                continue
            assert len(ledger.changes) <= limit
            if ledger.era == era:
                for index in ledger.changes[seen:]:
                    mirror[index] = ledger.free[index]
            else:
                mirror = list(ledger.free)
            era, seen = ledger.era, len(ledger.changes)
            eras.append(era)
            assert mirror == list(ledger.free)
        assert eras == sorted(eras)


def test_changes_start_empty_in_the_next_era(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "CHANGES_LIMIT", 2)
    ledger = Ledger(TINY)
    history = []
    for name in "abcda":
        ledger.take(Seat(name, cpu_milli=1))
        history.append((ledger.era, list(ledger.changes)))
    assert history == [(0, [0]), (0, [0, 1]), (1, [2]), (1, [2, 3]), (2, [0])]


def test_a_failed_take_or_give_back_is_no_change() -> None:
    ledger = Ledger(TINY)
    for call in (ledger.take, ledger.give_back):
        with pytest.raises(LedgerError):
            call(Seat("a", cpu_milli=99))
    assert ledger.changes == []


def test_a_copy_starts_without_changes_and_shares_states_but_nothing_else() -> None:
    ledger = Ledger(TINY)
    seat = Seat("a", 1, cards=(CardShare(0, 500, 2),))
    ledger.take(seat)
    other = ledger.copy()
    assert (other.changes, other.era) == ([], 0)
    assert other.free[0] == ledger.free[0]
    other.give_back(seat)
    other.take(Seat("b", 1))
    assert list(ledger.seats()) == [seat]
    assert ledger.changes == [0]
    assert other.free[0] != ledger.free[0]
    ledger.give_back(seat)
    assert other.free[0] == ledger.free[0]


def test_ledgers_of_their_own_do_not_mix_their_states() -> None:
    one, other = Ledger(TINY), Ledger(TINY)
    one.take(Seat("a", 1))
    assert room_in(other.free_on("a")) == NodeModel.of(TINY.nodes[0])


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_alike_nodes_stay_equal_when_old_moves_are_forgotten(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(free_module, "TRANSITION_CACHE_LIMIT", limit)
    ledger = Ledger(TINY)
    random_ = random.Random(limit)
    taken: dict[str, list[Seat]] = {"a": [], "b": []}
    for _ in range(300):
        name = random_.choice("ab")
        seat = Seat(name, cards=(CardShare(random_.randrange(2), random_.choice([250, 500]), random_.randrange(3)),))
        if taken[name] and random_.random() < 0.5:
            ledger.give_back(taken[name].pop())
        elif room_in(ledger.free_on(name)).has_room_for(seat):
            ledger.take(seat)
            taken[name].append(seat)
        a, b = ledger.free_on("a"), ledger.free_on("b")
        assert (a == b) == (room_in(a) == room_in(b))


seat_values = st.builds(
    Seat,
    st.text(max_size=3),
    st.integers(0, 2**50),
    st.integers(0, 2**60),
    st.lists(st.builds(CardShare, *[st.integers(0, 2**40)] * 5), max_size=3).map(tuple),
    st.dictionaries(st.text(max_size=3), st.integers(0, 2**40), max_size=3).map(lambda it: tuple(sorted(it.items()))),
)


def test_a_seat_tells_its_cards_and_how_much_of_each() -> None:
    seat = Seat("a", cards=(CardShare(2, 250), CardShare(5, 1000)))
    assert (seat.gpus, seat.shares) == ((2, 5), (0.25, 1.0))


@given(seat_values)
def test_a_seat_is_the_same_after_a_journey_as_plain_data(seat: Seat) -> None:
    data = seat.to_dict()
    assert Seat.from_dict(data) == seat
    assert hash(Seat.from_dict(data)) == hash(seat)
    assert all(isinstance(share, dict) for share in data["cards"])
