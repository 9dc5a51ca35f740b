"""The analysis of one trace, which all reports of the analyser render."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from torchperfd.model.loader_workers import UNMEASURED_COST, WorkerCost
from torchperfd.model.settled_advice import SettledAdvice
from torchperfd_daemon.analysis.advice import Advice, AdviceContext, advise
from torchperfd_daemon.analysis.advice.rules import recording_notes
from torchperfd_daemon.analysis.breakdown import Breakdown, Device, DeviceTime, Kernel
from torchperfd_daemon.analysis.collectives import Collectives, collectives
from torchperfd_daemon.analysis.idle import Idle, idle
from torchperfd_daemon.analysis.links import find_links
from torchperfd_daemon.analysis.operator_sums import Operator
from torchperfd_daemon.analysis.operators import GroupBy, Samples, operators, sample
from torchperfd_daemon.analysis.picture import Picture, draw
from torchperfd_daemon.analysis.quality import Quality, assess
from torchperfd_daemon.analysis.steps import Step, StepSource, TimedBy, find_steps, phases, whole_recording
from torchperfd_daemon.analysis.trace import Trace

SummaryTable = Literal["operators", "kernels", "steps"]


@dataclass(frozen=True, slots=True)
class Summary:
    """The answers for one rank's trace. Times in ns since the trace's earliest event.

    Attributes:
        size: Its bytes on disk.
        events: Sound events in it, of every kind.
        skipped: Events left out because they were broken.
        damaged: The file was cut or its JSON broken; the numbers cover what could be read.
        duration_ns: From the earliest start to the latest end.
        device_names: The models of the machine's accelerators, each once.
        rank: The rank in the file; None if the file does not contain it.
        breakdown: Where device time goes, over every device event in the file.
        linked: The same over those whose launch is in the file.
        kernels: The kernels by name, most time first.
        step_source: What marks them, as in `Steps`.
        step_mark: The mark's name, likewise.
        steps_timed_by: Whose times they are, likewise.
        step_breakdowns: Device time within each step, parallel to ``steps``.
        step_phases: Host time of each step by phase, in ns, parallel to ``steps``.
        idle: Why the device was idle; None without device events.
        group_by: How calls are grouped into rows of the operator table.
        self_cpu_ns: Self CPU time of all rows together: the whole that a row's share is of.
        advice: What to change, most time saved first, as far as this rank alone shows it.
        collectives: The collectives that `across` matches with other ranks.
        samples: The values of each step, for comparisons; None unless requested.
        picture: The timeline and flame graph, for pages; None unless requested.
        quality: The defects of the trace.
        process: The process of these events, in a file of several; None otherwise.
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
    step_source: StepSource
    step_mark: str
    steps_timed_by: TimedBy
    step_breakdowns: tuple[Breakdown, ...]
    step_phases: tuple[dict[str, int], ...]
    idle: Idle | None
    group_by: GroupBy
    operators: tuple[Operator, ...]
    self_cpu_ns: int
    advice: tuple[Advice, ...]
    collectives: Collectives
    samples: Samples | None = None
    picture: Picture | None = None
    quality: Quality = field(default_factory=Quality)
    devices: tuple[Device, ...] = ()
    process: str | None = None
    device_names: tuple[str, ...] = ()
    others: tuple["Summary", ...] = ()

    def share(self, operator: Operator) -> float:
        """The operator's part of all self CPU time: torch's ``Self CPU %`` as a fraction."""
        return operator.self_cpu_ns / self.self_cpu_ns if self.self_cpu_ns else 0.0


def summarise(
    trace: Trace,
    *,
    group_by: GroupBy = "name",
    comm_pattern: str | None = None,
    samples: bool = False,
    rectangles: int = 0,
    worker_cost: Callable[[], WorkerCost] = lambda: UNMEASURED_COST,
    loader_advice: SettledAdvice | None = None,
) -> Summary:
    """Return the complete analysis of one trace.

    Args:
        group_by: How calls are grouped into rows of the operator table, as in `operators`.
        comm_pattern: A further regular expression for the names of communication kernels.
        samples: Whether to take the tables apart by step, which `compare` needs.
        rectangles: How many the timeline of the picture may have; 0 for no picture.
        worker_cost: Returns the cost of a loader's worker on the machine; called only if advice needs it.
        loader_advice: What the run was advised on its loaders; None to follow the rule on the trace alone.

    Raises:
        UsageError: ``comm_pattern`` is no regular expression.
    """
    device = DeviceTime(trace, comm_pattern)
    links = find_links(trace)
    marks = find_steps(trace, links)
    found = marks.steps
    table = tuple(operators(trace, group_by=group_by, links=links))
    # Of a trace without steps, the advice is on the whole recording.
    units = found or (whole_recording(trace, device.window),)
    within = device.within([unit.window for unit in units])
    gaps = idle(trace, device, units, links)
    # A stub after the last step would count as one of which nothing can be saved.
    whole = tuple(unit for unit in units if not unit.is_stub)
    context = AdviceContext(
        trace,
        list(whole),
        within[: len(whole)],
        _first(gaps, len(whole)),
        links,
        worker_cost,
        timed_by=marks.timed_by,
        is_whole=not found,
        device=device,
        loader_advice=loader_advice,
    )
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
        steps=found,
        step_source=marks.source,
        step_mark=marks.mark,
        steps_timed_by=marks.timed_by,
        step_breakdowns=tuple(within[: len(found)]),
        step_phases=tuple(phases(trace, found, marks.thread)),
        idle=_first(gaps, len(found)),
        group_by=group_by,
        operators=table,
        self_cpu_ns=sum(row.self_cpu_ns for row in table),
        advice=advise(context),
        collectives=collectives(trace, [step for step in found if not step.is_stub]),
        samples=sample(trace, found, links) if samples else None,
        picture=draw(trace, rectangles, found) if rectangles else None,
        quality=assess(trace, links, context.launches, recording_notes(context)),
        devices=tuple(device.devices()),
        process=None if trace.process is None else str(trace.process),
        device_names=trace.device_names,
    )


def _first(gaps: Idle | None, count: int) -> Idle | None:
    """Return the idle time with its first ``count`` steps only."""
    return gaps and replace(gaps, steps=gaps.steps[:count], avoidable=gaps.avoidable[:count])
