"""The parts of a trace that a page draws: a timeline and a flame graph, of bounded size for any trace."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.breakdown import DEVICE
from torchperfd_daemon.analysis.callers import PYTHON
from torchperfd_daemon.analysis.flame import Flame, flame
from torchperfd_daemon.analysis.nesting import Nesting, nest
from torchperfd_daemon.analysis.operator_sums import ASYNC_PREFIXES
from torchperfd_daemon.analysis.own_frames import own_threads, runner_rows
from torchperfd_daemon.analysis.steps import Step
from torchperfd_daemon.analysis.timeline import Timeline, places, timeline
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

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
