"""The exporter's rows of overhead: the profiler's own work, first uses of code, and full launch queues.

CUPTI writes three different things under the category ``overhead``:

- its own work, such as asking for another buffer within a launch. A run that is not recorded has none of it;
- the loading or compiling of a kernel at its first use, which is start-up work;
- ``Command Buffer Full``: the host waits since the device has as much queued as it can hold. The device then
  decides how long the step takes.
"""

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperfd.durations import ns_text
from torchperfd_daemon.analysis.intervals import Cover
from torchperfd_daemon.analysis.trace import Int64, Trace

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
        profilers_ns: The time that the profiler's own work covers.
        queue_full_ns: The time that waits for a full queue cover.
    """

    profilers: Int64
    first_use: Int64
    queue_full: Int64
    profilers_ns: int
    queue_full_ns: int

    def lines(self, steps: int) -> list[str]:
        """Return a sentence for the profiler's own work, and one for full queues, if the file has any.

        Args:
            steps: How many steps are recorded; 0 without steps.
        """
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
    full = trace.named(rows, lambda name: _QUEUE_FULL.search(name) is not None)
    first = trace.named(rows, lambda name: _FIRST_USE.search(name) is not None)
    own = np.setdiff1d(rows, np.concatenate((full, first)), assume_unique=True)
    return Overheads(own, first, full, _covered(trace, own), _covered(trace, full))


def _covered(trace: Trace, rows: Int64) -> int:
    return Cover(trace.start[rows], trace.end[rows]).length
