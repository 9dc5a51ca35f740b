"""The median and the 95th percentile of a run's step time, for the live page."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from torchperfd_daemon.store import Rank, p50_and_p95

_DIGITS: Final = 7

Durations = Mapping[int, Sequence[int]]
"""The durations of steps by rank, in nanoseconds."""


@dataclass(slots=True)
class RankPercentiles:
    """Those of one rank, in seconds."""

    rank: int
    p50_seconds: float
    p95_seconds: float


@dataclass(slots=True)
class StepPercentiles:
    """Those of the steps of all ranks together, in seconds.

    Attributes:
        slowest: Those of the rank with the largest mean step.
    """

    p50_seconds: float
    p95_seconds: float
    slowest: RankPercentiles


def recent_durations(ranks: Iterable[Rank]) -> Durations:
    """Return copies of the durations of each rank's present steps.

    Ranks without steps are left out, and those that have left unless all have.
    """
    stepped = [rank for rank in ranks if rank.steady_steps]
    there = [rank for rank in stepped if rank.connected] or stepped
    return {rank.identity.rank: rank.history.newest_durations(rank.present_steps) for rank in there}


def of_run(durations: Durations) -> StepPercentiles | None:
    """Return the percentiles of a run; None without steps. May run on any thread."""
    if not durations:
        return None
    p50, p95 = p50_and_p95(np.concatenate([np.asarray(column) for column in durations.values()]))
    slowest = max(durations, key=lambda rank: float(np.mean(durations[rank])))
    return StepPercentiles(_seconds(p50), _seconds(p95), of_ranks({slowest: durations[slowest]})[0])


def of_ranks(durations: Durations) -> list[RankPercentiles]:
    """Return the percentiles of each rank. May run on any thread."""
    by_count: dict[int, list[int]] = {}
    for rank, column in durations.items():
        by_count.setdefault(len(column), []).append(rank)
    # Nearly always all ranks have as many steps, so that all are sorted in one call.
    return [
        RankPercentiles(rank, _seconds(p50), _seconds(p95))
        for ranks in by_count.values()
        for rank, p50, p95 in zip(ranks, *p50_and_p95([durations[rank] for rank in ranks]), strict=True)
    ]


def _seconds(nanoseconds: Any) -> float:
    return round(float(nanoseconds) / 1e9, _DIGITS)
