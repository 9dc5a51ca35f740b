"""Simulated runs with the noise of real ones: drift, resemblance of neighbours, spikes, other means."""

import math
import random
from dataclasses import dataclass
from typing import Final

from torchperfd.report.ending import Ending
from torchperfd.report.record import RankBlocks, RankRecord, RunRecord

PHASES: Final = {"data": 0.15, "forward": 0.3, "backward": 0.4, "optimizer": 0.1, "other": 0.05}
"""Shares of a step."""
_MAX_BLOCKS: Final = 256


@dataclass(frozen=True, slots=True)
class Noise:
    """What makes steps unequal, as parts of a time.

    Attributes:
        drift: Standard deviation of the machine's speed, which all phases share.
        drift_steps: Steps over which that speed forgets.
        independent: Standard deviation of each phase in each step.
        related: The same, of a part that resembles the step before (correlation 0.9).
        spikes: Part of the steps in which a phase takes four times as long.
        between: Standard deviation of a phase's mean from run to run.
    """

    drift: float = 0.015
    drift_steps: float = 150.0
    independent: float = 0.08
    related: float = 0.03
    spikes: float = 0.004
    between: float = 0.003


def simulate(
    source: random.Random,
    *,
    steps: int,
    step_seconds: float = 0.02,
    noise: Noise = Noise(),
    planted: dict[str, float] | None = None,
    speed: float = 1.0,
) -> RunRecord:
    """Return a run of one rank.

    Args:
        source: Of random numbers.
        steps: Training steps after the first.
        step_seconds: Mean time of a step without what is planted.
        noise: What makes steps unequal.
        planted: By phase, what it takes besides, as a part of the step.
        speed: All times are multiplied with it.
    """
    base = {
        name: step_seconds * (share * source.gauss(1, noise.between) + (planted or {}).get(name, 0.0))
        for name, share in PHASES.items()
    }
    keep = math.exp(-1 / noise.drift_steps)
    drift = source.gauss(0, noise.drift)
    related = dict.fromkeys(PHASES, 0.0)
    columns: dict[str, list[float]] = {name: [] for name in PHASES}
    for _ in range(steps):
        drift = keep * drift + math.sqrt(1 - keep * keep) * source.gauss(0, noise.drift)
        for name, seconds in base.items():
            related[name] = 0.9 * related[name] + math.sqrt(1 - 0.81) * source.gauss(0, noise.related)
            spike = 3.0 if source.random() < noise.spikes else 0.0
            factor = 1 + drift + related[name] + source.gauss(0, noise.independent) + spike
            columns[name].append(speed * seconds * max(0.2, factor))
    return _record(columns)


def _record(columns: dict[str, list[float]]) -> RunRecord:
    count = len(next(iter(columns.values())))
    size = 1
    while count // size >= _MAX_BLOCKS:
        size *= 2
    phases = {
        name: tuple(
            math.fsum(values[first : first + size]) / size for first in range(0, count - size + 1, size)
        )
        for name, values in columns.items()
    }
    step = tuple(map(math.fsum, zip(*phases.values(), strict=True)))
    rank = RankRecord(0, count + 1, math.fsum(step) / len(step), {}, RankBlocks(size, step, phases))
    return RunRecord("simulated", "train.py", "node", None, None, 1, Ending("finished"), ranks=(rank,))
