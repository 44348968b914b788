"""Agents that cannot start: the run fails with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt
from dovetail.engines.ray import agent_pool
from dovetail.engines.ray.agent import Agent
from dovetail.engines.ray.message_handlers import _last_error
from dovetail.errors import DovetailError
from engines.ray_runs import on_ray
from runtime.aids import run_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["on_ray"]


@pytest.mark.ray
@pytest.mark.usefixtures("on_ray", "by_value")
def test_a_run_fails_where_no_agent_starts_on_any_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Unfit(Agent):
        """An agent as on a node with another version of Dovetail."""

        def __init__(self) -> None:
            raise ImportError("no module of that name here")

    monkeypatch.setattr(agent_pool, "Agent", Unfit)
    monkeypatch.setattr(agent_pool.IDLE_AGENTS, "take", lambda *_: None)
    with pytest.raises(DovetailError) as caught:
        list(run_of(dt.Stage("same", _same), source=range(10), run_dir=tmp_path / "run"))
    assert "DT404" in str(caught.value)
    assert "no module of that name here" in str(caught.value)


def _same(items: list[Any]) -> list[Any]:
    return items


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Traceback:\n  File x\nImportError: no such module\n", "ImportError: no such module"),
        (
            "The actor died.\nray.exceptions.RaySystemError: gone\n[stack of C++]\n",
            "ray.exceptions.RaySystemError: gone",
        ),
        ("one line", "one line"),
        ("", "no reason given"),
    ],
)
def test_the_last_error_of_a_traceback_is_reported(text: str, message: str) -> None:
    assert _last_error(text) == message
