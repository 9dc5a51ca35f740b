"""Finds by how much steps are longer beside checkpoints that are saved in the background."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torchperfd_daemon.diagnosis.detect.straggler import MIN_SHARE

_BESIDE: Final = 0.5
"""The steps of a sample are beside a save if one was under way for this part of its time."""
_KEPT: Final = 10
_MIN_SAMPLES: Final = 5
_MIN_ERRORS: Final = 5.0
"""The difference must be this multiple of its standard error."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """The training steps of one sample."""

    steps: int
    seconds: float


class StepsBesideSaves:
    """Compares the steps beside one rank's newest save with those before and after it, in fixed memory.

    A save begins and ends at random times. Steps that are longer beside it than both before and after it are
    longer because of it. While it is under way, those before it are all there is to compare with.
    """

    def __init__(self) -> None:
        self._before: deque[_Sample] = deque(maxlen=_KEPT)
        self._beside: deque[_Sample] = deque(maxlen=_KEPT)
        self._after: deque[_Sample] = deque(maxlen=_KEPT)

    def add(self, saving: float, steps: int, seconds: float) -> None:
        """Add the training steps of a sample.

        Args:
            saving: For which part of its time a save was under way, 0 to 1.
            steps: Their number.
            seconds: Their total time.
        """
        if steps <= 0:
            return
        sample = _Sample(steps, seconds)
        if saving >= _BESIDE:
            if self._after:
                self._before.extend(self._after)
                self._after.clear()
                self._beside.clear()
            self._beside.append(sample)
        elif not saving:
            (self._after if self._beside else self._before).append(sample)

    @property
    def extra_seconds(self) -> float:
        """By how much the mean step beside the newest save is longer; 0 unless that is beyond chance."""
        if len(self._beside) < _MIN_SAMPLES or len(self._before) < _MIN_SAMPLES:
            return 0.0
        others = [each for each in (self._before, self._after) if len(each) >= _MIN_SAMPLES]
        return min(_longer(self._beside, each) for each in others)


def _longer(beside: Sequence[_Sample], others: Sequence[_Sample]) -> float:
    longer = _mean(beside) - _mean(others)
    error = math.hypot(_error(beside), _error(others))
    return longer if longer >= max(MIN_SHARE * _mean(others), _MIN_ERRORS * error) else 0.0


def _mean(samples: Sequence[_Sample]) -> float:
    """Return the mean step in seconds."""
    return sum(each.seconds for each in samples) / sum(each.steps for each in samples)


def _error(samples: Sequence[_Sample]) -> float:
    """Return the standard error of the mean step, from the means of samples."""
    return statistics.stdev(each.seconds / each.steps for each in samples) / math.sqrt(len(samples))
