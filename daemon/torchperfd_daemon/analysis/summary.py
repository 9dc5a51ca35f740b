"""What one trace says: the result that every face of the analyser renders."""

from dataclasses import dataclass

from torchperfd_daemon.analysis.breakdown import Breakdown, DeviceTime, Kernel
from torchperfd_daemon.analysis.operators import GroupBy, Operator, operators
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
        rank: The rank that the file says it is of; None when it does not say.
        breakdown: Where device time goes, over every device event in the file.
        linked: The same over those whose launch is in the file.
        kernels: The kernels by name, most time first.
        steps: The training steps, in order.
        step_breakdowns: Device time within each step's host time, parallel to ``steps``.
        group_by: What a row of the operator table stands for.
        operators: The operator table, most self CPU time first.
        self_cpu_ns: Self CPU time of all rows together: the whole that a row's share is of.
    """

    path: str
    size: int
    events: int
    skipped: int
    damaged: bool
    duration_ns: int
    rank: int | None
    breakdown: Breakdown
    linked: Breakdown
    kernels: tuple[Kernel, ...]
    steps: tuple[Step, ...]
    step_breakdowns: tuple[Breakdown, ...]
    group_by: GroupBy
    operators: tuple[Operator, ...]
    self_cpu_ns: int

    def share(self, operator: Operator) -> float:
        """The operator's part of all self CPU time: torch's ``Self CPU %`` as a fraction."""
        return operator.self_cpu_ns / self.self_cpu_ns if self.self_cpu_ns else 0.0


def summarise(trace: Trace, *, group_by: GroupBy = "name", comm_pattern: str | None = None) -> Summary:
    """Work out everything the analyser says about one trace.

    Args:
        trace: The loaded trace.
        group_by: What a row of the operator table stands for, as in `operators`.
        comm_pattern: A further regular expression for the names of communication kernels.

    Raises:
        UsageError: ``comm_pattern`` is no regular expression.
    """
    device = DeviceTime(trace, comm_pattern)
    found = steps(trace)
    table = tuple(operators(trace, group_by=group_by))
    return Summary(
        path=trace.path,
        size=trace.size,
        events=trace.events,
        skipped=trace.skipped,
        damaged=trace.damaged,
        duration_ns=trace.duration_ns,
        rank=trace.rank,
        breakdown=device.all(),
        linked=device.linked(),
        kernels=tuple(device.kernels()),
        steps=tuple(found),
        step_breakdowns=tuple(
            device.within([(step.start_ns, step.start_ns + step.duration_ns) for step in found])
        ),
        group_by=group_by,
        operators=table,
        self_cpu_ns=sum(row.self_cpu_ns for row in table),
    )
