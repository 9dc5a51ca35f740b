"""Why the device is idle: each gap between device events is charged to one cause, as a whole.

A gap lasts from the moment at which nothing runs on the device any more to the start of the next device
event. The host thread that launched that event, found by correlation id, is the one that counts; where the
launch is not in the file it is the thread that launches most. The first of these rules that applies decides:

1. The launch was over when the gap began, so the host was not late. A communication kernel waits for others:
   ``collective_wait``. Anything else waits for the device itself (an event, another stream): ``other``.
2. One of the following filled at least half of the gap, or, if none did, was under way on that thread when
   the gap began. Of several the first in this order decides, and what several share in time is the first's:

   - ``data``: a batch was drawn (the phase ``data``).
   - ``pageable_copy``: a copy from pageable memory was made, which the host has to stage.
   - ``collective_wait``: an operator of c10d ran; or a backend's span (``gloo:all_reduce``) was open, on any
     thread, while this one was in no call.
   - ``synchronisation``: the host waited for the device: a synchronising call, or a copy to pageable memory,
     which is how ``.item()`` and ``.cpu()`` read.

   Copies and synchronising calls count as long as the operator that asked for them. That a wait was under
   way is enough because of what it costs: once the device has nothing queued, it idles until the host, set
   free by the device's last event, has launched again.
3. The launch is in the file, and the thread was in operators or runtime calls for at least a tenth of the
   gap: ``launch``, the host could not keep up. Between calls of eager code there is Python, so much of it.
4. The launch is not in the file, and the gap ends with a communication kernel: ``collective_wait``.
5. ``other``: the host did something that leaves no events, or the launch is unknown.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from torchperfd_daemon.analysis.breakdown import LAUNCHES, DeviceTime
from torchperfd_daemon.analysis.callers import PYTHON
from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.links import Links, find_links
from torchperfd_daemon.analysis.operators import ASYNC_PREFIXES
from torchperfd_daemon.analysis.phases import drawing
from torchperfd_daemon.analysis.spans import ByThread, Spans, outermost
from torchperfd_daemon.analysis.steps import Step
from torchperfd_daemon.analysis.trace import Flags, Int32, Int64, Trace

Cause = Literal["data", "pageable_copy", "collective_wait", "synchronisation", "launch", "other"]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
# What can fill a gap, in order of precedence, and the two causes that remain.
_FILLING: Final = 4
_COLLECTIVE_WAIT, _LAUNCH, _OTHER = (CAUSES.index(name) for name in ("collective_wait", "launch", "other"))
_OPERATOR: Final = "cpu_op"
_ANNOTATION: Final = "user_annotation"
# Runtime calls that return when the device is done: by the vendors' names, and frees, which wait for it too.
_WAITING_CALL: Final = re.compile(
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
# Of one part in so many of a gap in calls the host is said to be launching.
_LAUNCHING_SHARE: Final = 10
_MOST_PLACES: Final = 10
_NOWHERE: Final = -1


@dataclass(frozen=True, slots=True)
class IdlePlace:
    """Gaps of one cause that are of one place.

    Attributes:
        what: What the host was in: the operator that asked for the wait, copy or launch, the DataLoader, the
            collective. Where no host call is to blame, the device event that ends the gap; empty for the time
            after the last device event.
        where: The innermost function around it that is neither torch's nor Python's own, as Kineto names it,
            ``train.py(12): train_step``; the line is the function's first. Empty without ``with_stack=True``.
        ns: The gaps' time.
        gaps: How many.
    """

    what: str
    where: str
    ns: int
    gaps: int


@dataclass(frozen=True, slots=True)
class IdleCause:
    """All gaps of one cause; of their places those with most time, most first."""

    cause: Cause
    ns: int
    gaps: int
    places: tuple[IdlePlace, ...]


@dataclass(frozen=True, slots=True)
class Idle:
    """Why the device was idle.

    Attributes:
        causes: Every cause, most time first; they sum to ``Breakdown.idle_ns`` of scope ``all``.
        steps: For each step the time in ns by cause; they sum to the idle time of the step's breakdown. Gaps
            are cut at the step's ends, and the time before the first and after the last device event counts.
    """

    causes: tuple[IdleCause, ...]
    steps: tuple[dict[Cause, int], ...]


@dataclass(frozen=True, slots=True)
class _Gaps:
    """The gaps as parallel columns, in order of time.

    Attributes:
        start: When the device ran dry, in ns.
        end: When the next device event began.
        event: The row of that event, -1 for none.
        communication: It is a communication kernel.
        inside: The gap lies within the device's window.
    """

    start: Int64
    end: Int64
    event: Int64
    communication: Flags
    inside: Flags


@dataclass(frozen=True, slots=True)
class _Charges:
    """What each gap is charged to, parallel to the gaps: its cause as an index into `CAUSES`, and names."""

    cause: Int64
    what: Int64
    where: Int64


def idle(trace: Trace, device: DeviceTime, steps: Sequence[Step], links: Links | None = None) -> Idle | None:
    """Return why the device was idle; None for a trace without device events.

    Args:
        trace: The loaded trace.
        device: Its device events.
        steps: Its steps.
        links: What launched its device events, if that has been found before.
    """
    if not len(device.rows):
        return None
    gaps = _gaps(trace, device)
    charges = _charge(trace, gaps, links or find_links(trace))
    causes = [_cause(trace, gaps, charges, number) for number in range(len(CAUSES))]
    return Idle(
        causes=tuple(sorted(causes, key=lambda cause: -cause.ns)),
        steps=tuple(_by_step(gaps, charges, steps)),
    )


def _gaps(trace: Trace, device: DeviceTime) -> _Gaps:
    """Return the gaps, with what lies before the first and after the last device event."""
    order = np.argsort(trace.start[device.rows], kind="stable")
    rows = device.rows[order]
    dry = np.concatenate(([0], np.maximum.accumulate(trace.end[rows])))
    begins = np.append(trace.start[rows], trace.duration_ns)
    found = np.flatnonzero(begins > dry)
    return _Gaps(
        start=dry[found],
        end=begins[found],
        event=np.append(rows, _NOWHERE)[found],
        communication=np.append(device.comm[order], False)[found],
        inside=(found > 0) & (found < len(rows)),
    )


def _charge(trace: Trace, gaps: _Gaps, links: Links) -> _Charges:
    """Charge each gap by the rules above."""
    launches = _Launches(trace, links)
    launch = launches.of(gaps.event)
    known = launch >= 0
    late = ~known | (trace.end[launch] > gaps.start)
    cause = np.where(gaps.communication & ~(known & late), _COLLECTIVE_WAIT, _OTHER)
    what = np.where(gaps.event >= 0, trace.name[gaps.event], _NOWHERE).astype(np.int64)
    where = np.full(len(cause), _NOWHERE, dtype=np.int64)
    thread = np.where(known, trace.thread[launch], launches.busiest_thread)
    kinds = _Kinds(trace, launches)
    for each in np.unique(thread[late]).tolist():
        chosen = np.flatnonzero(late & (thread == each))
        host = _Host(trace, kinds, each)
        cause[chosen], what[chosen], where[chosen] = host.charge(
            gaps.start[chosen], gaps.end[chosen], launch[chosen], cause[chosen], what[chosen]
        )
    return _Charges(cause, what, where)


class _Launches:
    """The runtime and driver calls of a trace, and what they launched."""

    def __init__(self, trace: Trace, links: Links) -> None:
        self._trace = trace
        self._links = links
        self.calls = np.flatnonzero(trace.of_categories(LAUNCHES))
        rows = self.calls[trace.correlation[self.calls] >= 0]
        self.busiest_thread = int(np.bincount(trace.thread[rows]).argmax()) if len(rows) else _NOWHERE

    def of(self, events: Int64) -> Int64:
        """Return the row of each device event's launch, -1 for none."""
        links = self._links
        place = np.minimum(np.searchsorted(links.event, events), len(links.event) - 1)
        return np.where(events >= 0, links.launch[place], _NOWHERE)

    def of_copies(self, kind: str) -> Int64:
        """Return the rows of the launches of copies that have ``kind`` in their names."""
        copies = np.flatnonzero(self._trace.of_categories({"gpu_memcpy"}))
        rows = self.of(self._trace.named(copies, lambda name: kind in name))
        return rows[rows >= 0]


class _Kinds:
    """The host's calls of a trace by what they mean for a gap."""

    def __init__(self, trace: Trace, launches: _Launches) -> None:
        operators = np.flatnonzero(trace.of_categories({_OPERATOR}))
        annotated = np.flatnonzero(trace.of_categories({_OPERATOR, _ANNOTATION}))
        python = np.flatnonzero(trace.of_categories({PYTHON}))
        waiting = trace.named(launches.calls, lambda name: _WAITING_CALL.fullmatch(name) is not None)
        collective = trace.named(operators, lambda name: name.startswith(_COLLECTIVE_CALLS))
        self.drawing = ByThread(trace, drawing(trace))
        self.staging = ByThread(trace, launches.of_copies(_FROM_PAGEABLE))
        self.collective = ByThread(trace, collective)
        self.waiting = ByThread(trace, np.union1d(waiting, launches.of_copies(_TO_PAGEABLE)))
        self.calls = ByThread(trace, np.concatenate((operators, launches.calls)))
        self.asking = ByThread(trace, trace.named(operators, _asks))
        self.users = ByThread(trace, trace.named(python, _is_users))
        self.collective_spans = trace.named(annotated, lambda name: name.startswith(ASYNC_PREFIXES))


class _Host:
    """One host thread: what it did at which time."""

    def __init__(self, trace: Trace, kinds: _Kinds, thread: int) -> None:
        self._trace = trace
        self._asking = self._outermost(kinds.asking.on(thread))
        self._asking_spans = self._spans(self._asking)
        self._users = kinds.users.on(thread)
        self._user_spans = self._spans(self._users)
        drawing = kinds.drawing.on(thread)
        staging = self._with_askers(kinds.staging.on(thread))
        collective = kinds.collective.on(thread)
        waiting = self._with_askers(kinds.waiting.on(thread))
        self._filling = (drawing, staging, np.concatenate((collective, kinds.collective_spans)), waiting)
        self._calls = self._cover(kinds.calls.on(thread))
        self._layers = [
            (number, self._cover(rows))
            for number, rows in enumerate((drawing, staging, collective, waiting))
            if len(rows)
        ]
        if len(kinds.collective_spans):
            # A span that another thread may be in is the host's wait only while this one is in no call.
            self._layers += [(_OTHER, self._calls), (_COLLECTIVE_WAIT, self._cover(kinds.collective_spans))]

    def charge(
        self, start: Int64, end: Int64, launch: Int64, cause: Int64, what: Int64
    ) -> tuple[Int64, Int64, Int64]:
        """Return cause, what and where of gaps that the host was late for.

        Args:
            start: When each gap begins, in ns.
            end: When it ends.
            launch: The row of the launch of what ends it, -1 for none.
            cause: Its cause as long as the host shows none.
            what: Its place, likewise.
        """
        trace = self._trace
        filled, begun = self._within(start, end), self._within(start, start + 1)
        charged = np.concatenate((2 * filled >= end - start, begun > 0), dtype=np.bool_)
        first = np.argmax(charged, axis=0)
        waited = charged.any(axis=0)
        launching = self._calls.up_to(end) - self._calls.up_to(start)
        launched = ~waited & (launch >= 0) & (_LAUNCHING_SHARE * launching >= end - start)
        cause = np.where(waited, first % _FILLING, np.where(launched, _LAUNCH, cause))
        # A gap that shows no call is looked at in its middle: there the host did what it took so long for.
        moment = (start + end) // 2
        what = np.where(launch >= 0, self._asker(trace.start[launch], trace.name[launch]), what)
        moment = np.where(launched, trace.start[launch], moment)
        for number, rows in enumerate(self._filling):
            chosen = np.flatnonzero(waited & (cause == number))
            if len(chosen):
                call = rows[self._spans(rows).first_ending_after(start[chosen])]
                what[chosen] = trace.name[call]
                moment[chosen] = np.maximum(trace.start[call], start[chosen])
        innermost = self._user_spans.innermost(moment)
        users = np.append(trace.name[self._users], _NOWHERE)
        return cause, what, users[innermost]

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
        """Return the name of the operator that is to be held to account at each moment, else ``name``."""
        asker = self._asking_spans.innermost(moment)
        return np.where(asker >= 0, np.append(self._trace.name[self._asking], _NOWHERE)[asker], name)

    def _with_askers(self, calls: Int64) -> Int64:
        """Return the calls, those within an asking operator replaced by it."""
        asker = self._asking_spans.innermost(self._trace.start[calls])
        asked = asker >= 0
        return np.union1d(calls[~asked], self._asking[asker[asked]])

    def _outermost(self, rows: Int64) -> Int64:
        return rows[outermost(self._trace.start[rows], self._trace.end[rows])]

    def _cover(self, rows: Int64) -> Cover:
        return Cover(self._trace.start[rows], self._trace.end[rows])

    def _spans(self, rows: Int64) -> Spans:
        return Spans(self._trace.start[rows], self._trace.end[rows])


def _asks(name: str) -> bool:
    """Whether this is an operator that code calls, and no node or call of autograd's engine."""
    return "::" in name and not name.startswith(_AUTOGRAD)


def _is_users(name: str) -> bool:
    """Whether this is a Python function with a source line that is neither torch's nor Python's own."""
    match = _FUNCTION.fullmatch(name)
    if match is None or _LIBRARY.search(match["file"]):
        return False
    return match["file"].removesuffix(".py").partition("/")[0] not in sys.stdlib_module_names


def _cause(trace: Trace, gaps: _Gaps, charges: _Charges, number: int) -> IdleCause:
    """Add up the gaps of one cause that lie in the device's window."""
    chosen = np.flatnonzero(gaps.inside & (charges.cause == number))
    spans = gaps.end[chosen] - gaps.start[chosen]
    places, which = np.unique(
        charges.what[chosen] * (len(trace.names) + 1) + charges.where[chosen] + 1, return_inverse=True
    )
    sums = np.zeros(len(places), dtype=np.int64)
    np.add.at(sums, which, spans)
    counts = np.bincount(which, minlength=len(places))
    most = np.argsort(-sums, kind="stable")[:_MOST_PLACES]
    names = [*trace.names, ""]
    rows = []
    for place in most.tolist():
        what, where = divmod(int(places[place]), len(trace.names) + 1)
        rows.append(IdlePlace(names[what], names[where - 1], int(sums[place]), int(counts[place])))
    return IdleCause(CAUSES[number], int(spans.sum()), len(chosen), tuple(rows))


def _by_step(gaps: _Gaps, charges: _Charges, steps: Sequence[Step]) -> list[dict[Cause, int]]:
    """Return each step's idle time by cause, in the order of `CAUSES`."""
    firsts = np.array([step.start_ns for step in steps], dtype=np.int64)
    lasts = firsts + np.array([step.duration_ns for step in steps], dtype=np.int64)
    columns = []
    for number in range(len(CAUSES)):
        chosen = charges.cause == number
        cover = Cover(gaps.start[chosen], gaps.end[chosen])
        columns.append(cover.up_to(lasts) - cover.up_to(firsts))
    return [dict(zip(CAUSES, row, strict=True)) for row in np.column_stack(columns).tolist()]
