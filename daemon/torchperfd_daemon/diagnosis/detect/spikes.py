"""Detects long steps with a fixed period, and the likely cause of such a period."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from torchperfd_daemon.diagnosis.detect.robust_statistics import robust_deviation

LONG: Final = 1.3
"""A step is a spike from this multiple of the median on, if it also exceeds the noise."""
MIN_SPIKES: Final = 6

_RECENT: Final = 65
_MEDIAN_EVERY: Final = 16
_KEPT: Final = 64
_PHASES: Final = 32
_BEYOND: Final = 6.0
_IN_PHASE: Final = 0.9
_COVERED: Final = 0.75
_MOSTLY: Final = 0.5


class SpikeCause(Enum):
    """The likely cause of periodic long steps."""

    LOADER_WORKERS = "loader workers"
    GARBAGE_COLLECTION = "garbage collection"
    CHECKPOINT = "checkpoint"
    EVERY_N_STEPS = "every n steps"


@dataclass(frozen=True, slots=True)
class PeriodicSpikes:
    """Long steps with a fixed period.

    Attributes:
        period: The number of steps from one spike to the next.
        cause: Their likely cause.
        phase: The phase that is longer in them; empty if phases are unknown.
        spikes: The number of kept spikes with this period.
        excess_seconds: The mean time that a spike takes above the median step.
    """

    period: int
    cause: SpikeCause
    phase: str
    spikes: int
    excess_seconds: float

    @property
    def seconds_per_step(self) -> float:
        """The cost of the spikes, spread over all steps."""
        return self.excess_seconds / self.period


@dataclass(frozen=True, slots=True)
class _Spike:
    step: int
    excess: float
    phase: str
    collected: float


class SpikeDetector:
    """Reads steps one by one and keeps the newest 64 spikes.

    Args:
        workers: The number of workers of the loader; 0 if unknown.
    """

    def __init__(self, workers: int = 0) -> None:
        self._workers = workers
        self._seen = 0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._median = math.inf
        self._limit = math.inf
        self._usual: dict[str, float] = {}
        self._spikes: deque[_Spike] = deque(maxlen=_KEPT)

    def observe(
        self, seconds: float, phases: Mapping[str, float] | None = None, collected: float = 0.0
    ) -> None:
        """Add the next step, with the times of its phases and of garbage collections in it, in seconds."""
        step = self._seen
        self._seen += 1
        if seconds > self._limit:
            phase = max(phases, key=lambda name: phases[name] - self._usual.get(name, 0.0)) if phases else ""
            self._spikes.append(_Spike(step, seconds - self._median, phase, collected))
        elif phases and self._median < math.inf:
            for name, value in phases.items():
                usual = self._usual.get(name, value)
                if name in self._usual or len(self._usual) < _PHASES:
                    self._usual[name] = usual + (value - usual) / _MEDIAN_EVERY
        self._recent.append(seconds)
        if self._seen % _MEDIAN_EVERY == 0:
            self._median = statistics.median(self._recent)
            spread = robust_deviation(self._recent, self._median)
            self._limit = max(LONG * self._median, self._median + _BEYOND * spread)

    def find(self) -> PeriodicSpikes | None:
        """Return the spikes' period and cause; None if fewer than :data:`MIN_SPIKES` agree on a period.

        If all spikes together have no period, those of each phase are tried, the costliest phase first.
        """
        by_phase: dict[str, list[_Spike]] = {}
        for spike in self._spikes:
            by_phase.setdefault(spike.phase, []).append(spike)
        groups = sorted(by_phase.values(), key=lambda spikes: -sum(spike.excess for spike in spikes))
        for spikes in (list(self._spikes), *groups):
            period = find_period([spike.step for spike in spikes])
            if period is not None:
                return self._describe(period, spikes)
        return None

    def _describe(self, period: int, spikes: list[_Spike]) -> PeriodicSpikes:
        total = sum(spike.excess for spike in spikes)
        cost: dict[str, float] = {}
        for spike in spikes:
            cost[spike.phase] = cost.get(spike.phase, 0.0) + spike.excess
        phase = max(cost, key=lambda name: cost[name])
        collected = sum(min(spike.collected, spike.excess) for spike in spikes)
        cause = self._cause(period, phase, collected / total)
        return PeriodicSpikes(period, cause, phase, len(spikes), total / len(spikes))

    def _cause(self, period: int, phase: str, collected: float) -> SpikeCause:
        if collected >= _MOSTLY:
            return SpikeCause.GARBAGE_COLLECTION
        if phase == "checkpoint":
            return SpikeCause.CHECKPOINT
        # Workers deliver batches round robin, so one round has one wait.
        if phase == "data" and self._workers > 1 and period == self._workers:
            return SpikeCause.LOADER_WORKERS
        return SpikeCause.EVERY_N_STEPS


def find_period(steps: list[int]) -> int | None:
    """Return the period of ascending step numbers; None without one.

    At the right period all steps have the same phase on a circle, and the mean of their directions has the
    length 1 (Rayleigh's test; Mardia and Jupp, Directional Statistics). The same holds for every divisor of
    the period, so the longest period wins. Few spikes may lie in between, and few periods may lack a spike.
    """
    if len(steps) < MIN_SPIKES:
        return None
    offsets = np.array(steps, dtype=np.float64) - steps[0]
    gaps = np.diff(offsets)
    longest = int(np.median(gaps) * 1.5)
    if longest < 2:
        return None
    candidates = np.unique(np.concatenate([gaps, np.round(np.median(gaps) / np.arange(1, 4))]))
    candidates = candidates[(candidates >= 2) & (candidates <= longest)]
    for period in candidates[::-1]:
        direction = np.exp(2j * np.pi * offsets / period).mean()
        periods = np.unique(np.round(offsets / period - np.angle(direction) / (2 * np.pi)))
        if abs(direction) >= _IN_PHASE and len(periods) / (periods[-1] - periods[0] + 1) >= _COVERED:
            return int(period)
    return None
