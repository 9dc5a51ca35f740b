"""A timeline small enough to draw: what ran on each thread and stream, the shortest neighbours merged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from torchperfd_daemon.analysis.breakdown import DEVICE
from torchperfd_daemon.analysis.intervals import Nesting
from torchperfd_daemon.analysis.trace import Int64, Trace

# Names of generated kernels go on for kilobytes.
_LONGEST: Final = 400


def in_use(texts: Sequence[str], names: Int64) -> tuple[tuple[str, ...], Int64]:
    """Return a table of the names in use, cut where they are very long, and the column that counts in it.

    Args:
        texts: The table that ``names`` counts in.
        names: Indices; -1 is no name and stays.
    """
    used, inverse = np.unique(names, return_inverse=True)
    shown = [texts[name] for name in used.tolist() if name >= 0]
    table = tuple(text if len(text) <= _LONGEST else text[:_LONGEST] + "…" for text in shown)
    return table, inverse - (len(used) - len(table))


Kind = Literal["thread", "spans", "stream"]

# More lanes, or deeper ones, cannot be read as a picture.
_LANES: Final = 48
_LEVELS: Final = 16
_STEP: Final = "ProfilerStep#"


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """The events of one place, as parallel columns in order of (level, start).

    Attributes:
        kind: A host ``thread``, a device's ``stream``, or all ``spans`` that begin on one thread and end
            on another.
        level: How deep each rectangle is nested.
        start: Its start in ns since the trace's earliest event.
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
        lanes_left_out: Lanes that took least time, left out.
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
    steps = [name for name, text in enumerate(trace.names) if text.startswith(_STEP)]
    training = set(np.unique(trace.thread[np.isin(trace.name, steps)]).tolist())
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
        found.append(Place(number, "stream", f"device {device}, {_stream(stream)}"))
    return found


def timeline(trace: Trace, calls: Nesting, depth: Int64, spans: Int64, rectangles: int) -> Timeline:
    """Return the timeline of a trace.

    Args:
        calls: The events to draw, nested.
        depth: How many events contain each of them.
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
    """Return the rectangles' columns, in the order of the events, and the resolution it took.

    Args:
        row: The events to draw, in order of (place, level, start).
    """
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
    """Return the sort key: numbers by size, before words."""
    return tuple((0, int(part)) if str(part).isdecimal() else (1, str(part)) for part in place)


def _stream(thread: int | str) -> str:
    return str(thread) if "stream" in str(thread) else f"stream {thread}"
