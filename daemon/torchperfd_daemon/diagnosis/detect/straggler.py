"""Detects the rank that the others wait for, by comparing own work per step with the peers'.

In synchronous training all ranks have the same step time. They differ in their own work, and in how long they
wait for the others.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.diagnosis.detect.robust_statistics import robust_deviation

Float64 = npt.NDArray[np.float64]

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
        middle = float(np.median(peers))
        excess = each.mean - middle
        if excess < MIN_SHARE * middle:
            break  # the next ranks are faster and have slower peers, so their excess is smaller
        # The deviation of few peers is often too small.
        spread = robust_deviation(peers.tolist(), middle) * (1 + 2 / len(peers))
        # The median of n normal values varies by pi / 2n of one's variance.
        peer_error = float(np.median(np.delete(errors, index))) * math.sqrt(math.pi / 2 / len(peers))
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
        blocks, length = _blocks(len(total), period)
        means = total[len(total) - blocks * length :].reshape(blocks, length).mean(axis=1)
        student = 1 + _STUDENT / (blocks - 1)
        self.error = float(means.std(ddof=1)) / math.sqrt(blocks) * student


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
        name: seconds - float(np.median([phases.get(name, 0.0) for phases in peers]))
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
