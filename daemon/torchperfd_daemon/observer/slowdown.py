"""Since when a run is slower than it was, by the steps of one rank, which stand for the run's."""

import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.diagnosis.detect import Onset, OnsetDetector, StepTimes
from torchperfd_daemon.observer.periodicity import PeriodicityTracker
from torchperfd_daemon.observer.rank_watch import RankWatch
from torchperfd_daemon.store import HISTORY_STEPS, Rank

NEW_NORMAL_S: Final = 600.0
"""A slowdown that has lasted for so long is the new normal: the run's past begins anew."""

_RECOVERED: Final = 1.05
_NORMAL_STEPS: Final = 256
_MARKS: Final = 256


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Since when a run is slower than it was.

    Attributes:
        step: Index of the first slower step.
        unix_seconds: When that step ended.
        normal_seconds: What a step took before.
        told_at: When it was certain; monotonic seconds.
    """

    step: int
    unix_seconds: float
    normal_seconds: float
    told_at: float


@dataclass(frozen=True, slots=True)
class _Mark:
    """How many steps the onset detector had been given at a sample, how many there were, and when."""

    fed: int
    seen: int
    unix_seconds: float


class SlowdownTracker:
    """Feeds the steps of a run to its detectors, and keeps the slowdown that there is now.

    Args:
        times: Where to count how long the run's steps take.
    """

    def __init__(self, times: StepTimes) -> None:
        self.slowdown: Slowdown | None = None
        self.since = -np.inf
        """Monotonic seconds at which the present regime began."""
        self.rhythm = PeriodicityTracker()
        self._times = times
        self._onsets = OnsetDetector()
        self._leader: Rank | None = None
        self._seen = self._fed = 0
        self._marks: deque[_Mark] = deque(maxlen=_MARKS)

    def follow(self, watches: Collection[RankWatch], now: float, wall: float) -> int:
        """Take the new steps of the first rank, and return how many there were.

        In synchronous training all steps take the same time, so that the first rank stands for all.
        """
        leader = min(
            (watch.rank for watch in watches if watch.rank.connected and watch.rank.history.seen),
            key=lambda rank: rank.identity.rank,
            default=None,
        )
        if leader is None:
            return 0
        if leader is not self._leader:
            self._leader, self._seen = leader, leader.history.seen
            self._marks.clear()
            self.rhythm = PeriodicityTracker()
        made = leader.history.seen - self._seen
        self._seen += made
        if not made:
            return 0
        onset = None
        columns = leader.history.newest(min(made, HISTORY_STEPS))
        self.rhythm.observe(columns)
        for ns in columns.duration_ns:
            self._times.add(ns / 1e9)
            onset = self._onsets.observe(ns / 1e9) or onset
            self._fed += 1
        self._marks.append(_Mark(self._fed, self._seen, wall))
        if onset is not None:
            self._begin(onset, leader, watches, now, wall)
        elif self.slowdown is not None:
            self._end(self.slowdown, leader, watches, now, wall)
        return made

    def _begin(
        self, onset: Onset, leader: Rank, watches: Collection[RankWatch], now: float, wall: float
    ) -> None:
        """Begin another regime: slower than normal, or normal again."""
        step, unix_seconds = self._locate(onset, leader)
        self.since = now - max(0.0, wall - unix_seconds)
        normal = self.slowdown.normal_seconds if self.slowdown else onset.before_seconds
        if onset.after_seconds <= normal * _RECOVERED:
            self._accept(watches)
            return
        if self.slowdown is None:
            for watch in watches:
                watch.remember(self.since)
            self.slowdown = Slowdown(step, unix_seconds, normal, now)

    def _end(
        self, slowdown: Slowdown, leader: Rank, watches: Collection[RankWatch], now: float, wall: float
    ) -> None:
        """Forget a slowdown that is normal by now, or over though its end was too gradual for an onset."""
        if now - slowdown.told_at > NEW_NORMAL_S:
            self._accept(watches)
            return
        newest = leader.history.newest(_NORMAL_STEPS)
        first_unix_seconds = newest.end_unix_ns[0] / 1e9
        if (
            len(newest.duration_ns) == _NORMAL_STEPS
            and first_unix_seconds > slowdown.unix_seconds
            and statistics.fmean(newest.duration_ns) / 1e9 <= slowdown.normal_seconds * _RECOVERED
        ):
            self.since = now - max(0.0, wall - first_unix_seconds)
            self._accept(watches)

    def _accept(self, watches: Collection[RankWatch]) -> None:
        self.slowdown = None
        for watch in watches:
            watch.forget(self.since)

    def _locate(self, onset: Onset, leader: Rank) -> tuple[int, float]:
        """Return the index of an onset's step since training began, and when it ended in Unix seconds."""
        # What was trained before this daemon came is in the totals only.
        unheard = max(0, leader.totals.train.steps - self._seen)
        mark = next((mark for mark in self._marks if mark.fed > onset.step), self._marks[-1])
        step = max(0, mark.seen - (mark.fed - onset.step))
        ago = self._seen - step
        if 0 < ago <= len(leader.history):
            return step + unheard, leader.history.newest(ago).end_unix_ns[0] / 1e9
        return step + unheard, mark.unix_seconds
