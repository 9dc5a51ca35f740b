"""Changes of a run's steps over time: periodic long steps, the onset of a slowdown, and that of each cause.

The steps of one rank represent the run's. A cause that joins a slowdown later has an onset of its own.
"""

import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from torchperfd.model.formatting import duration
from torchperfd_daemon.diagnosis.detect.onset import Onset, OnsetDetector
from torchperfd_daemon.diagnosis.detect.straggler import StepTimes
from torchperfd_daemon.diagnosis.detect.trends import Regression, RegressionDetector, SpikeDetector
from torchperfd_daemon.diagnosis.evidence import MIN_FINDINGS, SAMPLE_S, WINDOW_SAMPLES
from torchperfd_daemon.diagnosis.verdict import Cause, Verdict, capture_command
from torchperfd_daemon.observer.rank_watch import RankWatch
from torchperfd_daemon.store.model import HISTORY_STEPS, StepColumns
from torchperfd_daemon.store.store import Rank

MIN_SHARE: Final = 0.05
"""Periodic long steps that cost a smaller share of all steps are not reported."""


class PeriodicityTracker:
    """Follows the steps of one rank, which represents its run. Memory of fixed size."""

    def __init__(self) -> None:
        self._spikes = SpikeDetector()
        self._throughput = RegressionDetector()
        self._step_seconds = 0.0

    def observe(self, columns: StepColumns) -> None:
        """Add the next steps, at least one."""
        for index, ns in enumerate(columns.duration_ns):
            phases = {name: column[index] / 1e9 for name, column in columns.phases.items()}
            self._spikes.observe(ns / 1e9, phases)
            self._throughput.observe(ns / 1e9)
        self._step_seconds = statistics.fmean(columns.duration_ns) / 1e9

    @property
    def period(self) -> int:
        """The number of steps from one long step to the next; 1 without a period."""
        found = self._spikes.find()
        return found.period if found else 1

    @property
    def seconds_per_step(self) -> float:
        """What periodic long steps take longer than the others, spread over all steps; 0 without a period."""
        found = self._spikes.find()
        return found.seconds_per_step if found else 0.0

    @property
    def past_step_seconds(self) -> float | None:
        """The step time before throughput decreased, even if slowly; None if it has not decreased."""
        found = self._regression()
        return 1 / found.past_per_second if found else None

    def remark(self, verdict: Verdict) -> str:
        """Return an addition to a verdict's evidence about periodic long steps; empty without any."""
        found = self._spikes.find()
        if found is None or found.seconds_per_step < MIN_SHARE * self._step_seconds:
            return ""
        phase = f", most of it in {found.phase}" if found.phase and found.phase != verdict.phase else ""
        return f"every {_ordinal(found.period)} step takes {duration(found.excess_seconds)} longer{phase}"

    def slower_than_ever(self, run: str) -> Verdict | None:
        """Return the verdict on a run whose throughput has decreased, even if slowly; None if it has not."""
        found = self._regression()
        if found is None:
            return None
        cost = 1 / found.now_per_second - 1 / found.past_per_second
        words = (
            f"{found.now_per_second:.3g} steps/s, {-found.change:.0%} fewer than the"
            f" {found.past_per_second:.3g} of the run's past"
        )
        return Verdict(Cause.UNKNOWN, run, "", None, "", words, cost, capture_command(run))

    def _regression(self) -> Regression | None:
        found = self._throughput.find()
        return found if found and found.regressed and found.now_per_second else None


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


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


# Until a window is full of slow steps, a small cause of the same slowdown may not be found.
_WITH_SLOWDOWN_S: Final = (WINDOW_SAMPLES + MIN_FINDINGS) * SAMPLE_S


class CauseOnsets:
    """Keeps the onset of each cause that has come with or during a slowdown."""

    def __init__(self) -> None:
        self._slowdown_step: int | None = None
        # By cause and rank: the first slower step, and when it ended in Unix seconds.
        self._onsets: dict[tuple[Cause, int | None], tuple[int, float]] = {}

    def date(
        self, verdicts: Sequence[Verdict], slowdown: Slowdown, ranks: Sequence[Rank], now: float
    ) -> list[Verdict]:
        """Return the verdicts of one sample, each that has grown with its onset.

        A cause that is found soon after the slowdown has the slowdown's onset; that of a later one is the
        newest step at its first sample.

        Args:
            ranks: The run's connected ranks.
            now: Monotonic seconds.
        """
        if slowdown.step != self._slowdown_step:
            self._slowdown_step = slowdown.step
            self._onsets.clear()
        with_slowdown = now - slowdown.detected_at <= _WITH_SLOWDOWN_S
        newest = max(ranks, key=lambda rank: rank.totals.train.steps, default=None)
        if with_slowdown or newest is None:
            onset = slowdown.step, slowdown.unix_seconds
        else:
            onset = newest.totals.train.steps, newest.last_step_unix_seconds
        return [
            _dated(verdict, *self._onsets.setdefault((verdict.cause, verdict.rank), onset))
            if verdict.has_grown
            else verdict
            for verdict in verdicts
        ]


def _dated(verdict: Verdict, step: int, unix_seconds: float) -> Verdict:
    return replace(
        verdict,
        evidence=f"{verdict.evidence}, since step {step}",
        onset_step=step,
        onset_unix_seconds=unix_seconds,
    )
