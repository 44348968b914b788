"""Offers in groups: the choice of a better worker is that of a search through all workers."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from dovetail.jobs.admission import Admission
from dovetail.jobs.free_vector import shared_free
from dovetail.jobs.offer_groups import OfferGroups
from dovetail.jobs.store import Offer, OfferingWorker
from dovetail.jobs.worker_choice import OtherWorkers, placement_rank
from jobs.claim_scenes import random_free, random_shape

if TYPE_CHECKING:
    from dovetail.resources.shape import Shape

LEASE_MS = 1_000
QUEUES = (("a",), ("b",), ("a", "b"))


def best_of_all(
    workers: dict[str, OfferingWorker], own: str, queue: str, shape: Shape, admission: Admission
) -> str | None:
    """The worker with the lowest rank below that of `own`, then with the most free slots, then the one that has asked
    longest ago, then the smallest id."""
    limit = placement_rank(shape, workers[own].offer.free)
    ranked = [
        (placement_rank(shape, one.offer.free), -one.offer.slots, one.offer.offered_ms, one.id)
        for one in workers.values()
        if one.id != own
        and queue in one.queues
        and one.offer.slots > 0
        and admission.take(shape, one.offer.free) is not None
    ]
    better = [item for item in ranked if item[0] < limit]
    return min(better)[-1] if better else None


@pytest.mark.parametrize("seed", range(20))
def test_the_better_worker_is_that_of_a_search_through_all(seed: int) -> None:
    random, admission, groups = Random(seed), Admission(), OfferGroups()
    workers: dict[str, OfferingWorker] = {}
    states = [shared_free(random_free(random)) for _ in range(6)]
    found = 0
    for now_ms in range(0, 4_000, 40):
        name = f"w{random.randint(0, 15):02}"
        if random.random() < 0.15:
            workers.pop(name, None)
            groups.remove(name)
        else:
            offer = Offer(now_ms, LEASE_MS, random.randint(0, 2), random.choice(states), None)
            workers[name] = OfferingWorker(name, random.choice(QUEUES), offer)
            groups.put(workers[name])
        groups.expire(now_ms)
        workers = {one.id: one for one in workers.values() if one.offer.is_live(now_ms)}
        if not workers:
            continue
        own, queue, shape = random.choice(sorted(workers)), random.choice("ab"), random_shape(random).rank
        others, expected = OtherWorkers(groups, own, admission), dict(workers)
        rank = placement_rank(shape, workers[own].offer.free)
        for _ in range(3):  # jobs that are left to a worker make it smaller for this claim
            best = others.best_before(rank, queue, shape)
            assert best == best_of_all(expected, own, queue, shape, admission)
            if best is None:
                break
            found += 1
            others.leave(best, shape)
            offer = expected[best].offer
            left = admission.take(shape, offer.free) or offer.free
            expected[best] = expected[best]._replace(offer=offer._replace(slots=offer.slots - 1, free=left))
    assert found > 0
