"""Which events of several ranks are one collective, and how the ranks' clocks differ.

Collectives are matched by process group, sequence number and name. Where a file has no numbers, a group's
collectives are the same sequence on all of its ranks, and the two sequences are laid side by side: with
their last elements together, or, where the ends of the collectives agree much better so, elsewhere. What
fits nowhere, since the file does not tell several groups apart, is matched by end time alone.

Clocks of different hosts differ. A rank's clock is set by the ends of the collectives that it shares with
another rank: nobody is through before the last one has come, so that ends are close to one moment.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from typing import Final

import numpy as np
import numpy.typing as npt

from torchperfd_daemon.analysis.collectives import Collectives, Kind
from torchperfd_daemon.analysis.trace import Flags, Int64

# What moves from or to one rank: some ranks are through before others have come, so ends tell nothing.
_ROOTED: Final = frozenset(
    {"broadcast", "_broadcast_oop", "Broadcast", "reduce", "_reduce_oop", "Reduce", "gather", "scatter"}
)
# Of these every rank of the group moves as many bytes, which tells collectives without numbers apart.
_ALIKE: Final = frozenset(
    {"allreduce", "all_reduce", "AllReduce", "broadcast", "Broadcast", "reduce", "Reduce"}
)
# Two sequences that lie right have the same names, and their collectives run at the same time, but for
# a few that threads began in another order, or that one rank was told late to be over.
_MOSTLY: Final = 0.75
# A farther position is believed when the ends then agree that much better: less is chance.
_CLEARLY: Final = 2
# The whole of two sequences, or clocks that need no setting, are believed before what agrees up to so
# much better.
_EXPECTED: Final = 10
# So many pairs of ends are evidence, where a sequence has them.
_EVIDENCE: Final = 3
_POSITIONS: Final = 256
# Ends of one collective on two ranks are no farther apart than this, or little.
_TOGETHER_NS: Final = 1_000_000
_PAIRS: Final = 1 << 20
# Clocks that hosts keep by network time differ by less.
_KEPT_NS: Final = 5_000_000


@dataclass(frozen=True, slots=True)
class Matches:
    """Matched collectives as rows, ranks as columns; times in ns since the reference's origin, on its clock.

    Attributes:
        ranks: The ranks, ascending: the columns.
        kinds: Table of kinds.
        kind: What each row is, an index into ``kinds``.
        bytes: What each row moves; -1 when a file does not say.
        here: Which ranks were found in which rows, two at least.
        start: When a rank came; 0 where it was not found.
        end: When it was through, likewise.
        unmatched: Collectives of each rank that are in no row.
        by_sequence: Rows matched by the group's own numbers.
        by_order: Rows matched by their order.
        by_end: Rows matched by end time.
        reference: The rank whose clock all times are on.
        clock: How far each rank's clock is ahead of the reference's, in ns; None where no row tells.
        residual: How far each rank's ends still are from those of the rank that its clock was set by, in
            ns, in the median; None where no row tells.
    """

    ranks: tuple[int, ...]
    kinds: tuple[Kind, ...]
    kind: Int64
    bytes: Int64
    here: Flags
    start: Int64
    end: Int64
    unmatched: tuple[int, ...]
    by_sequence: int
    by_order: int
    by_end: int
    reference: int
    clock: tuple[int | None, ...]
    residual: tuple[int | None, ...]


def match(traces: Mapping[int, Collectives]) -> Matches:
    """Match the collectives of two or more ranks' traces, given by rank."""
    events = _Events(traces)
    events.match_by_sequence()
    events.match_by_order()
    events.match_by_end(_Clocks(events))
    clocks = _Clocks(events)
    here = _table(events, np.ones_like(events.end)) > 0
    kind, size = np.zeros(len(here), dtype=np.int64), np.zeros(len(here), dtype=np.int64)
    found = events.match >= 0
    kind[events.match[found]] = events.kind[found]
    np.maximum.at(size, events.match[found], events.bytes[found])
    size[events.match[found & (events.bytes < 0)]] = -1
    known = clocks.residual >= 0
    return Matches(
        ranks=tuple(events.ranks),
        kinds=tuple(events.kinds),
        kind=kind,
        bytes=size,
        here=here,
        start=np.where(here, _table(events, events.start) + clocks.shift, 0),
        end=np.where(here, _table(events, events.end) + clocks.shift, 0),
        unmatched=tuple(np.bincount(events.place[~found], minlength=len(events.ranks)).tolist()),
        by_sequence=events.matches[0],
        by_order=events.matches[1],
        by_end=events.matches[2],
        reference=events.ranks[clocks.reference],
        clock=tuple(
            ahead if is_known else None
            for ahead, is_known in zip((clocks.as_written - clocks.shift).tolist(), known, strict=True)
        ),
        residual=tuple(apart if apart >= 0 else None for apart in clocks.residual.tolist()),
    )


class _Events:
    """All ranks' collectives as columns, ordered by rank and start, and which of them are one.

    Attributes:
        ranks: The ranks, ascending; ``place`` is an index into them.
        kinds: Table of kinds over all ranks.
        place: Whose it is.
        kind: An index into ``kinds``.
        sort: Equal for what may be one collective, as far as kind and bytes tell.
        start: In ns since the rank's own origin.
        end: Likewise.
        bytes: Moved; -1 when not known.
        match: Equal for what is one collective; -1 for what is not matched.
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
        self._sequence = np.concatenate([one.sequence for one in each])
        rooted = np.array([kind.name in _ROOTED for kind in self.kinds], dtype=np.bool_)
        self.ends_together = ~rooted[self.kind]

    def match_by_sequence(self) -> None:
        """Match what has the group's own number."""
        numbered = np.flatnonzero(self._sequence >= 0)
        keys = np.column_stack([self.kind[numbered], self._sequence[numbered]])
        _, match = np.unique(keys, axis=0, return_inverse=True)
        self.match[numbered] = match.reshape(-1)
        self._settle(0)

    def match_by_order(self) -> None:
        """Match what has no number, group by group, by laying the ranks' sequences side by side.

        If one of them does not fit where groups have no names, these are several groups' collectives and
        not one's, and what fits is chance: none is matched.
        """
        groups = {kind: (kind.group, kind.ranks, kind.source) for kind in self.kinds}
        for group in dict.fromkeys(groups.values()):
            named = group[0] != ""
            of_group = np.array([groups[kind] == group for kind in self.kinds], dtype=np.bool_)
            rows = np.flatnonzero(of_group[self.kind] & (self._sequence < 0))
            sequences = [rows[self.place[rows] == at] for at in range(len(self.ranks))]
            longest = max(sequences, key=len)
            others = [each for each in sequences if len(each) and each is not longest]
            pairs = [_side_by_side(self, longest, each) for each in others]
            names = np.zeros(len(self.match), dtype=np.int64)
            names[longest] = self.match.max(initial=-1) + 1 + np.arange(len(longest))
            for pair in pairs:
                if pair is not None and (named or None not in pairs):
                    theirs, mine = pair
                    self.match[theirs] = self.match[mine] = names[theirs]
        self._settle(1)

    def match_by_end(self, clocks: "_Clocks") -> None:
        """Match what is left by end time, with what is matched already first: of one sort, at one time,
        and each the other's nearest.
        """
        start, end = self.start + clocks.shift[self.place], self.end + clocks.shift[self.place]
        names = self.match.max(initial=-1) + 1 + np.arange(len(self.match))
        for sort in np.unique(self.sort[(self.match < 0) & (self._sequence < 0)]).tolist():
            rows = np.flatnonzero((self.sort == sort) & (self._sequence < 0))
            rows = rows[np.argsort(end[rows], kind="stable")]
            by_rank = [rows[self.place[rows] == at] for at in range(len(self.ranks))]
            for joining, (theirs, mine) in product((True, False), permutations(by_rank, 2)):
                left = mine[self.match[mine] < 0]
                # Where this rank takes part already is no place for another of its collectives.
                free = (self.match[theirs] >= 0) & ~np.isin(self.match[theirs], self.match[mine])
                if not joining:
                    free |= self.match[theirs] < 0
                if not len(left) or not free.any():
                    continue
                pair = theirs[free]
                nearest = _nearest(end[pair], end[left])
                mutual = _nearest(end[left], end[pair])[nearest] == np.arange(len(left))
                pair = pair[nearest]
                between = np.maximum(start[pair] - end[left], start[left] - end[pair])
                mutual &= between <= _TOGETHER_NS
                pair, left = pair[mutual], left[mutual]
                self.match[pair] = np.where(self.match[pair] >= 0, self.match[pair], names[pair])
                self.match[left] = self.match[pair]
        self._settle(2)

    def _settle(self, way: int) -> None:
        """Number the matches anew from 0, earlier ones first; what has no partner is not matched."""
        found = np.flatnonzero(self.match >= 0)
        _, match, ranks = np.unique(self.match[found], return_inverse=True, return_counts=True)
        kept = ranks > 1
        number = np.where(kept, np.cumsum(kept) - 1, -1)
        self.match[found] = number[match.reshape(-1)]
        self.matches[way] = int(kept.sum()) - sum(self.matches)


class _Clocks:
    """How each rank's times are brought to the reference's clock.

    Attributes:
        reference: The rank whose clock it is, as a place.
        as_written: What to add to a rank's times to bring them to the reference's origin, in ns, if
            clocks did not differ.
        shift: What to add, since they do.
        residual: How far ends then are apart in the median, to the rank that the clock was set by; -1 for
            a clock that no match set.
    """

    def __init__(self, events: _Events) -> None:
        count = len(events.ranks)
        self.reference = 0
        self.residual = np.full(count, -1, dtype=np.int64)
        ends = _table(events, events.end)
        together = np.zeros(len(ends), dtype=np.bool_)
        together[events.match[(events.match >= 0) & events.ends_together]] = True
        here = _table(events, np.ones_like(events.end)) > 0
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
                self.shift[rank] = _median(apart)
                self.residual[rank] = _median(np.abs(apart - self.shift[rank]))
            else:
                self.shift[rank] = _voted(events, self.reference, rank, int(self.as_written[rank]))


def _shared(here: Flags) -> npt.NDArray[np.float64]:
    """Return how many rows each two columns share, 0 for a column with itself."""
    numbers = here.astype(np.float64)
    counts = numbers.T @ numbers
    np.fill_diagonal(counts, 0)
    return counts


def _table(events: _Events, values: Int64) -> Int64:
    """Spread a column over matches (rows) and places (columns); 0 where a rank takes no part."""
    table = np.zeros((sum(events.matches), len(events.ranks)), dtype=np.int64)
    matched = events.match >= 0
    table[events.match[matched], events.place[matched]] = values[matched]
    return table


def _side_by_side(events: _Events, longest: Int64, rows: Int64) -> tuple[Int64, Int64] | None:
    """Return which of ``longest`` and which of ``rows`` are the same; None where the two do not fit.

    Of the positions that fit, it is the one that leaves clocks as they are written, or that of two whole
    sequences; else the one at which both end together; unless ends agree clearly better at another.
    """
    places = events.place[[longest[0], rows[0]]].tolist()
    as_written = events.origin_ns[places[1]] - events.origin_ns[places[0]]
    found: tuple[Int64, Int64] | None = None
    best = np.inf
    # Where the middle one stands if clocks are right.
    middle = len(rows) // 2
    at = _nearest(np.sort(events.end[longest]), events.end[rows[[middle]]] + as_written)
    shifts = _shifts(events.sort[longest], events.sort[rows])
    for shift in [*shifts, int(at[0]) - middle]:
        there, here = _overlap(longest, rows, shift)
        same = events.sort[there] == events.sort[here]
        if not len(here) or np.mean(same) < _MOSTLY:
            continue
        there, here = there[same], here[same]
        together = events.ends_together[here]
        judges = together if together.any() else np.ones(len(here), dtype=np.bool_)
        # One pair of ends always agrees, and says nothing; two of more say little.
        if (
            judges.sum() < min(_EVIDENCE, len(rows))
            or 2 * len(here) < len(rows)
            or judges.sum() < 2 <= len(longest)
        ):
            continue
        apart = events.end[there] - events.end[here]
        clock = _median(apart[judges])
        start, end = events.start[here] + clock, events.end[here] + clock
        between = np.maximum(start - events.end[there], events.start[there] - end)
        at_once = between <= _TOGETHER_NS
        if np.mean(at_once[judges]) < _MOSTLY:
            continue
        # What fits a part only fits more easily.
        residual = float(np.median(np.abs(apart[judges] - clock))) * (len(rows) / len(here)) ** 2
        is_whole = len(longest) == len(rows) and shift == 0
        if is_whole or abs(clock - as_written) <= _KEPT_NS:
            residual /= _EXPECTED
        if found is None or residual * _CLEARLY < best:
            fits = at_once | ~judges
            found, best = (there[fits], here[fits]), residual
    return found


def _shifts(longest: Int64, rows: Int64) -> list[int]:
    """Return where a sequence may stand in another, the closest to both ending together first.

    The rarest sort that both have tells: each place of it in one is a place of it in the other.
    """
    at_end = len(longest) - len(rows)
    sorts = np.intersect1d(longest, rows)
    if not len(sorts):
        return []
    rarest = min(sorts.tolist(), key=lambda sort: int(np.sum(longest == sort)) * int(np.sum(rows == sort)))
    theirs, mine = np.flatnonzero(longest == rarest), np.flatnonzero(rows == rarest)
    # Of places that are many, those near the ends are enough for as many positions as are tried.
    apart = np.unique(theirs[-_POSITIONS:, None] - mine[None, -_POSITIONS:])
    order = np.argsort(np.abs(apart - at_end), kind="stable")
    return [int(shift) for shift in apart[order][:_POSITIONS]]


def _overlap(longest: Int64, rows: Int64, shift: int) -> tuple[Int64, Int64]:
    """Return the parts that are side by side when ``rows`` begins at place ``shift`` of ``longest``."""
    first, last = max(0, shift), max(0, min(len(longest), len(rows) + shift))
    return longest[first:last], rows[max(0, -shift) : max(0, last - shift)]


def _voted(events: _Events, reference: int, rank: int, as_written: int) -> int:
    """Return what to add to a rank's times: as written, or where clearly more pairs of ends agree."""
    votes: list[Int64] = []
    for theirs, mine in _unmatched_ends(events, reference, rank):
        if sum(map(len, votes)) + len(theirs) * len(mine) > _PAIRS:
            break
        votes.append((theirs[:, None] - mine[None, :]).ravel())
    if not votes:
        return as_written
    apart = np.sort(np.concatenate(votes))
    near, close = _within(apart, apart, 2 * _TOGETHER_NS), _within(apart, apart, _TOGETHER_NS // 2)
    # Of a loop whose steps take the same time, a clock that is a step off has almost as many pairs near:
    # one less. How close they are tells only where steps are as short as this.
    most = int(np.lexsort((close, near))[-1])
    if near[most] <= _CLEARLY * _within(apart, np.array([as_written]), 2 * _TOGETHER_NS)[0]:
        return as_written
    return _median(apart[np.abs(apart - apart[most]) <= _TOGETHER_NS])


def _within(values: Int64, centres: Int64, reach: int) -> Int64:
    """Return how many of ``values``, which are sorted, are no farther than ``reach`` from each centre."""
    return np.searchsorted(values, centres + reach, side="right") - np.searchsorted(values, centres - reach)


def _unmatched_ends(events: _Events, reference: int, rank: int) -> Iterator[tuple[Int64, Int64]]:
    """Yield the ends of what is not matched on two ranks, sort by sort, the rarest first."""
    found = []
    for sort in range(len(events.sorts)):
        left = (events.match < 0) & (events.sort == sort) & events.ends_together
        ends = [events.end[left & (events.place == place)] for place in (reference, rank)]
        if len(ends[0]) and len(ends[1]):
            found.append((ends[0], ends[1]))
    yield from sorted(found, key=lambda ends: len(ends[0]) * len(ends[1]))


def _nearest(sorted_moments: Int64, moments: Int64) -> Int64:
    """Return for each moment the index of the nearest among ``sorted_moments``, of which there is one."""
    after = np.searchsorted(sorted_moments, moments).clip(1, max(1, len(sorted_moments) - 1))
    before = after - 1
    after = np.minimum(after, len(sorted_moments) - 1)
    closer = np.abs(sorted_moments[after] - moments) < np.abs(moments - sorted_moments[before])
    return np.where(closer, after, before)


def _median(values: Int64) -> int:
    return int(np.median(values - values[0])) + int(values[0])
