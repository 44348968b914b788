"""Role: one kind of long-lived actor, and the settings of pools, colocation and scaling. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dovetail.resources.resources import Resources

if TYPE_CHECKING:
    from dovetail.resources.shape import Shape

ActorClass = Callable[..., Any] | str
"""A class, a function that returns an object, or "package.module:name" of one."""
Workers = int | tuple[int, int]
Placement = bool | Literal["strict"]
DEFAULT_POOL = "default"
"""Pool of roles without one, if a system has a pool of this name."""
RestartPolicy = Literal["always", "never", "fail"]


@dataclass(frozen=True)
class Together:
    """Colocation: one instance of each role of a group is in one process, or in separate processes on one node."""

    group: str
    where: Literal["process", "node"] = "process"
    _: KW_ONLY
    share: Literal["sum", "max"] = "sum"
    """Resources of a process with several roles: the sum of theirs, or the maximum if they never work at once."""


@dataclass(frozen=True)
class Affinity:
    """The nodes that a role may use, by their labels and by other roles on them."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the nodes must have."""
    _: KW_ONLY
    near: Sequence[str] = ()
    """Roles that must have an instance on the same node."""
    apart: Sequence[str] = ()
    """Roles that must not have an instance on the same node."""


@dataclass(frozen=True)
class Pool:
    """A named part of the cluster: nodes with these labels, and at most these resources of them."""

    labels: Mapping[str, str] = field(default_factory=dict)
    _: KW_ONLY
    cpus: float | None = None
    gpus: float | None = None
    memory: str | None = None


@dataclass(frozen=True)
class Scale:
    """Scaling of the number of workers, so that a signal stays near its target.

    `signal` is "outstanding" (calls per instance that are not finished), the name of a method that returns a number or
    a bool, of the role itself ("queue_depth") or of another one ("pool.is_full"), or a function of the live system."""

    target: float
    signal: str | Callable[..., float] = "outstanding"
    _: KW_ONLY
    inverse: bool = False
    """True: a higher signal means fewer workers, as for a pool that is full."""
    tolerance: float = 0.2
    """Signals within this share of the target change nothing."""
    interval: float | str = "5s"
    cooldown: float | str = "30s"
    """Time after a change in which workers are not removed; signals that take time to follow a change (all except
    "outstanding") add none either."""


@dataclass(frozen=True)
class Restart:
    """Restarts of instances that died: how often, and how long to wait."""

    policy: RestartPolicy = "always"
    _: KW_ONLY
    limit: int = 5
    """Restarts of one instance within `window`; one more, and the instance stays dead and the system is degraded."""
    window: float | str = "10m"
    backoff: float | str = "1s"
    """Wait before the first restart; it doubles with every further restart within `window`."""


@dataclass(frozen=True)
class Health:
    """Checks of the method `health` of a class that has one, as by a liveness probe of Kubernetes.

    A check fails if `health` raises, returns False, or does not return in time. The first failure makes the instance
    degraded; after several in succession its process is killed, and restarted by its policy."""

    _: KW_ONLY
    period: float | str = "10s"
    """Time between checks."""
    timeout: float | str = "1s"
    """Time in which `health` must return."""
    failure_threshold: int = 3
    """Consecutive failures that end the process of the instance."""


@dataclass(frozen=True)
class Role:
    """One kind of long-lived actor: its class, the number of instances, and the resources of each."""

    name: str
    cls: ActorClass
    _: KW_ONLY
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    profile: str | None = None
    """Name of a profile that gives the defaults of resources and slots."""
    workers: Workers = 1
    """Number of instances: n, or (minimum, maximum)."""
    resources: Resources | None = None
    """Resources of each instance, or of each rank of a gang. None: those of the profile, or one CPU."""
    slots: int | None = None
    """Calls that one instance executes at the same time. None: those of the profile, or 1."""
    ranks: int = 1
    """Processes per instance, started and restarted together."""
    together: Together | str | None = None
    """Colocation group; a string is a group in one process."""
    pool: str | None = None
    """Name of a pool; None: the pool "default" if the system has one, else the whole cluster."""
    spread: Placement = False
    """True: on as many nodes as possible; "strict": on a node of its own."""
    pack: Placement = False
    """True: on as few nodes as possible; "strict": all on one node."""
    affinity: Affinity | None = None
    env: Mapping[str, str] | None = None
    env_from: Sequence[str] = ()
    """Variables of the driver that its processes get as well; on other machines they get only a few by default."""
    runtime_env: Mapping[str, Any] | None = None
    restart: Restart | RestartPolicy = "always"
    health: Health | None = None
    """Limits of health checks; None: the defaults."""
    after: Sequence[str] = ()
    """Roles that must be ready before this one starts."""
    calls: Sequence[str] = ()
    """Roles that its methods call and wait for, so that deadlocks are found before the launch."""
    scale: Scale | None = None

    @property
    def shape(self) -> Shape:
        """Shape of one instance with all of its ranks."""
        return (self.resources or Resources()).shape(self.ranks)

    @property
    def low(self) -> int:
        return self.workers[0] if isinstance(self.workers, tuple) else self.workers

    @property
    def high(self) -> int:
        return self.workers[1] if isinstance(self.workers, tuple) else self.workers

    @property
    def colocation(self) -> Together | None:
        return Together(self.together) if isinstance(self.together, str) else self.together

    @property
    def near(self) -> Sequence[str]:
        return () if self.affinity is None else self.affinity.near

    @property
    def apart(self) -> Sequence[str]:
        return () if self.affinity is None else self.affinity.apart

    @property
    def restart_rules(self) -> Restart:
        return Restart(self.restart) if isinstance(self.restart, str) else self.restart

    @property
    def health_rules(self) -> Health:
        return Health() if self.health is None else self.health
