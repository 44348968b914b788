"""What is a run told that has to wait for others?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dovetail.resources.amounts import CPU, CUSTOM, HOST, MEMORY
from dovetail.resources.sizes import about_size, milli

if TYPE_CHECKING:
    from dovetail.claims.book import Wait
    from dovetail.claims.owner import Owner
    from dovetail.resources.amounts import Amounts, Key

NAMES = {
    (True, CPU): "CPUs",
    (True, MEMORY): "memory",
    (False, "milli"): "GPUs",
    (False, "memory_bytes"): "GPU memory",
    (False, "nvdecs"): "NVDECs",
    (False, "nvencs"): "NVENCs",
}
SIZES, PIECES = ("memory", "GPU memory"), ("NVDECs", "NVENCs")
SHOWN = 3


class Told:
    """Who holds what somebody waits for, in words."""

    def __init__(self, wait: Wait, need: Amounts, capacity: Amounts) -> None:
        self.comes = wait.comes
        self._total = _totals(capacity)
        self._need, got = _totals(need), _totals(wait.owner.granted)
        self._missing = [name for name, amount in self._need.items() if amount > got.get(name, 0)] or list(self._need)
        having = [other for other in wait.others if any(_totals(other.granted).get(name) for name in self._missing)]
        self._holders = having or [other for other in wait.others if other.granted]
        foreign = _totals(wait.foreign)
        self._foreign = foreign if any(foreign.get(name) for name in self._missing) else {}

    @property
    def needs(self) -> str:
        """'4 CPUs, 16GB memory'."""
        return ", ".join(_text(name, self._need[name]) for name in self._missing)

    @property
    def holders(self) -> tuple[str, ...]:
        """'run fill-2026 (pid 123) holds 8 of 8 CPUs', one each."""
        return (*map(self._holds, self._holders), *self._strangers())

    @property
    def by_strangers(self) -> bool:
        """Whether some of it is held by those who know nothing of us."""
        return bool(self._foreign)

    def line(self, now: float, strangers: str = "") -> str:
        """All of it for somebody who waits: 'waiting for 4 CPUs: run ... holds ... since 12 s; it gives back ...'.
        `strangers`: their names, if they are known."""
        told = [f"{self._holds(owner)} since {max(0.0, now - owner.since):.0f} s" for owner in self._holders[:SHOWN]]
        if len(self._holders) > SHOWN:
            told.append(f"and {len(self._holders) - SHOWN} more")
        told += [f"{line} ({strangers})" if strangers else line for line in self._strangers()]
        return f"waiting for {self.needs}: {', '.join(told) or 'others come first'}; {self._then()}"

    def _strangers(self) -> list[str]:
        return [f"others that are not Dovetail's hold {self._parts(self._foreign)}"] if self._foreign else []

    def _then(self) -> str:
        if self._foreign and not self.comes:
            return "this begins when enough of that is free"
        one = len(self._holders) == 1
        if one and self._holders[0].process.pid == os.getpid() and not self.comes:
            return "it is a run of this very program: read its results to their end first, or give both of them room"
        if self.comes:
            return "it gives back at its next replan" if one else "they give back at their next replans"
        return "it needs that itself: this begins when it ends" if one else "this begins when enough of them have ended"

    def _holds(self, owner: Owner) -> str:
        return f"run {owner.name} (pid {owner.process.pid}) holds {self._parts(_totals(owner.granted))}"

    def _parts(self, held: dict[str, int]) -> str:
        """'8 of 8 CPUs, 1 of 2 GPUs'."""
        return ", ".join(
            f"{_number(name, held.get(name, 0))} of {_text(name, self._total.get(name, 0))}" for name in self._missing
        )


def _totals(amounts: Amounts) -> dict[str, int]:
    """By resource, in its own integers."""
    found: dict[str, int] = {}
    for key, amount in amounts.items():
        found[_name(key)] = found.get(_name(key), 0) + amount
    return found


def _name(key: Key) -> str:
    _, card, what = key
    return NAMES.get((card == HOST, what), what.removeprefix(CUSTOM))


def _number(name: str, amount: int) -> str:
    return about_size(amount) if name in SIZES else str(amount) if name in PIECES else milli(amount)


def _text(name: str, amount: int) -> str:
    one = amount == (1 if name in PIECES else 1000)
    return f"{_number(name, amount)} {name.removesuffix('s') if one and name in NAMES.values() else name}"
