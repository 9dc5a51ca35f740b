"""Across ranks: who comes to collectives last, and what that costs the others.

A collective is over for no rank before the last one has come. So the rank that is in it for the shortest
time only transferred; what the others were in it longer, they waited. In synchronous training this is the
one place where a slow rank shows: its steps take as long as everybody's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.collectives import Collectives, Kind
from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.matching import Matches, match
from torchperfd_daemon.analysis.trace import Int64

# Below this part of the time recorded, waiting for a rank is not worth a word.
_WORTH_SAYING: Final = 0.01


@dataclass(frozen=True, slots=True)
class RankWait:
    """One rank among the others.

    Attributes:
        rank: Which.
        matched: Its collectives that were found on another rank too.
        unmatched: Those that were not.
        wait_ns: Time in which it was in a collective and waited; moments of several at once count once.
        last: How often it was the last to arrive.
        cost_ns: What the others waited for it when it was last, summed over them, likewise.
        clock_ns: How far its clock is ahead of the reference's; None where no collective tells.
        clock_residual_ns: How far its ends are from those of the rank that its clock was set by, on the
            set clock, in the median; None where none tells.
    """

    rank: int
    matched: int
    unmatched: int
    wait_ns: int
    last: int
    cost_ns: int
    clock_ns: int | None
    clock_residual_ns: int | None


@dataclass(frozen=True, slots=True)
class KindWait:
    """All matched collectives of one kind.

    Attributes:
        kind: What, by which group, and which event it was timed by.
        ranks: Who took part.
        calls: How many.
        bytes: What they moved: of each the input or output, whichever is larger; None when a file does
            not say.
        transfer_ns: The shortest time that a rank was in it, summed over the calls.
        wait_ns: What ranks were in it longer, summed over calls and ranks.
    """

    kind: Kind
    ranks: tuple[int, ...]
    calls: int
    bytes: int | None
    transfer_ns: int
    wait_ns: int

    @property
    def bytes_per_second(self) -> float | None:
        """Bandwidth as the algorithm has it: bytes by transfer time (nccl-tests' ``algbw``)."""
        return self.bytes / self.transfer_ns * 1e9 if self.bytes and self.transfer_ns else None


@dataclass(frozen=True, slots=True)
class Across:
    """What the traces of several ranks say together.

    Attributes:
        ranks: Each rank, in order.
        kinds: Each kind of collective, most wait first.
        missing: Ranks of the run without a trace here; who waited for one of them seems to transfer.
        steps: Training steps that all traces hold; 0 when there is none, or numbers differ.
        duration_ns: The longest of the recordings.
        reference: The rank whose clock the others were set by.
        by_sequence: Collectives matched by the group's own numbers.
        by_order: Those matched by their order.
        by_end: Those matched by end time.
    """

    ranks: tuple[RankWait, ...]
    kinds: tuple[KindWait, ...]
    missing: tuple[int, ...]
    steps: int
    duration_ns: int
    reference: int
    by_sequence: int
    by_order: int
    by_end: int

    @property
    def matched(self) -> int:
        """All collectives found on two ranks at least."""
        return self.by_sequence + self.by_order + self.by_end

    @property
    def blamed(self) -> RankWait | None:
        """The rank that keeps the others waiting; None where none does, or several by turns.

        It costs each of the others a hundredth of the time recorded at least, and twice what any other
        rank costs.
        """
        first, second, *_ = sorted(self.ranks, key=lambda each: each.cost_ns, reverse=True)
        worth_saying = first.cost_ns > 0 and self.cost_each_ns(first) >= _WORTH_SAYING * self.duration_ns
        return first if worth_saying and first.cost_ns >= 2 * second.cost_ns else None

    def cost_each_ns(self, rank: RankWait) -> float:
        """What the rank cost each of the others, on average."""
        return rank.cost_ns / (len(self.ranks) - 1)


def across(traces: Mapping[int, Collectives]) -> Across | None:
    """Match the collectives of several ranks, by rank; None with fewer than two.

    Formulas: a rank's wait in a collective is its time in it less the shortest time of any rank in it; of
    that, it waited for the last to arrive for as long as it had come before it, on clocks set alike.
    """
    if len(traces) < 2:
        return None
    matches = match(traces)
    duration = np.where(matches.here, matches.end - matches.start, np.iinfo(np.int64).max)
    transfer = duration.min(axis=1)
    wait = np.where(matches.here, duration - transfer[:, None], 0)
    recordings = traces.values()
    world = max((each.world_size or 0 for each in recordings), default=0)
    return Across(
        ranks=_ranks(matches, wait),
        kinds=_kinds(matches, transfer, wait),
        missing=tuple(rank for rank in range(world) if rank not in traces),
        steps=len(set.intersection(*(set(each.steps) for each in recordings))),
        duration_ns=max(each.duration_ns for each in recordings),
        reference=matches.reference,
        by_sequence=matches.by_sequence,
        by_order=matches.by_order,
        by_end=matches.by_end,
    )


def _ranks(matches: Matches, wait: Int64) -> tuple[RankWait, ...]:
    count = len(matches.ranks)
    arrivals = np.where(matches.here, matches.start, np.iinfo(np.int64).min)
    last = arrivals.argmax(axis=1) if len(arrivals) else np.zeros(0, dtype=np.int64)
    for_last = np.clip(arrivals.max(axis=1, initial=0)[:, None] - matches.start, 0, wait)
    cost = np.zeros(count, dtype=np.int64)
    waited = []
    for at in range(count):
        mine = matches.here[:, at]
        start = matches.start[mine, at]
        waited.append(Cover(start, start + wait[mine, at]).length)
        until, by = start + for_last[mine, at], last[mine]
        for culprit in np.unique(by[until > start]).tolist():
            of_culprit = by == culprit
            cost[culprit] += Cover(start[of_culprit], until[of_culprit]).length
    times_last = np.bincount(last, minlength=count)
    return tuple(
        RankWait(
            rank=rank,
            matched=int(matches.here[:, at].sum()),
            unmatched=matches.unmatched[at],
            wait_ns=waited[at],
            last=int(times_last[at]),
            cost_ns=int(cost[at]),
            clock_ns=matches.clock[at],
            clock_residual_ns=matches.residual[at],
        )
        for at, rank in enumerate(matches.ranks)
    )


def _kinds(matches: Matches, transfer: Int64, wait: Int64) -> tuple[KindWait, ...]:
    found = []
    for number in np.unique(matches.kind).tolist():
        rows = matches.kind == number
        taking_part = np.flatnonzero(matches.here[rows].any(axis=0)).tolist()
        size = matches.bytes[rows]
        found.append(
            KindWait(
                kind=matches.kinds[number],
                ranks=tuple(matches.ranks[at] for at in taking_part),
                calls=int(rows.sum()),
                bytes=int(size.sum()) if (size >= 0).all() else None,
                transfer_ns=int(transfer[rows].sum()),
                wait_ns=int(wait[rows].sum()),
            )
        )
    return tuple(sorted(found, key=lambda kind: kind.wait_ns, reverse=True))
