"""The training steps of a trace: the ``ProfilerStep#N`` spans that ``profiler.step()`` records."""

import re
from dataclasses import dataclass
from typing import Final

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
    found: dict[int, Step] = {}
    for row, name in enumerate(trace.names):
        if not name.startswith("ProfilerStep#") or trace.categories[row] == _GPU_COPY:
            continue
        match = _STEP.fullmatch(name)
        if match is None:
            continue
        start = trace.starts[row]
        step = Step(int(match[1]), start, trace.ends[row] - start)
        if step.index not in found or start < found[step.index].start_ns:
            found[step.index] = step
    return sorted(found.values(), key=lambda step: step.start_ns)
