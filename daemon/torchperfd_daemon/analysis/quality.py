"""The quality of a trace: data that its file lost, and data that is impossible."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from torchperfd.model.formatting import ns_text
from torchperfd_daemon.analysis.categories import DEVICE
from torchperfd_daemon.analysis.layout import printable
from torchperfd_daemon.analysis.links import Links
from torchperfd_daemon.analysis.overhead import LaunchRecord
from torchperfd_daemon.analysis.trace import Reading, Trace
from torchperfd_daemon.analysis.trace_repair import overlaps, working

_MAX_LISTED: Final = 4


@dataclass(frozen=True, slots=True)
class Quality:
    """The defects of a trace. All counts are 0 and all flags are off for a sound one.

    Attributes:
        reading: How well the file could be read.
        skipped: Events left out because they could not be read.
        launches: Calls that make a device do something.
        launches_without_kernels: Those of them without a device event that should have one.
        launches_captured: Those of them that were written into a CUDA graph and run nothing themselves.
        kernels_without_launches: Device events whose launch is not in the file.
        overlaps: Device events that began before an earlier one of their stream had ended.
        overlap_ns: The sum of these overlaps.
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


def assess(trace: Trace, links: Links, launches: LaunchRecord, recording: Sequence[str] = ()) -> Quality:
    """Return the defects of a trace.

    Args:
        links: The launches of its device events.
        launches: The calls that make the device do something.
        recording: A sentence for each thing in the recording that other steps of the run do not have.
    """
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
        lines.append("the file is cut off or damaged: the numbers cover what could be read")
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
        "skipped_why": reading.skipped_why,
        "repaired": reading.repaired,
        "more_exports": reading.more_exports,
        "uncategorised": reading.uncategorised,
        "warnings": list(reading.warnings),
        "launches": quality.launches,
        "launches_without_kernels": quality.launches_without_kernels,
        "launches_captured": quality.launches_captured,
        "kernels_without_launches": quality.kernels_without_launches,
        "impossible_times": {
            "far_away": reading.far_away,
            "shortened": reading.shortened,
            "endless": reading.endless,
            "clock_apart": reading.clock_apart,
        },
        "overlaps": quality.overlaps,
        "overlap_us": quality.overlap_ns / 1000,
        "devices": quality.devices,
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
