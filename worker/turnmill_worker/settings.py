"""How a worker behaves, whatever its engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turnmill.errors import UsageError

LEAST_LEASE, GREATEST_LEASE = 0.1, 3600.0
"""Seconds. It is one value for the farm and stays there, so a slip must not get in."""


@dataclass(frozen=True)
class WorkerSettings:
    """All times in seconds.

    `lease`: length of a claim; one value for the farm, the first worker's. `drain`: how long a
    polite shutdown waits for turns to end. `stalled_after`: an engine that neither moves nor is healthy
    for so long is dead. `unstored`: answers kept in memory while Redis is away, before claiming stops.
    `keep_every`: how often growing answers are kept.
    """

    lease: float = 10.0
    drain: float = 30.0
    stalled_after: float = 120.0
    unstored: int = 2000
    keep_every: float = 5.0

    def __post_init__(self) -> None:
        for name in ("lease", "stalled_after", "unstored", "keep_every"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name}: must be a number above 0")
        if not LEAST_LEASE <= self.lease <= GREATEST_LEASE:
            raise UsageError(f"lease {self.lease:g}: from {LEAST_LEASE:g} to {GREATEST_LEASE:g} s")
        if not 0 <= self.drain < math.inf:
            raise UsageError("drain: must be a number, not below 0")
