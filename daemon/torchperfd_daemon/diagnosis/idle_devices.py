"""How long devices work and idle in a step, and what of a rank's lateness that time absorbs. Pure.

Where hosts cannot keep their devices busy, all devices idle for some of each step. What one rank is late by
falls into that time first, so that steps grow by less than the rank is late.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Final

from torchperfd.durations import duration
from torchperfd_daemon.diagnosis.evidence import RankEvidence

# Steps that have grown by this share of a rank's lateness differ from it only by chance.
_NOT_ABSORBED: Final = 0.9
# So many standard errors; the means of successive samples depend on each other.
_CERTAIN: Final = 4.0


def device_work(rank: RankEvidence) -> float:
    """Return how long a rank's device works in a step, in seconds; 0 where it is unknown."""
    return rank.step_seconds * rank.device_busy if rank.device_busy is not None else 0.0


def device_idle(rank: RankEvidence) -> float:
    """Return how long a rank's device neither works nor waits for other ranks in a step, in seconds."""
    return rank.step_seconds - device_work(rank) - rank.wait_seconds


def idle_before(ranks: Sequence[RankEvidence]) -> float:
    """Return for how long devices idled in a step before the run became slower, in seconds.

    Infinite where the driver does not show how busy devices are.
    """
    pasts = [rank.before for rank in ranks if rank.before]
    if not pasts or any(past.device_busy is None for past in pasts):
        return math.inf
    return max(0.0, statistics.median(device_idle(past) for past in pasts))


def absorbed(
    rank: RankEvidence, past: RankEvidence, cost: float, growth: float, ranks: Sequence[RankEvidence]
) -> float:
    """Return what of one rank's lateness costs nothing, because devices idled anyway, in seconds.

    Steps have then certainly grown by less.

    Args:
        cost: What the rank is late by.
        growth: What steps have grown by.
    """
    error = math.hypot(rank.step_error_seconds, past.step_error_seconds)
    if growth + _CERTAIN * error >= _NOT_ABSORBED * cost:
        return 0.0
    return min(cost - growth, idle_before(ranks))


def absorbed_words(seconds: float) -> str:
    """Return that time for a verdict's evidence; empty where there is none."""
    return f", {duration(seconds)} more in time for which devices idled before" if seconds else ""
