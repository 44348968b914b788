"""The end of a run closes everything, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from dovetail.runtime.run_loop import run_with_observers

if TYPE_CHECKING:
    from collections.abc import Sequence


class Noted:
    """Controller, engine, observer or recorder: notes what happens to it."""

    done = True

    def __init__(self, name: str, calls: list[str], raises: bool = False) -> None:
        self.name, self.calls, self.raises = name, calls, raises

    def step(self, now: float, events: Sequence[Any]) -> list[Any]:
        if self.raises:
            raise RuntimeError(self.name)
        return []

    def now(self) -> float:
        return 0.0

    def on_step(self, *_: object) -> None:
        self.calls.append(f"{self.name} saw")

    def abort(self, *_: object) -> None: ...

    def close(self, *_: object) -> None:
        self.calls.append(self.name)


@pytest.mark.parametrize("raises", [False, True])
def test_a_claim_is_released_only_after_the_engine_is_closed(raises: bool) -> None:
    calls: list[str] = []
    controller, engine, observer, keeper = (
        cast("Any", Noted(name, calls, raises)) for name in ("controller", "engine", "observer", "keeper")
    )
    try:
        run_with_observers(controller, engine, cast("Any", None), observer, [observer], claim_observers=[keeper])
    except RuntimeError:
        assert raises
    assert ("keeper saw" in calls) is not raises
    assert calls.index("observer") < calls.index("engine") < calls.index("keeper")
