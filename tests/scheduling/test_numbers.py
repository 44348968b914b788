"""How many workers fit? The numbers that were promised."""

from __future__ import annotations

from collections import Counter

import pytest

from dovetail.resources.cluster import Cluster
from dovetail.resources.ledger import Ledger
from dovetail.resources.resources import Resources
from dovetail.scheduling.fragmentation import Workload
from dovetail.scheduling.placement import FragmentationScore, Placer, Score
from scheduling.leftover_scores import BestFit, Spread


def scores_for(cluster: Cluster, asked: Resources) -> list[Score]:
    return [FragmentationScore(Workload({asked.shape(): 1})), BestFit(cluster), Spread(cluster)]


@pytest.mark.parametrize(
    ("gpu_memory", "cards", "fits"),
    [
        ("8GB", "2xA100:20GB", 4),
        ("1500MB", "1xA100:80GB", 54),
        ("1500MB", "2xA100:20GB", 26),
        ("20GB", "2xA100:20GB", 2),
        ("20481MB", "2xA100:20GB", 0),
        ("7GB", "1xA100:20GB, 1xA100:80GB", 2 + 11),
    ],
)
def test_as_many_workers_sit_as_each_cards_memory_holds(gpu_memory: str, cards: str, fits: int) -> None:
    cluster = Cluster.parse(f"1x(64cpu, 256GB, {cards})")
    asked = Resources(cpus=1, gpu_memory=gpu_memory)
    for score in scores_for(cluster, asked):
        assert len(Placer(Ledger(cluster), score).fill(asked.shape(), 1000)) == fits


def test_fewer_sit_where_the_cpus_end_first() -> None:
    cluster = Cluster.parse("1x(16cpu, 256GB, 1xA100:80GB)")
    asked = Resources(cpus=1, gpu_memory="1500MB")
    for score in scores_for(cluster, asked):
        assert len(Placer(Ledger(cluster), score).fill(asked.shape(), 1000)) == 16


def test_memory_sized_workers_are_shared_out_between_cards_as_each_holds() -> None:
    cluster = Cluster.parse("1x(64cpu, 256GB, 2xA100:20GB)")
    asked = Resources(cpus=1, gpu_memory="1500MB")
    for score in scores_for(cluster, asked):
        placed = Placer(Ledger(cluster), score).fill(asked.shape(), 1000)
        assert Counter(seats[0].cards[0].card for seats in placed) == {0: 13, 1: 13}


@pytest.mark.parametrize(("gpus", "fits"), [(0.25, 8), (0.3, 6), (1 / 3, 6), (1 / 7, 14), (0.5, 4), (0.51, 2), (1, 2)])
def test_shares_fit_as_often_as_they_go_into_each_card(gpus: float, fits: int) -> None:
    cluster = Cluster.parse("1x(64cpu, 256GB, 2xA100:20GB)")
    asked = Resources(cpus=1, gpus=gpus)
    for score in scores_for(cluster, asked):
        assert len(Placer(Ledger(cluster), score).fill(asked.shape(), 1000)) == fits
