"""The collectives of several ranks as columns, and their matches."""

from collections.abc import Mapping
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.collectives import Collectives
from torchperfd_daemon.analysis.trace import Int64

# Collectives from or to one rank: some ranks leave before others arrive, so ends do not show the clocks.
_ROOTED: Final = frozenset(
    {"broadcast", "_broadcast_oop", "Broadcast", "reduce", "_reduce_oop", "Reduce", "gather", "scatter"}
)
# In these every rank of the group moves equally many bytes, which distinguishes collectives without numbers.
_ALIKE: Final = frozenset(
    {"allreduce", "all_reduce", "AllReduce", "broadcast", "Broadcast", "reduce", "Reduce"}
)
# Ends of one collective on two ranks are no farther apart than this, or little.
TOGETHER_NS: Final = 1_000_000


class CollectiveEvents:
    """All ranks' collectives as columns, ordered by rank and start, and which of them are one.

    Attributes:
        ranks: The ranks, ascending; ``place`` is an index into them.
        place: The rank, an index into ``ranks``.
        kind: An index into ``kinds``.
        sort: Equal for events that may be one collective, by kind and bytes.
        start: In ns since the rank's own origin.
        end: Likewise.
        bytes: Bytes moved; -1 if unknown.
        match: Equal for the events of one collective; -1 if not matched.
        sequence: The number within its group; -1 if the file has none.
        ends_together: Whether all ranks end it at about the same time.
        matches: How many matches there are by sequence, by order and by end.
    """

    def __init__(self, traces: Mapping[int, Collectives]) -> None:
        self.ranks = sorted(traces)
        each = [traces[rank] for rank in self.ranks]
        numbers = {kind: at for at, kind in enumerate(dict.fromkeys(k for one in each for k in one.kinds))}
        self.kinds = list(numbers)
        renumbered = [np.array([numbers[kind] for kind in one.kinds], np.int64)[one.kind] for one in each]
        self.origin_ns = [one.origin_ns for one in each]
        self.place = np.repeat(np.arange(len(each)), [len(one) for one in each])
        self.kind = np.concatenate(renumbered)
        self.start = np.concatenate([one.start for one in each])
        self.end = np.concatenate([one.end for one in each])
        self.bytes = np.concatenate([one.bytes for one in each])
        alike = np.array([kind.name in _ALIKE for kind in self.kinds], dtype=np.bool_)[self.kind]
        by_size = np.column_stack([self.kind, np.where(alike, self.bytes, -1)])
        self.sorts, sort = np.unique(by_size, axis=0, return_inverse=True)
        self.sort = sort.reshape(-1)
        self.match = np.full(len(self.kind), -1, dtype=np.int64)
        self.matches = [0, 0, 0]
        self.sequence = np.concatenate([one.sequence for one in each])
        rooted = np.array([kind.name in _ROOTED for kind in self.kinds], dtype=np.bool_)
        self.ends_together = ~rooted[self.kind]

    def table(self, values: Int64) -> Int64:
        """Spread a column over matches (rows) and places (columns); 0 where a rank takes no part."""
        table = np.zeros((sum(self.matches), len(self.ranks)), dtype=np.int64)
        matched = self.match >= 0
        table[self.match[matched], self.place[matched]] = values[matched]
        return table

    def settle(self, way: int) -> None:
        """Renumber the matches from 0, earlier ones first; an event without a partner becomes unmatched."""
        found = np.flatnonzero(self.match >= 0)
        _, match, ranks = np.unique(self.match[found], return_inverse=True, return_counts=True)
        kept = ranks > 1
        number = np.where(kept, np.cumsum(kept) - 1, -1)
        self.match[found] = number[match.reshape(-1)]
        self.matches[way] = int(kept.sum()) - sum(self.matches)


def nearest(sorted_moments: Int64, moments: Int64) -> Int64:
    """Return for each moment the index of the nearest among ``sorted_moments``, of which there is one."""
    after = np.searchsorted(sorted_moments, moments).clip(1, max(1, len(sorted_moments) - 1))
    before = after - 1
    after = np.minimum(after, len(sorted_moments) - 1)
    closer = np.abs(sorted_moments[after] - moments) < np.abs(moments - sorted_moments[before])
    return np.where(closer, after, before)


def median(values: Int64) -> int:
    """Return the median of times that may be too large for a float."""
    return int(np.median(values - values[0])) + int(values[0])
