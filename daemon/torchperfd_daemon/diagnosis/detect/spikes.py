"""Long steps that come at a fixed period, and what such a period is a sign of."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from torchperfd_daemon.diagnosis.detect.deviation import robust_deviation

LONG: Final = 1.3
"""A step is a spike from this multiple of the median on, if it is beyond the noise too."""
LEAST_SPIKES: Final = 6

_RECENT: Final = 65
_MEDIAN_EVERY: Final = 16
_KEPT: Final = 64
_PHASES: Final = 32
_BEYOND: Final = 6.0
_IN_PHASE: Final = 0.9
_COVERED: Final = 0.75
_MOSTLY: Final = 0.5


class SpikeCause(Enum):
    """What long steps at a period are a sign of."""

    LOADER_WORKERS = "loader workers"
    GARBAGE_COLLECTION = "garbage collection"
    CHECKPOINT = "checkpoint"
    EVERY_N_STEPS = "every n steps"


@dataclass(frozen=True, slots=True)
class PeriodicSpikes:
    """Long steps at a period.

    Attributes:
        period: Steps from one spike to the next.
        cause: What they are a sign of.
        phase: The phase that is longer in them; empty where phases are not known.
        spikes: How many were seen, of those that are kept.
        excess_seconds: The mean time that a spike takes above the median step.
    """

    period: int
    cause: SpikeCause
    phase: str
    spikes: int
    excess_seconds: float

    @property
    def seconds_per_step(self) -> float:
        """What the spikes cost, spread over all steps."""
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
        workers: How many workers the loader has; 0 when not known.
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
        """Take the next step: its time, its phases' and that of garbage collections in it, in seconds."""
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
        """Return the spikes' period and sign, None where fewer than :data:`LEAST_SPIKES` agree on one.

        Where all spikes together have no period, those of one phase may have, the costliest phase first.
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
        # Workers hand over batches in turn: one round of them is one wait.
        if phase == "data" and self._workers > 1 and period == self._workers:
            return SpikeCause.LOADER_WORKERS
        return SpikeCause.EVERY_N_STEPS


def find_period(steps: list[int]) -> int | None:
    """Return the period of ascending step numbers, None without one.

    Folding: at the right period all steps fall on one place of the circle, and the mean of their directions
    has the length 1 (Rayleigh's test; Mardia and Jupp, Directional Statistics). Every divisor of the period
    does as well, so that the longest period wins; spikes in between, and turns without any, may be few.
    """
    if len(steps) < LEAST_SPIKES:
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
        turns = np.unique(np.round(offsets / period - np.angle(direction) / (2 * np.pi)))
        if abs(direction) >= _IN_PHASE and len(turns) / (turns[-1] - turns[0] + 1) >= _COVERED:
            return int(period)
    return None
