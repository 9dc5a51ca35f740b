"""The parts of a trace that a page draws, of bounded size for any trace: a timeline and a flame graph.

The timeline has what ran on each thread and stream, the shortest neighbours merged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from torchperfd_daemon.analysis.callers import own_threads, runner_rows
from torchperfd_daemon.analysis.categories import ANNOTATION, DEVICE, PYTHON, STEP_MARK, with_one_step
from torchperfd_daemon.analysis.intervals import Nesting, nest
from torchperfd_daemon.analysis.operator_sums import ASYNC_PREFIXES
from torchperfd_daemon.analysis.steps import Step
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

# Names of generated kernels go on for kilobytes.
_MAX_NAME: Final = 400


def in_use(texts: Sequence[str], names: Int64) -> tuple[tuple[str, ...], Int64]:
    """Return a table of the names in use, cut where they are very long, and the column that counts in it.

    Args:
        names: Indices; -1 is no name and stays.
    """
    used, inverse = np.unique(names, return_inverse=True)
    shown = [texts[name] for name in used.tolist() if name >= 0]
    table = tuple(text if len(text) <= _MAX_NAME else text[:_MAX_NAME] + "…" for text in shown)
    return table, inverse - (len(used) - len(table))


Kind = Literal["thread", "spans", "stream"]

# More lanes, or deeper ones, cannot be read as a picture.
_LANES: Final = 48
_LEVELS: Final = 16
# The flame graph has one node for so many rectangles of the timeline.
_RECTANGLES_A_NODE: Final = 8
# A step has them in full, or else its shortest neighbours are merged.
_RECTANGLES_OF_STEP: Final = 12_000


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """The events of one place, as parallel columns in order of (level, start).

    Attributes:
        kind: A host ``thread``, a device's ``stream``, or all ``spans`` that begin on one thread and end
            on another.
        name: An index into ``Timeline.names``; -1 if it is more than one event.
        row: The event in the trace, the first one of several.
    """

    kind: Kind
    label: str
    level: Int64
    start: Int64
    end: Int64
    name: Int64
    count: Int64
    row: Int64


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The lanes of one trace.

    Attributes:
        resolution_ns: Neighbours shorter than this and closer than this are one rectangle; 0 where every
            event has its own.
        lanes: Threads, spans, then streams; the thread of the training steps first, then the busiest.
        events_left_out: Events of those lanes, and events nested too deep to draw.
    """

    names: tuple[str, ...]
    resolution_ns: int
    lanes: tuple[Lane, ...]
    lanes_left_out: int
    events_left_out: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where events run: a thread of the trace's table, or, past its end, all asynchronous spans."""

    number: int
    kind: Kind
    label: str


def places(trace: Trace) -> list[Place]:
    """Return every place of a trace, in the order in which they are drawn; streams after threads."""
    durations = (trace.end - trace.start).astype(np.float64)
    busy = np.bincount(trace.thread, weights=durations, minlength=len(trace.threads)).tolist()
    streams = set(np.unique(trace.thread[trace.of_categories(DEVICE)]).tolist())
    steps = trace.of_names(lambda name: name.startswith(STEP_MARK))
    training = set(np.unique(trace.thread[steps]).tolist())
    hosts = [number for number in range(len(trace.threads)) if number not in streams]
    hosts.sort(key=lambda number: (number not in training, -busy[number]))
    several = len({trace.threads[number][0] for number in hosts}) > 1
    found = []
    for number in hosts:
        process, thread = trace.threads[number]
        label = f"{'main ' if number in training else ''}thread {thread}"
        found.append(Place(number, "thread", f"{label}, process {process}" if several else label))
    found.append(Place(len(trace.threads), "spans", "asynchronous"))
    for number in sorted(streams, key=lambda number: _in_order(trace.threads[number])):
        device, stream = trace.threads[number]
        name = stream if "stream" in str(stream) else f"stream {stream}"
        found.append(Place(number, "stream", f"device {device}, {name}"))
    return found


def timeline(trace: Trace, calls: Nesting, depth: Int64, spans: Int64, rectangles: int) -> Timeline:
    """Return the timeline of a trace.

    Args:
        spans: Rows of further events, that begin on one thread and end on another.
        rectangles: How many to draw; every lane and level has one even so.
    """
    span_rows, span_levels = _in_levels(trace, spans)
    row = np.concatenate((calls.row, span_rows))
    level = np.concatenate((depth, span_levels))
    place = trace.thread[row].astype(np.int64)
    place[len(calls) :] = len(trace.threads)
    outermost = ((trace.end - trace.start)[row] * (level == 0)).astype(np.float64)
    busy = np.bincount(place, weights=outermost, minlength=len(trace.threads) + 1)
    used = np.flatnonzero(np.bincount(place, minlength=len(busy)))
    kept = used[np.argsort(-busy[used], kind="stable")][:_LANES]
    drawn = np.flatnonzero(np.isin(place, kept) & (level < _LEVELS))
    drawn = drawn[np.lexsort((trace.start[row[drawn]], level[drawn], place[drawn]))]
    boxes, resolution = _merge(trace, row[drawn], level[drawn], place[drawn], rectangles)
    names, boxes["name"] = in_use(trace.names, boxes["name"])
    box_place = boxes.pop("place")
    lanes = []
    for each in places(trace):
        if each.number in kept:
            first, last = np.searchsorted(box_place, (each.number, each.number + 1)).tolist()
            columns = {name: column[first:last] for name, column in boxes.items()}
            lanes.append(Lane(each.kind, each.label, **columns))
    return Timeline(names, resolution, tuple(lanes), len(used) - len(kept), len(row) - len(drawn))


def _merge(
    trace: Trace, row: Int64, level: Int64, place: Int64, rectangles: int
) -> tuple[dict[str, Int64], int]:
    """Return the rectangles' columns, in the order of the events, and the resolution it took."""
    start, end, names = trace.start[row], trace.end[row], trace.name[row].astype(np.int64)
    alone = (np.diff(place) != 0) | (np.diff(level) != 0)
    length, gap = end - start, start[1:] - end[:-1]
    # Two neighbours become one at any resolution above all of these.
    needed = np.maximum(np.maximum(length[1:], length[:-1]), gap)[~alone]
    spare = max(0, rectangles - 1 - int(alone.sum()))
    resolution = int(np.partition(needed, -spare - 1)[-spare - 1]) + 1 if len(needed) > spare else 0
    opens = np.ones(len(row), dtype=np.bool_)
    opens[1:][~alone] = needed >= resolution
    first = np.flatnonzero(opens)
    count = np.diff(np.append(first, len(row)))
    columns = {
        "place": place[first],
        "level": level[first],
        "start": start[first],
        "end": np.maximum.reduceat(end, first) if len(first) else end,
        "name": np.where(count == 1, names[first], -1),
        "count": count,
        "row": row[first],
    }
    return columns, resolution


def _in_levels(trace: Trace, rows: Int64) -> tuple[Int64, Int64]:
    """Return the rows in order of start, and levels on which none overlaps another."""
    rows = rows[np.argsort(trace.start[rows], kind="stable")]
    free_from: list[int] = []
    levels = []
    for start, end in zip(trace.start[rows].tolist(), trace.end[rows].tolist(), strict=True):
        level = next((at for at, free in enumerate(free_from) if free <= start), len(free_from))
        free_from[level : level + 1] = [end]
        levels.append(level)
        # Levels beyond those that are drawn need not be distinguished.
        del free_from[_LEVELS:]
    return rows, np.array(levels, dtype=np.int64)


def _in_order(place: tuple[int | str, int | str]) -> tuple[tuple[int, int | str], ...]:
    return tuple((0, int(part)) if str(part).isdecimal() else (1, str(part)) for part in place)


@dataclass(frozen=True, slots=True, eq=False)
class Flame:
    """Calls by call path, as parallel columns, a parent before its children.

    Attributes:
        parent: The position of each node's parent, -1 for a thread: under it are its outermost calls.
        calls: How many; 1 for a thread.
    """

    names: tuple[str, ...]
    parent: Int64
    name: Int64
    total_ns: Int64
    calls: Int64
    left_out: int


def flame(trace: Trace, calls: Nesting, depth: Int64, threads: Sequence[Place], nodes: int) -> Flame:
    """Add up the calls of some threads by call path."""
    texts, renamed = with_one_step(trace.names)
    texts += [place.label for place in threads]
    root = np.full(len(trace.threads), -1, dtype=np.int64)
    root[[place.number for place in threads]] = np.arange(len(threads))
    of_thread = root[trace.thread[calls.row]]
    name = renamed[trace.name[calls.row]]
    length = (trace.end - trace.start)[calls.row].astype(np.float64)
    order = np.argsort(depth, kind="stable")
    order = order[of_thread[order] >= 0]
    edges = np.flatnonzero(np.diff(depth[order])) + 1
    node = np.empty(len(calls), dtype=np.int64)
    outermost = order[: edges[0]] if len(edges) else order
    columns = [
        (
            np.full(len(threads), -1),
            np.arange(len(trace.names), len(texts)),
            np.bincount(of_thread[outermost], length[outermost], len(threads)),
            np.ones(len(threads), dtype=np.int64),
        )
    ]
    known = len(threads)
    for level, at in enumerate(np.split(order, edges)):
        parents = node[calls.parent[at]] if level else of_thread[at]
        keys, group = np.unique(parents * len(texts) + name[at], return_inverse=True)
        node[at] = known + group
        known += len(keys)
        # Sums of ns are exact in doubles up to a hundred days.
        columns.append((*np.divmod(keys, len(texts)), np.bincount(group, length[at]), np.bincount(group)))
    parent, names, total, count = (np.concatenate(column) for column in zip(*columns, strict=True))
    kept = _largest(parent, total, len(threads), nodes)
    place = np.cumsum(kept) - 1
    parent = parent[kept]
    table, names = in_use(texts, names[kept])
    return Flame(
        names=table,
        parent=np.where(parent >= 0, place[parent], -1),
        name=names,
        total_ns=total[kept].astype(np.int64),
        calls=count[kept],
        left_out=len(kept) - int(kept.sum()),
    )


def _largest(parent: Int64, total: Int64, threads: int, nodes: int) -> Flags:
    """Return which nodes to keep: the threads, and those with most time whose parents stay."""
    kept = np.zeros(len(parent), dtype=np.bool_)
    kept[:threads] = True
    rest = np.argsort(-total[threads:], kind="stable")[:nodes] + threads
    for node in np.sort(rest).tolist():
        kept[node] = kept[parent[node]]
    return kept


@dataclass(frozen=True, slots=True, eq=False)
class StepPicture:
    """The timeline of one step, with what each of its events was called with.

    Attributes:
        end: Its end, or that of the last kernel that it launched.
        shapes: Table of inputs' shapes, as JSON text; the first is empty, for events without.
        shape: For each lane, an index into ``shapes`` for each rectangle.
        correlation: For each lane and rectangle, a number equal on a kernel and the call that launched it; -1
            for none.
    """

    index: int
    start: int
    end: int
    timeline: Timeline
    shapes: tuple[str, ...]
    shape: tuple[Int64, ...]
    correlation: tuple[Int64, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """The timeline of one trace, without Python frames, and its flame graph, with them.

    The flame graph has neither torchperfd's own threads nor the frames of its runner.
    """

    timeline: Timeline
    flame: Flame
    step: StepPicture | None = None


def draw(trace: Trace, rectangles: int, steps: Sequence[Step] = ()) -> Picture:
    """Return the picture of a trace, with the median one of its steps in full."""
    spans = _spans(trace)
    python = trace.of_categories({PYTHON})
    calls = nest(trace, np.flatnonzero(~spans & ~python))
    depth = _depth(calls)
    lanes = timeline(trace, calls, depth, np.flatnonzero(spans), rectangles)
    threads = [place for place in places(trace) if place.kind == "thread"]
    if python.any():
        calls = nest(trace, np.flatnonzero(~spans))
        ours = own_threads(trace, calls, python)
        threads = [place for place in threads if place.number not in ours]
        if len(above := runner_rows(trace, calls)):
            wanted = ~spans
            wanted[above] = False
            calls = nest(trace, np.flatnonzero(wanted))
        depth = _depth(calls)
    return Picture(
        lanes,
        flame(trace, calls, depth, threads, rectangles // _RECTANGLES_A_NODE),
        _in_full(trace, _median(steps), spans, min(rectangles, _RECTANGLES_OF_STEP)) if steps else None,
    )


def _median(steps: Sequence[Step]) -> Step:
    whole = [step for step in steps if not step.is_stub]
    return sorted(whole, key=lambda step: step.duration_ns)[(len(whole) - 1) // 2]


def _in_full(trace: Trace, step: Step, spans: Flags, rectangles: int) -> StepPicture:
    """Draw all events of a step: those of its time on the host, and the kernels that it launched then."""
    start = min(step.start_ns, step.host_start_ns)
    end = max(step.start_ns + step.duration_ns, step.host_start_ns + step.host_duration_ns)
    device = trace.of_categories(DEVICE)
    inside = (trace.start < end) & (trace.end > start) & ~trace.of_categories({PYTHON})
    begun = (trace.start >= step.host_start_ns) & (trace.start < step.host_start_ns + step.host_duration_ns)
    launched = np.unique(trace.correlation[begun & ~device & (trace.correlation >= 0)])
    kernels = device & np.isin(trace.correlation, launched)
    inside |= kernels
    calls = nest(trace, np.flatnonzero(inside & ~spans))
    drawn = timeline(trace, calls, _depth(calls), np.flatnonzero(inside & spans), rectangles)
    rows = np.concatenate([lane.row for lane in drawn.lanes]) if drawn.lanes else np.zeros(0, dtype=np.int64)
    used = np.unique(np.append(trace.shape[rows], 0))
    return StepPicture(
        index=step.index,
        start=start,
        end=max(end, int(trace.end[kernels].max(initial=end))),
        timeline=drawn,
        shapes=tuple(trace.shapes[number] for number in used.tolist()),
        shape=tuple(np.searchsorted(used, trace.shape[lane.row]) for lane in drawn.lanes),
        correlation=tuple(trace.correlation[lane.row] for lane in drawn.lanes),
    )


def _spans(trace: Trace) -> Flags:
    """Return which events begin on one thread and end on another, which only their names show."""
    return trace.of_names(lambda name: name.startswith(ASYNC_PREFIXES)) & trace.of_categories({ANNOTATION})


def _depth(calls: Nesting) -> Int64:
    """Return how many calls contain each: those before it, less those that ended before it."""
    ended = np.cumsum(np.bincount(calls.stop, minlength=len(calls) + 1))[: len(calls)]
    depth: Int64 = np.arange(len(calls)) - ended
    return depth
