"""What can be asked of a stream, beside its pipeline and its plan?"""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.scheduling.rules import Rules


@dataclass(frozen=True, slots=True)
class Options:
    """Numbers in seconds, items and bytes. The defaults are for a finite run on any cluster."""

    ordered: bool = False
    """Deliver epochs in the order of their input; see `control.commands.Deliver`."""
    in_order: bool = False
    """Whoever is called with several items gets neighbours, in the order of the source: `ordered` implies it."""
    eager: bool = False
    """Deliver results at once instead of with their epoch: for serving, and where no payload can be lost."""
    serving: bool = False
    """The source has no end: an epoch is closed by age too."""
    max_wait_s: float | None = None
    """A batch that is not full goes after this long; None: only at the end of its epoch."""
    max_aside: int | None = None
    """More items set aside than this fail the run."""
    follow_plan: bool = False
    """Start with the plan's workers even where their speed was only assumed."""
    replan: bool = True
    replan_every_s: float = 5.0
    first_replan_s: float | None = None
    """Sooner than that, where workers start at once and short runs count."""
    byte_budget: int = 4 << 30
    """What may wait in queues, in bytes."""
    queue_factor: float = 2.0
    """Messages that may wait per slot of the workers in front of which they wait."""
    queue_least: int = 8
    """Messages that may wait however few workers there are: chance must not starve a unit that is just fast enough."""
    message_s: float = 0.004
    """Work per message; a batch that takes longer is a message of its own."""
    message_items: int = 1024
    """The most items per message, unless a batch is larger."""
    message_bytes: int = 4 << 20
    """The most a message should bring or give, unless one batch is more."""
    queue_bytes: int = 32 << 20
    """What may wait in front of a unit, in bytes, unless its workers' next messages are more."""
    finish_waves: bool = False
    """A drain finishes all that was read, later waves included: for runs that nobody resumes."""
    payloads_survive: bool = False
    """Nothing that a worker gave can be lost with a node: then nobody needs to keep an epoch's input."""
    hop_s: float = 0.001
    """How long a message travels; a worker gets a second one in advance where that matters."""
    epoch_s: float = 0.5
    """Source work per epoch."""
    epoch_batches: int = 20
    """Full batches of the slowest unit per epoch, at least."""
    epoch_most_s: float = 60.0
    """However many batches of a late unit that is: an epoch is no more than so much source work, if it has a few."""
    open_epochs: int = 64
    """With ordered output: no more are begun while so many wait."""
    teardown_s: float = 30.0
    """A worker that does not stop within this time is killed."""
    setup_failures: float = 0.3
    """The share of starts that may fail once three did."""
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        assert not (self.ordered and self.eager), "what is delivered at once cannot be in order"
