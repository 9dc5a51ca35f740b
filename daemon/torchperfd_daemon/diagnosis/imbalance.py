"""Finds pipeline stages that work for different times.

A pipeline's step takes as long as its longest stage needs. With equal stages it would take their mean.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from torchperfd.durations import duration


@dataclass(frozen=True, slots=True)
class Imbalance:
    """The longest stage of a pipeline, and what it costs.

    Attributes:
        stages: How many stages were seen.
        own_seconds: The own work of the longest stage per step: the median of its ranks; of two, the faster.
        mean_seconds: The mean of all stages.
        wait_seconds: The median wait of all ranks per step.
    """

    stage: int
    stages: int
    own_seconds: float
    mean_seconds: float
    wait_seconds: float

    @property
    def cost_seconds(self) -> float:
        """What equal stages would save per step."""
        return self.own_seconds - self.mean_seconds

    def words(self, step_seconds: float) -> str:
        """Return the evidence in words."""
        return (
            f"stage {self.stage} works {duration(self.own_seconds)} of each {duration(step_seconds)} step,"
            f" the {self.stages} stages {duration(self.mean_seconds)} on average; ranks wait for"
            f" {duration(self.wait_seconds)} of it; move layers from stage {self.stage} to others"
        )


def find_imbalance(ranks: Iterable[tuple[int | None, float, float]]) -> Imbalance | None:
    """Return the longest stage; None for fewer than two stages.

    Args:
        ranks: Of each rank, its stage, own work and wait for others, in seconds per step; ranks without a
            stage are left out.
    """
    placed = [(stage, own, wait) for stage, own, wait in ranks if stage is not None]
    stages = {
        # Of an even number the lower one: a slow rank makes its stage no longer, not even of two.
        stage: statistics.median_low(own for there, own, _ in placed if there == stage)
        for stage in dict.fromkeys(stage for stage, _, _ in placed)
    }
    if len(stages) < 2:
        return None
    longest = max(stages, key=lambda stage: stages[stage])
    return Imbalance(
        longest,
        len(stages),
        stages[longest],
        statistics.fmean(stages.values()),
        statistics.median(wait for _, _, wait in placed),
    )
