"""How the clocks of several ranks differ.

A rank's clock is set by the ends of the collectives that it shares with another rank. No rank leaves a
collective before the last one has entered it, so the ends are close to one moment.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.analysis.collective_events import TOGETHER_NS, CollectiveEvents, median
from torchperfd_daemon.analysis.trace import Flags, Int64

# Pairs of ends that agree are believed over a clock as written only when there are that many times more.
_CLEARLY: Final = 2
_PAIRS: Final = 1 << 20


class RankClocks:
    """The corrections that bring each rank's times to the reference's clock.

    Attributes:
        reference: The rank whose clock it is, as a place.
        as_written: The correction of a rank's times to the reference's origin, in ns, if clocks did not
            differ.
        shift: The correction with the measured difference of the clocks.
        residual: The median distance of the corrected ends from those of the rank that set the clock; -1
            for a clock that no match set.
    """

    def __init__(self, events: CollectiveEvents) -> None:
        count = len(events.ranks)
        self.reference = 0
        self.residual = np.full(count, -1, dtype=np.int64)
        ends = events.table(events.end)
        together = np.zeros(len(ends), dtype=np.bool_)
        together[events.match[(events.match >= 0) & events.ends_together]] = True
        here = events.table(np.ones_like(events.end)) > 0
        # Where there is nothing better, ends of rooted collectives are better than no clock.
        shared = _shared(here[together]) + 1e-6 * _shared(here)
        if shared.any():
            self.reference = int(np.flatnonzero(shared.any(axis=0))[0])
        first = events.origin_ns[self.reference]
        self.as_written = np.array([origin - first for origin in events.origin_ns], dtype=np.int64)
        self.shift = self.as_written.copy()
        self.residual[self.reference] = 0
        known = [self.reference]
        while len(known) < count:
            left = [at for at in range(count) if at not in known]
            links = shared[np.ix_(known, left)]
            by, at = (int(found) for found in np.unravel_index(np.argmax(links), links.shape))
            partner, rank = known[by], left[at]
            known.append(rank)
            if links[by, at] > 0:
                both = here[:, partner] & here[:, rank]
                both &= together if (both & together).any() else True
                apart = ends[both, partner] - ends[both, rank] + self.shift[partner]
                self.shift[rank] = median(apart)
                self.residual[rank] = median(np.abs(apart - self.shift[rank]))
            else:
                self.shift[rank] = _voted(events, self.reference, rank, int(self.as_written[rank]))


def _shared(here: Flags) -> npt.NDArray[np.float64]:
    """Return how many rows each two columns share, 0 for a column with itself."""
    numbers = here.astype(np.float64)
    counts = numbers.T @ numbers
    np.fill_diagonal(counts, 0)
    return counts


def _voted(events: CollectiveEvents, reference: int, rank: int, as_written: int) -> int:
    """Return the correction of a rank's times: as written, or where clearly more ends agree."""
    votes: list[Int64] = []
    for theirs, mine in _unmatched_ends(events, reference, rank):
        if sum(map(len, votes)) + len(theirs) * len(mine) > _PAIRS:
            break
        votes.append((theirs[:, None] - mine[None, :]).ravel())
    if not votes:
        return as_written
    apart = np.sort(np.concatenate(votes))
    near, close = _within(apart, apart, 2 * TOGETHER_NS), _within(apart, apart, TOGETHER_NS // 2)
    # In a loop of equal steps, a clock that is one step off has almost as many near pairs: one less. The
    # distance of the pairs decides only if steps are as short as this.
    most = int(np.lexsort((close, near))[-1])
    if near[most] <= _CLEARLY * _within(apart, np.array([as_written]), 2 * TOGETHER_NS)[0]:
        return as_written
    return median(apart[np.abs(apart - apart[most]) <= TOGETHER_NS])


def _within(values: Int64, centres: Int64, reach: int) -> Int64:
    """Return how many of ``values``, which are sorted, are no farther than ``reach`` from each centre."""
    return np.searchsorted(values, centres + reach, side="right") - np.searchsorted(values, centres - reach)


def _unmatched_ends(events: CollectiveEvents, reference: int, rank: int) -> Iterator[tuple[Int64, Int64]]:
    """Yield the ends of unmatched collectives of two ranks, sort by sort, the rarest first."""
    found = []
    for sort in range(len(events.sorts)):
        left = (events.match < 0) & (events.sort == sort) & events.ends_together
        ends = [events.end[left & (events.place == place)] for place in (reference, rank)]
        if len(ends[0]) and len(ends[1]):
            found.append((ends[0], ends[1]))
    yield from sorted(found, key=lambda ends: len(ends[0]) * len(ends[1]))
