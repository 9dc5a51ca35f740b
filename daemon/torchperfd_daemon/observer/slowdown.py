"""Tracks since when a run is slower, by the steps of one rank, which represent the run's."""

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
"""A slowdown that has lasted this long becomes the new normal: the run's past begins again."""

_RECOVERED: Final = 1.05
_NORMAL_STEPS: Final = 256
_MARKS: Final = 256


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The present slowdown of a run.

    Attributes:
        step: Index of the first slower step.
        unix_seconds: When that step ended.
        detected_at: When it was detected; monotonic seconds.
    """

    step: int
    unix_seconds: float
    normal_seconds: float
    detected_at: float


@dataclass(frozen=True, slots=True)
class _Mark:
    """At one sample: the steps that the onset detector got so far, all steps so far, and the time."""

    fed: int
    seen: int
    unix_seconds: float


class SlowdownTracker:
    """Feeds the steps of a run to its detectors, and keeps its present slowdown.

    Args:
        times: Counts the step times of the run.
    """

    def __init__(self, times: StepTimes) -> None:
        self.slowdown: Slowdown | None = None
        self.since = -np.inf
        """Monotonic seconds at which the present regime began."""
        self.periodicity = PeriodicityTracker()
        self._times = times
        self._onsets = OnsetDetector()
        self._leader: Rank | None = None
        self._seen = self._fed = 0
        self._marks: deque[_Mark] = deque(maxlen=_MARKS)

    def follow(self, watches: Collection[RankWatch], now: float, wall: float) -> int:
        """Add the new steps of the first rank, and return how many there were.

        In synchronous training all ranks have the same step time, so that the first rank represents all.
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
            self.periodicity = PeriodicityTracker()
        new_steps = leader.history.seen - self._seen
        self._seen += new_steps
        if not new_steps:
            return 0
        onset = None
        columns = leader.history.newest(min(new_steps, HISTORY_STEPS))
        self.periodicity.observe(columns)
        for ns in columns.duration_ns:
            self._times.add(ns / 1e9)
            onset = self._onsets.observe(ns / 1e9) or onset
            self._fed += 1
        self._marks.append(_Mark(self._fed, self._seen, wall))
        if onset is not None:
            self._begin(onset, leader, watches, now, wall)
        elif self.slowdown is not None:
            self._end(self.slowdown, leader, watches, now, wall)
        return new_steps

    def _begin(
        self, onset: Onset, leader: Rank, watches: Collection[RankWatch], now: float, wall: float
    ) -> None:
        """Begin a new regime: slower than normal, or normal again."""
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
        """End a slowdown that has become the new normal, or that ended too gradually for an onset."""
        if now - slowdown.detected_at > NEW_NORMAL_S:
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
        # This daemon has not seen the steps from before it started.
        earlier_steps = max(0, leader.next_step - self._seen)
        mark = next((mark for mark in self._marks if mark.fed > onset.step), self._marks[-1])
        step = max(0, mark.seen - (mark.fed - onset.step))
        ago = self._seen - step
        if 0 < ago <= len(leader.history):
            return step + earlier_steps, leader.history.newest(ago).end_unix_ns[0] / 1e9
        return step + earlier_steps, mark.unix_seconds
