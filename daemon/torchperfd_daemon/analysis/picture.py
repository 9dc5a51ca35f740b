"""The parts of a trace that a page draws: a timeline and a flame graph, of bounded size for any trace."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.callers import PYTHON
from torchperfd_daemon.analysis.flame import Flame, flame
from torchperfd_daemon.analysis.nesting import Nesting, nest
from torchperfd_daemon.analysis.operator_sums import ASYNC_PREFIXES
from torchperfd_daemon.analysis.own_frames import own_threads, runner_rows
from torchperfd_daemon.analysis.timeline import Timeline, places, timeline
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

# The flame graph has one node for so many rectangles of the timeline.
_RECTANGLES_A_NODE: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """The timeline of one trace, without Python frames, and its flame graph, with them.

    The flame graph has neither torchperfd's own threads nor the frames of its runner.
    """

    timeline: Timeline
    flame: Flame


def draw(trace: Trace, rectangles: int) -> Picture:
    """Return the picture of a trace.

    Args:
        rectangles: How many the timeline may have.
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
    return Picture(lanes, flame(trace, calls, depth, threads, rectangles // _RECTANGLES_A_NODE))


def _spans(trace: Trace) -> Flags:
    """Return which events begin on one thread and end on another, which only their names show."""
    named = [name.startswith(ASYNC_PREFIXES) for name in trace.names]
    return np.array(named, dtype=np.bool_)[trace.name] & trace.of_categories({"user_annotation"})


def _depth(calls: Nesting) -> Int64:
    """Return how many calls contain each: those before it, less those that ended before it."""
    ended = np.cumsum(np.bincount(calls.stop, minlength=len(calls) + 1))[: len(calls)]
    depth: Int64 = np.arange(len(calls)) - ended
    return depth
