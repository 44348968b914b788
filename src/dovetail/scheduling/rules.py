"""Which rules does a replan keep? All of them unless a test, or somebody who is curious, switches one off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """Each rule can be switched off alone; the numbers say how far it goes."""

    queues: bool = True
    """What waits decides which unit is the bottleneck; speed only says how many workers that takes."""
    lull: bool = True
    """A unit without work keeps its workers until bringing them back would have cost less than the wait."""
    ramp: bool = True
    """An unmeasured unit grows by one worker at a time, one with an unsure rate at most to twice its size."""
    reserve: bool = True
    """The least of every unit is seated first, hardest first and tightly, whoever has to move for it; ramping shares
    leave whole cards to whole-GPU units. Off: in the order of the pipeline, where there is most room, as others do."""
    pays: bool = True
    """A change must bring more items within the horizon than starting and stopping costs."""
    spares: bool = True
    """A worker above need whose seat nobody wants stays."""
    take_back: bool = True
    """A draining worker whose unit needs one more is kept instead of starting another."""
    min_gain: float = 0.03
    """A running pipeline is left alone for less than this share of its rate."""
    close_enough: float = 0.02
    """Of all plans this close to the best, the one with the fewest changes is taken."""
    change_cost: float = 0.03
    """Share of the rate that must be won by changing as many workers as there are; decides between close plans."""
    headroom: float = 1.0
    """At a plan from empty, measured units may have up to so many times the slowest's rate from what is left over."""
    unsure_below: float = 0.5
    """Below this certainty of a rate a unit at most doubles."""
