"""Memory that operators allocate and free, as torch's own table counts it."""

from typing import Final

import numpy as np

from torchperfd_daemon.analysis.operator_rows import Operator
from torchperfd_daemon.analysis.trace import Int64, Trace

# torch's numbers for the kinds of device that memory is on.
HOST_MEMORY: Final = (0, 2, 5)
DEVICE_MEMORY: Final = (1, 6, 12, 20)
_MEMORY: Final = "[memory]"


def memory_during(trace: Trace, rows: Int64) -> tuple[Int64, Int64]:
    """Return the host's and the device's bytes allocated less freed during each event, on any thread.

    As in torch, both ends of an event belong to it.
    """
    memory = trace.memory
    if not len(memory.time):
        return np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    order = np.argsort(memory.time, kind="stable")
    times = memory.time[order]
    first = np.searchsorted(times, trace.start[rows], side="left")
    last = np.searchsorted(times, trace.end[rows], side="right")
    columns = []
    for kinds in (HOST_MEMORY, DEVICE_MEMORY):
        of_kind = np.where(np.isin(memory.device_type, kinds), memory.allocated, 0)[order]
        running = np.concatenate(([0], np.cumsum(of_kind)))
        columns.append(running[last] - running[first])
    return columns[0], columns[1]


def memory_outside(trace: Trace, rows: Int64) -> list[Operator]:
    """Return torch's row for the memory allocated and freed while none of ``rows`` ran, if there was any."""
    memory = trace.memory
    order = np.argsort(trace.start[rows], kind="stable")
    starts, reached = trace.start[rows][order], np.maximum.accumulate(trace.end[rows][order])
    begun = np.searchsorted(starts, memory.time, side="right")
    outside = begun == 0
    outside[~outside] = reached[begun[~outside] - 1] < memory.time[~outside]
    if not outside.any():
        return []
    host, device = (
        int(memory.allocated[outside & np.isin(memory.device_type, kinds)].sum())
        for kinds in (HOST_MEMORY, DEVICE_MEMORY)
    )
    return [
        Operator(
            _MEMORY,
            "cpu_instant_event",
            calls=int(outside.sum()),
            self_cpu_ns=0,
            total_cpu_ns=0,
            self_cpu_memory=host,
            total_cpu_memory=host,
            self_device_memory=device,
            total_device_memory=device,
        )
    ]
