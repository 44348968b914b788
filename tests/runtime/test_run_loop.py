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

    def __init__(self, name: str, told: list[str], raises: bool = False) -> None:
        self.name, self.told, self.raises = name, told, raises

    def step(self, now: float, events: Sequence[Any]) -> list[Any]:
        if self.raises:
            raise RuntimeError(self.name)
        return []

    def now(self) -> float:
        return 0.0

    def on_step(self, *_: object) -> None:
        self.told.append(f"{self.name} saw")

    def abort(self, *_: object) -> None: ...

    def close(self, *_: object) -> None:
        self.told.append(self.name)


@pytest.mark.parametrize("raises", [False, True])
def test_a_claim_is_released_only_after_the_engine_is_closed(raises: bool) -> None:
    told: list[str] = []
    controller, engine, observer, keeper = (
        cast("Any", Noted(name, told, raises)) for name in ("controller", "engine", "observer", "keeper")
    )
    try:
        run_with_observers(controller, engine, cast("Any", None), observer, [observer], claim_observers=[keeper])
    except RuntimeError:
        assert raises
    assert ("keeper saw" in told) is not raises
    assert told.index("observer") < told.index("engine") < told.index("keeper")
