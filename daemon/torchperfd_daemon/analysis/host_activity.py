"""The activity of a host thread over time, as far as it explains an idle device.

`idle` contains the rules that attribute a gap to one of these causes.
"""

import re
from typing import Final, Literal, get_args

import numpy as np

from torchperfd_daemon.analysis.callers import Links, is_library, is_tools
from torchperfd_daemon.analysis.categories import ANNOTATION, COPY, LAUNCHES, OPERATOR, PYTHON
from torchperfd_daemon.analysis.intervals import ByThread, Cover, Spans, outermost
from torchperfd_daemon.analysis.operator_sums import ASYNC_PREFIXES
from torchperfd_daemon.analysis.overhead import find_overheads
from torchperfd_daemon.analysis.steps import drawing
from torchperfd_daemon.analysis.trace import Int32, Int64, Trace

Cause = Literal[
    "profiler",
    "data",
    "pageable_copy",
    "collective_wait",
    "synchronisation",
    "host_compute",
    "launch",
    "other",
]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
# The waits that can fill a gap, in order of precedence, and the causes that remain.
_FILLING: Final = 5
_PROFILER, COLLECTIVE_WAIT, _SYNCHRONISATION, _HOST_COMPUTE, _LAUNCH, OTHER = (
    CAUSES.index(name)
    for name in ("profiler", "collective_wait", "synchronisation", "host_compute", "launch", "other")
)
# A wait under way when a gap begins must last one part in so many of the gap to be its cause.
_UNDER_WAY_SHARE: Final = 20
# Operators that launch nothing compute where they take so long in a gap, and each of them so long, or all
# together much longer: shorter ones are views, allocations and the like on the way to the next launch.
_COMPUTING_NS: Final = 100_000
COMPUTING_EACH_NS: Final = 20_000
_COMPUTING_TOGETHER_NS: Final = 1_000_000
# Runtime calls that return when the device is done: by the vendors' names, and frees, which wait for it too.
WAITING_CALL: Final = re.compile(
    r"(?:(?:cuda|hip)(?:(?:Stream|Device|Event|Thread)Synchronize|Free|FreeHost|HostFree"
    r"|Memcpy(?:2D|3D|ToSymbol|FromSymbol|DtoH|HtoD|WithStream)?)"
    r"|cu(?:(?:Stream|Ctx|Event)Synchronize|Memcpy(?:DtoH|HtoD)?)"
    r"|urQueueFinish|urEventWait|zeEventHostSynchronize|zeCommandQueueSynchronize)(?:_\w+)?"
)
_FROM_PAGEABLE: Final = "(Pageable -> Device"
_TO_PAGEABLE: Final = "-> Pageable)"
_COLLECTIVE_CALLS: Final = ("c10d::", "record_param_comms")
# Kineto leaves out of a file's name the directory that Python found it in.
_FUNCTION: Final = re.compile(r"(?P<file>.+)\(\d+\): .*", re.DOTALL)
_LIBRARY: Final = re.compile(r"(?:^|/)torch/|/lib/python3|^<")
_AUTOGRAD: Final = ("autograd::", "torch::autograd::")
# If calls fill at least one part in this many of a gap, its cause is launching.
_LAUNCHING_SHARE: Final = 10
NOWHERE: Final = -1


class Launches:
    """The runtime and driver calls of a trace, and what they launched."""

    def __init__(self, trace: Trace, links: Links) -> None:
        self._trace = trace
        self._links = links
        self.calls = np.flatnonzero(trace.of_categories(LAUNCHES))
        rows = self.calls[trace.correlation[self.calls] >= 0]
        self.busiest_thread = trace.busiest_thread(rows)

    @property
    def launching(self) -> Int64:
        """The rows of the calls that launched something on record."""
        rows = self._links.launch
        return self._trace.distinct(rows[rows >= 0])

    def of(self, events: Int64) -> Int64:
        """Return the row of each device event's launch, -1 for none."""
        links = self._links
        place = np.minimum(np.searchsorted(links.event, events), len(links.event) - 1)
        return np.where(events >= 0, links.launch[place], NOWHERE)

    def of_copies(self, kind: str) -> Int64:
        """Return the rows of the launches of copies that have ``kind`` in their names."""
        copies = np.flatnonzero(self._trace.of_categories({COPY}))
        rows = self.of(self._trace.named(copies, lambda name: kind in name))
        return rows[rows >= 0]


def collective_spans(trace: Trace) -> Int64:
    """Return the rows of a backend's spans (``gloo:all_reduce``), which any thread may be in."""
    annotated = np.flatnonzero(trace.of_categories({OPERATOR, ANNOTATION}))
    return trace.named(annotated, lambda name: name.startswith(ASYNC_PREFIXES))


class Kinds:
    """The host's calls of a trace by what they mean for a gap."""

    def __init__(self, trace: Trace, links: Links) -> None:
        launches = Launches(trace, links)
        operators = np.flatnonzero(trace.of_categories({OPERATOR}))
        operators = trace.named(operators, lambda name: not is_tools(name))
        python = np.flatnonzero(trace.of_categories({PYTHON}))
        waiting = trace.named(launches.calls, WAITING_CALL.fullmatch)
        is_collective = trace.are_named(operators, lambda name: name.startswith(_COLLECTIVE_CALLS))
        self.drawing = ByThread(trace, drawing(trace))
        self.staging = ByThread(trace, launches.of_copies(_FROM_PAGEABLE))
        self.collective = ByThread(trace, operators[is_collective])
        self.waiting = ByThread(trace, trace.distinct(waiting, launches.of_copies(_TO_PAGEABLE)))
        self.calls = ByThread(trace, np.concatenate((operators, launches.calls)))
        self.operators = ByThread(trace, operators[~is_collective])
        self.recorded = launches
        self.launching = launches.launching
        self.launches = ByThread(trace, trace.distinct(self.launching, waiting))
        self.asking = ByThread(trace, trace.named(operators, _asks))
        self.users = ByThread(trace, trace.named(python, _is_users))
        self.profiler = find_overheads(trace).profilers
        self.collective_spans = collective_spans(trace)

    def computing(self, trace: Trace, thread: int, at_least_ns: int = 0) -> Int64:
        """Return the operators of a thread in which nothing is launched, and no wait is made."""
        operators = self.operators.on(thread)
        operators = operators[trace.end[operators] - trace.start[operators] >= at_least_ns]
        calls = np.sort(trace.start[self.launches.on(thread)])
        first, last = (np.searchsorted(calls, edge[operators]) for edge in (trace.start, trace.end))
        without: Int64 = operators[first == last]
        return without


class Host:
    """The activity of one host thread over time."""

    def __init__(self, trace: Trace, kinds: Kinds, thread: int) -> None:
        self._trace = trace
        self._asking = self._outermost(kinds.asking.on(thread))
        self._asking_spans = self._spans(self._asking)
        self._users = kinds.users.on(thread)
        self._user_spans = self._spans(self._users)
        drawing = kinds.drawing.on(thread)
        staging = self._with_askers(kinds.staging.on(thread))
        collective = kinds.collective.on(thread)
        waiting = self._with_askers(kinds.waiting.on(thread))
        waits = kinds.waiting.on(thread)
        collecting = np.concatenate((collective, kinds.collective_spans))
        self._filling = (kinds.profiler, drawing, staging, collecting, waiting)
        # Of an operator that waits only its waits count.
        self._waits = tuple(
            self._cover(waits if number == _SYNCHRONISATION else rows)
            for number, rows in enumerate(self._filling)
        )
        self._calls = self._cover(kinds.calls.on(thread))
        self._computing = kinds.computing(trace, thread)
        spans = trace.end[self._computing] - trace.start[self._computing]
        self._computes = self._cover(self._computing)
        self._computes_long = self._cover(self._computing[spans >= COMPUTING_EACH_NS])
        self._layers = [
            (number, self._cover(rows))
            for number, rows in enumerate((kinds.profiler, drawing, staging, collective, waiting))
            if len(rows)
        ]
        if len(kinds.collective_spans):
            # A span that another thread may be in is the host's wait only while this one is in no call.
            self._layers += [(OTHER, self._calls), (COLLECTIVE_WAIT, self._cover(kinds.collective_spans))]

    def charge(
        self, start: Int64, end: Int64, launch: Int64, cause: Int64, what: Int64
    ) -> tuple[Int64, Int64, Int64]:
        """Return the cause, place and function of gaps that the host caused by being late.

        Args:
            launch: The row of the launch of the event that ends it, -1 for none.
            cause: Its cause if the host shows none.
        """
        trace = self._trace
        filled, begun = self._within(start, end), self._within(start, start + 1)
        under_way = (begun > 0) & (_UNDER_WAY_SHARE * self._under_way(start) >= end - start)
        # What the profiler does only costs the time that it takes.
        under_way[_PROFILER] = False
        computed = self._computed(start, end)
        computes = (2 * computed >= end - start) & (computed >= _COMPUTING_NS) & (launch >= 0)
        charged = np.concatenate((2 * filled >= end - start, [computes], under_way), dtype=np.bool_)
        first = np.argmax(charged, axis=0)
        charged_to = np.array([*range(_FILLING), _HOST_COMPUTE, *range(_FILLING)])[first]
        known = charged.any(axis=0)
        waited = known & (charged_to != _HOST_COMPUTE)
        computes = known & ~waited
        launching = self._calls.up_to(end) - self._calls.up_to(start)
        launched = ~known & (launch >= 0) & (_LAUNCHING_SHARE * launching >= end - start)
        cause = np.where(known, charged_to, np.where(launched, _LAUNCH, cause))
        # A gap without a call shows the function that ran in its middle, which is most likely what took so
        # long.
        moment = (start + end) // 2
        what = np.where(launch >= 0, self._asker(trace.start[launch], trace.name[launch]), what)
        moment = np.where(launched, trace.start[launch], moment)
        for number, rows in enumerate(self._filling):
            chosen = np.flatnonzero(waited & (cause == number))
            if len(chosen):
                call = rows[self._spans(rows).first_ending_after(start[chosen])]
                what[chosen] = trace.name[call]
                moment[chosen] = np.maximum(trace.start[call], start[chosen])
        chosen = np.flatnonzero(computes)
        if len(chosen):
            cover = self._computes
            middle = cover.moments_of((cover.up_to(start[chosen]) + cover.up_to(end[chosen])) // 2)
            what[chosen] = trace.name[self._computing[self._spans(self._computing).innermost(middle)]]
            moment[chosen] = middle
        users = np.append(trace.name[self._users], NOWHERE)
        return cause, what, users[self._user_spans.innermost(moment)]

    def _under_way(self, start: Int64) -> Int64:
        """Return how long the waits last that are under way when each gap begins, by kind of wait."""
        lengths = []
        for rows, waits in zip(self._filling, self._waits, strict=True):
            call = np.append(rows, NOWHERE)[self._spans(rows).innermost(start)]
            begin, end = (
                np.where(call >= 0, edge[call], start) for edge in (self._trace.start, self._trace.end)
            )
            lengths.append(waits.up_to(end) - waits.up_to(begin))
        return np.array(lengths)

    def _computed(self, start: Int64, end: Int64) -> Int64:
        every, long = (
            cover.up_to(end) - cover.up_to(start) for cover in (self._computes, self._computes_long)
        )
        return np.where(every >= _COMPUTING_TOGETHER_NS, every, long)

    def _within(self, start: Int64, end: Int64) -> Int64:
        """Return how much of each window each kind of wait had, as rows in order of precedence."""
        filled = np.zeros((len(CAUSES), len(start)), dtype=np.int64)
        before: Cover | None = None
        so_far = np.zeros_like(start)
        for number, cover in self._layers:
            before = before | cover if before else cover
            reached = before.up_to(end) - before.up_to(start)
            filled[number] += reached - so_far
            so_far = reached
        return filled[:_FILLING]

    def _asker(self, moment: Int64, name: Int32 | Int64) -> Int64:
        asker = self._asking_spans.innermost(moment)
        return np.where(asker >= 0, np.append(self._trace.name[self._asking], NOWHERE)[asker], name)

    def _with_askers(self, calls: Int64) -> Int64:
        asker = self._asking_spans.innermost(self._trace.start[calls])
        asked = asker >= 0
        return self._trace.distinct(calls[~asked], self._asking[asker[asked]])

    def _outermost(self, rows: Int64) -> Int64:
        return rows[outermost(self._trace.start[rows], self._trace.end[rows])]

    def _cover(self, rows: Int64) -> Cover:
        return Cover(self._trace.start[rows], self._trace.end[rows])

    def _spans(self, rows: Int64) -> Spans:
        return Spans(self._trace.start[rows], self._trace.end[rows])


def _asks(name: str) -> bool:
    """Whether this is an operator that code calls: no node or call of autograd's engine, and no tool's."""
    return "::" in name and not name.startswith(_AUTOGRAD) and not is_tools(name)


def _is_users(name: str) -> bool:
    """Whether this is a Python function with a source line that is no library's, Python's own or a tool's."""
    match = _FUNCTION.fullmatch(name)
    if match is None or _LIBRARY.search(match["file"]):
        return False
    return not is_library(name) and not is_tools(name)
