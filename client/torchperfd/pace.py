"""The pace: how long training steps take lately. Pure."""

from collections import deque
from collections.abc import Collection, Iterable
from statistics import fmean, median
from typing import Final

from torchperfd.recorder import TRAIN
from torchperfd.stretch import Stretch

_REMEMBERED: Final = 64
_RARE: Final = 3
"""Steps so many times as long as the median had something else in them: a checkpoint, a compilation."""


class Pace:
    """The latest training steps."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_REMEMBERED)

    def fold(self, drained: Iterable[Stretch]) -> None:
        """Add drained steps, whatever their kinds."""
        for stretch in drained:
            if stretch.kind[0] == TRAIN:
                self._recent.extend(stretch.duration[-_REMEMBERED:])

    @property
    def step_ns(self) -> float:
        """Mean of these steps, without rare long ones; 0 before the first."""
        return usual_ns(self._recent) if self._recent else 0.0


def usual_ns(durations: Collection[int]) -> float:
    """Return the mean of some durations, at least one, without rare long ones."""
    longest = _RARE * median(durations)
    return fmean(ns for ns in durations if ns <= longest)
