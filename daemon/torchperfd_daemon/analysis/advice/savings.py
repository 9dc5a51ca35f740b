"""What an edit of the recorded steps saves: the replayed step less the replayed step with the edit.

Also makes the graph of a trace's steps that is replayed.

The steps are replayed as they are when nothing is recorded. The cost of each recorded event is taken off the
host's time. If the length of unrecorded steps is known, all of the host's work is then scaled until the
replayed steps have that length: recording makes a host that launches slower than its events explain.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.advice.edits import NOTHING, DeviceEvents, Edit, HostCost, HostTime, Spans
from torchperfd_daemon.analysis.advice.replay import Timeline
from torchperfd_daemon.analysis.callers import Links
from torchperfd_daemon.analysis.categories import LAUNCHES, OPERATOR
from torchperfd_daemon.analysis.host_activity import COMPUTING_EACH_NS, Kinds, collective_spans
from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.overhead import Overheads
from torchperfd_daemon.analysis.steps import drawing
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


def find_host_calls(trace: Trace, kinds: Kinds, overheads: Overheads, first: int, last: int) -> HostCalls:
    """Return the calls in which the host waits for the device or computes by itself."""
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
    trace: Trace, links: Links, calls: HostCalls, overheads: Overheads, starts: Int64, ends: Int64
) -> Timeline:
    """Return the graph of some steps.

    A device event without a launch in the file counts as launched when it began. An event that began before
    its launch was over could begin then. Where the host shows no call at all it may wait as well.

    Args:
        overheads: The rows of overhead of the trace, of which full launch queues are waits.
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
        Spans.of(trace, waiting),
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
    never = np.iinfo(np.int64)
    first = np.full(len(trace.threads), never.max, dtype=np.int64)
    np.minimum.at(first, trace.thread[rows[launched]], trace.start[rows[launched]])
    return np.where(first < never.max, first, never.min)[trace.thread[rows]]


def _silent(trace: Trace, overheads: Overheads, first: int, last: int) -> HostTime:
    """Return the longer spans between two moments in which no host thread shows a call."""
    shown = trace.of_categories({OPERATOR, *LAUNCHES})
    shown[np.concatenate((overheads.profilers, overheads.first_use, overheads.queue_full))] = True
    rows = np.concatenate((np.flatnonzero(shown), drawing(trace), collective_spans(trace)))
    begin, until = Cover(trace.start[rows], trace.end[rows]).gaps(first, last)
    chosen = until - begin >= _SILENT_NS
    return HostTime(begin[chosen], until[chosen])


def _split(spans: HostTime, marks: Int64) -> HostTime:
    """Return the spans, which are in order, cut at some moments."""
    cuts = marks[Cover(spans.start, spans.end).contains(marks)]
    return HostTime(np.union1d(spans.start, cuts), np.union1d(spans.end, cuts[~np.isin(cuts, spans.start)]))


# A larger error of the replay makes each saving a range.
_CERTAIN: Final = 0.05
# Replayed steps are scaled to the unrecorded length this closely, in at most so many replays.
_CLOSE: Final = 0.003
_MAX_TRIES: Final = 12


class Savings:
    """The savings of edits in the steps of one trace.

    Args:
        step_ns: The mean step when nothing is recorded.
        is_known: That is a measured length, and not an estimate from the recording.

    """

    def __init__(
        self, timeline: Timeline, cost: HostCost, recorded_ns: float, step_ns: float, *, is_known: bool
    ) -> None:
        self._timeline = timeline
        self._cost = cost
        self._recorded_ns = recorded_ns
        self._step_ns = step_ns
        self._is_known = is_known

    @cached_property
    def step_ns(self) -> float:
        """The mean step when nothing is recorded, of which the savings are parts.

        Recording does not lengthen a step whose host waits for the device anyway.
        """
        return (
            max(self._step_ns, min(self._unedited_ns, self._recorded_ns))
            if self._timeline.busy
            else self._step_ns
        )

    def of(self, edit: Edit) -> float:
        """Return what an edit saves of a step, in ns; never more than the step."""
        left = self._timeline.replay(edit, self._base).step_ns
        saved = min(max(self._unedited_ns - left, 0.0), self._unedited_ns)
        if self._timeline.busy or not self._unedited_ns:
            return min(saved, self.step_ns)
        # Recorded operators of a host alone take longer by one factor.
        return self.step_ns * saved / self._unedited_ns

    @cached_property
    def margin_ns(self) -> float:
        """How far a saving may be off either way, in ns a step; 0 if the replay explains the recording."""
        return self.step_ns * self.error if self.error > _CERTAIN else 0.0

    @cached_property
    def error(self) -> float:
        """The part of the recorded step that the replayed graph does not explain, 0 to 1."""
        if not self._timeline.busy or not self._recorded_ns:
            return 0.0
        replayed, explained = (
            self._timeline.replay(NOTHING, explained=only).step_ns for only in (False, True)
        )
        apart = max(abs(replayed - self._recorded_ns), replayed - explained)
        return min(apart / self._recorded_ns, 1.0)

    @property
    def _unedited_ns(self) -> float:
        return self._unrecorded[1]

    @property
    def _base(self) -> HostCost:
        return self._unrecorded[0]

    @cached_property
    def _unrecorded(self) -> tuple[HostCost, float]:
        """What is taken off the host's time to leave unrecorded steps, and how long those take."""
        whole, cost = self._timeline.replay(NOTHING, self._cost).step_ns, self._cost
        if not self._is_known or whole <= (1 + _CLOSE) * self._step_ns:
            return cost, whole
        if self._timeline.replay(NOTHING, HostCost(cost.up_to, cost.scaled, 0.0)).step_ns > self._step_ns:
            return cost, whole  # The device alone takes longer than that.
        low, high = 0.0, 1.0
        for _ in range(_MAX_TRIES):
            middle = (low + high) / 2
            scaled = HostCost(cost.up_to, cost.scaled, middle)
            if self._timeline.replay(NOTHING, scaled).step_ns > (1 + _CLOSE) * self._step_ns:
                high = middle
            else:
                low = middle
        slowed = HostCost(cost.up_to, cost.scaled, low)
        return slowed, self._timeline.replay(NOTHING, slowed).step_ns
