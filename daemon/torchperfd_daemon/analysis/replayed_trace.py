"""The steps of a trace as the graph that `replay` works on."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.categories import LAUNCHES, OPERATOR
from torchperfd_daemon.analysis.host_activity import COMPUTING_EACH_NS, Kinds, Launches, collective_spans
from torchperfd_daemon.analysis.links import Links
from torchperfd_daemon.analysis.phases import drawing
from torchperfd_daemon.analysis.profiler_overhead import Overheads
from torchperfd_daemon.analysis.replay import DeviceEvents, HostTime, Timeline, Waits
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

# Between two calls of a host that is at work there is no more Python than this.
_SILENT_NS: Final = 100_000


@dataclass(frozen=True, slots=True)
class HostCalls:
    """The calls of the threads that launch, by what they wait for, as rows of the trace.

    Attributes:
        for_results: Calls that synchronise, and copies to pageable memory, which is how values are read.
        staging: Launches of copies from pageable memory, which the host stages.
        computing: Longer operators that launch nothing and wait for nothing.
        silent: Spans, and no rows, in which no thread shows a call.
    """

    for_results: Int64
    staging: Int64
    computing: Int64
    silent: HostTime


def find_host_calls(trace: Trace, links: Links, overheads: Overheads, first: int, last: int) -> HostCalls:
    """Return the calls in which the host waits for the device or computes by itself.

    Args:
        links: The launches of the trace's device events.
        overheads: The rows of overhead of the trace.
        first: From when on silent spans count, in ns.
        last: Until when.
    """
    kinds = Kinds(trace, Launches(trace, links))
    threads = np.unique(trace.thread[kinds.launching]).tolist()
    none = kinds.launching[:0]
    results, staging = ([each.on(thread) for thread in threads] for each in (kinds.waiting, kinds.staging))
    computing = [kinds.computing(trace, thread, COMPUTING_EACH_NS) for thread in threads]
    silent = _silent(trace, overheads, first, last)
    return HostCalls(
        np.concatenate([none, *results]),
        np.concatenate([none, *staging]),
        np.concatenate([none, *computing]),
        silent,
    )


def timeline(
    trace: Trace,
    links: Links,
    calls: HostCalls,
    overheads: Overheads,
    starts: Int64,
    ends: Int64,
) -> Timeline:
    """Return the graph of some steps.

    A device event without a launch in the file counts as launched when it began. An event that began before
    its launch was over could begin then. Where the host shows no call at all it may wait as well.

    Args:
        links: The launches of the trace's device events.
        overheads: The rows of overhead of the trace, of which full launch queues are waits.
        starts: When each step begins on the host, in ns, in order.
        ends: When it ends.
    """
    rows, known = links.event, links.launch >= 0
    launched = np.where(known, np.minimum(trace.end[links.launch], trace.start[rows]), trace.start[rows])
    begun = np.where(known, trace.start[links.launch], trace.start[rows])
    first, last = int(starts[0]), int(ends[-1])
    # What ran before the first launch in the file was launched before.
    unseen = ~known & (trace.start[rows] < _first_start(trace, rows, known & (begun >= first)))
    carried = (begun < first) | unseen
    inside = ~carried & (begun < last)
    waiting = np.concatenate((calls.for_results, calls.staging, overheads.queue_full))
    return Timeline(
        _events(trace, rows[inside], begun[inside], launched[inside]),
        Waits(waiting, trace.start[waiting], trace.end[waiting]),
        _split(calls.silent, np.unique(np.concatenate((starts, ends)))),
        starts,
        ends,
        _events(trace, rows[carried], begun[carried], launched[carried]),
    )


def _events(trace: Trace, rows: Int64, called: Int64, launched: Int64) -> DeviceEvents:
    stream = trace.thread[rows].astype(np.int64)
    return DeviceEvents(rows, stream, called, launched, trace.start[rows], trace.end[rows])


def _first_start(trace: Trace, rows: Int64, launched: Flags) -> Int64:
    """Return for each device event when the first one of its stream with a launch began."""
    first = np.full(len(trace.threads), np.iinfo(np.int64).min, dtype=np.int64)
    streams, which = np.unique(trace.thread[rows[launched]], return_inverse=True)
    starts = np.full(len(streams), np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(starts, which, trace.start[rows[launched]])
    first[streams] = starts
    found: Int64 = first[trace.thread[rows]]
    return found


def _silent(trace: Trace, overheads: Overheads, first: int, last: int) -> HostTime:
    """Return the longer spans between two moments in which no host thread shows a call."""
    shown = trace.of_categories({OPERATOR, *LAUNCHES})
    shown[np.concatenate((overheads.profilers, overheads.first_use, overheads.queue_full))] = True
    rows = np.concatenate((np.flatnonzero(shown), drawing(trace), collective_spans(trace)))
    rows = rows[(trace.end[rows] > first) & (trace.start[rows] < last)]
    order = np.argsort(trace.start[rows], kind="stable")
    begin = np.maximum.accumulate(np.append(first, trace.end[rows][order]))
    until = np.append(trace.start[rows][order], last)
    chosen = until - begin >= _SILENT_NS
    return HostTime(begin[chosen], until[chosen])


def _split(spans: HostTime, marks: Int64) -> HostTime:
    """Return the spans, which are in order, cut at some moments."""
    inside = np.searchsorted(spans.start, marks, side="right") - 1
    cuts = (
        marks[(inside >= 0) & (marks < spans.end[np.maximum(inside, 0)])] if len(spans.start) else marks[:0]
    )
    return HostTime(np.union1d(spans.start, cuts), np.union1d(spans.end, cuts[~np.isin(cuts, spans.start)]))
