"""Detects that a run is slower than before, even if it became so slowly."""

import statistics
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.diagnosis.detect.deviation import robust_deviation
from torchperfd_daemon.diagnosis.detect.reservoir import Reservoir

BLOCK_STEPS: Final = 64
MIN_BLOCKS: Final = 12
MIN_CHANGE: Final = 0.05
"""A smaller loss of throughput is not reported."""

_NEWEST: Final = 4
# Shorter than the resolution of any clock.
_SHORTEST: Final = 1e-9
_UNLIKE: Final = 5.0


@dataclass(frozen=True, slots=True)
class Regression:
    """Throughput now and before.

    Attributes:
        past_per_second: The median over blocks of the run's past.
        now_per_second: The median of the newest four blocks.
        noise_per_second: The deviation of one block in the past.
        regressed: Whether the loss is at least :data:`MIN_CHANGE` and beyond the noise of the past.
    """

    past_per_second: float
    now_per_second: float
    noise_per_second: float
    regressed: bool

    @property
    def change(self) -> float:
        """The change of throughput as a share of the past's; negative when it is lower."""
        return self.now_per_second / self.past_per_second - 1


class RegressionDetector:
    """Compares the newest 256 steps with all earlier ones, which are thinned out as they grow in number."""

    def __init__(self) -> None:
        self._block: list[float] = []
        self._amount = 0.0
        self._newest: list[float] = []
        self._past = Reservoir()
        self._blocks = 0

    def observe(self, seconds: float, amount: float = 1.0) -> None:
        """Add a step and its amount of work: samples, tokens or simply one step.

        A block's throughput is its mean amount divided by its median step, so that occasional long steps are
        not a regression.
        """
        self._block.append(seconds)
        self._amount += amount
        if len(self._block) < BLOCK_STEPS:
            return
        middle = statistics.median(self._block)
        if middle > _SHORTEST:
            self._newest.append(self._amount / BLOCK_STEPS / middle)
        self._block.clear()
        self._amount = 0.0
        if len(self._newest) > _NEWEST:
            self._past.add(self._blocks, self._newest.pop(0))
            self._blocks += 1

    def find(self) -> Regression | None:
        """Return the comparison; None before the past has :data:`MIN_BLOCKS` blocks."""
        if len(self._past) < MIN_BLOCKS:
            return None
        _, past = self._past.points()
        usual = float(np.median(past))
        noise = robust_deviation(past.tolist(), usual)
        now = statistics.median(self._newest)
        lost = usual - now
        return Regression(usual, now, noise, usual > 0 and lost >= max(MIN_CHANGE * usual, _UNLIKE * noise))
