"""Splits a file with the traces of several processes into one trace for each.

Tools merge the traces of ranks into one file. Each process counted its correlation and external ids, its
steps and its streams by itself, so that together they would be mistaken for each other.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

import numpy as np

from torchperfd_daemon.analysis.categories import ANNOTATION, DEVICE, LAUNCHES, OPERATOR
from torchperfd_daemon.analysis.trace import CollectiveArgs, Flags, Int64, Memory, Trace

T = TypeVar("T", Trace, CollectiveArgs, Memory)

_HOST: Final = LAUNCHES | {OPERATOR, ANNOTATION, "python_function"}
# These are on a device's timeline, beside what ran there.
_BESIDE: Final = frozenset({"gpu_user_annotation", "cuda_sync", "cuda_event", "device_wait"})
_STEP: Final = "ProfilerStep#"
# The least part of an equal share of the host's events that a process must have.
_FAIR: Final = 0.1
# A file of more processes does not contain ranks.
_MOST: Final = 64


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
    if not 1 < len(processes) <= _MOST:
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
    steps = np.isin(trace.name, [at for at, name in enumerate(trace.names) if name.startswith(_STEP)])
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
    """Return the trace of one of the processes."""
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
