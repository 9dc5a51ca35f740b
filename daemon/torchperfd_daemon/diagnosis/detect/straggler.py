"""Which rank the others wait for: own work per step, compared with the peers'.

In synchronous training all ranks' steps take the same time. What differs is how much of it is a rank's own
work, and how much it waits for the others.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.diagnosis.detect.deviation import robust_deviation

Float64 = npt.NDArray[np.float64]

WAITING: Final = frozenset({"collective_wait"})
"""The phases in which a rank waits for others."""
LEAST_STEPS: Final = 12
LEAST_SHARE: Final = 0.05
"""From this share of the peers' own work on, being late is worth telling."""

_BLOCKS: Final = 12
_FEWEST_BLOCKS: Final = 6
# Few blocks know their own spread badly. At this level Student's t is above the normal by about so much for
# each degree of freedom (the first term of its expansion): for the eleven of twelve blocks by a third.
_STUDENT: Final = 11 / 3
# Chances that any of all ranks is blamed without reason, and how unlike its peers a rank has to be.
_WRONG: Final = 1e-3
_UNLIKE: Final = 5.0
_STILL: Final = 2.0
_MOST_SUSPECTS: Final = 8
_MOST_PEERS: Final = 56

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankWork:
    """What one rank did in its newest steps.

    Attributes:
        rank: Its number.
        phase_seconds: Exclusive time by phase, one array per phase, all of one length: the steps. Ranks need
            not have the same steps or phases.
    """

    rank: int
    phase_seconds: dict[str, Float64]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        rank: Its number.
        phase: The phase of its own work that exceeds the peers' most.
        excess_seconds: Own work per step above the peers' median.
        phase_excess_seconds: The part of it that lies in ``phase``.
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

    Compared is the mean of a window of steps, since a rank that is late in some steps delays them all then.
    Its standard error comes from means over blocks of steps, which allows for noise with a memory (batch
    means; Law and Kelton, Simulation Modeling and Analysis). A rank is named if its excess over the peers'
    median is beyond chance at a level shared by all ranks (Bonferroni), beyond what the peers differ by among
    themselves (median absolute deviation, so that two in eight may be slow), and at least
    :data:`LEAST_SHARE` of their work. Fewer than two ranks with :data:`LEAST_STEPS` steps have nothing to be
    compared with.

    Args:
        ranks: All ranks, or the slowest with some of the others.
        among: How many ranks there are where not all are given; the chance of blame is shared by all.
        suspects: Ranks that there is a reason to name, such as that they were a moment ago. They are if their
            excess is large enough and beyond the chance of a single look, whatever the peers differ by.
        period: Steps after which long ones are known to come again. Blocks then hold whole periods, if the
            window has enough of them: what comes again in each is no chance.
    """
    seen = [_Summary(rank, period) for rank in ranks if _steps(rank) >= LEAST_STEPS]
    if len(seen) < 2:
        return []
    means = np.array([each.mean for each in seen])
    errors = np.array([each.error for each in seen])
    needed = _quantile(_WRONG / max(len(seen), among))
    found = []
    for index in np.argsort(-means).tolist():
        each = seen[index]
        peers = np.delete(means, index)
        middle = float(np.median(peers))
        excess = each.mean - middle
        if excess < LEAST_SHARE * middle:
            break  # who comes next is faster, and has slower peers: their excess descends
        # Of few peers the deviation is often too small.
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
    """Return the ranks that are worth comparing: the slowest eight and an even sample of the others.

    A thousand peers say no more about what is usual than fifty do.

    Args:
        slowest_first: All ranks, by their own work.
    """
    others = slowest_first[_MOST_SUSPECTS :: max(1, len(slowest_first) // _MOST_PEERS)]
    return [*slowest_first[:_MOST_SUSPECTS], *others]


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
    """Return into how many blocks of how many steps to cut a window."""
    length = math.ceil(steps / _BLOCKS / period) * period
    if period > 1 and steps // length >= _FEWEST_BLOCKS:
        return steps // length, length
    return _BLOCKS, steps // _BLOCKS


def _steps(work: RankWork) -> int:
    own = [len(column) for name, column in work.phase_seconds.items() if name not in WAITING]
    return min(own, default=0)


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
    """Return how many deviations a normal value exceeds with this chance, by Newton's method on erfc."""
    value = math.sqrt(-2 * math.log(chance))
    for _ in range(20):
        density = math.exp(-value * value / 2) / math.sqrt(2 * math.pi)
        value += (0.5 * math.erfc(value / math.sqrt(2)) - chance) / density
    return value
