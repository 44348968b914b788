"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the benchmarks of this session find modules that an earlier one has compiled."""
    return tmp_path_factory.mktemp("compiled")
