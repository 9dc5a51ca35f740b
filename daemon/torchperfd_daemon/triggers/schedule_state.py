"""Scheduled captures: which rank is next, and whether the cost of the last capture permits another one."""

from collections.abc import Iterable
from typing import Final

from torchperfd_daemon.store import Rank, State
from torchperfd_daemon.triggers.rules import Schedule

SETTLE_S: Final = 3.0
"""The delay before the cost is measured: the trace has to be written, and reports come once a second."""


class CostMeter:
    """Measures the cost of a capture: the time of a rank's steps beyond the usual time of as many steps."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._usual = rank.mean_step_seconds()
        self._steps, self._ns = self._made()

    def seconds(self) -> float:
        """Return the cost so far, in seconds."""
        steps, ns = self._made()
        return max(0.0, (ns - self._ns) / 1e9 - (steps - self._steps) * self._usual)

    def _made(self) -> tuple[int, int]:
        train = self._rank.totals.train
        return train.steps, train.ns


class ScheduleState:
    """The state of a schedule: when its next capture is due, and at which rank.

    Args:
        now: Monotonic seconds; the first capture is one interval later.
    """

    def __init__(self, schedule: Schedule, now: float) -> None:
        self.schedule = schedule
        self._due_at = now + schedule.every_seconds
        self._within_overhead_at = now
        self._last: tuple[str, int] | None = None

    def due(self, now: float) -> bool:
        """Return whether an interval is over; if so, begin the next one."""
        if now < self._due_at:
            return False
        self._due_at = now + self.schedule.every_seconds
        return True

    def is_within_overhead(self, now: float) -> bool:
        """Return whether the cost of the last capture, spread over the time since, is within the overhead."""
        return now >= self._within_overhead_at

    def next(self, ranks: Iterable[Rank]) -> Rank | None:
        """Return the training rank after the last one; None if no rank trains."""
        training = {
            (rank.identity.run, rank.identity.rank): rank
            for rank in ranks
            if rank.state is State.TRAINING and rank.history.seen
        }
        if not training:
            return None
        keys = sorted(training)
        later = [key for key in keys if self._last is not None and key > self._last]
        self._last = (later or keys)[0]
        return training[self._last]

    def add_cost(self, began: float, seconds: float) -> None:
        """Record the cost of a capture.

        Args:
            began: When it began; monotonic seconds.
        """
        self._within_overhead_at = began + seconds / self.schedule.overhead
