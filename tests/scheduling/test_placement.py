"""A placer chooses the seats that a search of all nodes would choose, and the worker to remove first."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dovetail
from dovetail.resources import fit as fit_module
from dovetail.resources import free_resources as free_module
from dovetail.resources import ledger as ledger_module
from dovetail.resources.cluster import Cluster
from dovetail.resources.ledger import Ledger
from dovetail.resources.resources import Resources
from dovetail.resources.seat import CardShare, Seat
from dovetail.scheduling import fragmentation as fragmentation_module
from dovetail.scheduling import placement as placement_module
from dovetail.scheduling.fragmentation import Fragmentation, Workload
from dovetail.scheduling.placement import (
    FragmentationScore,
    Placer,
    Score,
    _NodeHeap,
    stop_rank,
)
from scheduling import naive, strategies
from scheduling.leftover_scores import BestFit, Spread

if TYPE_CHECKING:
    from dovetail.resources.seat import Seats
    from dovetail.resources.shape import Shape

Expected = list[tuple["Shape", int]]
ScoreOf = Callable[[Cluster, Expected], tuple[Score, naive.Rule]]


def by_fragmentation(cluster: Cluster, expected: Expected) -> tuple[Score, naive.Rule]:
    return FragmentationScore(Workload(expected)), naive.fragmentation_rule(naive.classes_of(expected))


def by_best_fit(cluster: Cluster, expected: Expected) -> tuple[Score, naive.Rule]:
    return BestFit(cluster), naive.leftover_rule(cluster, packs=True)


def by_spread(cluster: Cluster, expected: Expected) -> tuple[Score, naive.Rule]:
    return Spread(cluster), naive.leftover_rule(cluster, packs=False)


every_score = pytest.mark.parametrize("score_of", [by_fragmentation, by_best_fit, by_spread])


class SideBySide:
    """A placer beside a plain list of all seats, from which the expected result is computed again at each step."""

    def __init__(self, cluster: Cluster, score: Score, rule: naive.Rule) -> None:
        self.cluster = cluster
        self.rule = rule
        self.ledger = Ledger(cluster)
        self.placer = Placer(self.ledger, score)
        self.workers: list[Seats] = []

    @property
    def states(self) -> list[naive.State]:
        return naive.states_of(self.cluster, [seat for seats in self.workers for seat in seats])

    def step(self, verb: str, number: int, shapes: list[Shape]) -> None:
        shape = shapes[number % len(shapes)]
        match verb:
            case "place":
                self.place(shape)
            case "find":
                assert self.placer.find(shape) == naive.seats_of(shape, self.states, self.rule)
            case "take behind its back":
                self.take_behind_its_back(shape, number)
            case "give back" if self.workers:
                self.placer.give_back(self.workers.pop(number % len(self.workers)))
            case "give back behind its back" if self.workers:
                for seat in self.workers.pop(number % len(self.workers)):
                    self.ledger.give_back(seat)

    def place(self, shape: Shape) -> None:
        wanted = naive.seats_of(shape, self.states, self.rule)
        placed = self.placer.place(shape)
        assert placed == wanted
        if placed is not None:
            self.workers.append(placed)

    def take_behind_its_back(self, shape: Shape, number: int) -> None:
        """Take any free seat in the ledger, without the placer."""
        free = [(state.node.name, way) for state in self.states for way in naive.ways(shape, state)]
        if free:
            seat = naive.seat_of(shape, *free[number % len(free)])
            self.ledger.take(seat)
            self.workers.append((seat,))


@every_score
@strategies.often
@given(
    cluster=strategies.clusters(),
    expected=strategies.expected(),
    shapes=st.lists(strategies.plain_shapes(), min_size=1, max_size=4),
    steps=strategies.steps(),
    changes_limit=st.sampled_from([1, 2, 3, 7, 100_000]),
)
def test_a_placer_picks_what_a_rescan_of_every_node_picks(
    score_of: ScoreOf,
    cluster: Cluster,
    expected: Expected,
    shapes: list[Shape],
    steps: list[strategies.Step],
    changes_limit: int,
) -> None:
    with patch.object(ledger_module, "CHANGES_LIMIT", changes_limit):
        both = SideBySide(cluster, *score_of(cluster, expected))
        for verb, number in steps:
            both.step(verb, number, shapes)
    assert naive.states_of_ledger(cluster, both.ledger.free) == both.states


@strategies.often
@given(
    cluster=strategies.clusters(),
    shapes=st.lists(strategies.plain_shapes(), min_size=1, max_size=4),
    steps=strategies.steps(),
)
def test_a_placer_picks_what_a_rescan_picks_when_exactly_this_work_is_expected(
    cluster: Cluster, shapes: list[Shape], steps: list[strategies.Step]
) -> None:
    both = SideBySide(cluster, *by_fragmentation(cluster, [(shape, 1) for shape in shapes]))
    for verb, number in steps:
        both.step(verb, number, shapes)


@every_score
@strategies.often
@given(
    cluster=strategies.clusters(),
    expected=strategies.expected(),
    shapes=st.lists(strategies.plain_shapes(), max_size=6),
)
def test_a_ranker_gives_every_node_the_score_and_the_cards_of_the_formula(
    score_of: ScoreOf, cluster: Cluster, expected: Expected, shapes: list[Shape]
) -> None:
    score, rule = score_of(cluster, expected)
    both = SideBySide(cluster, score, rule)
    for number, shape in enumerate(shapes):
        both.take_behind_its_back(shape, number * 7)
        for asked in shapes:
            ranker = score.ranker(asked)
            for free, state in zip(both.ledger.free, both.states, strict=True):
                choice = ranker.best(free)
                assert (None if choice is None else tuple(choice)) == rule(asked, state)


@pytest.mark.parametrize("seed", range(3))
def test_what_no_longer_holds_never_shows_even_when_the_heap_is_rebuilt(seed: int) -> None:
    """The big node stays the best, so that all that changes on the others piles up below it; then it is dug out."""
    numbers = random.Random(seed)
    cluster = Cluster.parse("1x(48cpu, 4xA100:40GB) + 3x(8cpu, 2xA100:40GB) + 1x(9cpu, 1xT4:16GB)")
    asked = Resources(cpus=0.5, gpus=0.25).shape()
    others = [Resources(cpus=1).shape(), Resources(cpus=2, gpus=0.25).shape(), Resources(cpus=0.5, gpus=1).shape()]
    both = SideBySide(cluster, *by_spread(cluster, []))
    with patch.object(_NodeHeap, "_rank_all", autospec=True, side_effect=_NodeHeap._rank_all) as rerank:
        for _ in range(2000):
            verb = numbers.choice(["take behind its back", "give back behind its back"])
            both.step(verb, numbers.randrange(1000), others)
            both.step("find", 0, [asked])
            if rerank.call_count == 3:
                break
        assert both.ledger.era == 0
        assert rerank.call_count == 3, "the heap was not rebuilt twice: make this test longer"
    for _ in range(60):
        both.step("place", 0, [asked])
    assert both.placer.place(asked) is None


@every_score
@given(
    cluster=strategies.clusters(),
    expected=strategies.expected(),
    shapes=st.lists(st.one_of(strategies.shapes(), strategies.gangs()), min_size=1, max_size=4),
)
def test_no_node_is_overcommitted_and_giving_all_back_restores_the_start(
    score_of: ScoreOf, cluster: Cluster, expected: Expected, shapes: list[Shape]
) -> None:
    ledger = Ledger(cluster)
    beginning = list(ledger.free)
    placer = Placer(ledger, score_of(cluster, expected)[0])
    workers = [seats for shape in shapes * 3 for seats in placer.fill(shape, 4)]
    seats = [seat for seats in workers for seat in seats]
    replayed = Ledger(cluster, seats)
    now = naive.states_of(cluster, seats)
    assert naive.states_of_ledger(cluster, ledger.free) == naive.states_of_ledger(cluster, replayed.free) == now
    assert sorted(ledger.seats()) == sorted(seats)
    for gone in workers[::2] + workers[1::2]:
        placer.give_back(gone)
    assert list(ledger.free) == beginning
    assert list(ledger.seats()) == []
    assert [seats for shape in shapes * 3 for seats in placer.fill(shape, 4)] == workers


@every_score
@given(
    cluster=strategies.clusters(),
    expected=strategies.expected(),
    shapes=st.lists(st.one_of(strategies.shapes(), strategies.gangs()), min_size=1, max_size=6),
)
def test_finding_a_place_takes_nothing(
    score_of: ScoreOf, cluster: Cluster, expected: Expected, shapes: list[Shape]
) -> None:
    ledger = Ledger(cluster)
    placer = Placer(ledger, score_of(cluster, expected)[0])
    for shape in shapes:
        free, taken, changes = list(ledger.free), list(ledger.seats()), list(ledger.changes)
        found = placer.find(shape)
        placer.fitting_positions(shape)
        assert placer.find(shape) == found
        assert (list(ledger.free), list(ledger.seats()), list(ledger.changes)) == (free, taken, changes)
        assert placer.place(shape) == found


@every_score
@given(
    cluster=strategies.clusters(),
    expected=strategies.expected(),
    shapes=st.lists(strategies.shapes(), min_size=1, max_size=6),
)
def test_a_worker_is_turned_away_only_if_no_cards_of_any_node_would_do(
    score_of: ScoreOf, cluster: Cluster, expected: Expected, shapes: list[Shape]
) -> None:
    placer = Placer(Ledger(cluster), score_of(cluster, expected)[0])
    seats: list[Seat] = []
    for shape in shapes * 4:
        states = naive.states_of(cluster, seats)
        able = [position for position, state in enumerate(states) if naive.ways(shape, state)]
        assert placer.fitting_positions(shape) == able
        placed = placer.place(shape)
        assert (placed is not None) == bool(able)
        seats += placed or ()


@given(
    cluster=strategies.clusters(most_nodes=1),
    asked=strategies.whole_resources(),
    decoding=st.lists(strategies.codec_resources(), max_size=3),
)
def test_several_cards_whose_codecs_add_up_are_those_with_the_fewest(
    cluster: Cluster, asked: Resources, decoding: list[Resources]
) -> None:
    """In the order of how many codecs are left of those it asks for, there is no way to sit on cards that all come
    before the last taken."""
    shape = asked.shape()
    placer = Placer(Ledger(cluster), BestFit(cluster))
    others = [seat for other in decoding for seats in placer.fill(other.shape(), 1) for seat in seats]
    state = naive.states_of(cluster, others)[0]
    placed = placer.place(shape)
    ways = naive.ways(shape, state)
    if not ways or not naive.adds_up_codecs(shape):
        assert (placed is None) == (not ways)
        return
    assert placed is not None
    assert placed[0].cards in ways

    def last(way: naive.Way) -> tuple[int, int]:
        cards = [state.cards[share.card] for share in way]
        left = [card.nvdecs * bool(shape.nvdecs) + card.nvencs * bool(shape.nvencs) for card in cards]
        return max(zip(left, (share.card for share in way), strict=True))

    assert last(placed[0].cards) == min(last(way) for way in ways)


def test_filling_stops_at_the_number_asked_for_and_when_it_is_full() -> None:
    cluster = Cluster.parse("2x(4cpu, 8GB)")
    placer = Placer(Ledger(cluster), BestFit(cluster))
    shape = Resources(cpus=1).shape()
    assert placer.fill(shape, 0) == []
    assert len(placer.fill(shape, 3)) == 3
    assert len(placer.fill(shape, 100)) == 5
    assert placer.place(shape) is None


def test_the_coarse_score_packs_the_first_of_nearly_equal_nodes() -> None:
    """Any node costs the same integer score here; an exact gradient would go elsewhere (docs/decisions/002)."""
    cluster = Cluster.parse("4x(64cpu, 1xA100:40GB)")
    quarter, whole = Resources(cpus=1, gpus=0.25).shape(), Resources(cpus=1, gpus=1).shape()
    placer = Placer(Ledger(cluster), FragmentationScore(Workload({quarter: 100, whole: 1})))
    assert [seats[0].node for seats in placer.fill(quarter, 6)] == ["node-0"] * 4 + ["node-1"] * 2


def test_a_share_joins_a_card_in_use_so_that_whole_cards_stay_whole() -> None:
    cluster = Cluster.parse("1x(64cpu, 4xA100:40GB)")
    half, whole = Resources(cpus=1, gpus=0.5).shape(), Resources(cpus=1, gpus=1).shape()
    placer = Placer(Ledger(cluster), FragmentationScore(Workload({half: 2, whole: 2})))
    placed = [placer.place(shape) for shape in (whole, half, half, whole, whole)]
    assert [seats and seats[0].cards[0].card for seats in placed] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize(
    ("needs_all", "worker"),
    [
        (Resources(cpus=8, gpus=0.5), Resources(cpus=1)),
        (Resources(cpus=1, gpus=0.5, memory="8GB"), Resources(cpus=1, memory="1GB")),
        (Resources(cpus=1, gpus=0.5, custom={"licence": 1}), Resources(cpus=1, custom={"licence": 0.1})),
    ],
    ids=["cpus", "memory", "custom"],
)
def test_a_worker_without_a_gpu_does_not_shut_expected_work_out_of_one(needs_all: Resources, worker: Resources) -> None:
    cluster = Cluster.parse("1x(8cpu, 8GB, 1xA100:40GB, licence=1) + 1x(8cpu, 8GB, licence=1)")
    placer = Placer(Ledger(cluster), FragmentationScore(Workload({needs_all.shape(): 1})))
    placed = placer.place(worker.shape())
    assert placed is not None
    assert placed[0].node == "node-1"


def test_cards_with_as_much_left_are_not_alike_if_they_are_of_different_size() -> None:
    """Half of either card and 20 GB are left; a quarter of the larger card would take all of that memory."""
    cluster = Cluster.parse("1x(8cpu, 1xA100:80GB, 1xA100:40GB)")
    larger, smaller = CardShare(0, 500, 60 << 30), CardShare(1, 500, 20 << 30)
    ledger = Ledger(cluster, [Seat("node-0", 0, 0, (larger,)), Seat("node-0", 0, 0, (smaller,))])
    expected = Workload({Resources(cpus=0, gpus=0.25, gpu_memory="10GB").shape(): 1})
    placed = Placer(ledger, FragmentationScore(expected)).place(Resources(cpus=1, gpus=0.25).shape())
    assert placed is not None
    assert placed[0].cards == (CardShare(1, 250, 10 << 30),)


def test_spread_takes_turns() -> None:
    cluster = Cluster.parse("3x(8cpu, 2xA100:40GB)")
    placer = Placer(Ledger(cluster), Spread(cluster))
    seats = [seats[0] for seats in placer.fill(Resources(cpus=1, gpus=0.25).shape(), 6)]
    assert [seat.node for seat in seats] == ["node-0", "node-1", "node-2"] * 2
    assert [seat.cards[0].card for seat in seats] == [0, 0, 0, 1, 1, 1]


SCRIPT = """
import json
from dovetail.resources.cluster import Cluster
from dovetail.resources.ledger import Ledger
from dovetail.resources.resources import Resources
from dovetail.scheduling.fragmentation import Workload
from dovetail.scheduling.placement import FragmentationScore, Placer, stop_rank
from scheduling.leftover_scores import BestFit, Spread

cluster = Cluster.parse(
    "3x(32cpu, 128GB, 2xA100:40GB, licence=2, seat=1){pool=red, zone=a}"
    " + 4x(16cpu, 64GB, 1xL4:24GB, 2xT4:16GB){pool=blue}"
    " + 2x(64cpu, 256GB){pool=cpu} + 2x(32cpu, 128GB, 2xA100:40GB, seat=3){zone=a}"
)
asked = [
    Resources(cpus=2, labels={"pool": "red|blue"}),
    Resources(cpus=1, gpus=0.25, custom={"seat": 0.5, "licence": 0.25}),
    Resources(cpus=1, gpu_memory="5GB", accelerator="L4|A100|T4"),
    Resources(cpus=1, gpus=1, memory="4GB"),
    Resources(cpus=0.5, nvdecs=1, accelerator="T4|L4"),
    Resources(cpus=2, entire_gpu=True, gpus=2, labels={"zone": "a"}),
]
shapes = [resources.shape() for resources in asked] + [asked[3].shape(ranks=3), asked[0].shape(ranks=40)]
workload = Workload({shape: 1 + number for number, shape in enumerate(shapes)})
story = []
for score in (FragmentationScore(workload), BestFit(cluster), Spread(cluster)):
    ledger = Ledger(cluster)
    placer = Placer(ledger, score)
    workers = []
    for turn in range(40):
        for shape in shapes:
            seats = placer.place(shape)
            if seats is not None:
                workers.append(seats)
            story.append([seat.to_dict() for seat in seats or ()])
        if turn % 3 == 2:
            stopping = FragmentationScore(workload)
            singles = [(number, seats[0]) for number, seats in enumerate(workers) if len(seats) == 1]
            frees = [(number, seat, ledger.free_on(seat.node)) for number, seat in singles]
            leaving = max(frees, key=lambda one: (stop_rank(stopping, one[2], one[2].given_back(one[1])), one[0]))[0]
            story.append(leaving)
            placer.give_back(workers.pop(leaving))
print(json.dumps(story))
"""


@pytest.mark.outside
def test_two_processes_with_different_hash_seeds_choose_the_same_seats() -> None:
    results = []
    paths = (str(Path(dovetail.__file__).parents[1]), str(Path(__file__).parents[1]))
    for seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-W", "error", "-c", SCRIPT]
        results.append(subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120).stdout)
    assert results[0] == results[1]
    story = json.loads(results[0])
    placed = [step for step in story if isinstance(step, list) and step]
    assert len(placed) > 200
    assert max(len(seats) for seats in placed) == 40, "no gang was seated"


def ranks_of(ledger: Ledger, workers: list[Seats], score: FragmentationScore) -> list[tuple[int, int]]:
    """Rank of each worker with one seat."""
    frees = [(ledger.free_on(seats[0].node), seats[0]) for seats in workers]
    return [stop_rank(score, free, free.given_back(seat)) for free, seat in frees]


@strategies.often
@given(
    cluster=strategies.clusters(),
    expected=strategies.expected(),
    shapes=st.lists(strategies.shapes(), min_size=1, max_size=4),
)
def test_a_worker_that_frees_more_usable_gpu_never_ranks_below_one_that_frees_less(
    cluster: Cluster, expected: Expected, shapes: list[Shape]
) -> None:
    """Compared with a count of F of the whole cluster without each worker, on full nodes and on others."""
    ledger = Ledger(cluster)
    workers = [seats for shape in shapes * 2 for seats in Placer(ledger, BestFit(cluster)).fill(shape, 4)]
    left = [fragments_without(number, cluster, workers, expected) for number in range(len(workers))]
    scores = [rank[0] for rank in ranks_of(ledger, workers, FragmentationScore(Workload(expected)))]
    in_order = [score for _, score in sorted(zip(left, scores, strict=True))]
    assert in_order == sorted(scores, reverse=True)


def fragments_without(number: int, cluster: Cluster, workers: list[Seats], expected: Expected) -> Fraction:
    """F of the whole cluster without one worker, counted from scratch."""
    classes = naive.classes_of(expected)
    staying = [seat for other, seats in enumerate(workers) if other != number for seat in seats]
    return sum((naive.fragments(state, classes) for state in naive.states_of(cluster, staying)), Fraction(0))


def test_a_worker_that_frees_a_whole_card_stops_before_one_that_frees_a_part() -> None:
    cluster = Cluster.parse("2x(64cpu, 2xA100:40GB)")
    ledger = Ledger(cluster)
    half, whole = Resources(cpus=1, gpus=0.5).shape(), Resources(cpus=1, gpus=1).shape()
    placer = Placer(ledger, BestFit(cluster))
    workers = [*placer.fill(half, 1), *placer.fill(whole, 1), *placer.fill(half, 4)]
    assert [(seats[0].node, seats[0].cards[0].card) for seats in workers] == [
        ("node-0", 0),
        ("node-0", 1),
        ("node-0", 0),
        ("node-1", 0),
        ("node-1", 0),
        ("node-1", 1),
    ]
    ranks = ranks_of(ledger, workers, FragmentationScore(Workload({whole: 1})))
    assert ranks.index(max(ranks)) == 5
    assert ranks[1] == max(ranks[:5])


def test_a_worker_that_shares_its_card_stops_after_one_that_is_alone_on_its_card() -> None:
    cluster = Cluster.parse("2x(8cpu, 1xA100:40GB)")
    half, whole = Resources(cpus=1, gpus=0.5).shape(), Resources(cpus=1, gpus=1).shape()
    ledger = Ledger(cluster)
    alone, beside, other = Placer(ledger, Spread(cluster)).fill(half, 3)
    assert [seats[0].node for seats in (alone, beside, other)] == ["node-0", "node-1", "node-0"]
    ledger.give_back(other[0])
    ledger.take(beside[0])
    on_own_card, on_shared_card = ranks_of(ledger, [alone, beside], FragmentationScore(Workload({whole: 1})))
    assert on_own_card > on_shared_card


LIMITS = (
    (fragmentation_module, "MAX_CACHED_STATES"),
    (placement_module, "MAX_CACHED_CHOICES"),
    (fit_module, "ASSIGNMENT_CACHE_LIMIT"),
    (free_module, "TRANSITION_CACHE_LIMIT"),
)


def story(cluster: Cluster, score: Score, expected: Expected, shapes: list[Shape], steps: list[strategies.Step]) -> str:
    """All results of a placer in the course of some steps."""
    ledger = Ledger(cluster)
    placer = Placer(ledger, score)
    fragmentation = Fragmentation(Workload(expected))
    workers: list[Seats] = []
    results: list[object] = []
    for verb, number in steps:
        shape = shapes[number % len(shapes)]
        if verb == "place":
            seats = placer.place(shape)
            results.append(seats)
            if seats is not None:
                workers.append(seats)
        elif verb == "find":
            results.append((placer.find(shape), placer.fitting_positions(shape)))
        elif workers:
            results.append([fragmentation.of_free(free) for free in ledger.free])
            placer.give_back(workers.pop(number % len(workers)))
    return "\n".join(str(line) for line in results)


@every_score
@strategies.often
@given(
    cluster=strategies.clusters(),
    expected=strategies.expected(),
    shapes=st.lists(st.one_of(strategies.shapes(), strategies.gangs()), min_size=1, max_size=4),
    steps=strategies.steps(),
    limits=st.tuples(*[st.sampled_from((1, 2, 3, 100_000))] * len(LIMITS)),
)
def test_small_caches_do_not_change_the_result(
    score_of: ScoreOf,
    cluster: Cluster,
    expected: Expected,
    shapes: list[Shape],
    steps: list[strategies.Step],
    limits: tuple[int, ...],
) -> None:
    roomy = story(cluster, score_of(cluster, expected)[0], expected, shapes, steps)
    with ExitStack() as patches:
        for (module, name), limit in zip(LIMITS, limits, strict=True):
            patches.enter_context(patch.object(module, name, limit))
        assert story(cluster, score_of(cluster, expected)[0], expected, shapes, steps) == roomy
