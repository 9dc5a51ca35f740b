"""Repairs a trace after it is read: splits a file of several processes, and corrects impossible times.

Tools merge the traces of ranks into one file. Each process counted its correlation and external ids, its
steps and its streams by itself, so that together they would be mistaken for each other.

Exporters convert a device's clock to the host's, and now and then get a start or an end wrong by seconds
or years. One such event would make a recording of milliseconds idle or busy for years. Events that still ran
when the recording was stopped get the end that torch's own tables give them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

import numpy as np

from torchperfd_daemon.analysis.categories import (
    ANNOTATION,
    DEVICE,
    GPU_ANNOTATION,
    LAUNCHES,
    OPERATOR,
    PYTHON,
    STEP_MARK,
    WAIT,
)
from torchperfd_daemon.analysis.intervals import nest
from torchperfd_daemon.analysis.trace import CollectiveArgs, Flags, Int32, Int64, Memory, Trace

T = TypeVar("T", Trace, CollectiveArgs, Memory)

_HOST: Final = LAUNCHES | {OPERATOR, ANNOTATION, PYTHON}
# These are on a device's timeline, beside what ran there.
_BESIDE: Final = frozenset({GPU_ANNOTATION, "cuda_sync", "cuda_event", WAIT})
# The least part of an equal share of the host's events that a process must have.
_FAIR: Final = 0.1
# A file of more processes does not contain ranks.
_MAX_PROCESSES: Final = 64


def host_processes(trace: Trace) -> list[int | str]:
    """Return the processes that operators, annotations and launches are of, in order of first sight."""
    used = np.zeros(len(trace.threads), dtype=np.bool_)
    used[trace.thread[trace.of_categories(_HOST)]] = True
    return list(dict.fromkeys(trace.threads[number][0] for number in np.flatnonzero(used).tolist()))


def by_process(trace: Trace) -> Iterator[Trace]:
    """Yield the trace of each process, or the whole trace if it has one process or does not distinguish them.

    A process counts if it has a fair part of the host's events, and launched something or marked steps.
    Events of no such process go to the first.
    """
    processes = working(trace)
    if not 1 < len(processes) <= _MAX_PROCESSES:
        yield trace
        return
    owner = _owners(trace, processes)
    for number, process in enumerate(processes):
        chosen = owner == number
        yield _limited(trace, chosen, process, processes)


def working(trace: Trace) -> list[int | str]:
    """Return the processes that are worth a trace of their own."""
    if len(trace.processes) < 2:
        return trace.processes
    on_host, launches = trace.of_categories(_HOST), trace.of_categories(LAUNCHES)
    steps = trace.of_names(lambda name: name.startswith(STEP_MARK))
    events = np.bincount(trace.thread[on_host], minlength=len(trace.threads))
    marks = np.bincount(trace.thread[on_host & (launches | steps)], minlength=len(trace.threads))
    totals = {process: [0, 0] for process in trace.processes}
    for number, (process, _) in enumerate(trace.threads):
        if process in totals:
            totals[process][0] += int(events[number])
            totals[process][1] += int(marks[number])
    share = _FAIR * int(on_host.sum()) / len(totals)
    return [process for process, (count, marked) in totals.items() if marked and count >= share]


def _owners(trace: Trace, processes: list[int | str]) -> Int64:
    """Return the process of each row, an index into ``processes``; the first if it is unknown."""
    place = {process: number for number, process in enumerate(processes)}
    of_thread = np.array([place.get(process, -1) for process, _ in trace.threads], dtype=np.int64)
    owner: Int64 = of_thread[trace.thread]
    on_device = np.flatnonzero(trace.of_categories(DEVICE | _BESIDE))
    owner[on_device] = _of_device(trace, owner, on_device, len(processes))
    return np.maximum(owner, 0)


def _of_device(trace: Trace, owner: Int64, on_device: Int64, processes: int) -> Int64:
    """Return the process that launched each of the rows on devices, -1 for none.

    A correlation id that only one process has identifies it. Otherwise the nearest launch in the file
    decides, since a file lists one process after another. A device belongs to the process that has most of
    its events.
    """
    calls = np.flatnonzero(trace.of_categories(LAUNCHES) & (trace.correlation >= 0))
    found = np.full(len(on_device), -1, dtype=np.int64)
    if not len(calls):
        return found
    calls = calls[np.lexsort((calls, trace.correlation[calls]))]
    keys = trace.correlation[calls]
    wanted = trace.correlation[on_device]
    low, high = np.searchsorted(keys, wanted, side="left"), np.searchsorted(keys, wanted, side="right")
    for at in np.flatnonzero((high > low) & (wanted >= 0)).tolist():
        candidates = calls[low[at] : high[at]]
        found[at] = owner[candidates[np.argmin(np.abs(candidates - on_device[at]))]]
    _, device = np.unique(
        [str(trace.threads[number][0]) for number in trace.thread[on_device].tolist()], return_inverse=True
    )
    for number in range(int(device.max()) + 1 if len(device) else 0):
        those = device == number
        votes = np.bincount(found[those & (found >= 0)], minlength=processes)
        if 10 * int(votes.max()) >= 9 * int(votes.sum()) > 0:
            found[those] = int(votes.argmax())
        elif votes.any():
            found[those & (found < 0)] = int(votes.argmax())
    return found


def _limited(trace: Trace, chosen: Flags, process: int | str, processes: list[int | str]) -> Trace:
    owner = trace.memory.processes.index(process) if process in trace.memory.processes else -1
    return replace(
        chosen_rows(trace, chosen),
        process=process,
        processes=processes,
        memory=_rows(trace.memory, trace.memory.process == owner),
    )


def chosen_rows(trace: Trace, chosen: Flags) -> Trace:
    """Return a trace of the chosen events only, with all its memory events."""
    args = trace.collective_args
    kept = _rows(args, chosen[args.row])
    number = np.cumsum(chosen) - 1
    return replace(_rows(trace, chosen), collective_args=replace(kept, row=number[kept.row]))


def _rows(table: T, chosen: Flags) -> T:
    """Return a dataclass with the chosen rows of its columns, the arrays among its fields."""
    columns = ((each.name, getattr(table, each.name)) for each in fields(table))
    limited: dict[str, Any] = {name: of[chosen] for name, of in columns if isinstance(of, np.ndarray)}
    return replace(table, **limited)


# An event farther from the recording than this, and than ten times its length, does not belong to it.
_APART_NS: Final = 100_000_000
_APART: Final = 10
# Below this a wrong end does little harm, and cannot be distinguished from a correct one.
_LONG_NS: Final = 1_000_000
# Of the device events no more than one in so many can be left out; if more are apart, the clocks are.
_FEW: Final = 10


@dataclass(frozen=True, slots=True)
class Outliers:
    """Device events that start far outside the recording.

    Attributes:
        clock_apart: Whether most device events are far away. Then the clocks differ, and no event is left
            out.
    """

    rows: Int64
    clock_apart: bool


def timeless(start: Int64, end: Int64) -> Flags:
    """Return which events of any kind have time 0 and no duration, while all others are far from 0.

    Exporters write these for records that they have lost.
    """
    at_zero: Flags = (start == 0) & (end == 0)
    if not at_zero.any() or at_zero.all() or int(start[~at_zero].min()) <= _APART_NS:
        return np.zeros(len(start), dtype=np.bool_)
    return at_zero


def far_away(start: Int64, end: Int64, on_device: Flags) -> Outliers:
    """Return the device events that lie far outside of the recording.

    The recording is the stretch with most events between gaps that are too long for it.
    """
    none = Outliers(np.zeros(0, dtype=np.int64), clock_apart=False)
    if not on_device.any() or int(start.max() - start.min()) <= _APART_NS:
        return none
    if not on_device.all():
        begun, over = int(start[~on_device].min()), int(end[~on_device].max())
        device = start[on_device]
        if begun - int(device.min()) <= _APART_NS and int(device.max()) - over <= _APART_NS:
            return none
    order = np.argsort(start, kind="stable")
    reached = np.maximum.accumulate(end[order])
    opens = np.concatenate(([True], start[order][1:] - reached[:-1] > _APART_NS))
    part = np.cumsum(opens) - 1
    if part[-1] == 0:
        return none
    sizes = np.bincount(part)
    first = np.flatnonzero(opens)
    begin, until = start[order][first], reached[np.append(first[1:], len(order)) - 1]
    hosts = np.bincount(part, weights=~on_device[order])
    main = int(np.lexsort((sizes, hosts))[-1])
    low, high = int(begin[main]), int(until[main])
    apart = max(_APART_NS, _APART * (high - low))
    outside = ((begin - high > apart) | (low - until > apart)) & (hosts == 0)
    rows = order[outside[part]]
    if not len(rows):
        return none
    if _FEW * len(rows) > int(on_device.sum()) and len(rows) > 1:
        return Outliers(none.rows, clock_apart=True)
    return Outliers(np.sort(rows), clock_apart=False)


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Device events of one stream that ran at once, which a stream does not do by itself."""

    events: int
    ns: int


def shorten(start: Int64, end: Int64, stream: Int32, on_device: Flags) -> tuple[int, int]:
    """Shorten device events that outlast the recording to the start of the next event of their stream.

    Returns:
        How many were shortened, and how many last as long, but have none after them on their stream.

    Args:
        end: Ends in ns, changed in place.
    """
    rows = np.flatnonzero(on_device)
    if not len(rows) or len(rows) == len(start) == 1:
        return 0, 0
    rows = rows[np.lexsort((start[rows], stream[rows]))]
    # The recording ends with the host's last event, or the device's last that does not run over another.
    following = _next_start(start[rows], stream[rows])
    over = end[rows] > following
    others = np.ones(len(start), dtype=np.bool_)
    others[rows[over]] = False
    longest = rows[np.argmax(end[rows] - start[rows])]
    others[longest] = False
    if not others.any():
        return 0, 0
    began, latest = int(start.min()), int(end[others].max())
    allowed = latest + (latest - began)
    impossible = over & (end[rows] > allowed) & (end[rows] - start[rows] >= _LONG_NS)
    shortened = rows[impossible]
    end[shortened] = following[impossible]
    far = (end[rows] > max(allowed, began + _APART * (latest - began))) & (
        end[rows] - start[rows] > _APART_NS
    )
    return len(shortened), int(far.sum())


def overlaps(start: Int64, end: Int64, stream: Int32) -> Overlaps:
    """Return how much of the device events given overlaps on a stream."""
    order = np.lexsort((start, stream))
    start, end, stream = start[order], end[order], stream[order]
    if not len(order):
        return Overlaps(0, 0)
    edges = np.concatenate(([True], np.diff(stream) != 0))
    first = np.flatnonzero(edges)
    # Made to rise from stream to stream, so that one running maximum serves all of them.
    lift = (np.cumsum(edges) - 1) * (int(end.max() - start.min()) + 1)
    reached = np.maximum.accumulate(end + lift) - lift
    before = np.concatenate(([0], reached[:-1]))
    before[first] = start[first]
    shared = np.minimum(before, end) - start
    return Overlaps(int((shared > 0).sum()), int(shared[shared > 0].sum()))


def _next_start(start: Int64, stream: Int32) -> Int64:
    """Return when the next event of the same stream begins; the end of time for the last."""
    following = np.full(len(start), np.iinfo(np.int64).max, dtype=np.int64)
    same = np.diff(stream) == 0
    following[:-1][same] = start[1:][same]
    return following


def end_unfinished(trace: Trace, recorded_until: int | None) -> None:
    """End the unfinished events of a trace where torch's own tables do.

    The file stretches each of them to when it was written. ``torch.profiler`` ends it with the call that it
    was in on its thread, or else with the recording.

    Args:
        recorded_until: When the recording was stopped, in ns since the trace's origin; None if the file
            does not contain it; then events outside any other call are not changed.
    """
    rows = np.flatnonzero(trace.unfinished)
    if not len(rows):
        return
    ends = trace.end[rows]
    if recorded_until is not None:
        ends = np.clip(recorded_until, trace.start[rows], ends)
    # Treated as moments: they are in other calls, and no other call is in them.
    trace.end[rows] = trace.start[rows]
    concerned = np.zeros(len(trace.threads), dtype=np.bool_)
    concerned[trace.thread[rows]] = True
    calls = nest(trace, np.flatnonzero(concerned[trace.thread]))
    within = np.flatnonzero(trace.unfinished[calls.row] & (calls.parent >= 0))
    at = np.searchsorted(rows, calls.row[within])
    ends[at] = np.minimum(ends[at], trace.end[calls.row[calls.parent[within]]])
    trace.end[rows] = ends
