"""The training steps that the profiler marked in the trace."""

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd_daemon.analysis.trace import Trace

_STEP: Final = re.compile(r"ProfilerStep#(\d{1,18})")
# Kineto repeats each step on the GPU's timeline; host time is the step's own.
_GPU_COPY: Final = "gpu_user_annotation"


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the profiler's own number for it, and host times in ns since the trace's start."""

    index: int
    start_ns: int
    duration_ns: int


def steps(trace: Trace) -> list[Step]:
    """Return the steps in order of start; of a step recorded twice, the earlier."""
    numbers = {
        name: int(match[1]) for name, text in enumerate(trace.names) if (match := _STEP.fullmatch(text))
    }
    rows = np.flatnonzero(np.isin(trace.name, list(numbers)) & ~trace.of_categories({_GPU_COPY}))
    found: dict[int, Step] = {}
    for row in rows.tolist():
        index, start = numbers[int(trace.name[row])], int(trace.start[row])
        if index not in found or start < found[index].start_ns:
            found[index] = Step(index, start, int(trace.end[row]) - start)
    return sorted(found.values(), key=lambda step: step.start_ns)
