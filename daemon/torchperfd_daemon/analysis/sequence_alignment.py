"""Lays two ranks' sequences of collectives side by side."""

from typing import Final

import numpy as np

from torchperfd_daemon.analysis.collective_events import TOGETHER_NS, CollectiveEvents, median, nearest
from torchperfd_daemon.analysis.trace import Int64

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
