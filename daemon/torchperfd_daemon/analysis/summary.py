"""The analysis of one trace, which all reports of the analyser render, and the trace's quality.

Quality is data that the file lost, and data that is impossible.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np

from torchperfd.model.formatting import ns_text
from torchperfd.model.loader_facts import UNMEASURED_COST, WorkerCost
from torchperfd.model.verdict_document import SettledAdvice
from torchperfd_daemon.analysis.advice import Advice, AdviceContext, advise
from torchperfd_daemon.analysis.advice.rules import recording_notes
from torchperfd_daemon.analysis.breakdown import Breakdown, Device, DeviceTime, Kernel
from torchperfd_daemon.analysis.callers import Links, find_links
from torchperfd_daemon.analysis.categories import DEVICE
from torchperfd_daemon.analysis.collectives import Collectives, collectives
from torchperfd_daemon.analysis.host_activity import Kinds
from torchperfd_daemon.analysis.idle import Idle, idle
from torchperfd_daemon.analysis.layout import in_us, printable
from torchperfd_daemon.analysis.operator_sums import Operator
from torchperfd_daemon.analysis.operators import GroupBy, Samples, operators, sample
from torchperfd_daemon.analysis.overhead import LaunchRecord
from torchperfd_daemon.analysis.picture import Picture, draw
from torchperfd_daemon.analysis.steps import Step, StepSource, TimedBy, find_steps, phases, whole_recording
from torchperfd_daemon.analysis.trace import Reading, Trace
from torchperfd_daemon.analysis.trace_repair import overlaps, working

_MAX_LISTED: Final = 4


@dataclass(frozen=True, slots=True)
class Quality:
    """The defects of a trace. All counts are 0 and all flags are off for a sound one.

    Attributes:
        skipped: Events left out because they could not be read.
        launches_without_kernels: Calls that launch something, and whose device event is not in the file.
        launches_captured: Launches that were written into a CUDA graph and run nothing themselves.
        overlaps: Device events that began before an earlier one of their stream had ended.
        processes: The processes that operators, annotations and launches are of, in order of first sight.
        analysed: Those of them that are analysed by themselves if there are several.
        recording: A sentence for each thing in the recording that other steps of the run do not have.
    """

    reading: Reading = field(default_factory=Reading)
    skipped: int = 0
    damaged: bool = False
    launches: int = 0
    launches_without_kernels: int = 0
    launches_captured: int = 0
    kernels_without_launches: int = 0
    overlaps: int = 0
    overlap_ns: int = 0
    devices: int = 0
    processes: tuple[str, ...] = ()
    analysed: tuple[str, ...] = ()
    recording: tuple[str, ...] = ()


def _assess(trace: Trace, links: Links, launches: LaunchRecord, recording: Sequence[str]) -> Quality:
    rows = np.flatnonzero(trace.of_categories(DEVICE))
    at_once = overlaps(trace.start[rows], trace.end[rows], trace.thread[rows])
    return Quality(
        reading=trace.reading,
        skipped=trace.skipped,
        damaged=trace.damaged,
        launches=len(launches.rows),
        launches_without_kernels=launches.lost,
        launches_captured=int(launches.captured.sum()),
        kernels_without_launches=int((links.launch < 0).sum()),
        overlaps=at_once.events,
        overlap_ns=at_once.ns,
        devices=len({trace.threads[number][0] for number in np.unique(trace.thread[rows]).tolist()}),
        processes=tuple(map(str, trace.processes)),
        analysed=tuple(map(str, working(trace) if trace.process is None else trace.processes)),
        recording=tuple(recording),
    )


def quality_lines(quality: Quality) -> list[str]:
    """Return a sentence for each defect, the gravest first."""
    reading = quality.reading
    lines = []
    if quality.damaged:
        at = f" at byte {reading.damaged_at:,} of its text" if reading.damaged_at else ""
        lines.append(f"the file is cut off or damaged{at}: the numbers cover what could be read")
    if reading.more_exports:
        lines.append("the file holds another trace after this one, which is not read: split the file")
    if quality.skipped:
        why = ", ".join(f"{count:,} {reason}" for reason, count in reading.skipped_why.items())
        lines.append(f"events left out: {why or f'{quality.skipped:,}'}")
    if reading.repaired:
        lines.append(f"events with fields that could not be read, whose times count: {reading.repaired:,}")
    if reading.uncategorised:
        lines.append(f"events without a kind in the file, which is inferred: {reading.uncategorised:,}")
    lines += [f"the exporter says: {printable(each)}" for each in reading.warnings]
    if quality.launches_without_kernels:
        share = f"{quality.launches_without_kernels:,} of {quality.launches:,}"
        why = (
            "the recording ended before them, or lost them"
            if quality.devices
            else "there is no device event at all, so that GPU times are missing and not zero"
        )
        lines.append(f"launches without kernels: {share}; {why}")
    if quality.launches_captured:
        lines.append(
            f"launches written into a CUDA graph: {quality.launches_captured:,}; these run nothing, and "
            "no advice rests on idle time while graphs are captured"
        )
    lines += quality.recording
    if quality.kernels_without_launches:
        lines.append(
            f"device events whose launch is not in the file: {quality.kernels_without_launches:,}; "
            "only an External id can name their operator"
        )
    return lines + _impossible(quality) + _several(quality)


def quality_to_dict(quality: Quality) -> dict[str, Any]:
    """Return ``quality`` of the ``torchperfd.analysis/1`` document; times in µs."""
    reading = quality.reading
    return {
        "notes": quality_lines(quality),
        **in_us(reading, "skipped_why repaired more_exports uncategorised"),
        "warnings": list(reading.warnings),
        **in_us(quality, "launches launches_without_kernels launches_captured kernels_without_launches"),
        "impossible_times": in_us(reading, "far_away shortened endless clock_apart"),
        **in_us(quality, "overlaps overlap_ns devices"),
        "processes": list(quality.processes),
    }


def _impossible(quality: Quality) -> list[str]:
    reading = quality.reading
    lines = []
    if reading.far_away:
        lines.append(f"device events left out, far outside the recording: {reading.far_away:,}")
    if reading.shortened:
        lines.append(
            "device events said to outlast the recording, which end here with the start of the next: "
            f"{reading.shortened:,}"
        )
    if reading.endless:
        lines.append(
            f"device events that last longer than the rest of the recording: {reading.endless:,}; "
            "busy and idle times are in doubt"
        )
    if reading.clock_apart:
        lines.append("device and host clocks differ: which step or operator a device event is of is in doubt")
    if quality.overlaps:
        lines.append(
            f"device events that began before the last of their stream had ended: {quality.overlaps:,}, for "
            f"{ns_text(quality.overlap_ns)}; busy time has that once, the sums of kernels twice"
        )
    return lines


def _several(quality: Quality) -> list[str]:
    lines = []
    if len(quality.analysed) > 1:
        more = ["…"] * (len(quality.analysed) > _MAX_LISTED)
        shown = ", ".join([*quality.analysed[:_MAX_LISTED], *more])
        lines.append(
            f"the file holds {len(quality.analysed)} processes that launched something or marked steps "
            f"({printable(shown)}): each is analysed by itself"
        )
    if quality.devices > 1:
        lines.append(f"{quality.devices} devices together: busy means that any of them is")
    return lines


SummaryTable = Literal["operators", "kernels", "steps"]


@dataclass(frozen=True, slots=True)
class Summary:
    """The answers for one rank's trace. Times in ns since the trace's earliest event.

    The facts of the file are those of `Trace`, the marks of steps those of `Steps`.

    Attributes:
        breakdown: Where device time goes, over every device event in the file.
        linked: The same over those whose launch is in the file.
        step_breakdowns: Device time within each step, parallel to ``steps``.
        step_phases: Host time of each step by phase, in ns, parallel to ``steps``.
        self_cpu_ns: Self CPU time of all rows together: the whole that a row's share is of.
        advice: What to change, most time saved first, as far as this rank alone shows it.
        samples: The values of each step, for comparisons; None unless requested.
        picture: The timeline and flame graph, for pages; None unless requested.
        process: The process of these events, in a file of several; None otherwise.
        others: The summaries of the file's other processes.
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
    """Return the complete analysis of one trace; for the options see `Request`.

    Args:
        worker_cost: Returns the cost of a loader's worker on the machine; called only if advice needs it.

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
    kinds = Kinds(trace, links)
    gaps = idle(trace, device, units, kinds)
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
        kinds=kinds,
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
        quality=_assess(trace, links, context.launches, recording_notes(context)),
        devices=tuple(device.devices()),
        process=None if trace.process is None else str(trace.process),
        device_names=trace.device_names,
    )


def _first(gaps: Idle | None, count: int) -> Idle | None:
    return gaps and replace(gaps, steps=gaps.steps[:count])
