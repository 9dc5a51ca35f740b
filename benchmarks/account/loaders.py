"""Loaders of the oracle's jobs: what their workers take for a batch, fitted to the recorded waits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.diagnosis.step_records import MIN_SHARE, RankRecord

Float64 = npt.NDArray[np.float64]

_BISECTIONS: Final = 24


@dataclass(frozen=True, slots=True)
class Batches:
    """How a loader makes batches, in seconds; each array has shape (ranks, steps).

    Attributes:
        make: What a batch takes to make.
        handover: What taking a finished one over from a worker takes.
        workers: How many make batches.
    """

    make: Float64
    handover: Float64
    workers: int


def batches_of(records: Sequence[RankRecord], workers: int, known_seconds: float) -> Batches | None:
    """Return how the workers of each rank make batches; None without workers.

    Args:
        known_seconds: What a batch takes, where no wait shows that.
    """
    if not workers:
        return None
    data = np.array([record.host["data"] for record in records])
    handover = np.repeat(data.min(axis=1, keepdims=True), data.shape[1], axis=1)
    make = np.zeros(data.shape)
    for rank, record in enumerate(records):
        step = float(record.steps.mean())
        waited = float((data[rank] - handover[rank]).mean())
        spent = record.steps - data[rank]
        if waited < MIN_SHARE * step:
            # Workers that keep up take at most their share of the step.
            make[rank] = min(known_seconds, workers * step)
            continue
        low, high = 0.0, 2.0 * workers * step
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if _wait(middle, spent, float(handover[rank, 0]), workers) < waited:
                low = middle
            else:
                high = middle
        make[rank] = (low + high) / 2
    return Batches(make, handover, workers)


def _wait(make: float, spent: Float64, handover: float, workers: int) -> float:
    """Return the mean wait for batches of equal cost, if the loop spends such times between them.

    Args:
        make: What a worker takes for a batch.
        spent: What the loop takes for everything else, by step.
    """
    free = [0.0] * workers
    taken: list[float] = []
    now = waited = 0.0
    for step, spends in enumerate(spent.tolist()):
        begin = free[step % workers]
        if step >= 2 * workers:
            begin = max(begin, taken[step - 2 * workers])
        ready = free[step % workers] = begin + make
        waited += max(0.0, ready - now)
        now = max(now, ready) + handover
        taken.append(now)
        now += spends
    return waited / max(1, len(spent))
