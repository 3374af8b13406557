"""When the next checkpoint is due."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hpcrun.recipe import Checkpoint

FAILURES_PER_YEAR = 2.4
"""Of one node: 6.5 per 1000 node-days on a cluster of A100s (Kokolis et al., 2024, arXiv:2410.21680)."""

_YEAR_S = 365.25 * 86400
_COST_UNKNOWN_S = 10.0
"""What a save is taken to cost until one has been measured."""


def best_interval(cost: float, mean_time_to_failure: float) -> float:
    """Seconds of work between checkpoints that lose the least time (Daly, 2006, eq. 37; Young, 1974).

    Args:
        cost: seconds for which one checkpoint stops the work.
        mean_time_to_failure: seconds between failures of the whole job.
    """
    if cost >= 2 * mean_time_to_failure:
        return mean_time_to_failure
    ratio = cost / (2 * mean_time_to_failure)
    young = math.sqrt(2 * cost * mean_time_to_failure)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


class Interval:
    """Rank 0 asks it after every step; the other ranks hear the answer.

    Args:
        nodes: of the job: any of them can end it.
        failures_per_year: of one node; None takes :data:`FAILURES_PER_YEAR`.
    """

    def __init__(
        self,
        wanted: Checkpoint,
        nodes: int,
        failures_per_year: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted, self._clock = wanted, clock
        self._mean_time_to_failure = _YEAR_S / (failures_per_year or FAILURES_PER_YEAR) / nodes
        self._cost, self._duration = _COST_UNKNOWN_S, 0.0
        self._last = clock()

    def due(self, step: int) -> bool:
        """Whether a save is due when ``step`` has been taken."""
        if self._wanted.every_steps:
            return step % self._wanted.every_steps == 0
        return self._clock() - self._last >= self.seconds

    @property
    def seconds(self) -> float:
        """Between saves, where the interval is a time. Never below what a save takes behind the training."""
        if fixed := self._wanted.every_seconds:
            return float(fixed)
        return max(best_interval(self._cost, self._mean_time_to_failure), self._duration)

    def started(self) -> None:
        """A save has begun."""
        self._last = self._clock()

    def measured(self, stall: float, seconds: float) -> None:
        """A save has stopped the training for ``stall`` seconds and taken ``seconds`` in all."""
        self._cost, self._duration = max(stall, 1e-3), seconds
