"""Eviction policy and accounting of cached models, without processes."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.jobs.workers.model_eviction import RELOAD_WINDOW_S, Model, ModelState, ModelTable
from waiting import LONG

CARD = 0
GB = 1 << 30
TRACES = 100 if LONG else 8
TRACE_LENGTH = 3_000


class Cache:
    """A process with a byte budget that uses models one after another."""

    def __init__(self, budget: int) -> None:
        self.table = ModelTable()
        self.budget = budget
        self.used = 0
        self.now_s = 0.0

    def use(self, key: str, size: int, load_s: float) -> None:
        self.now_s += 1.0
        if self.table.get(1, key) is not None:
            self.table.on_used(1, key)
        elif size <= self.budget:
            missing = self.used + size - self.budget
            for victim in self.table.choose_victims(CARD, missing) if missing > 0 else ():
                self.table.on_evicted(1, victim.key, self.now_s)
                self.used -= victim.size
            self.table.add(1, key, CARD, size)
            self.used += size
            self.table.on_loaded(1, key, load_s, self.now_s)
        self.table.on_unpinned(1, [key])


def lru_hits(trace: list[int], sizes: list[int], budget: int) -> int:
    held: OrderedDict[int, int] = OrderedDict()
    hits = 0
    for key in trace:
        if key in held:
            hits += 1
            held.move_to_end(key)
        elif sizes[key] <= budget:
            while sum(held.values()) + sizes[key] > budget:
                held.popitem(last=False)
            held[key] = sizes[key]
    return hits


@pytest.mark.parametrize("seed", range(TRACES))
def test_with_skewed_access_as_many_hits_as_true_lru(seed: int) -> None:
    choose = random.Random(seed)
    count = choose.randint(8, 60)
    sizes = [choose.randint(1, 20) * GB for _ in range(count)]
    load_s = [0.5 + size / (2 * GB) * choose.uniform(0.7, 1.3) for size in sizes]
    budget = max(max(sizes), int(sum(sizes) * choose.uniform(0.1, 0.6)))
    skew = choose.uniform(0.6, 1.6)
    weights = [1 / (rank + 1) ** skew for rank in range(count)]
    choose.shuffle(weights)
    trace = choose.choices(range(count), weights, k=TRACE_LENGTH)
    cache = Cache(budget)
    for key in trace:
        cache.use(f"m{key}", sizes[key], load_s[key])
        assert cache.used <= budget
    assert cache.table.totals.hits >= lru_hits(trace, sizes, budget)


def test_of_models_of_one_size_the_one_that_is_loaded_faster_is_evicted() -> None:
    cache = Cache(2 * GB)
    cache.use("slow", GB, 60.0)
    cache.use("fast", GB, 1.0)
    cache.use("other", GB, 5.0)
    assert {model.key for model in cache.table} == {"slow", "other"}


def test_a_model_that_is_not_used_any_more_falls_behind() -> None:
    cache = Cache(2 * GB)
    for _ in range(5):
        cache.use("once popular", GB, 5.0)
    for step in range(40):
        cache.use(f"new {step % 2}", GB, 5.0)
    assert "once popular" not in {model.key for model in cache.table}


def test_a_load_shortly_after_an_eviction_counts_as_reload() -> None:
    cache = Cache(GB)
    for key in ("a", "b", "a"):
        cache.use(key, GB, 1.0)
    assert (cache.table.totals.reloads, cache.table.totals.evictions, cache.table.totals.misses) == (1, 2, 3)
    cache.now_s += RELOAD_WINDOW_S
    cache.use("b", GB, 1.0)
    assert cache.table.totals.reloads == 1


def test_what_is_loading_or_in_use_is_never_a_victim() -> None:
    table = ModelTable()
    for key in ("loading", "pinned", "idle"):
        table.add(1, key, CARD, GB)
    for key in ("pinned", "idle"):
        table.on_loaded(1, key, 1.0, 0.0)
    table.on_unpinned(1, ["idle"])
    assert table.choose_victims(CARD, 2 * GB) == []
    assert table.idle_bytes() == {CARD: GB}
    assert [victim.key for victim in table.choose_victims(CARD, 1)] == ["idle"]
    assert table.choose_victims(CARD, 1) == [], "it is being evicted already"
    assert table.evicting_bytes(CARD) == GB


def test_a_victim_that_a_job_began_to_use_stays() -> None:
    table = ModelTable()
    table.add(1, "model", CARD, GB)
    table.on_loaded(1, "model", 1.0, 0.0)
    table.on_unpinned(1, ["model"])
    [victim] = table.choose_victims(CARD, GB)
    table.on_used(1, "model")
    table.on_kept(1, "model")
    assert (victim.state, victim.pins) == (ModelState.LOADED, 1)
    assert table.choose_victims(CARD, GB) == []


def test_small_victims_are_spared_if_a_large_one_is_needed_anyway() -> None:
    table = ModelTable()
    for key, size, load_s in (("small", 1, 1e-3), ("large", 10, 1.0)):
        table.add(1, key, CARD, size)
        table.on_loaded(1, key, load_s, 0.0)
        table.on_unpinned(1, [key])
    assert [victim.key for victim in table.choose_victims(CARD, 5)] == ["large"]


steps = st.lists(
    st.tuples(st.sampled_from(["use", "end", "kill"]), st.integers(1, 3), st.sampled_from("abcde"), st.integers(1, 9)),
    max_size=60,
)


@given(steps, st.integers(1, 25))
def test_bytes_are_conserved_and_never_above_the_budget(events: list[tuple[str, int, str, int]], budget: int) -> None:
    """Three processes share a device, with jobs that overlap and processes that are killed."""
    table = ModelTable()
    used = 0
    for now, (what, host, key, size) in enumerate(events):
        found = table.get(host, key)
        match what:
            case "use" if found is not None:
                table.on_used(host, key)
            case "use":
                missing = used + size - budget
                victims: list[Model] = table.choose_victims(CARD, missing) if missing > 0 else []
                for victim in victims:
                    assert not victim.pins
                    gone = table.on_evicted(victim.host, victim.key, now)
                    assert gone is victim
                    used -= victim.size
                if used + size <= budget:
                    table.add(host, key, CARD, size)
                    used += size
                    table.on_loaded(host, key, size, now)
            case "end":
                table.on_unpinned(host, [key])
            case "kill":
                used -= sum(model.size for model in table.remove_host(host))
        assert used == sum(model.size for model in table)
        assert used <= budget
