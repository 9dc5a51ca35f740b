"""Work in a recording that other steps of the run do not have: the profiler's own, and what a run does once.

CUPTI writes three different things under the category ``overhead``:

- its own work, such as asking for another buffer within a launch. A run that is not recorded has none of it;
- the loading or compiling of a kernel at its first use, which is start-up work;
- ``Command Buffer Full``: the host waits because the launch queue is full. The run has this wait as well.

A run records CUDA graphs and makes first calls once, not in each step.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd.model.formatting import ns_text
from torchperfd_daemon.analysis.callers import Links
from torchperfd_daemon.analysis.categories import ANNOTATION, DRAW, LAUNCHES, OPERATOR
from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.layout import printable
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

OVERHEAD: Final = "overhead"
_QUEUE_FULL: Final = re.compile(r"command buffer full", re.IGNORECASE)
_FIRST_USE: Final = re.compile(r"driver compiler|module loading|function loading", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Overheads:
    """The rows of overhead in a trace, by kind.

    Attributes:
        profilers: Rows of the profiler's own work.
        first_use: Rows of code that is loaded or compiled at its first use.
        queue_full: Rows in which the host waits for a full launch queue.
    """

    profilers: Int64
    first_use: Int64
    queue_full: Int64
    profilers_ns: int
    queue_full_ns: int

    def lines(self, steps: int) -> list[str]:
        """Return a sentence for the profiler's own work, and one for full queues, if the file has any."""
        lines = []
        each = f" ({ns_text(self.profilers_ns / steps)} a step)" if steps else ""
        if self.profilers_ns:
            lines.append(
                f"the profiler's own work took {ns_text(self.profilers_ns)} of the recording{each}; "
                "a run without the profiler does not have it, so no advice counts it"
            )
        if self.queue_full_ns:
            lines.append(
                f"the host waited {ns_text(self.queue_full_ns)} for a full launch queue: "
                "there the device decides how long a step takes, not the host"
            )
        return lines


def find_overheads(trace: Trace) -> Overheads:
    """Return the rows of overhead of a trace, by kind."""
    rows = np.flatnonzero(trace.of_categories({OVERHEAD}))
    full = trace.named(rows, _QUEUE_FULL.search)
    first = trace.named(rows, _FIRST_USE.search)
    own = np.setdiff1d(rows, np.concatenate((full, first)), assume_unique=True)
    return Overheads(own, first, full, _covered(trace, own), _covered(trace, full))


def _covered(trace: Trace, rows: Int64) -> int:
    return Cover(trace.start[rows], trace.end[rows]).length


# Runtime and driver calls that make a device do something: one for each kernel, copy and fill.
_LAUNCHING: Final = re.compile(r"Launch(?!HostFunc)|EnqueueKernel|Mem(?:cpy|set)|AppendMem|aclopExecute")
_BEGIN: Final = re.compile(r"(?:cuda|cu|hip)StreamBeginCapture\w*")
_END: Final = re.compile(r"(?:cuda|cu|hip)StreamEndCapture\w*")
# Runtime calls that load code or set a device up.
_SETS_UP: Final = re.compile(
    r"(?:cu|cuda|hip)(?:Module(?:Load|GetLoading)|Library(?:Load|GetKernel)|Init\b|DevicePrimaryCtx|CtxCreate"
    r"|Graph(?:Instantiate|ExecUpdate)|DeviceGetStreamPriorityRange)\w*"
)
# Spans of torch's compilers, by the names that torch gives them.
_COMPILES: Final = re.compile(r"\(dynamo_timed\)|^_?compile(?:_inner|_fx|_file)?$|entire_frame_compile")
# Calls that last as long as the device needs; what an operator spends in them is no first-call work.
_WAITS: Final = re.compile(r"Synchronize|c10d::.*wait|(?:cuda|cu|hip)Memcpy\w*")
# A first call counts if it takes so many times the median of the later ones, and so much longer.
_FIRST_CALL: Final = 10
_MIN_EXCESS_NS: Final = 2_000_000
# A recording is a cold start if first calls take this share of its steps.
_COLD_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """The calls of a trace that make a device do something.

    Attributes:
        captured: Which of them were written into a graph, so that they run nothing themselves.
        followed: Which of them have a device event in the file.
    """

    rows: Int64
    captured: Flags
    followed: Flags
    captures: tuple[Cover, ...]

    def is_capturing(self, start: int, end: int) -> bool:
        """Return whether a graph is being captured at some time between two moments."""
        return any(np.diff(cover.up_to(np.array([start, end])))[0] > 0 for cover in self.captures)

    @property
    def lost(self) -> int:
        """How many should have a device event and have none."""
        return int((~self.followed & ~self.captured).sum())


@dataclass(frozen=True, slots=True)
class ColdStart:
    """First calls in the steps.

    Attributes:
        ns: The time that they cover beyond a later call's.
        name: The longest one's name; empty without any.
        is_cold: They take so much of the steps that these do not show a later step.
    """

    ns: int = 0
    name: str = ""
    is_cold: bool = False

    @property
    def lines(self) -> list[str]:
        """A sentence for a cold start; none for a warm one."""
        if not self.is_cold:
            return []
        return [
            f"cold start: {ns_text(self.ns)} of the steps are first calls, most of all"
            f" {printable(self.name)}; later steps do not have them, so no advice rests on idle time;"
            " record after a few steps"
        ]


def find_launches(trace: Trace, links: Links) -> LaunchRecord:
    """Return the launching calls of a trace."""
    calls = np.flatnonzero(trace.of_categories(LAUNCHES))
    rows = trace.named(calls, _LAUNCHING.search)
    followed = np.zeros(len(trace), dtype=np.bool_)
    followed[links.launch[links.launch >= 0]] = True
    captures = _captures(trace, calls)
    inside = np.zeros(len(rows), dtype=np.bool_)
    for thread, cover in captures.items():
        inside |= (trace.thread[rows] == thread) & cover.contains(trace.start[rows])
    return LaunchRecord(rows, inside & ~followed[rows], followed[rows], tuple(captures.values()))


def _captures(trace: Trace, calls: Int64) -> dict[int, Cover]:
    """Return when each thread captures a graph; a capture that the file cuts reaches to the file's edge."""
    begins = trace.named(calls, _BEGIN.fullmatch)
    ends = trace.named(calls, _END.fullmatch)
    found = {}
    for thread in np.unique(trace.thread[np.concatenate((begins, ends))]).tolist():
        since = np.sort(trace.start[begins[trace.thread[begins] == thread]])
        until = np.sort(trace.end[ends[trace.thread[ends] == thread]])
        if len(until) and (not len(since) or until[0] <= since[0]):
            since = np.append(0, since)
        closing = np.append(until, trace.duration_ns)[np.searchsorted(until, since, side="right")]
        found[int(thread)] = Cover(since, closing)
    return found


def find_cold_start(trace: Trace, overheads: Overheads, windows: Sequence[tuple[int, int]]) -> ColdStart:
    """Return the first calls in some windows of the host's time, which are in order."""
    since, until = (np.array([each[side] for each in windows], dtype=np.int64) for side in (0, 1))
    whole = int((until - since).sum())
    calls = np.flatnonzero(trace.of_categories(LAUNCHES | {OPERATOR}))
    kept = trace.named(calls, lambda name: _WAITS.search(name) is None and not name.startswith(DRAW))
    waiting = trace.named(calls, _WAITS.search)
    waiting = np.concatenate((waiting, overheads.profilers, overheads.queue_full))
    rows, excess = _first_calls(trace, kept, Cover(trace.start[waiting], trace.end[waiting]))
    setting_up = trace.named(calls, _SETS_UP.fullmatch)
    annotated = np.flatnonzero(trace.of_categories({ANNOTATION, OPERATOR}))
    compiling = trace.named(annotated, _COMPILES.search)
    further = np.unique(np.concatenate((setting_up, compiling, overheads.first_use)))
    rows, lengths = np.append(rows, further), np.append(excess, (trace.end - trace.start)[further])
    if not len(rows):
        return ColdStart()
    starts = np.maximum(trace.start[rows], since[0])
    cover = Cover(starts, np.maximum(trace.start[rows] + lengths, starts))
    taken = cover.up_to(until) - cover.up_to(since)
    ns = int(taken.sum())
    name = trace.names[int(trace.name[rows[np.argmax(lengths)]])]
    return ColdStart(ns, name, ns >= max(_COLD_SHARE * whole, _MIN_EXCESS_NS))


def _first_calls(trace: Trace, rows: Int64, waits: Cover) -> tuple[Int64, Int64]:
    """Return the first calls of their names that take far longer than later ones, and by how much, in ns.

    Args:
        waits: When the host waits for the device or the profiler works, which does not count.
    """
    # Few names have a call that is long enough, and to sort the calls of all is most of the work.
    has_long = np.zeros(len(trace.names), dtype=np.bool_)
    has_long[trace.name[rows[trace.end[rows] - trace.start[rows] >= _MIN_EXCESS_NS]]] = True
    rows = rows[has_long.take(trace.name[rows])]
    order = np.lexsort((trace.start[rows], trace.name[rows]))
    rows = rows[order]
    starts, ends = trace.start[rows], trace.end[rows]
    lengths = ends - starts - (waits.up_to(ends) - waits.up_to(starts))
    edges = np.flatnonzero(np.diff(trace.name[rows], prepend=-1))
    counts = np.diff(np.append(edges, len(rows)))
    several = counts > 1
    edges, counts = edges[several], counts[several]
    long = lengths[edges] >= _MIN_EXCESS_NS
    edges, counts = edges[long], counts[long]
    later = [lengths[at + 1 : at + count] for at, count in zip(edges.tolist(), counts.tolist(), strict=True)]
    usual = np.array([np.median(each) for each in later], dtype=np.float64)
    excess = lengths[edges] - usual
    kept = (lengths[edges] >= _FIRST_CALL * usual) & (excess >= _MIN_EXCESS_NS)
    return rows[edges[kept]], excess[kept].astype(np.int64)
