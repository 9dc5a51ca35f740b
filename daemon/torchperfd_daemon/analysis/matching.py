"""Matches the events of one collective on several ranks, and determines how the ranks' clocks differ.

Collectives are matched by process group, sequence number and name. In a file without numbers, a group's
collectives are the same sequence on all of its ranks. The sequences are aligned at their last elements, or at
another place if the ends of the collectives agree much better there. If the file does not distinguish groups,
the sequences may not fit; the collectives are then matched by end time alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

from torchperfd_daemon.analysis.collective_events import TOGETHER_NS, CollectiveEvents, nearest
from torchperfd_daemon.analysis.collectives import Collectives, Kind
from torchperfd_daemon.analysis.rank_clocks import RankClocks
from torchperfd_daemon.analysis.sequence_alignment import align
from torchperfd_daemon.analysis.trace import Flags, Int64


@dataclass(frozen=True, slots=True)
class Matches:
    """Matched collectives as rows, ranks as columns; times in ns since the reference's origin, on its clock.

    Attributes:
        ranks: The ranks, ascending: the columns.
        kind: The kind of each row, an index into ``kinds``.
        bytes: The bytes that each row moves; -1 if a file does not contain them.
        here: Which ranks were found in which rows, at least two in each.
        start: When a rank arrived; 0 if it was not found.
        end: When it left, likewise.
        unmatched: The number of collectives of each rank that are in no row.
        by_sequence: Rows matched by the group's own numbers.
        by_order: Rows matched by their order.
        by_end: Rows matched by end time.
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
    """Match the events that have the group's own number."""
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
        names = np.zeros(len(events.match), dtype=np.int64)
        names[longest] = events.match.max(initial=-1) + 1 + np.arange(len(longest))
        for pair in pairs:
            if pair is not None and (named or None not in pairs):
                theirs, mine = pair
                events.match[theirs] = events.match[mine] = names[theirs]
    events.settle(1)


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
