"""Compares ranks: which rank arrives last at collectives, and the time that this costs the others.

No rank leaves a collective before the last one has arrived. So the shortest time of any rank in a collective
is the transfer, and the rest of the other ranks' time is waiting. In synchronous training a slow rank shows
only here, since all ranks have the same step time. An `Across` becomes a document with tables and a
verdict, and a dictionary for programs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from torchperfd.document.blocks import Document, Heading, Sentences
from torchperfd.document.tables import Table
from torchperfd_daemon.analysis.collectives import Collectives, Kind
from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.layout import in_us, ms, printable, table
from torchperfd_daemon.analysis.matching import Matches, match
from torchperfd_daemon.analysis.trace import Int64
from torchperfd_daemon.text import ranks_phrase

# Waiting for a rank is reported from this share of the recorded time on.
_MIN_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True)
class RankWait:
    """One rank among the others.

    Attributes:
        matched: Its collectives that were found on another rank too.
        wait_ns: Time in which it waited in a collective; overlapping waits count once.
        cost_ns: Time for which the others waited for it when it was last, summed over them; overlapping waits
            of one rank count once.
        clock_ns: How far its clock is ahead of the reference's; None without a suitable collective.
        clock_residual_ns: The median distance, after its clock was set, of its ends of collectives from those
            of the rank by which it was set; None without a suitable collective.
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
        kind: The function, the process group, and the event that gives its time.
        bytes: The sum over calls of the larger of input and output; None if a file does not contain it.
        transfer_ns: The shortest time of any rank in it, summed over the calls.
        wait_ns: The time of ranks in it beyond that, summed over calls and ranks.
    """

    kind: Kind
    ranks: tuple[int, ...]
    calls: int
    bytes: int | None
    transfer_ns: int
    wait_ns: int

    @property
    def bytes_per_second(self) -> float | None:
        """The algorithm bandwidth: bytes divided by transfer time (nccl-tests' ``algbw``)."""
        return self.bytes / self.transfer_ns * 1e9 if self.bytes and self.transfer_ns else None


@dataclass(frozen=True, slots=True)
class Across:
    """The comparison of several ranks' traces.

    Attributes:
        missing: Ranks of the run without a trace here; waiting for one of them appears as transfer.
        steps: The number of training steps that all traces contain; 0 without any, or if numbers differ.
        reference: The rank by whose clock the others were set.
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
        """The number of collectives found on at least two ranks."""
        return self.by_sequence + self.by_order + self.by_end

    @property
    def blamed(self) -> RankWait | None:
        """The rank that the others wait for; None if there is none, or if it is not a single one.

        It costs each of the others at least 1 % of the recorded time, and at least twice as much as any other
        rank does.
        """
        first, second, *_ = sorted(self.ranks, key=lambda each: each.cost_ns, reverse=True)
        is_large = first.cost_ns > 0 and self.cost_each_ns(first) >= _MIN_SHARE * self.duration_ns
        return first if is_large and first.cost_ns >= 2 * second.cost_ns else None

    def cost_each_ns(self, rank: RankWait) -> float:
        """Return the mean time in ns that the rank cost each of the others."""
        return rank.cost_ns / (len(self.ranks) - 1)


def across(traces: Mapping[int, Collectives]) -> Across | None:
    """Match the collectives of several ranks, by rank; None with fewer than two.

    A rank's wait in a collective is its time in it less the shortest time of any rank in it. The part of the
    wait that the last rank caused is at most the difference of their arrivals, after setting the clocks.
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
    last = arrivals.argmax(axis=1)
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


# A smaller difference is within the precision of setting clocks by ends of collectives.
_CLOCKS_DIFFER_NS: Final = 1_000_000
_KINDS: Final = 5
_MAX_RANKS: Final = 16


def across_to_dict(across: Across) -> dict[str, Any]:
    """Return the part ``across`` of the ``torchperfd.analysis/1`` document; times in µs."""
    blamed = across.blamed
    return {
        "verdict": _verdict(across) if across.matched else None,
        "found": _found(across),
        "caveats": _caveats(across) if across.matched else [],
        "matched": across.matched,
        "matched_by": {way: getattr(across, f"by_{way}") for way in ("sequence", "order", "end")},
        "missing": list(across.missing),
        "steps": across.steps,
        "reference": across.reference,
        "slowest": None if blamed is None else blamed.rank,
        "ranks": [
            in_us(each, "rank matched unmatched wait_ns last cost_ns clock_ns clock_residual_ns")
            | {"cost_per_step_us": each.cost_ns / 1000 / across.steps if across.steps else None}
            for each in across.ranks
        ],
        "collectives": [
            {
                "name": each.kind.name,
                "group": each.kind.group or None,
                "ranks": list(each.ranks),
                "timed_by": each.kind.source,
                **in_us(each, "calls bytes transfer_ns wait_ns bytes_per_second"),
            }
            for each in across.kinds
        ],
    }


def across_document(across: Across) -> Document:
    """Return the waits, the cost of each rank and the verdict."""
    found = (Heading("across ranks", style="bold"), Sentences([_found(across)]))
    if not across.matched:
        return Document([found])
    ranks, kinds = len(across.ranks) - _MAX_RANKS, len(across.kinds) - _KINDS
    more_ranks = [f"{ranks:,} more ranks, which cost the others less; --json has all"] * (ranks > 0)
    more_kinds = [f"{kinds:,} more kinds of collective; --json has all"] * (kinds > 0)
    return Document(
        [
            found,
            (_rank_table(across), Sentences(more_ranks)),
            (_kind_table(across), Sentences(more_kinds)),
            [Sentences((*_caveats(across), _verdict(across)))],
        ]
    )


def _found(across: Across) -> str:
    parts = [f"{across.matched:,} collectives found on several of {len(across.ranks):,} ranks"]
    unmatched = sum(rank.unmatched for rank in across.ranks)
    if unmatched:
        parts.append(f"{unmatched:,} on one only")
    if across.missing:
        parts.append(f"no trace of {ranks_phrase(sorted(across.missing))}")
    return ", ".join(parts)


def _rank_table(across: Across) -> Table:
    """Return the ranks that cost others most, or wait longest, in order of rank."""
    most = sorted(across.ranks, key=lambda each: (-each.cost_ns, -each.wait_ns))[:_MAX_RANKS]
    rows = [
        (f"rank {each.rank}", f"{each.matched:,}", ms(each.wait_ns), f"{each.last:,}", ms(each.cost_ns))
        for each in sorted(most, key=lambda each: each.rank)
    ]
    return table(("", "collectives", "wait ms", "last to arrive", "costs others ms"), rows)


def _kind_table(across: Across) -> Table:
    rows = [
        (
            " ".join(part for part in (printable(each.kind.name), printable(each.kind.group)) if part),
            f"{len(each.ranks):,}",
            f"{each.calls:,}",
            "-" if each.bytes is None else f"{each.bytes / 1e6:,.3f}",
            ms(each.transfer_ns),
            ms(each.wait_ns),
            "-" if each.bytes_per_second is None else f"{each.bytes_per_second / 1e9:,.3f}",
        )
        for each in across.kinds[:_KINDS]
    ]
    headings = ("collective", "ranks", "calls", "MB", "transfer ms", "wait ms", "GB/s")
    return table(headings, rows)


def _caveats(across: Across) -> list[str]:
    lines = []
    if any(each.kind.source == "call" for each in across.kinds):
        lines.append("neither kernels nor spans were recorded: times are those of the host's calls")
    known = [each for each in across.ranks if each.clock_ns is not None]
    farthest = max(known, key=lambda each: abs(each.clock_ns or 0))
    ahead = farthest.clock_ns or 0
    if abs(ahead) >= _CLOCKS_DIFFER_NS:
        residual = max(each.clock_residual_ns or 0 for each in known)
        lines.append(
            f"rank {farthest.rank}'s clock is {ms(abs(ahead))} ms {'ahead of' if ahead > 0 else 'behind'} "
            f"rank {across.reference}'s; set alike, ends of collectives are {ms(residual)} ms apart"
        )
    return lines


def _verdict(across: Across) -> str:
    blamed = across.blamed
    if blamed is None:
        return "no one rank keeps the others waiting"
    each = across.cost_each_ns(blamed)
    per = f"{ms(each / across.steps)} ms a step" if across.steps else f"{ms(each)} ms"
    return (
        f"rank {blamed.rank} keeps the others waiting: last at {blamed.last:,} of {blamed.matched:,} "
        f"collectives; each of them loses {per} ({each / across.duration_ns:.1%})"
    )
