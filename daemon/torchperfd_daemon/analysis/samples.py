"""The time of each row in each step, from which a comparison distinguishes differences from noise."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchperfd_daemon.analysis.links import Links
from torchperfd_daemon.analysis.operator_memory import DEVICE_MEMORY, HOST_MEMORY
from torchperfd_daemon.analysis.operator_rows import OperatorSteps
from torchperfd_daemon.analysis.operators import operators_by_step
from torchperfd_daemon.analysis.steps import Step
from torchperfd_daemon.analysis.trace import Int64, Trace


@dataclass(frozen=True, slots=True)
class MemorySteps:
    """The allocator's work in each step, in bytes; columns as long as there are steps.

    Attributes:
        host_allocated: All allocations on the host, freed again or not.
        host_peak: The most allocated on the host at once, above the level when recording began.
        device_allocated: As ``host_allocated``, on devices.
        device_peak: As ``host_peak``, on devices.
    """

    host_allocated: Int64
    host_peak: Int64
    device_allocated: Int64
    device_peak: Int64


@dataclass(frozen=True, slots=True)
class Samples:
    """One trace by step; a trace without steps counts as one step, from its start to its end.

    Attributes:
        operators: The times of operators and kernels.
        memory: The allocations; None unless the recording has them.
    """

    operators: OperatorSteps
    memory: MemorySteps | None


def sample(trace: Trace, found: Sequence[Step], links: Links) -> Samples:
    """Return the values of each step.

    A call counts to the step that the host was in when it began, on any thread. A device event counts to the
    step that launched it; if that is unknown, to the step in whose host time it began.
    """
    if not found:
        found = [Step(0, 0, trace.duration_ns + 1)]
    starts = np.array([step.host_start_ns for step in found], dtype=np.int64)
    ends = starts + np.array([step.host_duration_ns for step in found], dtype=np.int64)
    step = np.searchsorted(starts, trace.start, side="right") - 1
    step[trace.start >= ends[step]] = -1
    memory = _memory(trace, starts, ends) if len(trace.memory.time) else None
    return Samples(operators_by_step(trace, step, links), memory)


def _memory(trace: Trace, starts: Int64, ends: Int64) -> MemorySteps:
    order = np.argsort(trace.memory.time, kind="stable")
    first, last = (np.searchsorted(trace.memory.time[order], edges) for edges in (starts, ends))
    columns: list[Int64] = []
    for kinds in (HOST_MEMORY, DEVICE_MEMORY):
        changes = np.where(np.isin(trace.memory.device_type, kinds), trace.memory.allocated, 0)[order]
        held, given = (np.concatenate(([0], np.cumsum(each))) for each in (changes, np.maximum(changes, 0)))
        spans = zip(first.tolist(), last.tolist(), strict=True)
        peaks = np.array([held[begin : end + 1].max() for begin, end in spans], dtype=np.int64)
        columns += [given[last] - given[first], peaks]
    return MemorySteps(*columns)
