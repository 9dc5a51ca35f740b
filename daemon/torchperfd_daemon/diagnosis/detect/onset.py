"""Detects since which step a run is slower or faster: change points in a stream of step times.

The detector uses cumulative sums (Page, Biometrika 41, 1954) of the difference between each step's log time
and the reference. Differences are clipped after Huber, so that one long step counts little more than a
changed one. Thresholds follow the noise, which is measured over blocks of several lengths: correlated noise
(other jobs, clock rates, caches) delays detection instead of causing false alarms.

A change is reported when it has lasted longer than earlier temporary changes. A shared machine becomes slower
for seconds, and is then as fast as before. The end of such an episode is certain only when it has lasted
longer than the episode.
"""

import math
import statistics
from array import array
from dataclasses import dataclass
from typing import Final

from torchperfd_daemon.diagnosis.detect.robust_statistics import BlockNoise, robust_deviation

MIN_SECONDS: Final = 0.5
"""No change is reported before it has lasted this long, regardless of the number of steps."""
LONGEST_SECONDS: Final = 10.0
"""The longest required time, within which a culprit must be named. A longer change is not an episode."""
MEMORY_STEPS: Final = 100_000
"""An episode is remembered for this many steps, in which one false alarm is allowed."""

# A change must last this many times the longest episode.
_LONGER: Final = 2.0


class DebounceWindow:
    """The time that the next change must last, learnt from the reported changes."""

    __slots__ = ("_learnt", "_since", "_until")

    def __init__(self) -> None:
        self._learnt = MIN_SECONDS
        self._until = 0
        self._since = -math.inf

    def seconds(self, step: int) -> float:
        """Return the required time, in seconds, of a change that comes long after the last one."""
        return self._learnt if step < self._until else MIN_SECONDS

    def required_seconds(self, since: int, step_seconds: float) -> float:
        """Return the required time of a change, in seconds.

        Args:
            since: The first step of the change.
        """
        return max(self.seconds(since), min(LONGEST_SECONDS, _LONGER * self._episode(since, step_seconds)))

    def learn(self, since: int, step_seconds: float) -> None:
        """Record a reported change; the arguments are those of :meth:`required_seconds`."""
        if self._episode(since, step_seconds):
            self._learnt = self.required_seconds(since, step_seconds)
            self._until = since + MEMORY_STEPS
        self._since = since

    def _episode(self, since: int, step_seconds: float) -> float:
        """Return for how many seconds the last change lasted; 0 if that is too long for an episode."""
        lasted = (since - self._since) * step_seconds
        return lasted if lasted < LONGEST_SECONDS else 0.0


CHANGES: Final = (0.1, 0.35, 1.0)
"""The changes with a pair of sums each. Changes in between are detected by the neighbouring sums."""
CONFIRM_STEPS: Final = 18
"""No change is reported before it has lasted this many steps and the time of :class:`DebounceWindow`."""
LEARNING_STEPS: Final = 64
"""The number of steps of a first reference. Later steps join it at this age, unless a change is suspected."""
REFERENCE_STEPS: Final = 256

_RING: Final = 1024
_REFER_EVERY: Final = 32
# Logarithm of the mean number of steps to a false alarm, for normal noise and an exact reference.
_LOG_RUN_LENGTH: Final = 14.0
_MIN_STEPS: Final = 12
_MIN_SIGMA: Final = 1e-3
# A change must be this multiple of the reference's usual error, and exceed the least by three standard
# errors.
_WANDERS: Final = 4.0
_SURE: Final = 3.0
_NEWEST: Final = 8
_MEDIAN_OF: Final = 64
_LONGEST_STEP: Final = 1e12


@dataclass(frozen=True, slots=True)
class Onset:
    """A lasting change of the step time.

    Attributes:
        step: The first changed step; the detector's first step is 0.
        detected_step: The step at which it was certain enough.
        after_seconds: The median of the newest steps.
        confidence: The probability, 0 to 1, that the true change exceeds half of the least of
            :data:`CHANGES` and the normal drift of the step time.
    """

    step: int
    detected_step: int
    before_seconds: float
    after_seconds: float
    confidence: float

    @property
    def change(self) -> float:
        """The increase of the step time, as a share of the time before; negative if it is faster."""
        return self.after_seconds / self.before_seconds - 1


class OnsetDetector:
    """Detects lasting changes in step times. The state has a fixed size of about 10 KiB."""

    def __init__(self) -> None:
        self._seen = 0
        self._logs = array("d", bytes(8 * _RING))
        self._sums = tuple(_Sums(math.log1p(change)) for change in CHANGES)
        self._debounce = DebounceWindow()
        self._begin(0)

    @property
    def noise(self) -> float:
        """The relative standard deviation of a step, for independent steps whose means vary as observed."""
        return math.sqrt(self._sums[0].variance(self._sigma))

    @property
    def least_change(self) -> float:
        """The least detectable change, given the normal drift of the step time."""
        return math.expm1(max(self._sums[0].shift / 2, _WANDERS * self._sums[0].noise.wander()))

    @property
    def steps_to_detect(self) -> float:
        """The mean number of steps until a change by the least of :data:`CHANGES` is detected.

        Infinite while there is no reference.
        """
        return max(float(CONFIRM_STEPS), 2 * self._sums[0].threshold / self._sums[0].shift)

    @property
    def seconds_to_detect(self) -> float:
        """The least time for which a change must last before it is reported."""
        return self._debounce.seconds(self._seen)

    def observe(self, seconds: float) -> Onset | None:
        """Add the next step's time; return the change that it makes certain, if any.

        A time that is not a positive number is replaced by the previous step's.
        """
        step = self._seen
        self._seen += 1
        value = math.log(seconds) if 0 < seconds < _LONGEST_STEP else self._logs[(step - 1) % _RING]
        self._logs[step % _RING] = value
        level = self._level
        if level is None:
            if self._seen - self._start >= LEARNING_STEPS:
                self._joined = self._seen
                self._refer()
            return None
        residual = value - level
        certain = False
        quiet = True
        for sums in self._sums:
            most = sums.add(residual, step)
            if most > 0.5 * sums.threshold:
                quiet = False
                certain = certain or most > sums.threshold
        if certain:
            onset = self._confirm(level)
            if onset is not None:
                self._begin(onset.step)
                return onset
        if self._seen - self._joined > (LEARNING_STEPS if quiet else _RING - REFERENCE_STEPS):
            self._join(level)
        return None

    def _begin(self, step: int) -> None:
        """Drop the reference, and keep the estimates of the noise."""
        self._start = step
        self._joined = step
        self._level: float | None = None
        self._sigma = _MIN_SIGMA
        for sums in self._sums:
            sums.reset()

    def _join(self, level: float) -> None:
        residual = self._logs[self._joined % _RING] - level
        for sums in self._sums:
            sums.learn(residual)
        self._joined += 1
        if self._joined % _REFER_EVERY == 0:
            self._refer()

    def _refer(self) -> None:
        values = self._slice(max(self._start, self._joined - REFERENCE_STEPS), self._joined)
        level = statistics.median(values)
        self._level = level
        self._sigma = max(_MIN_SIGMA, robust_deviation(values, level))
        for sums in self._sums:
            sums.fit(self._sigma, len(values))

    def _slice(self, first: int, end: int) -> "array[float]":
        low, high = first % _RING, end % _RING
        return self._logs[low:high] if low < high else self._logs[low:] + self._logs[:high]

    def _confirm(self, level: float) -> Onset | None:
        """Return the change if it has lasted, the newest steps still show it, and it is large enough."""
        since, sign = max(sums.newest() for sums in self._sums if sums.most > sums.threshold)
        lasted = self._seen - since
        if lasted < CONFIRM_STEPS:
            return None
        values = self._slice(max(since, self._seen - _MEDIAN_OF), self._seen)
        after = statistics.median(values)
        before_seconds, after_seconds = math.exp(level), math.exp(after)
        required = self._debounce.required_seconds(since, before_seconds)
        if lasted * after_seconds < required:
            return None
        least = math.log1p(self.least_change)
        error = self.noise * math.sqrt(1 / len(values) + 1 / REFERENCE_STEPS)
        score = (sign * (after - level) - least) / error
        if (
            score < _SURE
            or sign * (statistics.median(values[-_NEWEST:]) - level) < least
            or not self._lasts(math.ceil(required / after_seconds), level + sign * least, sign)
        ):
            return None
        self._debounce.learn(since, before_seconds)
        confidence = 1 - 0.5 * math.erfc(score / math.sqrt(2))
        first = self._first_changed(since, level)
        after_seconds = math.exp(statistics.median(values[-(self._seen - first) :]))
        return Onset(first, self._seen - 1, before_seconds, after_seconds, confidence)

    def _first_changed(self, since: int, level: float) -> int:
        """Return where the old and the new level describe the steps best, by absolute differences.

        The sums of small changes begin with a slight drift that precedes a larger change.
        """
        values = self._slice(max(since, self._seen - (_RING - 1)), self._seen)
        after = statistics.median(values[-_NEWEST:])
        first, least, total = 0, 0.0, 0.0
        for place, value in enumerate(values[:-_NEWEST], 1):
            total += abs(value - level) - abs(value - after)
            if total < least:
                first, least = place, total
        return self._seen - len(values) + first

    def _lasts(self, steps: int, bound: float, sign: int) -> bool:
        """Return whether the median of the newest ``steps``, as far as the ring has them, is beyond a bound.

        Without this test, a sum that has grown in one episode would take the next episode for the same
        change.
        """
        values = self._slice(self._seen - min(steps, _RING - 1), self._seen)
        return sign * (statistics.median(values) - bound) >= 0


class _Sums:
    """The two sums, up and down, that detect changes of one size in the logarithm of step times."""

    __slots__ = (
        "_clip", "_down", "_down_since", "_half", "_learnt", "_offset", "_up", "_up_since",
        "most", "noise", "shift", "threshold",
    )  # fmt: skip

    def __init__(self, shift: float) -> None:
        self.shift = shift
        self.noise = BlockNoise()
        self._half = shift / 2
        self._learnt = 0
        self._offset = 0.0
        self.reset()

    def reset(self) -> None:
        """Reset both sums; the threshold is infinite until :meth:`fit`."""
        self._up = self._down = self.most = 0.0
        self._up_since = self._down_since = 0
        self._clip = 1.5 * self.shift
        self.threshold = math.inf

    def variance(self, sigma: float) -> float:
        """Return the variance of a step that follows from means over blocks, at least ``sigma`` squared."""
        return max(sigma * sigma, self.noise.variance())

    def fit(self, sigma: float, reference: int) -> None:
        """Set the threshold for steps with deviation ``sigma`` around a reference of ``reference`` steps."""
        self._clip = max(1.5 * self.shift, 2.5 * sigma)
        # The median of n normal values varies by pi / 2n; it is in the sum once for each step of the change.
        inexact = 1 + math.pi / 2 * LEARNING_STEPS / reference
        # The correlation of the noise is known only after many steps.
        unseen = 1 + 2 * LEARNING_STEPS / max(LEARNING_STEPS, self.noise.steps)
        variance = self.variance(sigma) * inexact * unseen
        self.threshold = max(_MIN_STEPS * self._half, _LOG_RUN_LENGTH * variance / self.shift)

    def add(self, residual: float, step: int) -> float:
        """Add a step's difference from the reference; return the greater sum."""
        # Plain comparisons: this runs for every step, and min and max cost five times as much.
        clip, half = self._clip, self._half
        if residual > clip:
            residual = clip
        elif residual < -clip:
            residual = -clip
        residual -= self._offset
        up, down = self._up, self._down
        if up <= 0:
            up, self._up_since = 0.0, step
        if down <= 0:
            down, self._down_since = 0.0, step
        self._up = up = up + residual - half
        self._down = down = down - residual - half
        self.most = up if up > down else down
        return self.most

    def newest(self) -> tuple[int, int]:
        """Return the step since which the greater sum has grown, and its direction, 1 or -1."""
        return (self._up_since, 1) if self._up > self._down else (self._down_since, -1)

    def learn(self, residual: float) -> None:
        """Update the noise with a step that belongs to no change."""
        clipped = min(self._clip, max(-self._clip, residual))
        self.noise.add(clipped - self._offset)
        # For asymmetric noise, such as an occasional long step, the mean differs from the median.
        self._learnt = min(self._learnt + 1, REFERENCE_STEPS)
        self._offset += (clipped - self._offset) / self._learnt
