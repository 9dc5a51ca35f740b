"""Finds the runtime call and the operator that launched each device event.

Kineto writes the launching operator's id on each device event, as its ``External id``. Some versions write
the correlation id there instead, and by chance that may be the id of another operator. The launch itself is
the runtime or driver call with the same correlation id, and it lies within the operator that made it. An
external id therefore counts only where it differs from the correlation id and names an operator that ran at
the launch. Everywhere else the innermost operator around the launch is the launching one.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.breakdown import DEVICE, LAUNCHES
from torchperfd_daemon.analysis.intervals import ByThread, Spans
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

_OPERATOR: Final = "cpu_op"
_ANNOTATION: Final = "user_annotation"
# Inductor marks what it runs with an annotation, which replaces the operator if there is none.
_COMPILED: Final = ("## Call CompiledFxGraph", "Torch-Compiled Region")
# Older exporters cut times to whole microseconds, so that a launch may seem to follow its operator by one.
_ROUNDING_NS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Links:
    """The launch of each device event, as parallel columns in file order.

    Attributes:
        event: The row of each kernel, copy and fill.
        launch: The row of the runtime or driver call that launched it, -1 where the file has none.
        operator: The row of the operator that launched it, -1 for none.
    """

    event: Int64
    launch: Int64
    operator: Int64

    def launched_at(self, trace: Trace) -> Int64:
        """Return when the host launched each event, in ns; -1 if unknown."""
        rows = np.where(self.launch >= 0, self.launch, self.operator)
        return np.where(rows >= 0, trace.start[rows], -1)


def find_links(trace: Trace) -> Links:
    """Return the launch of each device event of a trace."""
    events = np.flatnonzero(trace.of_categories(DEVICE))
    calls = np.flatnonzero(trace.of_categories(LAUNCHES) & (trace.correlation >= 0))
    launch = _latest(trace, calls, trace.correlation[calls], trace.correlation[events], trace.start[events])
    around = _around(trace, launch)
    launchers = np.flatnonzero(trace.of_categories({_OPERATOR, _ANNOTATION}) & (trace.external > 0))
    known = launch >= 0
    moment = np.where(known, trace.start[launch], trace.start[events])
    external = trace.external[events]
    named = _latest(trace, launchers, trace.external[launchers], external, moment)
    believed = _believed(trace, events, launch, around, named)
    return Links(events, launch, np.where(believed, named, around))


def _believed(trace: Trace, events: Int64, launch: Int64, around: Int64, named: Int64) -> Flags:
    """Return for which events the operator that ``External id`` names may have made the launch."""
    external, known = trace.external[events], launch >= 0
    is_own = (external > 0) & (external != trace.correlation[events])
    moment = trace.start[launch]
    covers = (trace.start[named] <= moment) & (moment <= trace.end[named] + _ROUNDING_NS)
    covers &= (trace.thread[named] == trace.thread[launch]) | (around < 0)
    believed: Flags = is_own & (named >= 0) & (covers | ~known)
    judged = is_own & known
    # Where most ids name no operator that ran at the launch, the others do so by chance.
    if 2 * int((believed & judged).sum()) < int(judged.sum()):
        believed[:] = False
    return believed


def _around(trace: Trace, launch: Int64) -> Int64:
    """Return the row of the innermost operator around each launch, -1 for none."""
    finished = ~trace.unfinished
    operators = np.flatnonzero(trace.of_categories({_OPERATOR}) & finished)
    found = _innermost(trace, operators, launch)
    missing = np.flatnonzero((found < 0) & (launch >= 0))
    if len(missing):
        annotations = np.flatnonzero(trace.of_categories({_ANNOTATION}) & finished)
        compiled = trace.named(annotations, lambda name: name.startswith(_COMPILED))
        found[missing] = _innermost(trace, compiled, launch[missing])
    return found


def _innermost(trace: Trace, rows: Int64, launch: Int64) -> Int64:
    """Return which of ``rows`` is the innermost around each launch, -1 for none."""
    found = np.full(len(launch), -1, dtype=np.int64)
    known = np.flatnonzero(launch >= 0)
    if not len(rows) or not len(known):
        return found
    candidates = ByThread(trace, rows)
    threads = trace.thread[launch[known]]
    for thread in np.unique(threads).tolist():
        chosen, mine = known[threads == thread], candidates.on(thread)
        innermost = Spans(trace.start[mine], trace.end[mine]).innermost(trace.start[launch[chosen]])
        found[chosen] = np.append(mine, -1)[innermost]
    return found


def _latest(trace: Trace, rows: Int64, keys: Int64, wanted: Int64, moments: Int64) -> Int64:
    """Return the row of each wanted key, -1 for none.

    Of several rows with one key (traces of several processes in one file) it is the last that began by the
    moment, or else the first.

    Args:
        wanted: The keys that are looked for.
        moments: The moment for each of those, in ns.
    """
    if not len(rows):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    rows, keys = rows[order], keys[order]
    first = np.searchsorted(keys, wanted)
    if (np.diff(keys) == 0).any():
        starts = np.sort(trace.start[rows])
        width = len(rows) + 1
        number = np.concatenate(([0], np.cumsum(np.diff(keys) != 0)))
        place = number * width + np.searchsorted(starts, trace.start[rows], side="right")
        by_place = np.argsort(place, kind="stable")
        rows = rows[by_place]
        key = number[np.minimum(first, len(rows) - 1)]
        latest = key * width + np.searchsorted(starts, moments, side="right")
        found = np.maximum(first, np.searchsorted(place[by_place], latest, side="right") - 1)
    else:
        found = first
    last = len(rows) - 1
    is_known = keys[np.minimum(first, last)] == wanted
    return np.where(is_known, rows[np.minimum(found, last)], -1)
