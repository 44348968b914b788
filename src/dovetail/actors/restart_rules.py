"""Rules for the restarts of a process: policy, limit within a window, backoff, and the wait for a silent node. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dovetail.pipeline.durations import parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.actors.role import Role

MAX_BACKOFF_S, MAX_BACKOFF_FACTOR = 2.0, 6
"""The wait before a restart stops doubling at the larger of these two; `limit` ends a series of restarts."""
NODE_RETURN_S = 15.0
"""Time in which processes are restarted on a node whose agent was lost only if no other node has room: the node may be
lost, too."""
ROOM_RETRY_S = 1.0
"""Interval of attempts to place a process whose node is lost."""


class RestartRules(NamedTuple):
    """Restart of one process: the strictest rules of its roles."""

    policy: str
    limit: int
    window_s: float
    backoff_s: float

    @classmethod
    def of(cls, roles: Sequence[Role]) -> RestartRules:
        rules = [role.restart_rules for role in roles]
        policies = {rule.policy for rule in rules}
        policy = "fail" if "fail" in policies else "never" if "never" in policies else "always"
        return cls(
            policy,
            min(rule.limit for rule in rules),
            max(parse_duration(rule.window) for rule in rules),
            max(parse_duration(rule.backoff) for rule in rules),
        )

    def wait_s(self, restarts: int) -> float | None:
        """Wait before the next restart, after this many within the window; None: the limit is reached."""
        if restarts >= self.limit:
            return None
        longest_s = max(MAX_BACKOFF_S, MAX_BACKOFF_FACTOR * self.backoff_s)
        return min(self.backoff_s * float(2 ** min(restarts, 30)), longest_s)
