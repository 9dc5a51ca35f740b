"""Replays the steps of a trace as a graph of host work, launches, device events and waits, with edits.

The host is one thread of work: the time between its launches, waits and step marks is kept as a duration.
A device event begins when three things are true, each with the delay that was recorded:

- the host has launched it;
- the event before it on its stream has ended;
- the event of another stream that held it up, if one did, has ended.

A host that waits for the device continues when the event that ended its wait has ended. A full launch queue
is such a wait. A communication kernel keeps its length, in which it may wait for its peers: the same change
is made on all ranks.

All times are maxima of sums, so a shorter duration never makes a step longer. Unedited, every event gets its
recorded time. The steps are replayed twice in a row, and the second pass counts: by then the state at the
first step is what the edited steps themselves leave behind. Consecutive device events of a stream between
two waits are one node, so an edit costs a few array operations, linear in events.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.advice.edits import (
    CLOCKS_NS,
    NO_EVENT,
    DeviceEvents,
    Edit,
    HostCost,
    HostTime,
    Replayed,
    Spans,
    disjoint_waits,
    distinct,
    wait_around,
    with_silent,
)
from torchperfd_daemon.analysis.advice.sweep import Durations, Graph, sweep
from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.trace import Flags, Float64, Int64

Nodes = tuple[Float64, Float64, Float64]
Pass = tuple[Float64, Float64, Float64]

_NEVER: Final = -np.inf
_LOWEST: Final = np.iinfo(np.int64).min
# A launch takes so long to reach the device, and a stream so long to its next event, where no event shows it.
_USUAL_LATENCY_NS: Final = 5_000
_USUAL_GAP_NS: Final = 1_000
# A device event that begins later than this, and than a few latencies, after its launch and its stream allow
# was held up by something else.
_HELD_NS: Final = 20_000
# It was held up by the event of another stream that ended last, if no more than this before.
_SIGNALLED_NS: Final = 100_000
_HELD_LATENCIES: Final = 3


class Timeline:
    """The graph of some steps.

    Args:
        silent: Spans in which the host shows no call. It waited there if the device's last work ended late
            in the span; otherwise it was at work.

    Attributes:
        ending: The rows of the device events that end a node.
        unexplained_ns: The time for which device events were held up by something that is not in the graph.
    """

    def __init__(
        self,
        events: DeviceEvents,
        waits: Spans,
        silent: HostTime,
        starts: Int64,
        ends: Int64,
        carried: DeviceEvents | None = None,
    ) -> None:
        waits = with_silent(waits, silent, events)
        self._waits = disjoint_waits(waits, int(starts[0]), int(ends[-1]))
        order = np.lexsort((events.end, events.start, events.stream))
        self._row = events.row[order]
        self._stream = np.unique(events.stream[order], return_inverse=True)[1].astype(np.int64)
        self._start, self._end = events.start[order], events.end[order]
        launched = np.clip(np.minimum(events.launched[order], self._start), starts[0], ends[-1])
        self._inside = wait_around(launched, self._waits)
        # A launch within a wait counts from the begin of the wait.
        self._launched = np.where(self._inside >= 0, np.append(self._waits.start, 0)[self._inside], launched)
        streams = np.unique(events.stream[order])
        carried_ends = np.sort(carried.end) if carried else events.end[:0]
        self._carried = np.full(len(streams), _NEVER)
        for number, stream in enumerate(streams.tolist() if carried else ()):
            ended = carried.end[carried.stream == stream] if carried else carried_ends
            self._carried[number] = ended.max() if len(ended) else _NEVER
        self._nodes(starts, ends, np.clip(events.called[order], starts[0], None))
        moments = (self._launched, self._waits.start, self._node_end, starts[:1])
        self._points = distinct(np.concatenate(moments))
        self._waiting = Cover(self._waits.start, self._waits.end)
        self._works: dict[Callable[[Int64], Int64] | None, Float64] = {}
        self._at_launch, self._at_start, self._at_end = (
            np.searchsorted(self._points, each) for each in (self._launched, self._node_start, self._node_end)
        )
        self._delays()
        self._targets(carried_ends)
        self._runs()

    def _nodes(self, starts: Int64, ends: Int64, called: Int64) -> None:
        """Order waits and step marks of the host, and find between which of them each event was launched."""
        waits = self._waits
        marks = np.unique(np.concatenate((starts, ends)))
        inside = wait_around(marks, waits)
        moved = np.where(inside >= 0, np.append(waits.end, 0)[inside], marks)
        begin = np.concatenate((waits.start, moved))
        end = np.concatenate((waits.end, moved))
        is_mark = np.arange(len(begin)) >= len(waits.row)
        order = np.lexsort((is_mark, end))
        self._node_start, self._node_end = begin[order], end[order]
        self._wait_of = np.where(is_mark, NO_EVENT, np.arange(len(begin)))[order]
        self._first = int(starts[0])
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        self._marks = place[len(waits.row) :]
        self._begins = self._marks[np.searchsorted(marks, starts)]
        self._stops = self._marks[np.searchsorted(marks, ends)]
        self._segment = np.searchsorted(waits.end, self._launched, side="right")
        self._segment = self._segment + np.searchsorted(np.sort(moved), called, side="right")

    def _delays(self) -> None:
        """Find what decided when each device event began, and the delay after it."""
        start, launched, stream = self._start, self._launched, self._stream
        before = np.append(_NEVER, self._end[:-1].astype(np.float64))[: len(start)]
        first = np.flatnonzero(np.diff(stream, prepend=-1))
        before[first] = self._carried
        by_launch = launched >= before
        latencies = (start - launched)[by_launch & (self._inside < 0)]
        # Those that something held up are longer, so the lower quartile is what launching takes.
        self.latency_ns = float(np.percentile(latencies, 25)) if len(latencies) else float(_USUAL_LATENCY_NS)
        least = np.maximum(launched + np.minimum(self.latency_ns, start - launched), before)
        held = start - least > max(_HELD_NS, _HELD_LATENCIES * self.latency_ns)
        gaps = (start - before)[~by_launch & ~held & (start >= before)]
        usual_gap = float(np.median(gaps)) if len(gaps) else float(_USUAL_GAP_NS)
        self._cause, self._cause_lag = self._held_by(np.flatnonzero(held), least)
        known = self._cause >= 0
        self._latency = np.where(by_launch & ~known, start - launched, 0.0)
        short = np.minimum(self.latency_ns, start - launched)
        self._latency = np.where(by_launch & ~known, self._latency, short)
        gap = np.where(np.isfinite(before), start - before, 0.0)
        self._gap = np.where(by_launch | known, np.minimum(usual_gap, gap), gap)
        # A launch within a wait stages a copy, which takes time of its own.
        unknown = held & ~known & (self._inside < 0)
        self._unexplained = np.where(unknown, start - least, 0.0)
        self._of_launch = by_launch
        self.unexplained_ns = float(self._unexplained.sum())

    def _held_by(self, held: Int64, least: Float64) -> tuple[Int64, Float64]:
        """Return for each event the one of another stream that held it up, -1 for none, and the lag."""
        cause = np.full(len(self._start), NO_EVENT, dtype=np.int64)
        lag = np.zeros(len(self._start))
        if not len(held):
            return cause, lag
        order = np.argsort(self._end, kind="stable")
        ended = self._end[order]
        last = np.searchsorted(ended, self._start[held], side="right") - 1
        for _ in range(2):
            # The one before the own stream's is tried once: streams in turns are rare.
            own = (last >= 0) & (self._stream[order[np.maximum(last, 0)]] == self._stream[held])
            last = np.where(own, last - 1, last)
        found = order[np.maximum(last, 0)]
        late = self._start[held] - self._end[found]
        is_cause = (last >= 0) & (self._stream[found] != self._stream[held])
        is_cause &= (late <= _SIGNALLED_NS) & (self._end[found] >= least[held])
        is_cause &= self._start[found] < self._start[held]
        cause[held[is_cause]] = found[is_cause]
        lag[held[is_cause]] = late[is_cause]
        return cause, lag

    def _targets(self, carried: Int64) -> None:
        """Find for each wait the device event that ended it, and the delays around it.

        Args:
            carried: When the events ended that were launched before the steps.
        """
        waits = self._waits
        count = len(waits.row)
        best = np.full(count, _NEVER)
        target = np.full(count, NO_EVENT, dtype=np.int64)
        drained = np.zeros(count, dtype=np.bool_)
        edges = np.flatnonzero(np.diff(self._stream, prepend=-1, append=-2))
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            ends = np.maximum.accumulate(self._end[first:last])
            ended = np.searchsorted(ends, waits.end + CLOCKS_NS, side="right")
            begun = np.searchsorted(np.maximum.accumulate(self._launched[first:last]), waits.start, "right")
            # Those that begin when the wait is over did not end it.
            ended = np.minimum(ended, np.searchsorted(self._start[first:last], waits.end))
            known = ended > 0
            is_drained = known & (ended >= begun)
            when = np.where(known, ends[np.maximum(ended - 1, 0)], _NEVER)
            better = known & ((is_drained & ~drained) | ((is_drained == drained) & (when > best)))
            best[better], target[better] = when[better], first + ended[better] - 1
            drained |= is_drained
        length = (waits.end - waits.start).astype(np.float64)
        waited = best > waits.start
        usual = np.minimum(self.latency_ns, length)
        # A wait for earlier work ends as recorded. Where the steps follow each other it has no such work.
        before = np.append(_LOWEST, carried)[np.searchsorted(carried, waits.end + CLOCKS_NS, side="right")]
        is_carried = ~waited & (before > waits.start)
        target[is_carried] = NO_EVENT
        waited |= is_carried
        self._fixed = np.where(is_carried, waits.end, _NEVER)
        self._target = target
        self._call_ns = np.where(waited, usual, length)
        ended_at = np.append(self._end, 0)[target]
        lag = np.where(waited, waits.end - ended_at, np.minimum(self.latency_ns, waits.end - ended_at))
        self._target_lag = np.where(target >= 0, lag, _NEVER)

    def _runs(self) -> None:
        """Join consecutive device events of a stream into nodes."""
        count = len(self._start)
        ends_node = np.zeros(count, dtype=np.bool_)
        ends_node[self._target[self._target >= 0]] = True
        ends_node[self._cause[self._cause >= 0]] = True
        begins = np.ones(count, dtype=np.bool_)
        begins[1:] = (np.diff(self._stream) != 0) | (np.diff(self._segment) != 0)
        begins[1:] |= (self._cause[1:] >= 0) | ends_node[:-1]
        self._run_first = np.flatnonzero(begins)
        self._run_last = np.append(self._run_first[1:], count)[: len(self._run_first)] - 1
        self._run_of = np.cumsum(begins) - 1
        self.ending = self._row[self._run_last]
        cause = self._cause[self._run_first]
        runs, nodes = len(self._run_first), len(self._node_end)
        moment = np.concatenate((self._node_end, self._start[self._run_first]))
        is_run = np.arange(nodes + runs) >= nodes
        number = np.concatenate((np.arange(nodes), np.arange(runs)))
        order = np.lexsort((number, is_run, moment))
        # At place NO_EVENT, the last, is no event.
        run_of = np.append(self._run_of, NO_EVENT)
        self._graph = Graph(
            order=np.where(is_run, number, -1 - number)[order],
            stream=self._stream[self._run_first],
            segment=self._segment[self._run_first],
            cause=run_of[cause],
            target=run_of[np.append(self._target, NO_EVENT)[self._wait_of]],
        )

    @property
    def busy(self) -> bool:
        """Whether a device event is in the graph."""
        return len(self._row) > 0

    def replay(self, edit: Edit, base: HostCost | None = None, *, explained: bool = False) -> Replayed:
        """Return the steps with an edit.

        Args:
            base: What recording cost the host; None leaves its time as recorded.
            explained: Leave out the time for which events were held up by something unknown.
        """
        work = self._work(edit, base or HostCost())
        named = edit.waits and len(self._waits.row)
        removed = np.isin(self._waits.row, np.concatenate(edit.waits), kind="table") if named else None
        host = self._host_nodes(edit, removed)
        nodes = self._device_nodes(edit, work, removed, explained=explained)
        first, second = self._sweep(work, host, nodes)
        mean = float((second[1][self._stops] - second[1][self._begins]).mean())
        return Replayed(mean, first[0][self._marks], first[2])

    def _work(self, edit: Edit, base: HostCost) -> Float64:
        """Return the host's work up to each of the points, waits left out."""
        points = self._points
        if base.up_to not in self._works:
            self._works[base.up_to] = self._work_by(points, base.up_to)
        plain = self._works[base.up_to]
        edges = [each for spans in (*edit.host, *base.scaled) for each in (spans.start, spans.end)]
        added = distinct(np.clip(np.concatenate([points[:0], *edges]), self._first, self._node_end[-1]))
        at = np.searchsorted(points, added)
        is_new = points[np.minimum(at, len(points) - 1)] != added
        added, at = added[is_new], at[is_new]
        points = np.insert(points, at, added)
        plain = np.insert(plain, at, self._work_by(added, base.up_to))
        grown = np.diff(np.maximum.accumulate(plain))
        keep = np.ones(len(grown))
        for spans in edit.host:
            within = Cover(spans.start, spans.end).contains(points[:-1])
            keep = np.minimum(keep, np.where(within, spans.keep, 1.0))
        speed = np.full(len(grown), base.speed)
        for spans in base.scaled:
            speed = np.where(Cover(spans.start, spans.end).contains(points[:-1]), spans.keep, speed)
        grown *= keep * speed * (1 - edit.host_share)
        done = np.append(0.0, np.cumsum(grown))
        return np.delete(done, at + np.arange(len(at)))

    def _work_by(self, moments: Int64, cost: Callable[[Int64], Int64] | None) -> Float64:
        """Return how long the host has worked by each moment, without what recording has cost."""
        work = (moments - self._waiting.up_to(moments)).astype(np.float64)
        return work if cost is None else work - cost(moments)

    def _host_nodes(self, edit: Edit, removed: Flags | None) -> Nodes:
        """Return for each node of the host its own time, its lag behind its target, and its end if fixed."""
        call = self._call_ns.copy()
        for spans in edit.host:
            cover = Cover(spans.start, spans.end)
            inside = cover.up_to(self._waits.end) - cover.up_to(self._waits.start)
            length = np.maximum(self._waits.end - self._waits.start, 1)
            call = np.minimum(call, self._call_ns * (1 - (1 - spans.keep) * inside / length))
        lag = self._target_lag
        if removed is not None:
            call = np.where(removed, np.minimum(call, self.latency_ns), call)
            lag = np.where(removed, _NEVER, lag)
        # Of a mark, whose wait is the last place, there is none of these.
        own, behind, fixed = (
            np.append(each, none)[self._wait_of]
            for each, none in ((call, 0.0), (lag, _NEVER), (self._fixed, _NEVER))
        )
        return own, behind, fixed

    def _device_nodes(self, edit: Edit, work: Float64, removed: Flags | None, *, explained: bool) -> Nodes:
        """Return how long each run takes after its stream, its launches and what held it up."""
        lasts = (self._end - self._start).astype(np.float64)
        keep = np.ones(len(lasts))
        latency, gap = self._latency, self._gap
        for each in edit.device:
            chosen = np.isin(self._row, each.row, kind="table")
            keep = np.minimum(keep, np.where(chosen, each.keep, 1.0))
            # An event that is removed leaves no time before it either.
            if each.joined or not each.keep:
                gap = np.where(chosen, np.minimum(gap, 0.0), gap)
        lasts *= keep
        if explained:
            latency = np.where(self._of_launch, latency - self._unexplained, latency)
            gap = np.where(self._of_launch, gap, gap - self._unexplained)
        if removed is not None:
            at_once = (self._inside >= 0) & removed[self._inside]
            latency = np.where(at_once, np.minimum(latency, self.latency_ns), latency)
        first, last = self._run_first, self._run_last
        if not len(first):
            return lasts, lasts, lasts
        total = np.cumsum(gap + lasts)
        ready = work[self._at_launch] + latency + lasts - total
        through = total[last] - total[first] + (gap + lasts)[first]
        by_launch = total[last] + np.maximum.reduceat(ready, first)
        by_cause = self._cause_lag[first] + through - gap[first]
        return through, by_launch, by_cause

    def _sweep(self, work: Float64, host: Nodes, device: Nodes) -> tuple[Pass, Pass]:
        """Return for each of two passes the host's nodes, these or the device's work, and the runs' ends."""
        durations = Durations(*device, *host, work[self._at_start], work[self._at_end])
        streams, offset = self._carried.copy(), float(self._first)
        reached = float(self._carried.max(initial=_NEVER))
        first, reached = self._passed(durations, streams, offset, reached, is_first=True)
        second, _ = self._passed(durations, streams, float(first[0][-1]), reached, is_first=False)
        return first, second

    def _passed(
        self, durations: Durations, streams: Float64, offset: float, reached: float, *, is_first: bool
    ) -> tuple[Pass, float]:
        """Return one pass, and when the device has ended all work so far."""
        nodes, ends = sweep(self._graph, durations, streams, offset, is_first=is_first)
        done = np.full(len(nodes) + 1, _NEVER)
        np.maximum.at(done, self._graph.segment, ends)
        done = np.maximum(np.maximum.accumulate(done)[: len(nodes)], reached)
        return (nodes, np.maximum(nodes, done), ends), max(reached, float(ends.max(initial=_NEVER)))
