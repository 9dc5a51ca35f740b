"""What one trace says: the result that every face of the analyser renders."""

from dataclasses import dataclass

from torchperfd_daemon.analysis.operators import Operator, operators
from torchperfd_daemon.analysis.steps import Step, steps
from torchperfd_daemon.analysis.trace import Trace


@dataclass(frozen=True, slots=True)
class Summary:
    """The answers for one rank's trace. Times in ns since the trace's earliest event.

    Attributes:
        path: The trace file.
        size: Its bytes on disk.
        events: Sound events in it, of every kind.
        skipped: Events left out because they were broken.
        damaged: The file was cut or its JSON broken; the numbers cover what could be read.
        duration_ns: From the earliest start to the latest end.
        steps: The training steps, in order.
        operators: The operator table, most self CPU time first.
        self_cpu_ns: Self CPU time of all rows together: the whole that a row's share is of.
    """

    path: str
    size: int
    events: int
    skipped: int
    damaged: bool
    duration_ns: int
    steps: tuple[Step, ...]
    operators: tuple[Operator, ...]
    self_cpu_ns: int

    def share(self, operator: Operator) -> float:
        """The operator's part of all self CPU time: torch's ``Self CPU %`` as a fraction."""
        return operator.self_cpu_ns / self.self_cpu_ns if self.self_cpu_ns else 0.0


def summarise(trace: Trace) -> Summary:
    """Work out everything the analyser says about one trace."""
    table = tuple(operators(trace))
    return Summary(
        path=trace.path,
        size=trace.size,
        events=trace.events,
        skipped=trace.skipped,
        damaged=trace.damaged,
        duration_ns=trace.duration_ns,
        steps=tuple(steps(trace)),
        operators=table,
        self_cpu_ns=sum(row.self_cpu_ns for row in table),
    )
