"""A `Summary` as a document for people, and as a versioned dictionary for programs."""

import statistics
from collections import Counter
from typing import Any, Final

from torchperfd.document.blocks import Document, Heading, Sentences
from torchperfd.document.tables import Table
from torchperfd_daemon.analysis.breakdown import Breakdown
from torchperfd_daemon.analysis.idle import Idle
from torchperfd_daemon.analysis.layout import in_us, ms, name_in_sentence, printable, table
from torchperfd_daemon.analysis.operator_sums import SORT_KEYS, Operator
from torchperfd_daemon.analysis.operators import GROUP_FIELDS
from torchperfd_daemon.analysis.summary import Summary, quality_lines, quality_to_dict

SCHEMA: Final = "torchperfd.analysis/1"
# Short names for the most common orders, in addition to torch's own names, for any device.
_SHORT: Final = {"self": "self_cpu_time_total", "total": "cpu_time_total", "calls": "count"}
_PARTS: Final = (
    "n_gpu_events window_ns busy_ns idle_ns compute_ns comm_ns memcpy_ns exposed_comm_ns exposed_memcpy_ns"
    " overlap_ns comm_comp_overlap_pct"
)
_MEMORY: Final = ("self_cpu_memory", "total_cpu_memory", "self_device_memory", "total_device_memory")
_MAX_DEVICES: Final = 16
_MARKS: Final[dict[str, str]] = {
    "optimizer": "steps end with",
    "loader": "steps begin with",
    "annotation": "steps begin with the annotation",
}
_DEVICES: Final = ("cuda", "xpu", "privateuse1")
SORT_WORDS: Final = (
    *_SHORT,
    *SORT_KEYS,
    *(key.replace("device", device) for device in _DEVICES for key in SORT_KEYS if "device" in key),
)


def to_dict(summary: Summary, rank: int | None, sort_by: str = "self") -> dict[str, Any]:
    """Return one entry of ``ranks`` in the ``torchperfd.analysis/1`` document; times in µs."""
    return {
        "rank": rank,
        "trace": {
            "path": summary.path,
            "bytes": summary.size,
            "events": summary.events,
            "skipped": summary.skipped,
            "damaged": summary.damaged,
            "damaged_at": summary.quality.reading.damaged_at,
            "duration_us": summary.duration_ns / 1000,
            "device_names": list(summary.device_names),
        },
        "process": summary.process,
        "quality": quality_to_dict(summary.quality),
        "devices": [
            {"device": each.name, "kernel_us": each.kernel_ns / 1000, "breakdown": _breakdown(each.breakdown)}
            for each in summary.devices
        ],
        "breakdown": {"all": _breakdown(summary.breakdown), "linked": _breakdown(summary.linked)},
        "kernels": [in_us(kernel, "name sum_ns calls mean_ns") for kernel in summary.kernels],
        "steps_from": {
            "source": summary.step_source,
            "mark": summary.step_mark,
            "timed_by": summary.steps_timed_by,
        },
        "steps": [
            in_us(step, "index start_ns duration_ns host_start_ns host_duration_ns is_stub")
            | {
                "breakdown": _breakdown(device),
                "phases": {f"{phase}_us": ns / 1000 for phase, ns in phases.items()},
                "idle": {f"{cause}_us": ns / 1000 for cause, ns in idle.items()},
            }
            for step, device, phases, idle in zip(
                summary.steps,
                summary.step_breakdowns,
                summary.step_phases,
                summary.idle.steps if summary.idle else [{}] * len(summary.steps),
                strict=True,
            )
        ],
        "idle": _idle(summary.idle) if summary.idle else None,
        "group_by": summary.group_by,
        "operators": [
            in_us(row, "name category calls self_cpu_ns total_cpu_ns")
            | {"self_cpu_share": summary.share(row)}
            | in_us(row, "self_device_ns total_device_ns")
            | {f"{each}_bytes": getattr(row, each) for each in _MEMORY}
            | _grouped(summary, row)
            for row in _sorted(summary, sort_by)
        ],
    }


def _breakdown(device: Breakdown) -> dict[str, float]:
    return in_us(device, _PARTS)


def _grouped(summary: Summary, row: Operator) -> dict[str, Any]:
    field = GROUP_FIELDS.get(summary.group_by)
    return {"input_shapes" if field == "shapes" else field: getattr(row, field)} if field else {}


def _idle(idle: Idle) -> list[dict[str, Any]]:
    return [
        {
            "cause": cause.cause,
            "idle_us": cause.ns / 1000,
            "gaps": cause.gaps,
            "places": [
                {"what": place.what, "where": place.where, "idle_us": place.ns / 1000, "gaps": place.gaps}
                for place in cause.places
            ],
        }
        for cause in idle.causes
    ]


def summary_document(
    summary: Summary, rank: int | None, *, limit: int = 15, sort_by: str = "self", width: int | None = None
) -> Document:
    """Return the summary's facts and the first ``limit`` rows of its table."""
    head, *lines = _facts(summary, rank, width)
    doubts = (f"data quality: {line}" for line in quality_lines(summary.quality))
    hidden = len(summary.operators) - limit
    more = [f"{hidden:,} more operators; --limit {len(summary.operators)} shows all"] * (hidden > 0)
    above = (Heading(head, style="bold", fold="never"), Sentences((*lines, *doubts), is_list=True))
    return Document([above, [_operator_table(summary, limit, sort_by), Sentences(more)]])


def _facts(summary: Summary, rank: int | None, width: int | None) -> list[str]:
    title = "" if rank is None else f"rank {rank}: "
    title += "" if summary.process is None else f"process {printable(summary.process)} of "
    return [
        f"{title}{printable(summary.path)}",
        f"{summary.size:,} bytes, {summary.events:,} events, {summary.skipped:,} skipped, "
        f"{ms(summary.duration_ns)} ms recorded",
        *_steps_lines(summary),
        *_phases_line(summary),
        *_device_lines(summary, width),
        *_idle_lines(summary, width),
    ]


def _device_lines(summary: Summary, width: int | None) -> list[str]:
    device = summary.breakdown
    if not device.n_gpu_events:
        return []

    def part(label: str, nanoseconds: int) -> str:
        return f"{label} {ms(nanoseconds)} ms ({nanoseconds / max(device.window_ns, 1):.1%})"

    # First each device: of several together, one that works hides another that does not.
    lines = [
        f"device {printable(each.name)}: {each.breakdown.n_gpu_events:,} events, "
        f"kernels {ms(each.kernel_ns)} ms, {part('busy', each.breakdown.busy_ns)}, "
        f"{part('idle', device.window_ns - each.breakdown.busy_ns)}"
        for each in summary.devices[:_MAX_DEVICES]
    ]
    busy, idle = ("any busy", "all idle") if summary.devices else ("busy", "idle")
    lines += [
        f"{device.n_gpu_events:,} GPU events in {ms(device.window_ns)} ms: "
        f"{part(busy, device.busy_ns)}, {part(idle, device.idle_ns)}",
        f"{part('compute', device.compute_ns)}, {part('exposed communication', device.exposed_comm_ns)}, "
        f"{part('exposed copies', device.exposed_memcpy_ns)}",
    ]
    if summary.kernels:
        top = summary.kernels[0]
        name = name_in_sentence(top.name, width)
        lines.append(f"top kernel {ms(top.sum_ns)} ms in {top.calls:,} calls: {name}")
    return lines


def _idle_lines(summary: Summary, width: int | None) -> list[str]:
    if summary.idle is None or not summary.breakdown.idle_ns:
        return []
    lines = []
    for cause in summary.idle.causes:
        if cause.ns:
            share, top = cause.ns / summary.breakdown.idle_ns, cause.places[0]
            place = " in ".join(name_in_sentence(part, width) for part in (top.what, top.where) if part)
            lines.append(
                f"idle for {cause.cause.replace('_', ' ')} {ms(cause.ns)} ms ({share:.1%}), "
                f"of that {ms(top.ns)} ms at {place}"
            )
    return lines


def _phases_line(summary: Summary) -> list[str]:
    phases = [each for step, each in zip(summary.steps, summary.step_phases, strict=True) if not step.is_stub]
    sums = Counter[str]()
    for step in phases:
        sums.update(step)
    if set(sums) <= {"other"}:
        return []
    parts = (f"{phase} {ms(ns / len(phases))}" for phase, ns in sums.most_common())
    whose = "the host's mean step" if summary.steps_timed_by == "device" else "mean step"
    return [f"{whose}, in ms: {', '.join(parts)}"]


def _operator_table(summary: Summary, limit: int, sort_by: str) -> Table:
    headings = ["operator", "calls", "self CPU ms", "self %", "total CPU ms"]
    with_device = any(row.total_device_ns for row in summary.operators)
    # The width is limited, so columns of memory are shown only if the table is sorted by them.
    with_memory = "memory" in sort_by
    if with_memory:
        headings += ["self CPU MB", "self GPU MB"]
    elif with_device:
        headings += ["self GPU ms", "total GPU ms"]
    rows = [_cells(summary, row, with_device, with_memory) for row in _sorted(summary, sort_by)[:limit]]
    return table(headings, rows)


def _cells(summary: Summary, row: Operator, with_device: bool, with_memory: bool) -> list[str]:
    cells = [
        printable(_label(row)),
        f"{row.calls:,}",
        ms(row.self_cpu_ns),
        f"{summary.share(row):.1%}",
        ms(row.total_cpu_ns),
    ]
    if with_memory:
        return [*cells, f"{row.self_cpu_memory / 1e6:,.3f}", f"{row.self_device_memory / 1e6:,.3f}"]
    return [*cells, ms(row.self_device_ns), ms(row.total_device_ns)] if with_device else cells


def _label(row: Operator) -> str:
    return " ".join(part for part in (row.name, row.shapes, row.module, " < ".join(row.stack)) if part)


def _sorted(summary: Summary, sort_by: str) -> list[Operator]:
    key = _SHORT.get(sort_by, sort_by)
    for device in _DEVICES:
        key = key.replace(device, "device")
    return sorted(summary.operators, key=SORT_KEYS[key], reverse=True)


def _steps_lines(summary: Summary) -> list[str]:
    found = summary.steps
    if not found:
        return [
            "no steps: the loop did not call profiler.step(), and nothing else marks them; "
            "advice is on the whole recording"
        ]
    whole = [step for step in found if not step.is_stub]
    longest = max(whole, key=lambda step: step.duration_ns)
    median = statistics.median(step.duration_ns for step in whole)
    stub = "".join(
        f"; step {step.index} is only the rest after the last step()" for step in found if step.is_stub
    )
    lines = [
        f"{len(found):,} steps, {found[0].index} to {found[-1].index}: "
        f"median {ms(median)} ms, longest {ms(longest.duration_ns)} ms (step {longest.index}){stub}"
    ]
    if summary.steps_timed_by == "device":
        host = statistics.median(step.host_duration_ns for step in whole)
        lines.append(f"timed on the device, since the host runs ahead of it with {ms(host)} ms a step")
    if summary.step_source != "profiler":
        mark = printable(summary.step_mark)
        lines.append(f"{_MARKS[summary.step_source]} {mark}, since the loop did not call profiler.step()")
    return lines
