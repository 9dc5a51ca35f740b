"""Matches the events of one collective on several ranks, and determines how the ranks' clocks differ.

Collectives are matched by process group, sequence number and name. In a file without numbers, a group's
collectives are the same sequence on all of its ranks. The sequences are aligned at their last elements, or at
another place if the ends of the collectives agree much better there. If the file does not distinguish groups,
the sequences may not fit; the collectives are then matched by end time alone.

A rank's clock is set by the ends of the collectives that it shares with another rank. No rank leaves a
collective before the last one has entered it, so the ends are close to one moment.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.collectives import (
    TOGETHER_NS,
    CollectiveEvents,
    Collectives,
    Kind,
    median,
    nearest,
)
from torchperfd_daemon.analysis.trace import Flags, Float64, Int64

# Correctly aligned sequences have the same names, and their collectives run at the same time, except for
# a few that threads began in another order, or whose end one rank noticed late.
_MOSTLY: Final = 0.75
# A farther position is accepted only if the ends agree better by this factor: less may be chance.
_CLEARLY: Final = 2
# Two whole sequences, or clocks that need no setting, take precedence over positions that agree better by up
# to this factor.
_EXPECTED: Final = 10
# So many pairs of ends are evidence, where a sequence has them.
_EVIDENCE: Final = 3
_POSITIONS: Final = 256
# Clocks that hosts keep by network time differ by less.
_KEPT_NS: Final = 5_000_000


def align(events: CollectiveEvents, longest: Int64, rows: Int64) -> tuple[Int64, Int64] | None:
    """Return which of ``longest`` and which of ``rows`` are the same; None if the two do not fit.

    Of the positions that fit, it is the one that leaves clocks as they are written, or that of two whole
    sequences; else the one at which both end together; unless ends agree clearly better at another.
    """
    places = events.place[[longest[0], rows[0]]].tolist()
    as_written = events.origin_ns[places[1]] - events.origin_ns[places[0]]
    found: tuple[Int64, Int64] | None = None
    best = np.inf
    # The position of the middle one if clocks are right.
    middle = len(rows) // 2
    at = nearest(np.sort(events.end[longest]), events.end[rows[[middle]]] + as_written)
    shifts = _shifts(events.sort[longest], events.sort[rows])
    for shift in [*shifts, int(at[0]) - middle]:
        there, here = _overlap(longest, rows, shift)
        same = events.sort[there] == events.sort[here]
        if not len(here) or np.mean(same) < _MOSTLY:
            continue
        there, here = there[same], here[same]
        together = events.ends_together[here]
        judges = together if together.any() else np.ones(len(here), dtype=np.bool_)
        # One pair of ends always agrees, which is no evidence; two of more are weak evidence.
        if (
            judges.sum() < min(_EVIDENCE, len(rows))
            or 2 * len(here) < len(rows)
            or judges.sum() < 2 <= len(longest)
        ):
            continue
        apart = events.end[there] - events.end[here]
        clock = median(apart[judges])
        start, end = events.start[here] + clock, events.end[here] + clock
        between = np.maximum(start - events.end[there], events.start[there] - end)
        at_once = between <= TOGETHER_NS
        if np.mean(at_once[judges]) < _MOSTLY:
            continue
        # A partial overlap fits more easily.
        residual = float(np.median(np.abs(apart[judges] - clock))) * (len(rows) / len(here)) ** 2
        is_whole = len(longest) == len(rows) and shift == 0
        if is_whole or abs(clock - as_written) <= _KEPT_NS:
            residual /= _EXPECTED
        if found is None or residual * _CLEARLY < best:
            fits = at_once | ~judges
            found, best = (there[fits], here[fits]), residual
    return found


def _shifts(longest: Int64, rows: Int64) -> list[int]:
    """Return the possible positions of a sequence in another, the closest to both ending together first.

    The rarest sort that both have decides: each place of it in one is a place of it in the other.
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


# Pairs of ends that agree are believed over a clock as written only when there are that many times more.
_CLEARLY_MORE: Final = 2
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


def _shared(here: Flags) -> Float64:
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
    if near[most] <= _CLEARLY_MORE * _within(apart, np.array([as_written]), 2 * TOGETHER_NS)[0]:
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


@dataclass(frozen=True, slots=True)
class Matches:
    """Matched collectives as rows, ranks as columns; times in ns since the reference's origin, on its clock.

    Attributes:
        bytes: The bytes that each row moves; -1 if a file does not contain them.
        here: Which ranks were found in which rows, at least two in each.
        start: When a rank arrived; 0 if it was not found.
        reference: The rank whose clock all times are on.
        clock: How far each rank's clock is ahead of the reference's, in ns; None without a suitable row.
        residual: The median distance in ns, after setting the clock, of each rank's ends from those of the
            rank by which it was set; None without a suitable row.
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
    events = CollectiveEvents(traces)
    _match_by_sequence(events)
    _match_by_order(events)
    _match_by_end(events, RankClocks(events))
    clocks = RankClocks(events)
    here = events.table(np.ones_like(events.end)) > 0
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
        start=np.where(here, events.table(events.start) + clocks.shift, 0),
        end=np.where(here, events.table(events.end) + clocks.shift, 0),
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


def _match_by_sequence(events: CollectiveEvents) -> None:
    numbered = np.flatnonzero(events.sequence >= 0)
    keys = np.column_stack([events.kind[numbered], events.sequence[numbered]])
    _, match = np.unique(keys, axis=0, return_inverse=True)
    events.match[numbered] = match.reshape(-1)
    events.settle(0)


def _match_by_order(events: CollectiveEvents) -> None:
    """Match the events without a number, group by group, by aligning the ranks' sequences.

    If groups have no names and one sequence does not fit, the events belong to several groups, and partial
    fits are chance: none is matched.
    """
    groups = {kind: (kind.group, kind.ranks, kind.source) for kind in events.kinds}
    for group in dict.fromkeys(groups.values()):
        named = group[0] != ""
        of_group = np.array([groups[kind] == group for kind in events.kinds], dtype=np.bool_)
        rows = np.flatnonzero(of_group[events.kind] & (events.sequence < 0))
        sequences = [rows[events.place[rows] == at] for at in range(len(events.ranks))]
        longest = max(sequences, key=len)
        others = [each for each in sequences if len(each) and each is not longest]
        pairs = [align(events, longest, each) for each in others]
        if not named and any(
            _fits_as_written(events, longest, each) for each in zip(others, pairs, strict=True)
        ):
            continue
        names = np.zeros(len(events.match), dtype=np.int64)
        names[longest] = events.match.max(initial=-1) + 1 + np.arange(len(longest))
        for pair in pairs:
            if pair is not None and (named or None not in pairs):
                theirs, mine = pair
                events.match[theirs] = events.match[mine] = names[theirs]
    events.settle(1)


def _fits_as_written(
    events: CollectiveEvents, longest: Int64, aligned: tuple[Int64, tuple[Int64, Int64] | None]
) -> bool:
    """Return whether the ends of a rank agree better where they are written than where they were aligned.

    Args:
        aligned: All collectives of the rank, and their alignment with ``longest``.
    """
    rows, pair = aligned
    if pair is None:
        return False
    apart = events.end[pair[0]] - events.end[pair[1]]
    places = events.place[[longest[0], rows[0]]].tolist()
    as_written = events.origin_ns[places[1]] - events.origin_ns[places[0]]
    clock = median(apart)
    if abs(clock - as_written) <= _KEPT_NS:
        return False
    theirs, mine = np.sort(events.end[longest]), events.end[rows] + as_written
    off = np.abs(theirs[nearest(theirs, mine)] - mine)
    return bool(off.max() <= TOGETHER_NS and _CLEARLY * median(off) < median(np.abs(apart - clock)))


def _match_by_end(events: CollectiveEvents, clocks: RankClocks) -> None:
    """Match the remaining events by end time, those with a partial match first: of one sort, at one time,
    and each the other's nearest.
    """
    start, end = events.start + clocks.shift[events.place], events.end + clocks.shift[events.place]
    names = events.match.max(initial=-1) + 1 + np.arange(len(events.match))
    for sort in np.unique(events.sort[(events.match < 0) & (events.sequence < 0)]).tolist():
        rows = np.flatnonzero((events.sort == sort) & (events.sequence < 0))
        rows = rows[np.argsort(end[rows], kind="stable")]
        by_rank = [rows[events.place[rows] == at] for at in range(len(events.ranks))]
        for joining, (theirs, mine) in product((True, False), permutations(by_rank, 2)):
            left = mine[events.match[mine] < 0]
            # A match that already contains this rank cannot contain another of its collectives.
            free = (events.match[theirs] >= 0) & ~np.isin(events.match[theirs], events.match[mine])
            if not joining:
                free |= events.match[theirs] < 0
            if not len(left) or not free.any():
                continue
            pair = theirs[free]
            partner = nearest(end[pair], end[left])
            mutual = nearest(end[left], end[pair])[partner] == np.arange(len(left))
            pair = pair[partner]
            between = np.maximum(start[pair] - end[left], start[left] - end[pair])
            mutual &= between <= TOGETHER_NS
            pair, left = pair[mutual], left[mutual]
            events.match[pair] = np.where(events.match[pair] >= 0, events.match[pair], names[pair])
            events.match[left] = events.match[pair]
    events.settle(2)
