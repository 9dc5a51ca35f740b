"""The parts of a trace that a page draws: a timeline and a flame graph, of bounded size for any trace.

A flame graph shows host calls added up by call path.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.breakdown import DEVICE
from torchperfd_daemon.analysis.intervals import Nesting, nest
from torchperfd_daemon.analysis.operator_sums import ASYNC_PREFIXES
from torchperfd_daemon.analysis.python_frames import PYTHON, own_threads, runner_rows
from torchperfd_daemon.analysis.steps import Step
from torchperfd_daemon.analysis.timeline import Place, Timeline, in_use, places, timeline
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

_STEP: Final = "ProfilerStep#"


@dataclass(frozen=True, slots=True, eq=False)
class Flame:
    """Calls by call path, as parallel columns, a parent before its children.

    Attributes:
        names: Table of names; every ``ProfilerStep#N`` is one.
        parent: The position of each node's parent, -1 for a thread: under it are its outermost calls.
        name: An index into ``names``.
        total_ns: Time of its calls, children included.
        calls: How many; 1 for a thread.
        left_out: Nodes left out because they took least time.
    """

    names: tuple[str, ...]
    parent: Int64
    name: Int64
    total_ns: Int64
    calls: Int64
    left_out: int


def flame(trace: Trace, calls: Nesting, depth: Int64, threads: Sequence[Place], nodes: int) -> Flame:
    """Add up the calls of some threads by call path.

    Args:
        calls: Nested calls, of these threads and others.
        depth: How many calls contain each of them.
    """
    texts, renamed = _with_one_step(trace.names)
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


def _with_one_step(names: Sequence[str]) -> tuple[list[str], Int64]:
    """Return the names with one for all steps, and what each counts as."""
    texts, renamed = list(names), np.arange(len(names))
    steps = [number for number, text in enumerate(names) if text.startswith(_STEP)]
    for number in steps[:1]:
        texts[number] = f"{_STEP[:-1]}*"
        renamed[steps] = number
    return texts, renamed


def _largest(parent: Int64, total: Int64, threads: int, nodes: int) -> Flags:
    """Return which nodes to keep: the threads, and those with most time whose parents stay."""
    kept = np.zeros(len(parent), dtype=np.bool_)
    kept[:threads] = True
    rest = np.argsort(-total[threads:], kind="stable")[:nodes] + threads
    for node in np.sort(rest).tolist():
        kept[node] = kept[parent[node]]
    return kept


# The flame graph has one node for so many rectangles of the timeline.
_RECTANGLES_A_NODE: Final = 8


# A step has them in full, or else its shortest neighbours are merged.
_RECTANGLES_OF_STEP: Final = 12_000


@dataclass(frozen=True, slots=True, eq=False)
class StepPicture:
    """The timeline of one step, with what each of its events was called with.

    Attributes:
        index: The step's number.
        start: Its start in ns since the trace's earliest event.
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
    """Return the picture of a trace.

    Args:
        rectangles: How many the timeline may have.
        steps: The steps, of which the median one is drawn in full.
    """
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
    named = [name.startswith(ASYNC_PREFIXES) for name in trace.names]
    return np.array(named, dtype=np.bool_)[trace.name] & trace.of_categories({"user_annotation"})


def _depth(calls: Nesting) -> Int64:
    """Return how many calls contain each: those before it, less those that ended before it."""
    ended = np.cumsum(np.bincount(calls.stop, minlength=len(calls) + 1))[: len(calls)]
    depth: Int64 = np.arange(len(calls)) - ended
    return depth
