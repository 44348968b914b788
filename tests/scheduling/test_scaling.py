"""The work per placement does not grow with the cluster."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from dovetail.resources.cluster import Cluster
from dovetail.resources.ledger import Ledger
from dovetail.resources.resources import Resources
from dovetail.scheduling.fragmentation import Workload
from dovetail.scheduling.placement import FragmentationScore, Placer, Ranker, Score
from scheduling import naive
from scheduling.leftover_scores import Spread

if TYPE_CHECKING:
    from dovetail.resources.fit import Fit
    from dovetail.resources.free_resources import FreeResources
    from dovetail.resources.shape import Shape
    from dovetail.scheduling.placement import SeatChoice

STAGES = [
    Resources(cpus=4).shape(),
    Resources(cpus=1, gpus=0.25).shape(),
    Resources(cpus=2, gpus=0.5).shape(),
    Resources(cpus=4, gpus=1).shape(),
    Resources(cpus=4, gpus=2).shape(),
    Resources(cpus=2).shape(),
]
NODE = "(128cpu, 8xL40S:48GB)"


class Counted:
    """A score that counts how often it ranks a node."""

    def __init__(self, score: Score) -> None:
        self.score = score
        self.rankings = 0

    def ranker(self, shape: Shape) -> Ranker:
        return _CountedRanker(self, self.score.ranker(shape))


class _CountedRanker:
    def __init__(self, counted: Counted, ranker: Ranker) -> None:
        self.counted = counted
        self.inner = ranker
        self.fit: Fit = ranker.fit

    def best(self, free: FreeResources) -> SeatChoice | None:
        self.counted.rankings += 1
        return self.inner.best(free)


def placer_on(cluster: Cluster, score: Score | None = None) -> tuple[Placer, Counted]:
    counted = Counted(score or FragmentationScore(Workload(dict.fromkeys(STAGES, 1))))
    return Placer(Ledger(cluster), counted), counted


@pytest.mark.parametrize("nodes", [50, 2000])
def test_one_stage_ranks_one_node_per_placement_whatever_their_number(nodes: int) -> None:
    placer, counted = placer_on(Cluster.parse(f"{nodes}x{NODE}"))
    assert placer.place(STAGES[1]) is not None
    assert counted.rankings == 1, "all nodes are alike"
    for number in range(1, 200):
        assert placer.place(STAGES[1]) is not None
        assert counted.rankings <= 1 + number


@pytest.mark.parametrize("nodes", [50, 2000])
@pytest.mark.parametrize("packs", [True, False])
def test_each_of_several_stages_ranks_a_changed_node_once(nodes: int, packs: bool) -> None:
    cluster = Cluster.parse(f"{nodes}x{NODE}")
    placer, counted = placer_on(cluster, None if packs else Spread(cluster))
    for shape in STAGES:
        assert placer.find(shape) is not None
    assert counted.rankings == len(STAGES)
    before, placed = counted.rankings, 0
    for _ in range(10):
        for shape in STAGES:
            assert placer.place(shape) is not None
            placed += 1
    assert counted.rankings - before <= len(STAGES) * placed


@pytest.mark.parametrize("nodes", [50, 2000])
def test_a_removed_worker_costs_one_ranking(nodes: int) -> None:
    placer, counted = placer_on(Cluster.parse(f"{nodes}x{NODE}"))
    workers = placer.fill(STAGES[2], 100)
    assert len(workers) == 100
    placer.find(STAGES[2])
    before = counted.rankings
    for seats in workers:
        placer.give_back(seats)
        placer.find(STAGES[2])
    assert counted.rankings - before == 100


@pytest.mark.parametrize("nodes", [50, 2000])
def test_a_repeated_request_without_changes_ranks_no_node(nodes: int) -> None:
    placer, counted = placer_on(Cluster.parse(f"{nodes}x{NODE}"))
    for _ in range(20):
        placer.find(STAGES[3])
        placer.fitting_positions(STAGES[3])
    assert counted.rankings == 1


@pytest.mark.parametrize("nodes", [50, 2000])
def test_a_full_cluster_is_not_ranked_repeatedly(nodes: int) -> None:
    placer, counted = placer_on(Cluster.parse(f"{nodes}x(2cpu)"))
    shape = Resources(cpus=2).shape()
    assert len(placer.fill(shape, nodes + 1)) == nodes
    before = counted.rankings
    assert [placer.place(shape) for _ in range(20)] == [None] * 20
    assert counted.rankings == before


def test_the_first_ranking_ranks_each_distinct_state_once() -> None:
    cluster = Cluster.parse(
        f"40x{NODE} + 40x(128cpu, 4xL40S:48GB) + 20x{NODE}{{pool=a}} + 1x(64cpu) + 40x{NODE} + 40x(128cpu, 4xL40S:48GB)"
    )
    placer, counted = placer_on(cluster)
    placer.find(STAGES[0])
    assert counted.rankings == 4
    spread = Placer(placer.ledger, Spread(cluster))
    seats = [seats[0] for shape in STAGES for seats in spread.fill(shape, 70)]
    states = {state.without_name for state in naive.states_of(cluster, seats)}
    assert len(states) > 6
    before = counted.rankings
    placer.find(STAGES[4])
    assert counted.rankings - before == len(states)


def test_the_reference_problem_on_1024_nodes_takes_less_than_two_cpu_seconds() -> None:
    cluster = Cluster.parse(f"1024x{NODE}")
    placer = Placer(Ledger(cluster), FragmentationScore(Workload(dict.fromkeys(STAGES, 1))))
    wanting, placed = list(STAGES), 0
    started = time.process_time()
    while wanting:
        for shape in list(wanting):
            if placer.place(shape) is None:
                wanting.remove(shape)
            else:
                placed += 1
    took_s = time.process_time() - started
    idle = sum(card.milli for free in placer.ledger.free for card in free.cards.free)
    assert placed > 10_000
    assert idle == 0, f"{idle} milli-GPUs are left"
    assert took_s < 2
