"""Free vectors of workers as texts and shared objects."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from dovetail.jobs.free_vector import free_from_text, free_to_text, shared_free
from dovetail.resources.fit import Fit
from jobs.claim_scenes import random_free, random_shape


@given(st.integers(0, 2**32))
def test_a_free_vector_is_read_as_it_was_written(seed: int) -> None:
    random = Random(seed)
    free, shape = random_free(random), random_shape(random).rank
    found = free_from_text(free_to_text(free))
    assert (found.cpu_milli, found.memory_bytes, found.cards.free) == (
        free.cpu_milli,
        free.memory_bytes,
        free.cards.free,
    )
    assert free_to_text(found) == free_to_text(free)
    assert Fit(shape).assignments(found) == Fit(shape).assignments(free)


@given(st.integers(0, 2**32))
def test_equal_states_of_equal_nodes_share_an_object(seed: int) -> None:
    one, two = random_free(Random(seed)), random_free(Random(seed))
    assert shared_free(one) == shared_free(two) == free_from_text(free_to_text(one))
    assert shared_free(one).cards is shared_free(two).cards
