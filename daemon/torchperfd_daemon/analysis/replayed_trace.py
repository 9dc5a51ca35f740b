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
from torchperfd_daemon.analysis.trace import Int64, Trace

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
    found: list[list[Int64]] = [[kinds.launching[:0]] for _ in range(3)]
    for thread in threads:
        found[0].append(kinds.waiting.on(thread))
        found[1].append(kinds.staging.on(thread))
        found[2].append(kinds.computing(trace, thread, COMPUTING_EACH_NS))
    silent = _silent(trace, overheads, first, last)
    return HostCalls(*(np.concatenate(rows) for rows in found), silent)


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
    inside = (begun >= first) & (begun < last)
    waiting = np.concatenate((calls.for_results, calls.staging, overheads.queue_full))
    silent = calls.silent
    if 2 * int((known & inside).sum()) < int(inside.sum()):
        # Without launches nothing is known of the host.
        silent = HostTime(starts, ends)
    events = rows[inside]
    earlier = rows[begun < first]
    return Timeline(
        DeviceEvents(
            events,
            trace.thread[events].astype(np.int64),
            launched[inside],
            trace.start[events],
            trace.end[events],
        ),
        Waits(waiting, trace.start[waiting], trace.end[waiting]),
        _split(silent, np.unique(np.concatenate((starts, ends)))),
        starts,
        ends,
        _last_ends(trace, earlier),
    )


def _last_ends(trace: Trace, rows: Int64) -> dict[int, int]:
    """Return for each stream when the last of some events ended."""
    streams, which = np.unique(trace.thread[rows], return_inverse=True)
    ends = np.zeros(len(streams), dtype=np.int64)
    np.maximum.at(ends, which, trace.end[rows])
    return dict(zip(streams.tolist(), ends.tolist(), strict=True))


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
