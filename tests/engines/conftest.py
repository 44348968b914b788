"""Fixtures for tests of engines. Assertions of the contract suite are rewritten by pytest, as those of tests are."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.register_assert_rewrite("engines.contract")


@pytest.fixture(scope="module")
def collected() -> Iterator[None]:
    """Garbage of earlier tests is collected, and later collections in this module leave out the objects that remain: it
    takes half a second in a process that has imported torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
