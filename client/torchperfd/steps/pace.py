"""The pace: how long training steps take lately. Pure."""

from collections import deque
from collections.abc import Collection, Iterable
from statistics import fmean, median
from typing import Final

from torchperfd.steps.step_batch import TRAIN, StepBatch

_REMEMBERED: Final = 64
_RARE: Final = 3
"""Steps so many times as long as the median had something else in them: a checkpoint, a compilation."""


class Pace:
    """The latest training steps."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_REMEMBERED)
        self._phases: dict[int, deque[int]] = {}

    def add(self, drained: Iterable[StepBatch]) -> None:
        """Add drained steps, whatever their kinds."""
        for batch in drained:
            if batch.kind[0] != TRAIN:
                continue
            newest = batch.duration[-_REMEMBERED:]
            for slot in batch.phases.keys() - self._phases.keys():
                self._phases[slot] = deque([0] * len(self._recent), maxlen=_REMEMBERED)
            for slot, column in self._phases.items():
                columns = batch.phases.get(slot)
                column.extend(columns.ns[-_REMEMBERED:] if columns else [0] * len(newest))
            self._recent.extend(newest)

    @property
    def step_ns(self) -> float:
        """Mean of these steps, without rare long ones; 0 before the first."""
        return usual_ns(self._recent) if self._recent else 0.0

    def phase_ns(self) -> dict[int, float]:
        """Return the mean of each phase, by slot, over the same steps as :attr:`step_ns`."""
        if not self._recent:
            return {}
        kept = usual(self._recent)
        return {
            slot: sum(ns for ns, keep in zip(column, kept, strict=True) if keep) / sum(kept)
            for slot, column in self._phases.items()
        }


def usual_ns(durations: Collection[int]) -> float:
    """Return the mean of some durations, at least one, without rare long ones."""
    return fmean(ns for ns, keep in zip(durations, usual(durations), strict=True) if keep)


def usual(durations: Collection[int]) -> list[bool]:
    """Return which of some durations, at least one, are no rare long ones."""
    longest = _RARE * median(durations)
    return [ns <= longest for ns in durations]
