"""Detects the rank that the others wait for, by its own work per step, and ranks that have stopped.

A rank's own work is compared with that of its peers, and the time without a step with its usual step time.
"""

import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeVar

import numpy as np

from torchperfd_daemon.diagnosis.detect.robust_statistics import Float64, median_of, robust_deviation

MIN_SECONDS: Final = 10.0
TIMES: Final = 8.0
"""A stall is a time without a step above this multiple of the 99.9th percentile and :data:`MIN_SECONDS`."""
MIN_ELSEWHERE_SECONDS: Final = 600.0
"""The least for validation passes and checkpoints, which are too rare for a usual time."""

_QUANTILE: Final = 0.999
_SHORTEST: Final = 1e-5
_GROWTH: Final = 1.05
_BUCKETS: Final = 512


class Doing(Enum):
    """A rank's activity, as stall detection distinguishes it."""

    IDLE = "idle"
    TRAINING = "training"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True, slots=True)
class Stall:
    """A time without a step that is longer than its limit; seconds."""

    waited_seconds: float
    limit_seconds: float
    usual_seconds: float


class StepTimes:
    """A histogram of step times in 512 buckets that grow by 5 %, from 10 µs on.

    In synchronous training all ranks have the same step time, so that one histogram is enough for a run.
    """

    def __init__(self) -> None:
        self._counts = array("q", bytes(8 * _BUCKETS))
        self.seen = 0
        """The number of steps so far."""

    def add(self, seconds: float) -> None:
        self._counts[_bucket(seconds)] += 1
        self.seen += 1

    @property
    def usual_seconds(self) -> float:
        """The 99.9th percentile, up to 5 % too high; 0 without steps."""
        left = self.seen - math.floor(_QUANTILE * self.seen)
        for index in range(_BUCKETS - 1, -1, -1):
            left -= self._counts[index]
            if left <= 0:
                return _SHORTEST * _GROWTH**index if self.seen else 0.0
        return 0.0


def limit_seconds(usual_seconds: float) -> float:
    """Return the time without a step after which a rank that trains has stalled, by its usual step time."""
    return max(MIN_SECONDS, TIMES * usual_seconds)


class StallDetector:
    """Follows one rank's progress. The caller passes all times, from one clock that does not go back.

    Args:
        times: The histogram of step times, which the caller fills.
    """

    def __init__(self, times: StepTimes) -> None:
        self._doing = Doing.IDLE
        self._progress_at: float | None = None
        self._times = times
        self._longest_elsewhere = 0.0

    @property
    def doing(self) -> Doing:
        """The activity that :meth:`enter` set last."""
        return self._doing

    def progress(self, now: float) -> None:
        """Record progress: a step, which the caller adds to the histogram, or another."""
        self._progress_at = now

    def enter(self, doing: Doing, now: float) -> None:
        """Set the rank's activity. A change counts as progress; the same activity again does not."""
        if doing is self._doing:
            return
        if self._doing is Doing.ELSEWHERE and self._progress_at is not None:
            self._longest_elsewhere = max(self._longest_elsewhere, now - self._progress_at)
        self._doing = doing
        self._progress_at = now

    @property
    def usual_seconds(self) -> float:
        """The 99.9th percentile of the time from step to step, up to 5 % too high; 0 without steps."""
        return self._times.usual_seconds

    def check(self, now: float, early: float = 0.0) -> Stall | None:
        """Return the present stall; None without one, or before two steps have ended.

        Args:
            now: Seconds, on the caller's clock.
            early: How many seconds before its limit a stall is returned.
        """
        if self._progress_at is None or self._doing is Doing.IDLE or not self._times.seen:
            return None
        waited = now - self._progress_at
        if waited + early <= MIN_SECONDS:
            return None
        usual = self.usual_seconds
        if self._doing is Doing.TRAINING:
            limit = limit_seconds(usual)
        else:
            limit = max(MIN_ELSEWHERE_SECONDS, TIMES * self._longest_elsewhere)
        return Stall(waited, limit, usual) if waited + early > limit else None


def _bucket(seconds: float) -> int:
    """Return the first bucket whose upper bound is not below a time."""
    if seconds <= _SHORTEST:
        return 0
    return min(_BUCKETS - 1, math.ceil(math.log(seconds / _SHORTEST) / math.log(_GROWTH)))


WAITING: Final = frozenset({"collective_wait"})
"""The phases in which a rank waits for others."""
MIN_STEPS: Final = 12
MIN_SAMPLES: Final = 5
"""The same for columns that are means of many steps each."""
MIN_SHARE: Final = 0.05
"""Lateness is reported from this share of the peers' own work on."""

_BLOCKS: Final = 12
_FEWEST_BLOCKS: Final = 6
# Few blocks give an inexact deviation. At this level Student's t exceeds the normal distribution by about
# this number divided by the degrees of freedom (the first term of its expansion): a third for twelve blocks.
_STUDENT: Final = 11 / 3
# The permitted chance of a false positive among all ranks, and the least deviations from the peers.
_WRONG: Final = 1e-3
_UNLIKE: Final = 5.0
_STILL: Final = 2.0
_MAX_SUSPECTS: Final = 8
_MAX_PEERS: Final = 56

T = TypeVar("T")


def mean_of(column: Float64) -> float:
    """Return the mean of a column; 0 if it is empty."""
    # Thousands of ranks may have one mean each, of which numpy's own would take twice as long.
    count = len(column)
    return float(column[0]) if count == 1 else float(np.add.reduce(column)) / count if count else 0.0


@dataclass(frozen=True, slots=True)
class RankWork:
    """The work of one rank in its newest steps.

    Attributes:
        phase_seconds: Exclusive time by phase; each array has shape (steps,). Ranks may have different steps
            and phases.
        are_means: Whether each column is the mean of many steps, as times on devices are.
        stage: Its pipeline stage; None without pipeline parallelism. Stages do different work, so a rank's
            peers are those of its own stage.
    """

    rank: int
    phase_seconds: dict[str, Float64]
    stage: int | None = None
    are_means: bool = False

    @property
    def own_seconds(self) -> float:
        """The mean step less the wait for other ranks."""
        return self._mean(waiting=False)

    @property
    def wait_seconds(self) -> float:
        return self._mean(waiting=True)

    @property
    def step_seconds(self) -> float:
        return self.wait_seconds + self.own_seconds

    def _mean(self, *, waiting: bool) -> float:
        columns = [each for name, each in self.phase_seconds.items() if (name in WAITING) is waiting]
        return float(sum(map(mean_of, columns)))

    @property
    def own_error_seconds(self) -> float:
        """The standard error of :attr:`own_seconds`; infinite while there are too few columns to compare."""
        own = [column for name, column in self.phase_seconds.items() if name not in WAITING]
        return _error_of_mean(np.sum(own, axis=0), 1) if self.is_long_enough else math.inf

    @property
    def is_long_enough(self) -> bool:
        """Whether there are enough columns to compare."""
        own = [len(column) for name, column in self.phase_seconds.items() if name not in WAITING]
        return min(own, default=0) >= (MIN_SAMPLES if self.are_means else MIN_STEPS)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        phase: The phase of its own work that exceeds the peers' most.
        excess_seconds: Own work per step above the peers' median.
        phase_excess_seconds: The part of the excess in ``phase``.
        peer_seconds: The peers' median own work per step.
        score: The excess in standard errors.
    """

    rank: int
    phase: str
    excess_seconds: float
    phase_excess_seconds: float
    peer_seconds: float
    score: float


def find_stragglers(
    ranks: Sequence[RankWork], among: int = 0, suspects: Collection[int] = (), period: int = 1
) -> list[Straggler]:
    """Return the ranks whose own work is longer than their peers', the slowest first.

    The means of a window of steps are compared, since a rank that is late in some steps delays all ranks in
    these. The standard error comes from means over blocks of steps, which allows for correlated noise (batch
    means; Law and Kelton, Simulation Modeling and Analysis). A rank is named if its excess over the peers'
    median

    - is beyond chance, at a level shared by all ranks (Bonferroni),
    - is beyond the differences among the peers (median absolute deviation, so that two in eight may be slow),
    - and is at least :data:`MIN_SHARE` of their work.

    Ranks are compared with those of their own pipeline stage. The result is empty if fewer than two of a
    stage have :data:`MIN_STEPS` steps, or :data:`MIN_SAMPLES` means of steps.

    Args:
        ranks: All ranks, or the slowest with some of the others.
        among: The number of all ranks, which share the chance of a false positive; 0 if all are given.
        suspects: Ranks with another reason to be named, such as the stragglers of the previous sample. They
            are named if their excess is large enough and beyond chance for one test, however much peers
            differ.
        period: The number of steps after which long steps recur. Blocks then contain whole periods, if the
            window has enough of them, so that recurring long steps do not count as noise.
    """
    found = []
    for stage in {rank.stage for rank in ranks}:
        own = [rank for rank in ranks if rank.stage == stage]
        found += _in_stage(own, max(len(ranks), among), suspects, period)
    return sorted(found, key=lambda each: -each.excess_seconds)


def _in_stage(
    ranks: Sequence[RankWork], among: int, suspects: Collection[int], period: int
) -> list[Straggler]:
    seen = [_Summary(rank, period) for rank in ranks if rank.is_long_enough]
    if len(seen) < 2:
        return []
    means = np.array([each.mean for each in seen])
    errors = np.array([each.error for each in seen])
    needed = _quantile(_WRONG / among)
    found = []
    for index in np.argsort(-means).tolist():
        each = seen[index]
        peers = np.delete(means, index)
        middle = median_of(peers)
        excess = each.mean - middle
        if excess < MIN_SHARE * middle:
            break  # the next ranks are faster and have slower peers, so their excess is smaller
        # The deviation of few peers is often too small.
        spread = robust_deviation(peers.tolist(), middle) * (1 + 2 / len(peers))
        # The median of n normal values varies by pi / 2n of one's variance.
        peer_error = median_of(np.delete(errors, index)) * math.sqrt(math.pi / 2 / len(peers))
        error = max(math.hypot(each.error, peer_error), 1e-9 * middle, 1e-15)
        score = excess / error
        beyond = score >= _STILL if each.rank in suspects else score >= needed and excess >= _UNLIKE * spread
        if not beyond:
            continue
        phase, phase_excess = _phase(index, seen)
        found.append(Straggler(each.rank, phase, excess, phase_excess, middle, score))
    return found


def slowest_and_peers(slowest_first: Sequence[T]) -> list[T]:
    """Return the ranks to compare: the slowest eight and an even sample of the others.

    About fifty peers determine the usual work as well as a thousand.

    Args:
        slowest_first: All ranks, sorted by own work, the slowest first.
    """
    others = slowest_first[_MAX_SUSPECTS :: max(1, len(slowest_first) // _MAX_PEERS)]
    return [*slowest_first[:_MAX_SUSPECTS], *others]


class _Summary:
    """Means of one rank's window."""

    def __init__(self, work: RankWork, period: int) -> None:
        self.rank = work.rank
        own = [name for name in work.phase_seconds if name not in WAITING]
        columns: Float64 = np.stack([work.phase_seconds[name] for name in own])
        self.phases: dict[str, float] = dict(zip(own, columns.mean(axis=1).tolist(), strict=True))
        total: Float64 = columns.sum(axis=0)
        self.mean = float(total.mean())
        self.error = _error_of_mean(total, period)


def _error_of_mean(columns: Float64, period: int) -> float:
    """Return the standard error of the mean, from means over blocks; for few blocks by Student's t."""
    blocks, length = _blocks(len(columns), period)
    means = columns[len(columns) - blocks * length :].reshape(blocks, length).mean(axis=1)
    return float(means.std(ddof=1)) / math.sqrt(blocks) * (1 + _STUDENT / (blocks - 1))


def steps_with_error(mean: Float64, error: float) -> Float64:
    """Return as many steps as ranks can be compared by, of this mean and this standard error.

    Of a rank of which no more is known, :func:`find_stragglers` then decides as by its own steps.

    Args:
        mean: One or several means, such as those of phases; shape (phases,). The first differs from step to
            step.

    Returns:
        Shape (phases, steps).
    """
    signs = np.resize((1.0, -1.0), _BLOCKS)
    # The inverse of _error_of_mean for these signs.
    apart = error * math.sqrt(_BLOCKS - 1) / (1 + _STUDENT / (_BLOCKS - 1))
    steps: Float64 = np.repeat(mean[:, None], _BLOCKS, axis=1)
    steps[0] += apart * signs
    return steps


def _blocks(steps: int, period: int) -> tuple[int, int]:
    """Return the number of blocks of a window, and the steps of each."""
    length = math.ceil(steps / _BLOCKS / period) * period
    if period > 1 and steps // length >= _FEWEST_BLOCKS:
        return steps // length, length
    blocks = min(_BLOCKS, steps)
    return blocks, steps // blocks


def _phase(index: int, seen: Sequence[_Summary]) -> tuple[str, float]:
    """Return the phase in which a rank exceeds its peers' median most, and by how much."""
    own = seen[index].phases
    peers = [each.phases for number, each in enumerate(seen) if number != index]
    excess = {
        name: seconds - median_of(np.array([phases.get(name, 0.0) for phases in peers]))
        for name, seconds in own.items()
    }
    name = max(excess, key=lambda phase: excess[phase])
    return name, excess[name]


def _quantile(chance: float) -> float:
    """Return the number of deviations that a normal value exceeds with this probability (Newton's method)."""
    value = math.sqrt(-2 * math.log(chance))
    for _ in range(20):
        density = math.exp(-value * value / 2) / math.sqrt(2 * math.pi)
        value += (0.5 * math.erfc(value / math.sqrt(2)) - chance) / density
    return value
