"""Determines the ends of events that still ran when the recording was stopped."""

import numpy as np

from torchperfd_daemon.analysis.nesting import nest
from torchperfd_daemon.analysis.trace import Trace


def end_unfinished(trace: Trace, recorded_until: int | None) -> None:
    """End the unfinished events of a trace where torch's own tables do.

    The file stretches each of them to when it was written. ``torch.profiler`` ends it with the call that it
    was in on its thread, or else with the recording.

    Args:
        trace: The trace, whose ends are changed in place.
        recorded_until: When the recording was stopped, in ns since the trace's origin; None if the file
            does not contain it; then events outside any other call are not changed.
    """
    rows = np.flatnonzero(trace.unfinished)
    if not len(rows):
        return
    ends = trace.end[rows]
    if recorded_until is not None:
        ends = np.clip(recorded_until, trace.start[rows], ends)
    # Treated as moments: they are in other calls, and no other call is in them.
    trace.end[rows] = trace.start[rows]
    concerned = np.zeros(len(trace.threads), dtype=np.bool_)
    concerned[trace.thread[rows]] = True
    calls = nest(trace, np.flatnonzero(concerned[trace.thread]))
    within = np.flatnonzero(trace.unfinished[calls.row] & (calls.parent >= 0))
    at = np.searchsorted(rows, calls.row[within])
    ends[at] = np.minimum(ends[at], trace.end[calls.row[calls.parent[within]]])
    trace.end[rows] = ends
