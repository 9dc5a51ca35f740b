"""Why the device is idle: each gap between device events is charged to one cause, as a whole.

A gap lasts from the moment at which nothing runs on the device any more to the start of the next device
event. The host thread that launched that event, found by correlation id, is the one that counts; where the
launch is not in the file it is the thread that launches most. The first of these rules that applies decides:

1. The launch was over when the gap began, or at least 0.1 ms and half of the gap before its end, so the host
   was not late: its queue was blocked. A communication kernel waits for others: ``collective_wait``. Anything
   else waits for the device itself (an event, another stream): ``other``. The same holds if the host waited
   for a full launch queue in half of the gap.
2. One of the following filled at least half of the gap, or, if none did, was under way on that thread when
   the gap began and lasts a twentieth of the gap or more. Of several the first in this order decides, and
   what several share in time is the first's:

   - ``profiler``: the profiler's own work, such as asking for another buffer; only if it filled half.
   - ``data``: a batch was drawn (the phase ``data``).
   - ``pageable_copy``: a copy from pageable memory was made, which the host has to stage.
   - ``collective_wait``: an operator of c10d ran; or a backend's span (``gloo:all_reduce``) was open, on any
     thread, while this one was in no call.
   - ``synchronisation``: the host waited for the device: a synchronising call, or a copy to pageable memory,
     which is how ``.item()`` and ``.cpu()`` read.
   - ``host_compute``: operators that launch nothing ran, so the host computed by itself. It must fill half of
     the gap, and be known to hold up the launch that ends it.

   Copies and synchronising calls count as long as the operator that asked for them. That a wait was under
   way is enough because of what it costs: once the device has nothing queued, it idles until the host, set
   free by the device's last event, has launched again. Without the wait the host would have been earlier by
   no more than it waited, so a wait far shorter than the gap did not cause it.
3. The launch is in the file, and the thread was in operators or runtime calls for at least a tenth of the
   gap: ``launch``, the host could not keep up. Between calls of eager code there is Python, so much of it.
4. The launch is not in the file, and the gap ends with a communication kernel: ``collective_wait``.
5. ``other``: the host did something that leaves no events, or the launch is unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.breakdown import DeviceTime
from torchperfd_daemon.analysis.callers import find_links
from torchperfd_daemon.analysis.host_activity import (
    CAUSES,
    COLLECTIVE_WAIT,
    NOWHERE,
    OTHER,
    Cause,
    Host,
    Kinds,
)
from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.overhead import find_overheads
from torchperfd_daemon.analysis.steps import Step, edges
from torchperfd_daemon.analysis.trace import Flags, Int64, Trace

_MAX_PLACES: Final = 10
# A device event that begins so long after its launch was held up by the device; usual are a few µs.
_BLOCKED_NS: Final = 100_000


@dataclass(frozen=True, slots=True)
class IdlePlace:
    """The gaps of one cause and one place.

    Attributes:
        what: The place on the host: the operator that asked for the wait, copy or launch, the DataLoader, or
            the collective. Without a host call, the device event that ends the gap; empty for the time after
            the last device event.
        where: The innermost function around it that is neither torch's nor Python's own, as Kineto names it,
            ``train.py(12): train_step``; the line is the function's first. Empty without ``with_stack=True``.
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
        event: The row of the device event that ends it, -1 for none.
        communication: That is a communication kernel.
        inside: The gap lies within the device's window.
    """

    start: Int64
    end: Int64
    event: Int64
    communication: Flags
    inside: Flags


def idle(trace: Trace, device: DeviceTime, steps: Sequence[Step], kinds: Kinds | None = None) -> Idle | None:
    """Return why the device was idle; None for a trace without device events."""
    if not len(device.rows):
        return None
    gaps = _gaps(trace, device)
    cause, *place = _charge(trace, gaps, kinds or Kinds(trace, find_links(trace)))
    causes = [_cause(trace, gaps, cause == number, place, CAUSES[number]) for number in range(len(CAUSES))]
    return Idle(tuple(sorted(causes, key=lambda each: -each.ns)), tuple(_by_step(gaps, cause, steps)))


def _gaps(trace: Trace, device: DeviceTime) -> _Gaps:
    """Return the gaps, with the time before and after the device's window, which waits can make longer."""
    order = np.argsort(trace.start[device.rows], kind="stable")
    rows = device.rows[order]
    first, last = device.window
    ended = np.maximum.accumulate(trace.end[rows])
    dry = np.concatenate(([0, first], ended, [last]))
    begins = np.concatenate(([first], trace.start[rows], [last, trace.duration_ns]))
    events = np.concatenate((rows[:1], rows, [NOWHERE, NOWHERE]))
    communication = device.comm[order]
    found = np.flatnonzero(begins > dry)
    return _Gaps(
        start=dry[found],
        end=begins[found],
        event=events[found],
        communication=np.concatenate((communication[:1], communication, [False, False]))[found],
        inside=(found > 0) & (found < len(dry) - 1),
    )


def _charge(trace: Trace, gaps: _Gaps, kinds: Kinds) -> tuple[Int64, Int64, Int64]:
    """Return the cause of each gap, its place and the user's function, as names' numbers; -1 for none."""
    launches = kinds.recorded
    launch = launches.of(gaps.event)
    known = launch >= 0
    launched = np.where(known, trace.end[launch], gaps.end)
    held = gaps.end - np.maximum(launched, gaps.start)
    blocked = (held >= _BLOCKED_NS) & (2 * held >= gaps.end - gaps.start)
    full = find_overheads(trace).queue_full
    queue = Cover(trace.start[full], trace.end[full])
    blocked |= 2 * (queue.up_to(gaps.end) - queue.up_to(gaps.start)) >= np.maximum(gaps.end - gaps.start, 1)
    late = ~known | ((launched > gaps.start) & ~blocked)
    cause = np.where(gaps.communication & ~(known & late), COLLECTIVE_WAIT, OTHER)
    what = np.where(gaps.event >= 0, trace.name[gaps.event], NOWHERE).astype(np.int64)
    where = np.full(len(cause), NOWHERE, dtype=np.int64)
    thread = np.where(known, trace.thread[launch], launches.busiest_thread)
    for each in np.unique(thread[late]).tolist():
        chosen = np.flatnonzero(late & (thread == each))
        host = Host(trace, kinds, each)
        cause[chosen], what[chosen], where[chosen] = host.charge(
            gaps.start[chosen], gaps.end[chosen], launch[chosen], cause[chosen], what[chosen]
        )
    return cause, what, where


def _cause(trace: Trace, gaps: _Gaps, is_it: Flags, place: Sequence[Int64], cause: Cause) -> IdleCause:
    """Add up the gaps of one cause that lie in the device's window."""
    chosen = np.flatnonzero(gaps.inside & is_it)
    spans = gaps.end[chosen] - gaps.start[chosen]
    what, where = (each[chosen] for each in place)
    places, which = np.unique(what * (len(trace.names) + 1) + where + 1, return_inverse=True)
    sums = np.zeros(len(places), dtype=np.int64)
    np.add.at(sums, which, spans)
    counts = np.bincount(which, minlength=len(places))
    most = np.argsort(-sums, kind="stable")[:_MAX_PLACES]
    names = [*trace.names, ""]
    rows = []
    for at in most.tolist():
        name, function = divmod(int(places[at]), len(trace.names) + 1)
        rows.append(IdlePlace(names[name], names[function - 1], int(sums[at]), int(counts[at])))
    return IdleCause(cause, int(spans.sum()), len(chosen), tuple(rows))


def _by_step(gaps: _Gaps, cause: Int64, steps: Sequence[Step]) -> list[dict[Cause, int]]:
    firsts, lasts = edges(steps)
    covers = [Cover(gaps.start[cause == at], gaps.end[cause == at]) for at in range(len(CAUSES))]
    columns = [cover.up_to(lasts) - cover.up_to(firsts) for cover in covers]
    return [dict(zip(CAUSES, row, strict=True)) for row in np.column_stack(columns).tolist()]
