"""Fixtures of the tests of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.aids import GatedSource


@pytest.fixture
def gated() -> Iterator[list[GatedSource]]:
    """Sources that are added to this list are released at the end of the test."""
    sources: list[GatedSource] = []
    yield sources
    for source in sources:
        source.released.set()
