"""Glances: whose turn it is, and whether what the last one cost allows for another yet."""

from collections.abc import Iterable
from typing import Final

from torchperfd_daemon.store import Rank, State
from torchperfd_daemon.triggers.rules import Schedule

SETTLE_S: Final = 3.0
"""How long after a glance its cost still comes in: the trace is written, accounts arrive once a second."""


class Meter:
    """What something costs a rank: the time of its steps beyond what as many steps usually take."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._usual = rank.mean_step_seconds()
        self._steps, self._ns = self._made()

    def seconds(self) -> float:
        """Return the cost so far."""
        steps, ns = self._made()
        return max(0.0, (ns - self._ns) / 1e9 - (steps - self._steps) * self._usual)

    def _made(self) -> tuple[int, int]:
        train = self._rank.totals.train
        return train.steps, train.ns


class Turns:
    """When a schedule's next glance is due, and at which rank.

    Args:
        schedule: What was asked for.
        now: Monotonic seconds; the first glance is an interval later.
    """

    def __init__(self, schedule: Schedule, now: float) -> None:
        self.schedule = schedule
        self._due_at = now + schedule.every_seconds
        self._affordable_at = now
        self._last: tuple[str, int] | None = None

    def due(self, now: float) -> bool:
        """Return whether an interval is over; the next one begins then."""
        if now < self._due_at:
            return False
        self._due_at = now + self.schedule.every_seconds
        return True

    def affordable(self, now: float) -> bool:
        """Return whether the last glance, spread over the time since, keeps to the overhead allowed."""
        return now >= self._affordable_at

    def next(self, ranks: Iterable[Rank]) -> Rank | None:
        """Return the rank after the last one, of those that train; None when none does."""
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

    def paid(self, began: float, seconds: float) -> None:
        """Take note of what a glance has cost that began at a moment of the monotonic clock."""
        self._affordable_at = began + seconds / self.schedule.overhead
